"""Tests what the command line prints, and its exit codes. A fake client stands in for a running daemon."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvoffloadd import __version__, cli, config, errors
from kvoffloadd.cli import report
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.daemon import Daemon

SHIPPED = Path(__file__).parent.parent / "config" / "kvoffloadd.toml"

Output = tuple[int, str, str]
Run = Callable[..., Output]


def run_process(*arguments: str) -> Output:
    done = subprocess.run(
        [sys.executable, "-m", "kvoffloadd", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=50,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: many cases, no start of an interpreter for each."""

    def run_here(*arguments: str) -> Output:
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # argparse's way out
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_here


# --- as a process -------------------------------------------------------------------------------------


def test_version() -> None:
    assert run_process("--version") == (0, f"kvoffloadd {__version__}\n", "")


def test_help_names_every_command_and_exit_code() -> None:
    code, out, _ = run_process("--help")
    assert code == 0
    for word in ("serve", "status", "top", "verify", "clear", "drain", "config", "plan", "3 daemon unreachable"):
        assert word in " ".join(out.split())


def test_no_command_is_a_usage_error() -> None:
    code, out, err = run_process()
    assert (code, out) == (2, "")
    assert "COMMAND" in err


def test_config_errors_stop_serve_before_anything_happens(tmp_path: Path) -> None:
    path = tmp_path / "kvoffloadd.toml"
    path.write_text("[copy]\nthreads = 0\nthread = 1\n")
    code, out, err = run_process("serve", "--config", str(path), "--set", "log.level=loud")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"kvoffloadd: {path}: 3 problems:",
        "  line 2: copy.threads = 0: must be from 1 to 256",
        "  line 3: copy.thread = 1: unknown key; did you mean threads?",
        '  override: log.level = "loud": must be one of "debug", "info", "warning", "error"',
    ]


def test_config_check_and_show_as_processes() -> None:
    socket = f"socket: {config.ServerConfig().socket}\n"
    assert run_process("config", "check", str(SHIPPED))[:2] == (0, f"{SHIPPED}: ok\n{socket}")
    code, out, err = run_process("config", "show")
    assert (code, err) == (0, "")
    assert out == report.config_text(config.load(None))


# --- config -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "--set", "memory"], '"memory" is not section.key=value'),
        (["serve", "--set", "memory=4"], '"memory=4" is not section.key=value'),
        (["serve", "--memory", "64GB"], '"64GB" has the unknown unit "GB"'),
        (["serve", "--memory", "8GB"], "did you mean 8GiB?"),
        (["serve", "--memory", "8"], "did you mean 8GiB?"),
        (["serve", "--disk", "/nvme0=8"], "did you mean 8GiB?"),
        (["serve", "--policy", "2"], 'memory.policy = "2": must be one of'),
        (["serve", "--memory", "lots"], '"lots" is not a size'),
        (["serve", "--memory", "5"], "memory.capacity_bytes"),
        (["serve", "--disk", "/nvme0"], '"/nvme0" is not PATH=SIZE, like "/nvme0/kvoffloadd=1TiB"'),
        (["serve", "--disk", "=1TiB"], '"=1TiB" is not PATH=SIZE'),
        (["serve", "--disk", "/nvme0=1TB"], '"1TB" has the unknown unit "TB"'),
        (["serve", "--disk", "/nvme0=1MiB"], "entry 1: capacity must be from 4 MiB"),
        (["serve", "--disk", "/a=1GiB", "--disk", "/a/b=1GiB"], "disk.roots: /a/b lies inside /a"),
        (["verify", "--repair"], "--repair needs --disk or --root"),
        (["verify", "--root", "/a", "--payloads"], "--payloads needs a daemon, and --root works without one"),
        (["serve", "--socket", "/" + 110 * "x"], "the path of a socket may have at most 107"),
        (["serve", "--conf", "x"], "unrecognized arguments: --conf"),
        (["serve", "--config", "/no/such.toml"], "/no/such.toml: can't be read: No such file or directory"),
        (["config", "show", "--set", "a.b=1"], "unknown section"),
        (["config", "check", "/"], "can't be read: Is a directory"),
        (["serve", "--set", "metrics.listen=:9477"], "must name an address of this host"),
        (["drain", "--deadline-s", "soon"], '"soon" is not a number of seconds'),
        (["drain", "--deadline-s", "nan"], '"nan" is not between 0 and 86,400 seconds'),
        (["drain", "--deadline-s", "0"], '"0" is not between'),
        (["stop"], "unknown command 'stop'; did you mean Ctrl-C where it serves, or systemctl stop?"),
        (["flush"], "unknown command 'flush'; did you mean clear?"),
    ],
)
def test_usage_and_config_errors(run: Run, arguments: list[str], reason: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert reason in err
    assert "Traceback" not in err


def test_config_show_reads_back_to_the_same_config(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(
        *("config", "show", "--memory", "8GiB", "--policy", "lru", "--socket", "x.sock"),
        *("--set", 'server.allowed_uids=["root", 12]', "--set", "server.socket_mode=0o600"),
    )
    assert code == 0
    path = tmp_path / "shown.toml"
    path.write_text(out)
    shown = config.load(path)
    assert shown.memory == config.MemoryConfig(capacity_bytes=8 << 30, policy="lru")
    assert shown.server == config.ServerConfig(socket=Path.cwd() / "x.sock", socket_mode=0o600, allowed_uids=(0, 12))
    assert "8589934592  # 8 GiB" in out


def test_config_show_takes_disk_roots_instead_of_the_files(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kvoffloadd.toml"
    path.write_text('[disk]\nroots = [{ path = "/other", capacity = "1GiB" }]\ndemote = "evict"\n')
    code, out, _ = run(
        *("config", "show", "--config", str(path)),
        *("--disk", "/nvme0/a=b=1TiB", "--disk", 'quo"te\\=16 MiB'),
    )
    assert code == 0
    path.write_text(out)
    roots = (
        config.DiskRoot(Path("/nvme0/a=b"), 1 << 40),
        config.DiskRoot(Path.cwd() / 'quo"te\\', 16 << 20),
    )
    assert config.load(path).disk == config.DiskConfig(roots=roots, demote="evict")


def test_config_check_notes_what_would_not_fit_here(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_text('[memory]\ncapacity_bytes = "1PiB"\n')
    code, out, err = run("config", "check", str(path))
    assert (code, out) == (0, f"{path}: ok\nsocket: {config.load(None).server.socket}\n")
    assert (
        "note: the daemon would not start on this machine: memory.capacity_bytes = 1125899906842624 (1 PiB): only"
        in err
    )


def test_config_check_warns_of_what_other_hosts_can_read(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "open.toml"
    path.write_text('[metrics]\nlisten = "0.0.0.0:9477"\n')
    code, out, err = run("config", "check", str(path))
    assert (code, out.splitlines()[0]) == (0, f"{path}: ok")
    assert err.startswith(
        "warning: metrics.listen = 0.0.0.0:9477: every host that can connect reads, without a password"
    )
    path.write_text('[metrics]\nlisten = "localhost:9477"\n')
    assert "warning" not in run("config", "check", str(path))[2]


def test_config_check_lists_an_unknown_policy_with_all_other_problems(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('[memory]\ncapacity = "8GiB"\npolicy = "lfu"\n')
    code, out, err = run("config", "check", str(path))
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"kvoffloadd: {path}: 2 problems:",
        '  line 2: memory.capacity = "8GiB": unknown key; did you mean capacity_bytes?',
        '  line 3: memory.policy = "lfu": must be one of "", "hit-density", "lru", "s3-fifo"; did you mean "lru"?',
    ]


# --- no daemon ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["status"], ["top", "--once"], ["verify"], ["clear", "--yes"], ["drain"]])
def test_no_daemon_is_told_at_once(run: Run, socket_dir: Path, command: list[str]) -> None:
    code, out, err = run(*command, "--socket", str(socket_dir / "none.sock"))
    assert (code, out) == (3, "")
    assert str(socket_dir / "none.sock") in err


def test_a_stale_socket_is_no_daemon(run: Run, socket_dir: Path) -> None:
    path = socket_dir / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    code, _, err = run("status", "--socket", str(path))
    assert code == 3
    assert str(path) in err


# --- a fake daemon ------------------------------------------------------------------------------------

STATUS = {
    "boot_id": b"\x01\x02",
    "uptime_s": 7300.0,
    "draining": False,
    "memory": {"capacity_bytes": 1 << 30, "slots": 12345, "hit_rate": 0.345},
    "sessions": [{"uid": 1000, "instance": "[red]a\x1b[2J", "mapped_bytes": 1 << 20}, {"uid": 7}],
    "groups": {"full": {"keys": 3}, "sliding": {"keys": 4}},
    "features": [],
}


class FakeClient:
    """Answers as a daemon would; `failure` is raised instead, if set."""

    failure: Exception | None = None
    findings: tuple[str, ...] = ()
    left = 0
    unrecorded: tuple[str, ...] = ()
    asked: ClassVar[list[tuple[bool, bool, bool]]]

    def __init__(self, socket_path: Path, namespace: object, role: str, connect_deadline_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        assert (namespace, role, connect_deadline_s) == (None, "observer", 0)
        self.socket_path = socket_path

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return STATUS

    def verify(self, *, payloads: bool, disk: bool, repair: bool, deadline_s: float | None) -> SimpleNamespace:
        assert (payloads or disk) == (deadline_s is not None)
        self.asked.append((payloads, disk, repair))
        return SimpleNamespace(
            findings=self.findings, slots=1000, payloads=900 if payloads else 0, records=5000 if disk else 0
        )

    def clear(self, everything: bool, namespaces: str | None, uid: int | None) -> SimpleNamespace:
        assert everything == (namespaces is None and uid is None)
        keys, count = (1200, 0) if everything else (3, 2)
        return SimpleNamespace(keys=keys, bytes=1 << 30, unrecorded=self.unrecorded, namespaces=count, left=self.left)

    def drain(self, deadline_s: float, everything: bool) -> SimpleNamespace:
        assert everything
        return SimpleNamespace(jobs=self.left, unsealed=0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    class Fake(FakeClient):
        asked: ClassVar[list[tuple[bool, bool, bool]]] = []

    monkeypatch.setattr("kvoffloadd.client.Client", Fake)
    return Fake


@pytest.mark.usefixtures("fake")
def test_status_as_tables(run: Run) -> None:
    code, out, err = run("status", "--all")
    assert (code, err) == (0, "")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in ("boot_id 0102", "uptime_s 2 h 1 min", "draining no", "capacity_bytes 1 GiB",
                "slots 12,345", "hit_rate 34.5 %", "uid instance mapped_bytes", "1,000 [red]a\\x1b[2J 1 MiB",
                "7 - -", "sliding 4", "features", "none"):  # fmt: skip
        assert row in rows


def test_counts_in_a_map_are_told_without_zeros() -> None:
    assert report.format_value("missed", {"evicted": 1234, "cleared": 0, "\x1b": 5}) == "evicted: 1,234, \\x1b: 5"
    assert report.format_value("missed", {"cleared": 0}) == "none"


@pytest.mark.usefixtures("fake")
def test_status_as_json(run: Run) -> None:
    code, out, _ = run("status", "--json")
    assert code == 0
    assert json.loads(out) == {**STATUS, "boot_id": "0102"}


def test_verify_exits_1_on_findings(run: Run, fake: type[FakeClient]) -> None:
    assert run("verify") == (0, "0 findings in 1,000 slots\n", "")
    assert run("verify", "--payloads") == (0, "0 findings in 1,000 slots, 900 payloads hashed again\n", "")
    fake.findings = ("slot 3 belongs to two parts",)
    assert run("verify") == (1, "finding: slot 3 belongs to two parts\n1 finding in 1,000 slots\n", "")
    code, out, _ = run("verify", "--json", "--payloads")
    assert (code, json.loads(out)) == (1, {
        "findings": [*fake.findings], "slots": 1000, "payloads": 900, "records": 0, "repaired": 0,
    })  # fmt: skip


def test_verify_asks_for_the_disk(run: Run, fake: type[FakeClient]) -> None:
    assert run("verify", "--disk") == (0, "0 findings in 1,000 slots, 5,000 records on disk read\n", "")
    fake.findings = ("disk: the record at /nvme0/segments/1, page 8 is damaged",)
    code, out, _ = run("verify", "--disk", "--json")
    assert (code, json.loads(out)["records"]) == (1, 5000)
    assert fake.asked == [(False, True, False), (False, True, False)]


def test_verify_repairs_the_disk(run: Run, fake: type[FakeClient]) -> None:
    bad = "disk: the record at /nvme0/segments/1, page 8 is damaged, dropped"
    fake.findings = (bad,)
    code, out, _ = run("verify", "--disk", "--repair", "--payloads")
    assert (code, fake.asked) == (0, [(True, True, True)])
    assert out.splitlines() == [
        f"finding: {bad}",
        "1 finding, 1 repaired, in 1,000 slots, 900 payloads hashed again, 5,000 records on disk read",
    ]
    fake.findings = (bad, "slot 3 belongs to two parts")
    code, out, _ = run("verify", "--disk", "--repair", "--json")
    assert (code, json.loads(out)["repaired"]) == (1, 1)


# --- disk roots without a daemon ------------------------------------------------------------------------


class Roots:
    """Stands in for the check of a root's files: what is wrong with which, and which can't be checked."""

    def __init__(self) -> None:
        self.findings: dict[str, list[str]] = {}
        self.failures: dict[str, Exception] = {}
        self.repaired: int | None = None

    def check_root(self, path: Path, *, repair: bool, progress: Callable[[int, int], None]) -> SimpleNamespace:
        if path.name in self.failures:
            raise self.failures[path.name]
        progress(1 << 20, 3 << 20)
        findings = self.findings.get(path.name, [])
        repaired = len(findings) if self.repaired is None else self.repaired
        return SimpleNamespace(
            segments=3, records=4000, bytes=3 << 20, findings=findings, repaired=repaired if repair else 0
        )


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> Roots:
    fake = Roots()
    monkeypatch.setitem(sys.modules, "kvoffloadd.storage.disk.repair", SimpleNamespace(check_root=fake.check_root))
    return fake


def test_verify_root_needs_no_daemon(run: Run, roots: Roots) -> None:
    assert run("verify", "--root", "/a") == (0, "/a: 0 findings in 4,000 records, 3 segments, 3 MiB\n", "")
    roots.findings["b"] = ["segment 7: \x1b bad"]
    code, out, err = run("verify", "--disk", "--root", "/a", "--root", "b")
    assert (code, err) == (1, "")
    b = Path.cwd() / "b"
    assert out.splitlines()[1:] == [
        f"finding: {b}: segment 7: \\x1b bad",
        f"{b}: 1 finding in 4,000 records, 3 segments, 3 MiB",
    ]


def test_verify_root_repairs(run: Run, roots: Roots) -> None:
    roots.findings["b"] = ["one", "two"]
    code, out, _ = run("verify", "--root", "/a", "--root", "/b", "--repair")
    assert (code, out.splitlines()[-1]) == (0, "/b: 2 findings, 2 repaired, in 4,000 records, 3 segments, 3 MiB")
    roots.repaired = 1
    code, out, _ = run("verify", "--root", "/b", "--repair", "--json")
    assert code == 1
    assert json.loads(out) == {
        "roots": [
            {"root": "/b", "segments": 3, "records": 4000, "bytes": 3 << 20, "findings": ["one", "two"], "repaired": 1}
        ]
    }


def test_a_root_that_cant_be_checked_does_not_hide_the_others(run: Run, roots: Roots) -> None:
    roots.failures["a"] = errors.ConfigError("another daemon holds its lock")
    roots.failures["c"] = OSError(5, "Input/output error")
    roots.findings["b"] = ["bad"]
    code, out, err = run("verify", "--root", "/a", "--root", "/b", "--root", "/c")
    assert code == 4
    assert out.splitlines()[0] == "finding: /b: bad"
    assert err.splitlines() == [
        "kvoffloadd: /a can't be checked: another daemon holds its lock",
        "kvoffloadd: /c can't be checked: [Errno 5] Input/output error",
    ]
    code, out, _ = run("verify", "--json", "--root", "/a", "--root", "/b")
    assert code == 4
    first, second = json.loads(out)["roots"]
    assert first == {"root": "/a", "error": "another daemon holds its lock"}
    assert second["findings"] == ["bad"]


class TerminalText(io.StringIO):
    """Keyboard or screen, where a person sits."""

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_while_work_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.ProgressLine, "FIRST_S", 0.01)
    monkeypatch.setattr(report.ProgressLine, "NEXT_S", 0.02)
    screen = TerminalText()
    monkeypatch.setattr("sys.stderr", screen)
    until = time.monotonic() + HANG_S
    with report.ProgressLine("/nvme0\x07") as line:
        while ": 25% of 4 MiB, " not in screen.getvalue() and time.monotonic() < until:
            line.update(1 << 20, 4 << 20)
            time.sleep(0.01)
    shown = screen.getvalue()
    assert "\r\x1b[K/nvme0\\x07: 25% of 4 MiB, " in shown
    assert shown.endswith("\r\x1b[K")


@pytest.mark.parametrize("screen", [TerminalText(), io.StringIO()])
def test_short_work_and_pipes_show_no_progress(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO) -> None:
    monkeypatch.setattr(report.ProgressLine, "FIRST_S", 30 if screen.isatty() else 0)
    monkeypatch.setattr("sys.stderr", screen)
    with report.ProgressLine("work") as line:
        time.sleep(0.05)
        assert line.text().startswith("work: ")
    assert screen.getvalue() == ""


# --- orders to a running daemon -------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_clear_asks_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))  # no terminal: its yes does not count
    code, out, err = run("clear")
    assert (code, out) == (2, "")
    assert "nothing was dropped: use --yes" in err
    assert run("clear", "--yes") == (0, "dropped 1,200 keys, 1 GiB\n", "")


def test_clear_says_where_it_is_not_recorded_yet(run: Run, fake: type[FakeClient]) -> None:
    fake.unrecorded = ("/disk \x1b[2J", "remote")
    code, out, _ = run("clear", "--yes")
    assert (code, out.splitlines()[0]) == (0, "dropped 1,200 keys, 1 GiB")
    assert "not recorded yet in /disk \\x1b[2J, remote: the daemon goes on trying" in out


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("YES\n", 0), ("\n", 2), ("no\n", 2), ("", 2)])
def test_clear_takes_a_yes_from_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    monkeypatch.setattr("sys.stdin", TerminalText(answer))
    got, _, err = run("clear", "--socket", "/tmp/x.sock")
    assert got == code
    assert err.startswith("Drop every key of every namespace from the daemon at /tmp/x.sock? [y/N] ")


def test_clear_of_some_namespaces(run: Run, fake: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TerminalText("no\n"))
    code, _, err = run("clear", "--namespace", "llama*")
    assert code == 2
    assert err.startswith("Drop every key of the namespaces that match 'llama*' from the daemon at ")
    assert run("clear", "--namespace", "llama*", "--yes") == (0, "dropped 3 keys, 1 GiB of 2 namespaces\n", "")
    code, _, err = run("clear", "--user", "root")
    assert code == 2
    assert err.startswith("Drop every key of every namespace of uid 0 from the daemon at ")
    assert run("clear", "--user", "1234", "--yes") == (0, "dropped 3 keys, 1 GiB of 2 namespaces\n", "")
    code, _, err = run("clear", "--user", "nobody here", "--yes")
    assert code == 2
    assert 'names the user "nobody here", which does not exist on this machine' in err
    fake.left = 1
    code, _, err = run("clear", "--namespace", "llama*", "--yes")
    assert code == 1
    assert "1 namespace could not be cleared" in err


def test_drain_exits_1_when_jobs_are_left(run: Run, fake: type[FakeClient]) -> None:
    assert run("drain")[0] == 0
    fake.left = 2
    assert run("drain", "--deadline-s", "0.5") == (1, "deadline passed: 2 jobs still run, 0 slots unsealed\n", "")


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (errors.DaemonUnreachableError("no daemon listens at /x"), 3, "no daemon listens at /x"),
        (errors.ConnectionLostError("end of stream"), 3, "the daemon went away before it answered: end of stream"),
        (errors.DeadlineError("5 s"), 4, "the daemon did not answer in time: 5 s"),
        (errors.RemoteError("forbidden", "not yours", "client", False), 4, "refused: forbidden: not yours"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures_have_their_own_exit_codes(
    run: Run, fake: type[FakeClient], failure: Exception, code: int, message: str
) -> None:
    fake.failure = failure
    assert run("status") == (code, "", f"kvoffloadd: {message}\n" if message else "")


# --- formatting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("x_bytes", 1536, "1.50 KiB"),
        ("bytes", 0, "0 B"),
        ("x_s", 0.002, "2.0 ms"),
        ("hit_rate", 1, "100.0 %"),
        ("rate_of_x", 2.5, "2.500"),
        ("keys", 1234567, "1,234,567"),
        ("on", True, "yes"),
        ("x", None, "-"),
        ("x", ["a", 2], "a, 2"),
        ("x", "\x07bell", "\\x07bell"),
        ("x", "schön", "schön"),
    ],
)
def test_values_have_units(name: str, value: object, shown: str) -> None:
    assert report.format_value(name, value) == shown


# --- text that the terminal's encoding lacks -------------------------------------------------------------------------

ENCODINGS = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


@pytest.mark.parametrize("variables", ENCODINGS)
@pytest.mark.parametrize("name", [b"disk-\xc3\xbc\xe2\x82\xac", b"disk-\xff"])
def test_paths_in_any_encoding_can_be_shown(tmp_path: Path, variables: dict[str, str], name: bytes) -> None:
    root = os.fsencode(tmp_path) + b"/" + name
    for command in (["config", "show"], ["doctor"], ["doctor", "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvoffloadd", *command, "--memory", "8MiB", "--disk", root + b"=8MiB"],
            capture_output=True, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, check=False, timeout=50,
        )  # fmt: skip
        assert done.returncode in (0, 1)
        assert done.stderr == b""
        assert b"disk-" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("variables", ENCODINGS)
def test_a_daemon_s_paths_in_any_encoding_can_be_shown(
    start_daemon: Callable[..., Daemon], tmp_path: Path, variables: dict[str, str]
) -> None:
    root = tmp_path / "disk-\u00fc\u20ac"
    daemon = start_daemon(f'disk.roots=[{{ path = "{root}", capacity = "16MiB" }}]', "disk.min_free_bytes=0")
    for command in (["status"], ["status", "--json"], ["top", "--once", "--interval", "0.1"], ["verify", "--disk"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvoffloadd", *command, "--socket", str(daemon.socket)],
            capture_output=True, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, check=False, timeout=50,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
