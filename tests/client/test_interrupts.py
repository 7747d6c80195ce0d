"""A signal's handler that raises (Ctrl-C), at any instruction of a call of the blocking client."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, GroupKind, KvCache, Outcome, Ref, Registration, SharedTensor
from kvoffloadd.client.callline import CallersLine, CallTicket
from kvoffloadd.errors import DeadlineError, UsageError
from kvoffloadd.model import U8Array
from tests.client.fake_daemon import FakeDaemon
from tests.client.flavours import NAMESPACE
from tests.client.interrupting import LINE, Interrupted, everywhere, interrupt
from tests.client.test_lifetime import fake_is_idle

HANGS_S = 60.0
"""No call here takes so long."""
QUICK = 11
"""The quick tests interrupt at each so many-th instruction, the slow ones at each."""

# A socket that an interrupt has kept from its place is closed with the last reference to it, which Python warns of.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

InOtherThread = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def client(fake: FakeDaemon, path: str) -> Iterator[Client]:
    client = Client(path, namespace=NAMESPACE, deadline_s=HANGS_S)
    client.connect()
    yield client
    client.close()


def pidfds() -> set[int]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "pidfd" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(int(fd))
    return found


@pytest.fixture(autouse=True)
def pidfds_may_be_lost(no_descriptor_is_left: None) -> Iterator[None]:
    """The kernel hands out numbers: between that and the instruction that keeps one, an interrupt loses it."""
    before = pidfds()
    yield
    for fd in pidfds() - before:
        os.close(fd)


@pytest.fixture
def in_other_thread() -> Iterator[InOtherThread]:
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result()


# --- the line ----------------------------------------------------------------------------------------


def leave_without_a_word(line: CallersLine, until_set: threading.Event) -> None:
    line.enter(CallTicket(sys._getframe()), monotonic())
    until_set.wait(HANGS_S)


def wait_in(line: CallersLine, deadline_s: float) -> None:
    ticket = CallTicket(sys._getframe())
    try:
        line.enter(ticket, monotonic() + deadline_s)
    finally:
        line.leave(ticket)


def test_who_waits_behind_an_interrupted_call_gets_its_turn() -> None:
    line, end = CallersLine(), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(leave_without_a_word, line, end)
        while not line._tickets:
            pass
        waiters = [pool.submit(wait_in, line, HANGS_S) for _ in range(2)]
        while len(line._tickets) < 3:
            pass
        assert not any(waiter.done() for waiter in waiters)
        with pytest.raises(DeadlineError, match="other threads"):
            wait_in(line, 0.0)
        end.set()
        first.result(HANGS_S)
        for waiter in waiters:
            waiter.result(HANGS_S)
    assert line._tickets == []


def test_a_call_beneath_a_call_is_refused_at_once() -> None:
    line = CallersLine()
    ticket = CallTicket(sys._getframe())
    line.enter(ticket, monotonic())
    with pytest.raises(UsageError, match="this thread is in a call"):
        wait_in(line, HANGS_S)
    line.leave(ticket)
    wait_in(line, 0.0)


def test_calls_come_in_their_order() -> None:
    line, end, order = CallersLine(), threading.Event(), []

    def work(number: int) -> None:
        ticket = CallTicket(sys._getframe())
        line.enter(ticket, monotonic() + HANGS_S)
        order.append(number)
        line.leave(ticket)

    with ThreadPoolExecutor(5) as pool:
        pool.submit(leave_without_a_word, line, end)
        for number in range(4):
            while len(line._tickets) < number + 1:
                pass
            pool.submit(work, number)
        while len(line._tickets) < 5:
            pass
        end.set()
    assert order == [0, 1, 2, 3]


# --- calls -------------------------------------------------------------------------------------------


def test_a_handler_may_raise_anywhere_in_the_line(client: Client, in_other_thread: InOtherThread) -> None:
    """The next call, from whatever thread, neither waits nor raises."""
    places = 0
    for places in everywhere(client.ping, LINE):
        in_other_thread(client.ping) if places % 2 else client.ping()
    assert places > 200


def test_a_handler_can_not_use_the_client_that_it_interrupts(client: Client, fake: FakeDaemon) -> None:
    errors: list[str] = []

    def handler(_number: int, _frame: Any) -> None:
        with pytest.raises(UsageError) as caught:
            client.close()
        errors.append(str(caught.value))

    def answer_later(peer: Any, message: Any) -> bool:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return False

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        fake.on["ping"] = answer_later
        client.ping()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 1
    assert "this thread is in a call of this client already" in errors[0]


STEPS = [QUICK, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["lookup", "pin", "events", "snapshot", "keep", "connect"])
def test_a_request_can_be_interrupted_anywhere(
    client: Client, fake: FakeDaemon, keys: U8Array, name: str, step: int
) -> None:
    fake.features = ["keep"]
    client.subscribe()
    calls: dict[str, Callable[[], Any]] = {
        "lookup": lambda: client.lookup({0: keys}),
        "pin": lambda: client.pin({0: keys}),
        "events": client.events,
        "snapshot": lambda: client.snapshot(0),
        "keep": lambda: client.keep({0: keys}, "soon"),
        "connect": client.connect,
    }
    for _ in everywhere(calls[name], step=step):
        client.ping()
        calls[name]()
        if name == "connect":
            fake.soon(lambda: [peer.hang_up() for peer in fake.peers])  # so that the next one has to connect
            fake_is_idle(fake)
    assert client.open_jobs() == []


@pytest.mark.parametrize("step", STEPS)
def test_a_registration_can_be_interrupted_anywhere(
    client: Client, fake: FakeDaemon, caches: KvCache, step: int
) -> None:
    """What was not finished can be done again, and is not repeated after a reconnect."""
    made: list[Registration] = []
    for _ in everywhere(lambda: made.append(client.register(caches)), step=step):
        client.ping()
        for one in client._core._connector.registrations[:]:  # made, and interrupted on its way to us
            client.unregister(one)
    assert client._core._connector.registrations == made
    for _ in everywhere(lambda: client.unregister(made[0]), step=step):
        client.unregister(made[0])
        assert client._core._connector.registrations == []
        client.ping()
        made[0] = client.register(caches)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["store", "load"])
def test_what_the_daemon_was_asked_for_stays_open(
    client: Client, fake: FakeDaemon, caches: KvCache, keys: U8Array, name: str, step: int
) -> None:
    """Wherever the request is interrupted: its blocks are the daemon's until it has closed the connection."""
    registration = client.register(caches)
    fake.manual_completion = True
    for _ in everywhere(lambda: getattr(client, name)(registration, {0: (keys, np.arange(4))}), step=step):
        fake_is_idle(fake)
        fake_is_idle(fake)  # now it has read all that had come
        asked = {message.job for tag, message in fake.seen if tag == name}
        jobs = client.open_jobs()
        assert asked <= {job.id for job in jobs}
        fake.seen.clear()
        client.ping()
        for job in jobs:
            if not job.done:  # the connection was whole: the daemon still has it
                fake.soon(partial(fake.complete, fake.peers[-1], job.id))
            assert client.wait(job, HANGS_S).outcome in (Outcome.DONE, Outcome.LOST)
        assert client.open_jobs() == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("completed", [True, False], ids=["completed", "connection lost"])
def test_a_wait_can_be_interrupted_anywhere(
    client: Client, fake: FakeDaemon, caches: KvCache, keys: U8Array, step: int, completed: bool
) -> None:
    """Its job is done in the end, and no completion is taken for another's."""
    registration = client.register(caches)
    fake.manual_completion = True
    at = 0
    while True:
        job = client.store(registration, {0: (keys, np.arange(4))})
        fake.soon(partial(fake.complete, fake.peers[-1], job.id) if completed else fake.peers[-1].close)
        if not interrupt(partial(client.wait, job, HANGS_S), at):
            break
        at += step
        assert client.wait(job, HANGS_S).outcome in (Outcome.DONE, Outcome.LOST)
        assert client.open_jobs() == []


@pytest.mark.parametrize("step", STEPS)
def test_a_close_can_be_interrupted_anywhere(fake: FakeDaemon, path: str, keys: U8Array, step: int) -> None:
    """`close` again closes it; in between nothing new can be asked, or all can."""
    fake.manual_completion = True
    tensor = SharedTensor.allocate(8, 4096)
    caches = KvCache([tensor], [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, 4096)])])
    at = 0
    while True:
        client = Client(path, namespace=NAMESPACE, deadline_s=HANGS_S)
        job = client.store(client.register(caches), {0: (keys, np.arange(4))})
        ended = not interrupt(partial(client.__exit__, None, None, None), at)
        client.close()
        assert job.result is not None
        assert job.result.outcome is Outcome.LOST
        if ended:
            return
        at += step


def test_the_mending_can_be_interrupted_too(client: Client, fake: FakeDaemon, keys: U8Array, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        for _ in range(3):
            interrupt(lambda: client.pin({0: keys}), rng.randrange(3000))
        assert client.lookup({0: keys}).states[0].tolist() == [0, 0, 0, 0]


def test_an_interrupted_wait_keeps_the_connection(
    client: Client, fake: FakeDaemon, caches: KvCache, keys: U8Array
) -> None:
    """Ctrl-C mostly comes while nothing but the daemon is waited for: nothing is torn then, and nothing broken off."""
    fake.manual_completion = True
    job = client.store(client.register(caches), {0: (keys, np.arange(4))})

    def handler(_number: int, _frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            client.wait(job, HANGS_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    fake.soon(lambda: fake.complete(fake.peers[0], job.id))
    assert client.wait(job, HANGS_S).outcome is Outcome.DONE
    assert fake.tags().count("hello") == 1
