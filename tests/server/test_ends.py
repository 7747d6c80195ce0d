"""Whatever fails at the end of a session, its socket, its place and its charges are given back."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd import steps
from kvoffloadd.device.base import Allocation
from kvoffloadd.errors import FramingError, UsageError
from kvoffloadd.protocol import messages as m
from kvoffloadd.server import connection as connections
from kvoffloadd.server.closer import Closer
from kvoffloadd.server.connection import PARTIAL_LOOKS, PeerConnection
from kvoffloadd.server.peer import Peer
from kvoffloadd.server.registration import Attachment
from kvoffloadd.server.turns import Turns
from kvoffloadd.steps import Steps
from tests.cache.fakes import make_cache
from tests.server.test_clears import context_of

UID = os.getuid()


class Failing:
    """A device that unmaps nothing."""

    kind = "host"

    def __init__(self) -> None:
        self.asked: list[Allocation] = []

    async def unmap(self, allocation: Allocation) -> None:
        self.asked.append(allocation)
        raise RuntimeError("can't start new thread")


def connection() -> tuple[PeerConnection, socket.socket, Any]:
    context = context_of(make_cache())
    context.closer = Closer(context.loop, (UID,))
    context.turns = Turns(context.loop)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    made = PeerConnection(context, ours, Peer(1, UID, 0, -1))
    context.sessions.add(made.session)
    return made, theirs, context


async def test_an_unmapping_that_fails_costs_no_other_and_no_charge() -> None:
    made, theirs, context = connection()
    registry, device = made.session._registry, Failing()
    account = context.accounts.of(UID)
    for number in (1, 2):
        account.charge(fds=1, mapped_bytes=4096)
        registry.attached[number] = Attachment(Allocation("host", 4096, 0), device)  # type: ignore[arg-type]
    await registry.close()
    assert len(device.asked) == 2
    assert context.accounts.figures() == {}
    theirs.close()
    await made.end("the test ends")


@pytest.mark.parametrize("error", [RuntimeError("no thread"), UsageError("a bug"), asyncio.CancelledError()])
async def test_a_session_whose_end_fails_leaves_its_socket(error: BaseException) -> None:
    made, theirs, context = connection()

    async def fail() -> None:
        raise error

    made.session.close = fail  # type: ignore[method-assign]
    await asyncio.wait([made.end("the test ends")])
    assert made.ended.is_set()
    assert context.sessions == set()
    assert theirs.recv(1) == b"", "the socket is closed"
    theirs.close()


class Copies:
    """Transfers that end, or whose end fails."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    async def end(self, *_: object) -> bool:
        if self._error is not None:
            raise self._error
        return True


@pytest.mark.parametrize("what", ["copies", "pins", "namespace"])
async def test_what_fails_within_a_session_s_end_costs_the_others_nothing(what: str) -> None:
    """Memory is unmapped all the same; but if nobody knows whether copies have ended."""
    made, theirs, context = connection()
    session, error = made.session, RuntimeError("a bug")
    context.jobs = Copies(error if what == "copies" else None)
    instance = context.instances.join(b"i" * 16, UID, None)
    session._instance = instance

    def fail(*_: object) -> None:
        raise error

    if what == "pins":
        pins: Any = type("Pins", (), {"close": fail})
        session._pins = pins()
    if what == "namespace":
        session._leave_namespace = fail  # type: ignore[method-assign]
    await asyncio.wait([made.end("the test ends")])
    assert made.ended.is_set()
    assert len(context.instances) == 0
    assert session._registry._closed is (what != "copies")
    theirs.close()


def fire(made: PeerConnection) -> None:
    timer: Any = made._timer
    look, arguments = timer._callback, timer._args
    timer.cancel()
    look(*arguments)


async def test_the_rest_of_a_frame_is_looked_for_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped finds its timers due, and its peers' bytes unread."""
    now = [time.monotonic()]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made, theirs, _ = connection()
    refused: list[FramingError] = []
    made._refuse = refused.append  # type: ignore[method-assign, assignment]
    made._watch_partial()
    limit_s = made._context.config.server.partial_frame_s
    now[0] += 1000 * limit_s
    fire(made)
    assert refused == [], "it was stopped"
    for _ in range(PARTIAL_LOOKS - 1):
        assert refused == []
        now[0] += limit_s / PARTIAL_LOOKS
        fire(made)
    assert len(refused) == 1
    theirs.close()
    await made.end("the test ends")


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_steps_that_a_sessions_end_finds_unfinished_are_closed(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even those that someone refers to, so that no collector closes them."""
    made, theirs, _ = connection()
    monkeypatch.setattr(steps, "TURN_S", 0.0)
    closed: list[bool] = []

    def work() -> Steps[m.Reply]:
        try:
            while True:
                yield
        finally:
            closed.append(True)

    begun = work()
    made.session.handle = lambda message, fds: begun  # type: ignore[method-assign]
    made._serve(m.Ping(seq=1), [])
    assert made._held_up
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not closed
    theirs.close()
    await made.end("the test ends")
    await asyncio.sleep(0)
    assert closed == [True]
    assert not made._held_up


async def test_steps_are_served_however_many_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request waits for them: there is never more than one, and what it has begun is not refused."""
    made, theirs, _ = connection()
    monkeypatch.setattr(connections, "REQUESTS_UNDER_WAY_MAX", 0)
    monkeypatch.setattr(steps, "TURN_S", 0.0)
    sent: list[Any] = []

    def work() -> Steps[m.Reply]:
        yield
        return m.Done(seq=1)

    made.session.handle = lambda message, fds: work()  # type: ignore[method-assign]
    made._send = sent.append  # type: ignore[method-assign, assignment]
    made._serve(m.Ping(seq=1), [])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sent == [m.Done(seq=1)]
    theirs.close()
    await made.end("the test ends")
