"""Whatever fails at the end of a session, its socket, its place and its charges are given back."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.device.base import Allocation
from kvoffloadd.errors import UsageError
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.state import ProtocolState
from kvoffloadd.scheduling.steps import TURN_S, Steps
from kvoffloadd.scheduling.turns import Turns
from kvoffloadd.server import connection as connections
from kvoffloadd.server.connection import PeerConnection
from kvoffloadd.server.peers import framewriter
from kvoffloadd.server.peers.connectionstate import Input, Output
from kvoffloadd.server.peers.descriptorcloser import DescriptorCloser
from kvoffloadd.server.peers.framedeadline import LOOKS, FrameDeadline
from kvoffloadd.server.peers.peer import Peer
from kvoffloadd.server.peers.quarantine import Quarantine
from kvoffloadd.server.session.registration import Attachment
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.peer import frame
from tests.cache.fakes import make_cache
from tests.server.test_clears import context_of

UID = os.getuid()


class FailingDevice:
    """A device that unmaps nothing."""

    kind = "host"

    def __init__(self) -> None:
        self.asked: list[Allocation] = []

    async def unmap(self, allocation: Allocation) -> None:
        self.asked.append(allocation)
        raise RuntimeError("can't start new thread")


def connection() -> tuple[PeerConnection, socket.socket, Any]:
    context = context_of(make_cache())
    context.closer = DescriptorCloser(context.loop, (UID,))
    context.turns = Turns(context.loop)
    made, theirs = connect(context, UID)
    return made, theirs, context


def connect(context: Any, uid: int) -> tuple[PeerConnection, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    made = PeerConnection(context, ours, Peer(1, uid, 0, -1))
    context.sessions.add(made.session)
    return made, theirs


async def test_an_unmapping_that_fails_costs_no_other_and_no_charge() -> None:
    made, theirs, context = connection()
    registry, device = made.session._registry, FailingDevice()
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
    """Memory is unmapped all the same, unless it is unknown whether copies have ended."""
    made, theirs, context = connection()
    session, error = made.session, RuntimeError("a bug")
    copies: Any = Copies(error if what == "copies" else None)
    context.quarantine = Quarantine(copies, (), context.fatal)
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


async def test_the_room_of_a_frame_whose_answer_ends_its_session_comes_back_at_once() -> None:
    """The session's end may wait for copies, and other sessions of the user wait for the room."""
    made, theirs, context = connection()
    account = context.accounts.of(UID)
    made._watch_partial()
    assert account.receive(made, connections.LARGE_BYTES + 1)
    assert made in account._received
    ended = made.end("its answer could not be written")
    made._end_partial()
    assert made not in account._received
    await ended
    theirs.close()


class SteppedDeadline:
    """A deadline on a separate clock, and the limits that were exceeded."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.limits: list[float] = []
        self.deadline = FrameDeadline(asyncio.get_running_loop(), self.limits.append, lambda: self.now_s)

    def look(self, after_s: float) -> None:
        timer: Any = self.deadline._timer
        due, arguments = timer._callback, timer._args
        timer.cancel()
        self.now_s += after_s
        due(*arguments)


async def test_the_rest_of_a_frame_is_looked_for_more_than_once() -> None:
    """A process that was stopped finds its timers due, and its peers' bytes unread."""
    late, limit_s = SteppedDeadline(), 8.0
    late.deadline.begin(limit_s)
    late.look(1000 * limit_s)
    assert late.limits == [], "it was stopped"
    for _ in range(LOOKS - 1):
        assert late.limits == []
        late.look(limit_s / LOOKS)
    assert late.limits == [limit_s]
    late.deadline.begin(limit_s)
    late.look(1.0)
    late.deadline.end()
    late.deadline.begin(limit_s)
    for _ in range(LOOKS - 1):
        late.look(limit_s / LOOKS)
    assert late.limits == [limit_s], "the next frame has its own"
    late.look(limit_s / LOOKS)
    assert late.limits == [limit_s, limit_s]


@pytest.mark.parametrize("paused_s", [0.0, 0.1, 50.0])
async def test_the_deadline_is_the_frames_however_often_it_is_paused(paused_s: float) -> None:
    """A peer that drips is paused each time that others are served first. Only those times do not count."""
    late, limit_s, step_s = SteppedDeadline(), 8.0, 0.25
    late.deadline.begin(limit_s)
    steps = 0
    while not late.limits:
        steps += 1
        assert steps <= limit_s / step_s + LOOKS
        timer: Any = late.deadline._timer
        if timer.when() - late.deadline._loop.time() <= step_s:
            late.look(step_s)
        else:
            late.now_s += step_s
        if not late.limits:
            late.deadline.pause()
            assert late.deadline._timer is None
            late.deadline.pause()
            late.now_s += paused_s
            late.deadline.begin(1.0)  # of no account: it has begun
    assert steps >= limit_s / step_s - 1
    assert late.limits == [limit_s]


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_steps_that_a_sessions_end_finds_unfinished_are_closed(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have gone on in the session's turns until then. The first turn is that of the request, which took it all."""
    made, theirs, _ = connection()
    monkeypatch.setattr(connections, "TURN_S", 0.0)
    taken: list[str] = []

    def work() -> Steps[m.Reply]:
        try:
            while True:
                taken.append("a step")
                yield
        finally:
            taken.append("closed")

    made.session.handle = lambda message, fds: work()  # type: ignore[method-assign]
    made.session.role = "scheduler"
    made._protocol.state = ProtocolState.READY
    made._protocol.receive_data(frame({"type": "ping", "seq": 1}), [])
    made._context.turns.begin(made)
    for _ in range(turns):
        before = len(taken)
        await asyncio.sleep(0)
        assert len(taken) > before
    assert "closed" not in taken
    theirs.close()
    await made.end("the test ends")
    assert taken[-1:] == ["closed"] * (turns > 0), "what has not begun has nothing to undo"
    assert taken.count("closed") == (turns > 0)


@pytest.mark.parametrize("unread", [False, True])
async def test_steps_go_on_however_many_requests_wait_and_however_much_is_unread(
    unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is never more than one of them, and what it has begun holds others up. The next request waits for it."""
    made, theirs, _ = connection()
    monkeypatch.setattr(connections, "REQUESTS_UNDER_WAY_MAX", 0)
    monkeypatch.setattr(connections, "TURN_S", 0.0)
    sent: list[Any] = []

    def work(seq: int) -> Steps[m.Reply]:
        for _ in range(5):
            yield
        return m.Done(seq=seq)

    def handle(message: Any, fds: list[int]) -> Any:
        return work(message.seq) if message.seq < 3 else m.Done(seq=message.seq)

    made.session.handle = handle  # type: ignore[method-assign]
    made.session.role = "scheduler"
    made._protocol.state = ProtocolState.READY
    made._send = lambda message, fds=(): sent.append(message)  # type: ignore[method-assign]
    made._protocol.receive_data(b"".join(frame({"type": "ping", "seq": seq}) for seq in (1, 2, 3)), [])
    made._context.turns.begin(made)
    if unread:
        made._outbox.put(bytes(2 << 20))
    assert sent == []
    async with asyncio.timeout(HANG_S):
        while len(sent) < (1 if unread else 3):  # noqa: ASYNC110  the turns of the loop are what is tried
            await asyncio.sleep(0)
    assert sent == [m.Done(seq=seq) for seq in range(1, 2 if unread else 4)], "in order, as far as replies are read"
    theirs.close()
    await made.end("the test ends")


async def test_the_frame_behind_one_that_was_refused_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TURN_S", 60.0)  # all is served in one turn, however slow
    made, theirs, _ = connection()
    made.session.role = "scheduler"
    made._protocol.state = ProtocolState.READY
    whole, refused = frame({"type": "ping", "seq": 1}), frame({"type": "ping", "seq": 2, "unknown": 1})
    for complete in (whole, refused):
        made._protocol.receive_data(complete[:6], [])
        made.serve()
        begun = made._deadline._timer
        assert begun is not None
        made._protocol.receive_data(complete[6:] + whole[:6], [])
        made.serve()
        assert made._deadline._timer is not None
        assert made._deadline._timer is not begun
        made._protocol.receive_data(whole[6:], [])
        made.serve()
        assert made._deadline._timer is None, "no frame has begun"
    theirs.close()
    await made.end("the test ends")


async def test_what_comes_before_and_with_the_hello_has_its_own_room_and_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "TURN_S", 60.0)  # all is served in one turn, however slow
    made, theirs, context = connection()
    account = context.accounts.of(UID)
    made._watch_partial()
    large = frame({"type": "ping", "seq": 1, "more": bytes(1 << 20)})
    made._protocol.receive_data(large[:6], [])
    made.serve()
    assert account.used["frame_bytes"] > 0
    made._protocol.receive_data(large[6:], [])
    made.serve()  # refused: the session's first message is its hello
    assert account.used["frame_bytes"] == 0
    theirs.close()
    await made.end("the test ends")

    made, theirs, context = connection()
    made._watch_partial()
    until_hello = made._deadline._timer
    assert until_hello is not None

    def handle(message: m.Message, fds: list[int]) -> m.Reply:
        made.session.role = "observer"
        made._protocol.state = ProtocolState.READY
        return m.Done(seq=1)

    made.session.handle = handle  # type: ignore[method-assign]
    made._send = lambda message, fds=(): None  # type: ignore[method-assign]
    hello = frame({"type": "hello", "seq": 1, "version": 1, "role": "observer", "instance": bytes(16)})
    made._protocol.receive_data(hello + frame({"type": "ping", "seq": 2})[:6], [])
    made.serve()
    assert made._deadline._timer not in (None, until_hello), "of the ping"
    theirs.close()
    await made.end("the test ends")


@pytest.mark.parametrize("size", [64, 1 << 20])
async def test_waiting_in_line_is_no_lateness_but_leaving_replies_unread_is_where_it_keeps_room(size: int) -> None:
    made, theirs, context = connection()
    made.session.role = "scheduler"
    made._protocol.state = ProtocolState.READY
    account, is_large = context.accounts.of(UID), size > connections.LARGE_BYTES
    made.start()
    made._protocol.receive_data(frame({"type": "ping", "seq": 1, "more": bytes(size)})[:20], [])
    made.serve()
    deadline: Any = made._deadline
    begun = deadline.watch
    assert begun is not None
    for _ in range(3):  # a byte more, while others are served
        made._protocol.receive_data(b"\0", [])
        made._settle(Input.QUEUED)
        assert begun.paused_s is not None
        made.serve()
        assert (deadline.watch, begun.paused_s) == (begun, None)
    made._outbox.put(bytes(2 << 20))
    made._on_written()
    assert (begun.paused_s is None) == is_large
    assert (account.used.get("frame_bytes", 0) > 0) == is_large
    if is_large:
        deadline._look(begun)
        assert deadline.watch is begun, "its time is not over"
        made._on_late(begun.limit_s)
    theirs.close()
    await made.end("the test ends")
    assert account.used.get("frame_bytes", 0) == 0


async def test_a_large_frame_that_is_unpacked_goes_on_however_much_is_unread() -> None:
    """It keeps its room until it is served, and nothing else watches it by then."""
    made, theirs, _ = connection()
    made.session.role = "scheduler"
    made._protocol.state = ProtocolState.READY
    made._protocol.receive_data(frame({"type": "ping", "seq": 1, "more": bytes(1 << 20)}), [])
    assert made._protocol.next_message() is None
    assert made._protocol.unpacking is not None
    made._outbox.put(bytes(2 << 20))
    assert made._output is Output.CONGESTED
    while made._protocol.unpacking is not None:
        made.serve()
    assert not made._protocol.pending
    theirs.close()
    await made.end("the test ends")


async def test_a_frame_that_is_being_unpacked_is_not_late_however_large_the_next_one_is() -> None:
    made, theirs, _ = connection()
    made.session.role = "scheduler"
    made._protocol.state = ProtocolState.READY
    large = frame({"type": "ping", "seq": 1, "more": bytes(1 << 20)})
    made._protocol.receive_data(large[:20], [])
    made.serve()
    begun: Any = made._deadline
    begun = begun.watch
    made._protocol.receive_data(large[20:] + large[:20], [])
    assert made._protocol.next_message() is None
    assert made._protocol.unpacking is not None
    made._outbox.put(bytes(2 << 20))
    made._on_written()
    assert made._output is Output.CONGESTED
    assert begun.paused_s is not None, "the daemon has all of it"
    theirs.close()
    await made.end("the test ends")


async def test_what_is_queued_at_the_end_is_still_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader gets what was sent before, with the error that ends its session, and then the end."""
    monkeypatch.setattr(framewriter, "FLUSH_S", 60.0)
    made, theirs, context = connection()
    context.jobs = Copies(None)
    theirs.setblocking(False)
    replies = 0
    while not made._outbox.frames:  # more than the socket takes
        made._reply_error(UsageError("x" * 300), 0)
        replies += 1
    made.turn_away(UsageError("x" * 300))
    for _ in range(20):  # it would be closed by now
        await asyncio.sleep(0)
    received = bytearray()
    async with asyncio.timeout(HANG_S):
        while part := await context.loop.sock_recv(theirs, 1 << 16):
            received += part
        await made.ended.wait()
    assert received.count(b"x" * 300) == replies + 1
    theirs.close()


async def test_a_session_s_turn_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few requests it has served by then: others have their turn in between."""
    made, theirs, _ = connection()
    now, served = [100.0], []

    def handle(message: Any, fds: list[int]) -> Any:
        now[0] += TURN_S * 0.4
        served.append(message.seq)
        return m.Done(seq=message.seq)

    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made.session.handle = handle  # type: ignore[method-assign]
    made.session.role = "scheduler"
    made._protocol.state = ProtocolState.READY
    made._protocol.receive_data(b"".join(frame({"type": "ping", "seq": seq}) for seq in range(1, 30)), [])
    made.serve()
    assert served == [1, 2, 3]
    theirs.close()
    await made.end("the test ends")
