"""docs/STATUS.md names every key that `status` has, and no other."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client
from kvoffloadd.protocol.connection import encode
from kvoffloadd.protocol.messages import FRAME_BYTES_MAX, Report
from kvoffloadd.server.status import LABEL_CHARS, NAMESPACES_MAX, SESSIONS_MAX
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import NAMESPACE
from tests.e2e.daemons import Hold
from tests.e2e.rank import Rank, new_keys

DOCUMENT = (
    (Path(__file__).parents[2] / "docs" / "STATUS.md")
    .read_text(encoding="utf-8")
    .partition("\n## `kvoffloadd status --json`\n")[2]
)
BY_NAME = {"transfers", "lanes", "devices"}
"""Maps whose keys are names, and whose values are alike."""

REASONS = {
    "missed", "not_demoted", "late_beats", "demoted", "promoted", "corrupt", "fetched", "not_fetched", "pushed",
    "not_pushed", "lookup_s", "get_s", "eras", "took_s",
}  # fmt: skip
"""Maps that are explained where they are named."""

ONLY_SOMETIMES = {
    "pinned_bytes",
    "pinning_failure",
    "unpinned_copies",
    "batch_failures",
    "pitched_copies",
    "left_out",
}


def keys_of(status: dict[str, Any]) -> Iterator[str]:
    """The last name of every path."""
    for name, value in status.items():
        yield name
        if name in REASONS or name in ("accounts", "open_sessions"):
            continue
        if name in BY_NAME and isinstance(value, dict):
            inner = list(value.values())
        else:
            inner = value if isinstance(value, list) else [value]
        for one in inner:
            if isinstance(one, dict):
                yield from keys_of(one)


@pytest.mark.slow
def test_every_key_is_explained_and_every_explained_key_exists(
    start_daemon: Callable[..., Daemon], hold: Hold, tmp_path: Path, seed: int
) -> None:
    disk = f'disk.roots=[{{ path = "{tmp_path / "disk"}", capacity = "16MiB" }}]'
    store = ("remote.engine=memory", f"remote.directory={tmp_path / 'store'}")
    quotas = f'quotas.users={{{os.getuid()} = {{ memory_max_bytes = "16MiB" }}}}'
    daemon = start_daemon(disk, "disk.min_free_bytes=0", *store, quotas, faults=hold.fault)
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    keys = new_keys(np.random.default_rng(seed), 2)
    rank.client.pin({0: keys})
    with hold:
        job = rank.client.store(rank.registration, {0: (keys, rank.blocks_of(0, 0, 2))})
        until(lambda: daemon.status()["slow_jobs"], "a job is slow")
        status = daemon.status()
    rank.client.wait(job, 10.0)

    found = set(keys_of(status))
    tables = re.findall(r"^\| `([\w.]+)` \|", DOCUMENT, re.MULTILINE)
    headings = re.findall(r"^### `(\w+)`$|^`(\w+)`: ", DOCUMENT, re.MULTILINE)
    explained = {name.rpartition(".")[2] for name in tables} | {name for pair in headings for name in pair if name}
    explained |= {"running", "quarantine", "leases", "hash_lane"}
    assert found - explained == set()
    assert explained - found - ONLY_SOMETIMES == set()
    (slow,) = status["slow_jobs"]
    assert (slow["direction"], slow["payloads"], slow["waits_for"]) == ("store", 2, "copy")
    assert status["lookups"][0]["missed"]["never_stored"] == 2
    reasons = {*status["lookups"][0]["missed"], *status["disk"]["promoted"], *status["disk"]["demoted"]}
    assert {reason for reason in reasons if f"`{reason}`" not in DOCUMENT} == set()


def test_sessions_tell_their_engine_and_where_their_memory_is(daemon: Daemon) -> None:
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    with Client(daemon.socket, namespace=None, role="observer") as observer:
        by_role = {session["role"]: session for session in observer.status()["sessions"] if session["instance"]}
    assert by_role["observer"]["devices"] == []
    assert by_role["worker"]["devices"] == [kind for kind in daemon.status()["devices"] if kind != "host"] or ["host"]
    assert by_role["worker"]["instance"] != by_role["observer"]["instance"]
    assert rank.mapped_bytes == by_role["worker"]["mapped_bytes"]


def test_no_number_of_sessions_and_no_name_is_too_much_for_the_reply(daemon: Daemon) -> None:
    model = "\U0001f600" * 512
    peer = daemon.peer()
    peer.hello(namespace=NAMESPACE | {"model": model})
    report = daemon.status()
    assert report["open_sessions"] == {"worker": 1, "observer": 1}
    (namespace,) = report["namespaces"]
    session = next(session for session in report["sessions"] if session["role"] == "worker")
    assert len(session["namespace"]) == len(namespace["label"]) == LABEL_CHARS
    assert model.startswith(session["namespace"][:-1])
    gpus = [f"cuda:{number:032x}" for number in range(8)]
    huge = dict.fromkeys(("session", "instance", "requests", "mapped_bytes"), 2**63)
    report["sessions"] = [session | huge | {"devices": gpus}] * SESSIONS_MAX
    report["namespaces"] = [namespace | dict.fromkeys(("epoch", "keys", "bytes", "sessions"), 2**62)] * NAMESPACES_MAX
    assert len(encode(Report(seq=1, status=report))) < FRAME_BYTES_MAX * 7 // 8
