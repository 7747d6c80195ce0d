"""Tests other users' memory that keeps the kernel waiting: copies that do not end cost their user, and no other."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import RawPeer
from tests.conftest import OTHER_UID
from tests.e2e.daemons import Hold
from tests.e2e.users import Stranger, needs_root
from tests.server.scene import Scene, ids, keys

pytestmark = needs_root

PAGE_BYTES, BLOCKS = 1 << 20, 16
UIDS = (OTHER_UID, OTHER_UID + 1, OTHER_UID + 2)
ALLOWED = (f"server.allowed_uids=[{', '.join(map(str, UIDS))}]", "server.socket_mode=0o666")
DRAIN_S = 0.3

Start = Callable[..., Daemon]


class StrangeWorker:
    """A worker of another user, with a memory of BLOCKS pages of 1 MiB; of the test's own memory if given."""

    def __init__(self, daemon: Daemon, uid: int = OTHER_UID, fd: int | None = None, blocks: int = BLOCKS) -> None:
        self._stranger: Stranger = daemon.welcome(Stranger.connect(daemon.socket, uid))
        self.peer: RawPeer = self._stranger.peer
        self.peer.hello(namespace={"model": "slow memory", "key_bytes": 32})
        memory = create_memfd("theirs", blocks * PAGE_BYTES) if fd is None else fd
        (self.allocation,) = self.peer.attach([memory])
        if fd is None:
            os.close(memory)
        tensor = {"allocation": self.allocation, "offset": 0, "num_blocks": blocks, "page_bytes": PAGE_BYTES}
        ref = {"tensor": 0, "offset": 0, "length": PAGE_BYTES}
        group = {"group": 0, "kind": "full", "tokens_per_key": 16, "refs": [ref]}
        tensors = [{**tensor, "stride_bytes": PAGE_BYTES}]
        self.registration = self.peer.ok("register", tensors=tensors, groups=[group])["registration"]

    def close(self) -> None:
        """Hang up, without a word."""
        self._stranger.close()

    def begin(self, what: str, job: int, numbers: list[int], blocks: list[int] | None = None, **fields: Any) -> None:
        groups = [{"group": 0, "keys": keys(*numbers), "blocks": ids(*(blocks or numbers))}]
        self.peer.ok(what, job=job, registration=self.registration, groups=groups, **fields)


@pytest.fixture
def slow(start_daemon: Start, hold: Hold) -> Daemon:
    """Copies of OTHER_UID's memory wait within `with hold:`."""
    faults = f"{hold.fault},hold_uid={OTHER_UID}"
    daemon = start_daemon(*ALLOWED, f"copy.worker_drain_s={DRAIN_S}", "copy.deadline_max_s=1", faults=faults)
    daemon.socket.parent.chmod(0o755)
    return daemon


def held(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.status()["quarantine"]
    return found


def works(scene: Scene, number: int) -> None:
    """A store and a load of the daemon's own user."""
    scene.store(scene.peer, keys(number), ids(1))
    groups = [{"group": 0, "keys": keys(number), "blocks": ids(2)}]
    job = scene.new_job()
    scene.peer.ok("load", job=job, registration=scene.registration, groups=groups)
    assert scene.peer.completed(job)["outcome"] == "done"


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_session_that_ends_though_its_copies_do_not(slow: Daemon, hold: Hold, what: str) -> None:
    scene, theirs = Scene(slow, "slow"), StrangeWorker(slow)
    theirs.begin("store", 1, [1, 2])
    assert theirs.peer.completed(1)["outcome"] == "done"
    with hold:
        theirs.begin(what, 2, [1, 2] if what == "load" else [3, 4])
        works(scene, 10)
        theirs.close()
        assert slow.says(f"of uid {OTHER_UID}, do not end")
        until(lambda: len(slow.sessions()) == 1, "the session has ended all the same")
        assert held(slow) == {"jobs": 1, "bytes": 2 * PAGE_BYTES}
        assert slow.status()["server"]["drains_late"] == 1
        assert slow.mapped("theirs") == 1, "a copy may still use it"
        assert slow.status()["accounts"][str(OTHER_UID)]["mapped_bytes"] == BLOCKS * PAGE_BYTES
        works(scene, 11)
        assert slow.verify() == ()
        again = StrangeWorker(slow)
        found = again.peer.ok("lookup", groups=[{"group": 0, "keys": keys(1, 2, 3, 4)}])["states"]
        assert found == [b"\1\1\0\0" if what == "load" else b"\1\1\2\2"], "what it stores is pending"
        again.close()
    until(lambda: held(slow) == {"jobs": 0, "bytes": 0}, "its copies have ended")
    until(lambda: slow.mapped("theirs") == 0, "its memory is unmapped")
    works(scene, 12)


def test_a_registration_that_ends_though_its_copies_do_not(slow: Daemon, hold: Hold) -> None:
    theirs = StrangeWorker(slow)
    with hold:
        theirs.begin("store", 1, [1])
        seq = theirs.peer.begin("unregister", registration=theirs.registration)
        assert slow.says(f"of uid {OTHER_UID}, do not end")
        assert theirs.peer.ok("ping")
        assert held(slow)["jobs"] == 1
    assert theirs.peer.completed(1)["outcome"] in ("done", "expired")
    assert theirs.peer.answer(seq)["type"] == "done"
    until(lambda: held(slow)["jobs"] == 0 and slow.mapped("theirs") == 0, "nothing of it is left")


def test_all_users_together_can_hold_too_much(start_daemon: Start, hold: Hold) -> None:
    """Each may hold what a single user may, so that no user's limit depends on the others."""
    daemon = start_daemon(*ALLOWED, f"copy.worker_drain_s={DRAIN_S}", faults=hold.fault, memory="64MiB")
    daemon.socket.parent.chmod(0o755)
    daemon.expected_in_log = "CRITICAL.*exiting: copies of other users' memory"
    workers = [StrangeWorker(daemon, uid, blocks=32) for uid in UIDS]
    with hold:
        for worker, count in zip(workers, (22, 12, 6), strict=True):
            worker.begin("store", 1, list(range(count)))
        workers[0].close()
        assert daemon.says(f"of uid {UIDS[0]}, do not end")
        assert held(daemon)["bytes"] == 22 * PAGE_BYTES, "no user alone ends the process"
        workers[1].close()
        workers[2].close()
        assert daemon.wait() == 70
    assert daemon.says("of 64 MiB of memory")


def test_a_stop_beside_copies_that_do_not_end(start_daemon: Start, hold: Hold, tmp_path: Path) -> None:
    """It loses nothing, and the next daemon takes over what others have stored."""
    faults = f"{hold.fault},hold_uid={OTHER_UID}"
    settings = (*ALLOWED, f"copy.worker_drain_s={DRAIN_S}", "server.drain_s=0.1", f"memory.pool_file={tmp_path}/pool")
    daemon = start_daemon(*settings, faults=faults)
    daemon.socket.parent.chmod(0o755)
    scene, theirs = Scene(daemon, "stop"), StrangeWorker(daemon)
    works(scene, 10)
    with hold:
        theirs.begin("store", 1, [1])
        assert daemon.stop() == 0
        assert daemon.says("copies of another user's memory have not ended")
    daemon.start()
    peer = daemon.peer()
    peer.hello(namespace=scene.namespace)
    again = Scene(daemon, "stop")
    assert again.peer.ok("lookup", groups=[{"group": 0, "keys": keys(10)}])["states"] == [b"\1"]


def test_a_stop_waits_for_no_job_in_quarantine(start_daemon: Start, hold: Hold) -> None:
    """It is known that they do not end, and no session is left that would hear of it."""
    faults = f"{hold.fault},hold_uid={OTHER_UID}"
    daemon = start_daemon(*ALLOWED, f"copy.worker_drain_s={DRAIN_S}", "server.drain_s=600", faults=faults)
    daemon.socket.parent.chmod(0o755)
    theirs = StrangeWorker(daemon)
    with hold:
        theirs.begin("store", 1, [1])
        theirs.close()
        until(lambda: held(daemon)["jobs"] == 1, "its copies are given up")
        assert daemon.stop() == 0
    assert daemon.says("draining: 0 jobs under way")


# --- the kernel's own waits ------------------------------------------------------------------------------------


class SlowPunch:
    """A memfd into which its owner punches a hole, in a process that hardly ever runs: below all others, on a CPU that
    another one keeps busy until `close`. Its last page is a part of the hole, and has never existed.
    """

    MAPPINGS, PUNCH_HOLE_AND_KEEP_SIZE = 32, 3

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = create_memfd("theirs", size_bytes)
        self._children: list[int] = []
        self._puncher = 0
        os.posix_fallocate(self.fd, 0, size_bytes - PAGE_BYTES)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._maps = [mmap.mmap(self.fd, size_bytes - PAGE_BYTES, flags) for _ in range(self.MAPPINGS)]

    def begin(self) -> None:
        self._fork(self._keep_busy)
        self._puncher = self._fork(self._punch)

    def _fork(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if not pid:
            try:
                os.closerange(3, self.fd)
                os.closerange(
                    self.fd + 1, os.sysconf("SC_OPEN_MAX")
                )  # sockets are to have an end when others close them
                os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
                work()
            finally:
                os._exit(0)
        self._children.append(pid)
        return pid

    @staticmethod
    def _keep_busy() -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            pass

    def _punch(self) -> None:
        punch_hole, size_bytes = ctypes.CDLL(None).fallocate, ctypes.c_long(self.size_bytes)
        begin, lowest = ctypes.c_long(0), os.sched_param(0)
        os.sched_setscheduler(0, os.SCHED_IDLE, lowest)  # what comes after this takes very long
        punch_hole(self.fd, self.PUNCH_HOLE_AND_KEEP_SIZE, begin, size_bytes)

    @property
    def over(self) -> bool:
        return os.waitid(os.P_PID, self._puncher, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)
        for one in self._maps:
            one.close()
        os.close(self.fd)


@pytest.fixture
def punch() -> Iterator[SlowPunch]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU: the punch and the daemon would share it")
    with SlowPunch(256 << 20) as made:
        yield made


def in_fault(daemon: Daemon, lane: str) -> bool:
    return bool(daemon.status()["lanes"][f"host {lane}-{OTHER_UID}"]["oldest_running_s"] > 1.0)


@pytest.mark.slow
def test_pages_that_are_being_punched_out(slow: Daemon, punch: SlowPunch) -> None:
    """Loads into them, and stores from them, wait in the kernel: with all threads of their user, and of no other."""
    scene, blocks = Scene(slow, "slow"), punch.size_bytes // PAGE_BYTES
    theirs = StrangeWorker(slow, fd=punch.fd, blocks=blocks)
    theirs.begin("store", 1, [1])
    assert theirs.peer.completed(1)["outcome"] == "done"
    punch.begin()
    for job in itertools.count(2):
        theirs.begin("load", job, [1], [blocks - 1], deadline_s=0.5)
        until(lambda: in_fault(slow, "load") or not slow.status()["running"]["jobs"], "it waits, or has ended")
        if punch.over or in_fault(slow, "load"):
            break
    for number in range(10, 30):
        works(scene, number)
    theirs.close()
    assert punch.over or slow.says(f"of uid {OTHER_UID}, do not end")
    for number in range(30, 50):
        works(scene, number)
    if punch.over:
        pytest.skip("the kernel was too fast: nothing has waited")
