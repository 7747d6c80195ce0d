"""`kvoffloadd status` for people: five lines, sections by name, and paths that stay whole."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd import cli
from kvoffloadd.cli.arguments import SECTIONS
from kvoffloadd.cli.status import print_sections, summary
from kvoffloadd.model import KeyState
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk_settings, store_on_disk
from tests.e2e.rank import Rank, new_keys
from tests.top.samples import root, status

LIMIT_S = 50.0
LONG = "/mnt/nvme-of-the-second-socket/kvoffloadd"
"""A path that takes half a line of a terminal."""


def run(daemon: Daemon, *arguments: str) -> str:
    """Returns what the command prints into a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "kvoffloadd", "status", *arguments, "--socket", str(daemon.socket)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def run_at_terminal(daemon: Daemon, *arguments: str) -> str:
    """Returns what the command shows at a terminal of 80 columns."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "kvoffloadd", "status", *arguments, "--socket", str(daemon.socket)],
        stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while piece := os.read(master, 65536):
            shown += piece
    except OSError:
        pass  # so Linux reports that the other end of a terminal is closed
    finally:
        os.close(master)
    assert child.wait(LIMIT_S) == 0
    return shown.decode().replace("\r\n", "\n")


def line(shown: str, label: str) -> str:
    (found,) = [line for line in shown.splitlines() if line.startswith(f"{label:<10}")]
    return found.removeprefix(label).strip()


# --- five lines ---------------------------------------------------------------------------------------


def test_five_lines_answer_what_people_ask() -> None:
    roots = [root(LONG), root("/nvme1/kvoffloadd", "full")]
    lines = list(summary(status(disk={**status()["disk"], "roots": roots})))
    assert lines == [
        "hits      50.0 % of 16,800 tokens, 66.7 % of 1,050 blocks",
        "ceiling   85.7 % of blocks, if the cache had no bounds (an estimate)",
        "memory    48 GiB of 64 GiB (75.0 %), 1,234,567 keys",
        "disk      80 GiB of 200 GiB (40.0 %), 7,654,321 keys",
        "engines   2 with 3 workers; 2 namespaces: meta/Llama-3.1-8B#00112233 and others",
        "disk roots",
        f"  {LONG}  40 GiB of 100 GiB (40.0 %), ok",
        "  /nvme1/kvoffloadd  40 GiB of 100 GiB (40.0 %), full: no space left on device",
    ]
    assert max(map(len, lines)) <= 80


def test_lines_that_only_some_daemons_have() -> None:
    remote = {
        "state": "open", "reason": "the master does not answer", "backlog_bytes": 0, "quarantined_bytes": 0,
        "agent": {"pid": 0, "about": ""}, "fetched": {"bytes": 0, "keys": 0}, "pushed": {"bytes": 0, "keys": 0},
    }  # fmt: skip
    shown = "\n".join(summary(status(draining=True, remote=remote)))
    assert line(shown, "remote") == "open: the master does not answer"
    assert line(shown, "draining") == "the daemon shuts down, and takes no new work"


def test_a_user_s_own_figures_are_not_taken_for_all() -> None:
    theirs = status()
    for name in ("disk", "devices", "transfers", "lanes"):
        del theirs[name]
    theirs["server"] = {"requests": 3}
    shown = "\n".join(summary(theirs))
    assert line(shown, "memory").endswith("keys by this user")
    assert line(shown, "disk") == "shown to root and the daemon's user"
    assert "disk roots" not in shown


@pytest.mark.slow
def test_a_new_daemon_s_five_lines(start_daemon: Callable[..., Daemon]) -> None:
    shown = run(start_daemon())
    assert [each.split()[0] for each in shown.splitlines()] == ["hits", "ceiling", "memory", "disk", "engines"]
    assert line(shown, "hits") == (
        "no prompt was pinned since the daemon's start (SGLang pins none; its own metrics count)"
    )
    assert line(shown, "ceiling") == "not known: no prompt was pinned"
    assert line(shown, "memory") == "0 B of 32 MiB (0.0 %), 0 keys"
    assert line(shown, "disk") == "none"
    assert line(shown, "engines") == "none; 0 namespaces"


@pytest.mark.slow
def test_tokens_are_those_of_prefixes(start_daemon: Callable[..., Daemon], seed: int) -> None:
    """The second of two prompts has a gap: the blocks behind it hit, and their tokens do not."""
    daemon = start_daemon()
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    first, second = (new_keys(np.random.default_rng([seed, number]), 4) for number in range(2))
    rank.store_keys(first[:2])
    rank.store_keys(second[[0, 2, 3]])
    for prompt in (first, second):
        rank.client.release(rank.client.pin({0: prompt}).lease)
    rank.client.pin({0: first[1:]}, {0: 1})  # the engine has the first block itself
    shown = run(daemon)
    assert line(shown, "hits") == f"{100 * 64 / 176:.1f} % of 176 tokens, {100 * 6 / 11:.1f} % of 11 blocks"
    assert line(shown, "engines").startswith("1 with 1 worker; 1 namespace: e2e#")
    (row,) = daemon.status()["lookups"]
    assert (row["asked_tokens"], row["hit_tokens"]) == (176, 64)


@pytest.mark.slow
def test_tokens_on_disk_count_when_they_have_come(
    start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int
) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)))
    keys = new_keys(np.random.default_rng(seed), 8)
    store_on_disk(daemon, daemon.welcome(Rank(daemon.socket)), keys[:6])
    daemon.leave_guests()
    assert daemon.stop() == 0
    daemon.start()
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    found = rank.client.pin({0: keys})
    assert found.promotion is not None
    assert rank.client.wait_ready(found, LIMIT_S).states[0][:6].tolist() == [KeyState.HIT] * 6
    (row,) = daemon.status()["lookups"]
    assert (row["on_disk"], row["asked_tokens"], row["hit_tokens"]) == (6, 128, 96)
    assert line(run(daemon), "hits") == "75.0 % of 128 tokens, 75.0 % of 8 blocks"


# --- what the disk serves -----------------------------------------------------------------------------


@pytest.mark.slow
def test_cleared_records_are_no_keys(start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)))
    kept = new_keys(np.random.default_rng(seed), 60)
    store_on_disk(daemon, daemon.welcome(Rank(daemon.socket)), kept)
    assert line(run(daemon), "disk").endswith(", 60 keys")
    daemon.clear()
    void = "0 keys (60 records are of cleared namespaces)"
    assert line(run(daemon), "disk").endswith(f", {void}")
    daemon.leave_guests()
    assert daemon.stop() == 0
    daemon.start()
    assert line(run(daemon), "disk").endswith(f", {void}")
    assert "0 keys in 1 segments found (60 records are of cleared namespaces)" in daemon.log()
    assert daemon.status()["disk"]["cleared_records"] == 60


# --- sections -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_paths_are_whole_wherever_they_are_shown(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    daemon = start_daemon(*disk_settings((folder / "root", 64 * MIB)))
    path = str(folder / "root")
    for arguments in ([], ["disk"], ["lanes"], ["--all"]):
        for shown in (run(daemon, *arguments), run_at_terminal(daemon, *arguments)):
            assert any(path in each for each in shown.splitlines()), (arguments, shown)
    shown = run_at_terminal(daemon, "disk")
    others = [each for each in shown.splitlines() if path not in each]
    assert max(map(len, others)) <= 80
    names = [each.split()[0] for each in others if each.strip()]
    assert {"capacity_bytes", "segments", "read_errors"} <= set(names[: names.index("keys")]), "below the path"


@pytest.mark.slow
def test_sections_by_name(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    store = ("remote.engine=memory", f"remote.directory={tmp_path / 'store'}")
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)), *store)
    report = daemon.status()
    plain = {name for name, value in report.items() if not isinstance(value, dict | list)}
    assert set(SECTIONS) == {"daemon", *report.keys() - plain}

    def titles(shown: str) -> set[str]:
        return {each for each in shown.splitlines() if not each.startswith(" ")} - {"disk roots"}

    assert titles(run(daemon, "--all")) == set(SECTIONS)
    assert titles(run(daemon, "memory", "disk")) == {"memory", "disk"}
    chosen = json.loads(run(daemon, "memory", "daemon", "--json"))
    assert chosen.keys() == {"memory", *plain}
    for arguments in (["--json"], ["--all", "--json"]):
        assert json.loads(run(daemon, *arguments)).keys() == report.keys()


def test_sections_that_a_daemon_lacks_are_empty(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...

        def status(self) -> dict[str, Any]:
            return status()

    monkeypatch.setattr("kvoffloadd.client.Client", Client)
    assert cli.main(["status", "remote"]) == 0
    assert capsys.readouterr().out.split() == ["remote", "none"]
    assert cli.main(["status", "remote", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"remote": None}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["dsk"], '"dsk" is no section of the status; did you mean disk?'),
        (["disk", "12"], f'"12" is no section of the status; known are {", ".join(SECTIONS)}'),
    ],
)
def test_sections_that_there_are_not(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], reason: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", *arguments])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


DISK = {
    "roots": [
        {
            "path": "/nvme0/kvo", "state": "ok", "reason": "", "capacity_bytes": 1 << 40, "used_bytes": 1 << 39,
            "live_bytes": 1 << 38, "segments": 2048, "records": 70000, "queued_bytes": 0, "errors": 0,
        },
        {"path": "/nvme1/[b]", "state": "off", "reason": "Input/output error\x1b", "capacity_bytes": 1 << 40},
        {},
    ],
    "keys": 60000,
    "index_bytes": 3 << 20,
    "demoted": {"keys": 61000, "bytes": 1 << 30},
    "promoted": {"keys": 5, "seconds": 0.25},
    "not_demoted": {"backlog": 12, "second-use": 0},
    "corrupt": 1,
}  # fmt: skip
OF_DISK = (
    "disk", "keys 60,000", "index_bytes 3 MiB", "demoted_keys 61,000", "demoted_bytes 1 GiB",
    "promoted_seconds 250.0 ms", "not_demoted_backlog 12", "not_demoted_second-use 0", "corrupt 1",
)  # fmt: skip


def test_what_fits_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_sections({"disk": DISK})
    rows = [" ".join(each.split()) for each in capsys.readouterr().out.splitlines()]
    for row in (
        "disk roots",
        "path state reason capacity_bytes used_bytes live_bytes segments records queued_bytes errors",
        "/nvme0/kvo ok 1 TiB 512 GiB 256 GiB 2,048 70,000 0 B 0",
        "/nvme1/[b] off Input/output error\\x1b 1 TiB - - - - - -",
        *OF_DISK,
    ):
        assert row in rows


def test_what_does_not_fit_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    first = {**DISK["roots"][0], "path": "/nvme0/" + 200 * "x"}  # type: ignore[index]
    print_sections({"disk": {**DISK, "roots": [first]}, "sessions": [{"session": 7, "about": 200 * "y"}]})
    rows = [" ".join(each.split()) for each in capsys.readouterr().out.splitlines()]
    for row in (str(first["path"]), "state ok", "segments 2,048", "session 7", f"about {200 * 'y'}", *OF_DISK):
        assert row in rows


@pytest.mark.parametrize("disk", [None, {}, {"roots": []}, {"roots": None, "keys": 1}, {"demoted": {}}])
def test_any_disk_part_can_be_shown(capsys: pytest.CaptureFixture[str], disk: object) -> None:
    print_sections({"boot_id": b"", "disk": disk})
    assert "boot_id" in capsys.readouterr().out
