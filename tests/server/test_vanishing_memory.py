"""Tests peers' memory that is gone when the daemon copies: that job fails, and nothing else happens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import NamespaceSpec, Outcome, Timeline
from scripts.harness.daemon import Daemon
from scripts.harness.peer import Fields, RawPeer
from tests.device.hiding import HIDDEN, hide
from tests.e2e.rank import Rank, new_keys
from tests.server import vanishing
from tests.server.scene import ids, keys
from tests.server.vanishing import BLOCK, BLOCKS, GONE_BLOCK, SIZE, Vanish

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
KINDS = (vanishing.cut_off, vanishing.full_tmpfs, vanishing.huge_pages)
WAYS = {(): "native", **HIDDEN}
STRICT = "copy.fill_holes=false"
each_way = pytest.mark.parametrize("hidden", WAYS, ids=WAYS.values())


@pytest.fixture
def copying(start_daemon: Start, hidden: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """A daemon that has to copy in one of the ways there are."""
    for name, value in hide(tmp_path, hidden).items():
        monkeypatch.setenv(name, value)
    return start_daemon("server.use_uvloop=false")


class RawWorker:
    """A raw peer with BLOCKS blocks of the memory that it is given. Jobs count from 1."""

    def __init__(self, daemon: Daemon, fd: int) -> None:
        self.peer: RawPeer = daemon.peer()
        self.peer.hello(namespace={"model": "vanishing", "key_bytes": 32})
        (allocation,) = self.peer.attach([fd])
        tensor = {"allocation": allocation, "offset": 0, "num_blocks": BLOCKS}
        group = {"group": 0, "kind": "full", "tokens_per_key": 16}
        registered = self.peer.ok(
            "register",
            tensors=[{**tensor, "page_bytes": BLOCK, "stride_bytes": BLOCK}],
            groups=[{**group, "refs": [{"tensor": 0, "offset": 0, "length": BLOCK}]}],
            signals=[allocation],
        )
        self.registration = registered["registration"]
        self.jobs = 0

    def job(self, what: str, numbers: tuple[int, ...], blocks: tuple[int, ...], **fields: Any) -> Fields:
        """Its end."""
        return self.peer.completed(self.begin(what, numbers, blocks, **fields))

    def begin(self, what: str, numbers: tuple[int, ...], blocks: tuple[int, ...], **fields: Any) -> int:
        self.jobs += 1
        groups = [{"group": 0, "keys": keys(*numbers), "blocks": ids(*blocks)}]
        self.peer.ok(what, job=self.jobs, registration=self.registration, groups=groups, **fields)
        return self.jobs

    def states(self, *numbers: int) -> list[int]:
        return list(self.peer.ok("lookup", groups=[{"group": 0, "keys": keys(*numbers)}])["states"][0])


def bystander(daemon: Daemon) -> Callable[[], bool]:
    """Another engine: whether all that it has stored and pinned before comes back right."""
    rank = daemon.welcome(Rank(daemon.socket, namespace=NamespaceSpec(model="bystander")))
    stored = new_keys(np.random.default_rng(0), 16)
    rank.store_keys(stored)
    rank.client.pin({0: stored})
    return lambda: bool(rank.loads_right(stored))


def failed(end: Fields, count: int) -> bool:
    """Whether a job failed as a whole, with the reason."""
    assert "is gone" in end["reason"] or end["outcome"] != "failed", end
    return (end["outcome"], end["failed"]) == ("failed", [ids(*range(count))])


@each_way
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_copy_of_what_is_gone_fails(
    copying: Daemon, kind: Callable[[], AbstractContextManager[tuple[int, Vanish]]]
) -> None:
    still_served = bystander(copying)
    with kind() as (fd, vanish):
        worker = RawWorker(copying, fd)
        assert worker.job("store", (1, 2), (0, 1))["outcome"] == "done"
        vanish()
        assert failed(worker.job("store", (3, 4), (2, GONE_BLOCK)), 2)
        assert failed(worker.job("load", (1, 2), (3, BLOCKS - 1)), 2)
        assert worker.states(1, 2, 3, 4) == [1, 1, 0, 0]
        assert worker.job("store", (3, 4), (2, GONE_BLOCK - 1))["outcome"] == "done"
        assert worker.job("load", (1, 2, 3, 4), (8, 7, 6, 5))["outcome"] == "done"
        transfers = copying.status()["transfers"]
        assert [transfers[what]["keys_failed"] for what in ("store", "load")] == [2, 2]
        assert still_served()


@each_way
def test_no_page_of_a_peer_s_is_made_where_that_is_forbidden(
    start_daemon: Start, hidden: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as the daemon's, which a cgroup may limit: sealed memory, whose owner punches holes into it."""
    for name, value in hide(tmp_path, hidden).items():
        monkeypatch.setenv(name, value)
    daemon = start_daemon("server.use_uvloop=false", STRICT)
    still_served = bystander(daemon)
    with vanishing.holes() as (fd, vanish):
        worker = RawWorker(daemon, fd)
        assert worker.job("store", (1, 2), (0, 1))["outcome"] == "done"
        vanish()
        assert failed(worker.job("store", (3, 4), (2, GONE_BLOCK)), 2)
        assert failed(worker.job("load", (1, 2), (3, BLOCKS - 1)), 2)
        assert failed(worker.job("store", (3,), (2,), ready={"signal": 0, "offset": SIZE - 8, "value": 1}), 1)
        assert os.fstat(fd).st_blocks * 512 == SIZE // 2
        os.posix_fallocate(fd, 0, SIZE)
        assert worker.job("load", (1, 2), (GONE_BLOCK, BLOCKS - 1))["outcome"] == "done"
        assert still_served()


def test_elsewhere_holes_are_filled(start_daemon: Start) -> None:
    daemon = start_daemon("copy.fill_holes=true")
    with vanishing.holes() as (fd, vanish):
        worker = RawWorker(daemon, fd)
        vanish()
        assert worker.job("store", (1,), (GONE_BLOCK,))["outcome"] == "done"
        assert worker.job("load", (1,), (BLOCKS - 1,))["outcome"] == "done"
        assert os.fstat(fd).st_blocks * 512 == SIZE // 2 + 2 * BLOCK


def test_the_client_library_leaves_no_holes(start_daemon: Start) -> None:
    """There are none in blocks that were never written, nor in a timeline that was never raised."""
    daemon = start_daemon(STRICT)
    timeline = Timeline()
    first, second = (daemon.welcome(Rank(daemon.socket, timelines=[timeline])) for _ in range(2))
    stored = new_keys(np.random.default_rng(1), 4)
    blocks = first.blocks_of(0, 0, 4)
    assert first.store_keys(stored).outcome is Outcome.DONE
    ready = timeline.signal()
    job = second.client.load(second.registration, {0: (stored, blocks)}, ready=ready)
    ready.reach()
    assert second.wait(job).outcome is Outcome.DONE
    assert second.wrong(0, stored, blocks) == 0


@each_way
def test_a_file_that_is_cut_off_and_grown_in_the_middle_of_copies(copying: Daemon) -> None:
    """Whatever the moment: each job ends done or failed, and what others stored is served."""
    still_served = bystander(copying)
    with vanishing.cut_off() as (fd, _):
        worker = RawWorker(copying, fd)
        assert worker.job("store", (1,), (0,))["outcome"] == "done"
        stop = threading.Event()

        def saw() -> None:
            while not stop.is_set():
                os.truncate(fd, BLOCK)
                os.truncate(fd, SIZE)

        sawing = threading.Thread(target=saw)
        sawing.start()
        try:
            outcomes = set()
            for turn in range(2, 42):
                many = tuple(range(turn * BLOCKS, (turn + 1) * BLOCKS))
                outcomes |= {worker.job("store", many, tuple(range(BLOCKS)))["outcome"]}
                outcomes |= {worker.job("load", (1,), (turn,))["outcome"]}
        finally:
            stop.set()
            sawing.join()
        assert outcomes <= {"done", "failed"}
        os.truncate(fd, SIZE)
        assert worker.job("load", (1,), (BLOCKS - 1,))["outcome"] == "done"
        assert still_served()


@each_way
def test_a_signal_that_is_gone(copying: Daemon) -> None:
    """It is gone at once, or while a job waits for it."""
    still_served = bystander(copying)
    with vanishing.cut_off() as (fd, vanish):
        worker = RawWorker(copying, fd)
        ready = {"signal": 0, "offset": SIZE - 8, "value": 1}
        waiting = worker.begin("store", (1,), (0,), ready=ready)
        assert copying.status()["running"]["jobs"] == 1
        vanish()
        assert failed(worker.peer.completed(waiting), 1)
        assert failed(worker.job("store", (1,), (0,), ready=ready), 1)
        assert worker.states(1) == [0]
        assert worker.job("store", (1,), (0,))["outcome"] == "done"
        assert still_served()


@pytest.mark.parametrize("hidden", [()], ids=["native"])
def test_a_fault_of_the_daemon_s_own_still_ends_it(copying: Daemon) -> None:
    """The daemon survives such a signal in copies alone. The exit status shows it, and Python's line in the log."""
    with vanishing.cut_off() as (fd, vanish):
        worker = RawWorker(copying, fd)
        vanish()
        assert failed(worker.job("store", (1,), (GONE_BLOCK,)), 1)
    copying.leave_guests()
    copying.signal(signal.SIGBUS)
    status = copying.wait()
    assert copying.says("Bus error")
    # Python then writes the stacks of threads that still run, and may read what they have just freed.
    assert status in (-signal.SIGBUS, -signal.SIGSEGV)
