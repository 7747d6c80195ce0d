"""A daemon that is killed and started anew in each phase of each call: nothing hangs, no byte is wrong, no block is
free before the daemon that had it is dead, and the client works on.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, Job, KvCache, Outcome, Ref, SharedTensor, Timeline
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.client.everycall import CALLS, Stage
from tests.client.flavours import MAKERS, NAMESPACE, OnLoop

BLOCKS, PAGE = 8, 4096
ON_AN_OPEN_JOB = {"wait", "wait_any", "cancel", "close"}
NOTHING_TO_ASK = {"open_jobs"}
EVERY: dict[str, Callable[[Stage], Any]] = {**CALLS, "close": lambda on: on.client.close()}


@dataclass
class RestartCase:
    """A client with 4 stored keys, and a store that has ended or waits for its signal."""

    daemon: Daemon
    client: Any
    name: str
    answers: bool = True
    tensor: SharedTensor = field(init=False)
    stage: Stage = field(init=False)

    def __post_init__(self) -> None:
        self.tensor = SharedTensor.allocate(BLOCKS, PAGE)
        self.rows = np.arange(BLOCKS, dtype=np.int8)[:, None] + np.ones(PAGE, np.int8)
        self.tensor.array[:] = self.rows
        timeline = Timeline()
        groups = [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, PAGE)])]
        caches = KvCache([self.tensor], groups, [timeline])
        registration = self.client.register(caches)
        keys = np.random.default_rng(7).integers(0, 256, (4, 32), dtype=np.uint8)
        self.ready = timeline.signal()
        if self.name not in ON_AN_OPEN_JOB:
            self.ready.reach()
        job = self.client.store(registration, {0: (keys, np.arange(4))}, ready=self.ready)
        if self.name not in ON_AN_OPEN_JOB:
            self.client.wait(job, HANG_S)
        self.stage = Stage(self.client, caches, registration, keys, job, HANG_S)

    def call(self) -> None:
        """Makes a call to its end, which is an answer or an error in words."""
        with suppress(KvOffloadError):
            EVERY[self.name](self.stage)

    def restart(self) -> None:
        """Kill the daemon and start it again, without waiting until it answers."""
        self.daemon.kill()
        self.daemon.launch()
        self.answers = False

    def meanwhile(self, work: Callable[[], None]) -> None:
        """Do this while the call is under way."""
        calling = threading.Thread(target=self.call)
        calling.start()
        work()
        calling.join(2 * HANG_S)
        assert not calling.is_alive(), f"{self.name} hangs"

    def check(self) -> None:
        """Every block is free or will be, and the client stores and loads what it is given."""
        if not self.answers:
            self.daemon.await_answer()
        jobs: list[Job] = [self.stage.job, *self.client.open_jobs()]
        for job in jobs:
            self.client.wait(job, HANG_S)
        np.testing.assert_array_equal(self.tensor.array, self.rows)  # also where `load` has written
        if self.name == "close":
            self.client.close()
            return
        assert self.client.open_jobs() == []
        registration = self.stage.registration
        if registration.closed:
            registration = self.client.register(self.stage.caches)
        keys = np.random.default_rng(8).integers(0, 256, (4, 32), dtype=np.uint8)
        stored = self.client.wait(self.client.store(registration, {0: (keys, np.arange(4))}), HANG_S)
        assert stored.outcome is Outcome.DONE
        self.tensor.array[4:] = 0
        loaded = self.client.wait(self.client.load(registration, {0: (keys, np.arange(4, 8))}), HANG_S)
        assert loaded.valid(0).all()
        np.testing.assert_array_equal(self.tensor.array[4:], self.rows[:4])


class WatchedSocket:
    """A client's socket that does something before the n-th time that bytes are read from it."""

    def __init__(self, sock: Any, at: int, act: Callable[[], None], *, torn: bool = False) -> None:
        self._socket = sock
        self._left = at
        self._act = act
        self._torn = torn
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recvmsg_into(self, buffers: Any, *more: Any) -> Any:
        if self._ended:
            return 0, [], 0, None
        self._left -= 1
        if self._left == 0:
            self._act()
        count, *rest = self._socket.recvmsg_into(buffers, *more)
        if self._left == 0 and self._torn:
            count, self._ended = count // 2, True
        return count, *rest


# --- the phases --------------------------------------------------------------------------------------


def before(case: RestartCase) -> None:
    """The daemon is another one already."""
    case.restart()
    case.daemon.await_answer()
    case.answers = True
    case.call()


def while_it_is_down(case: RestartCase) -> None:
    case.daemon.kill()
    case.answers = False
    case.meanwhile(case.daemon.launch)


def sent(case: RestartCase) -> None:
    """The request is on its way, and the daemon does not read it."""
    case.daemon.signal(signal.SIGSTOP)
    transport = case.client._core._transport
    connection = transport.current
    job = case.stage.job

    def work() -> None:
        asks = case.name not in {"wait", "wait_any", "connect", "events", "open_jobs", "subscribe"}
        until(lambda: not asks or (connection._pending and not connection.outbox), f"{case.name} has asked")
        assert job.done == (case.name not in ON_AN_OPEN_JOB)
        assert not any(one.done for one in case.client.open_jobs())
        case.restart()

    case.meanwhile(work)


def read(case: RestartCase, at: int, *, torn: bool = False) -> None:
    """The daemon dies when the answer has come, or half of it, and has not been read."""
    sockets = case.client._core._transport._sockets
    for connection, sock in sockets.items():
        sockets[connection] = WatchedSocket(sock, at, case.restart, torn=torn)
    if case.name in ("wait", "wait_any"):
        case.ready.reach()  # the completion is on its way
    case.call()
    for connection, sock in sockets.items():
        sockets[connection] = getattr(sock, "_socket", sock)


PHASES: dict[str, Callable[[RestartCase], None]] = {
    "before": before,
    "while it is down": while_it_is_down,
    "sent": sent,
    "answered": functools.partial(read, at=1),
    "half answered": functools.partial(read, at=1, torn=True),
    "a second answer": functools.partial(read, at=2),
}
QUICK = {"store", "wait"}


@pytest.fixture(params=["blocking", "asyncio"])
def make(request: pytest.FixtureRequest, start_daemon: Callable[..., Daemon]) -> Iterator[Callable[[str], RestartCase]]:
    """`make(name)`: a client of this flavour, ready for this call, with one daemon for all of them."""
    made: list[Any] = []
    daemon = start_daemon()

    def start(name: str) -> RestartCase:
        options = {"namespace": NAMESPACE, "deadline_s": HANG_S, "connect_deadline_s": HANG_S}
        made.append(MAKERS[request.param](daemon.socket, **options))
        return RestartCase(daemon, made[-1], name)

    yield start
    for client in made:
        client.close(0.0, force=True)
        if isinstance(client, OnLoop):
            client.end()


def restart_in(phase: str, names: set[str], make: Callable[[str], RestartCase]) -> None:
    for name in sorted(names):
        case = make(name)
        PHASES[phase](case)
        case.check()
        case.client.close()


@pytest.mark.parametrize("phase", PHASES)
def test_a_restart_in_each_phase(phase: str, make: Callable[[str], RestartCase]) -> None:
    restart_in(phase, QUICK, make)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_restart_in_each_phase_of_every_other_call(phase: str, make: Callable[[str], RestartCase]) -> None:
    restart_in(phase, set(EVERY) - QUICK - NOTHING_TO_ASK, make)
