"""When a connection's socket is read: every pair of input and output, and the ways between the inputs."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.errors import LimitError
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.state import ProtocolState
from kvoffloadd.scheduling.steps import Steps
from kvoffloadd.server import connection as connections
from kvoffloadd.server.peers.connectionstate import INTAKES, Input, Output
from scripts.harness.peer import frame
from tests.server.test_ends import UID, connection

SMALL, LARGE = 64, 1 << 20
UNREAD = bytes(2 << 20)
READ = {(Input.OPEN, Output.FLOWING)}
PRESSED = {(state, Output.CONGESTED) for state in (Input.OPEN, Input.QUEUED, Input.HELD_UP, Input.NO_ROOM)}
PAIRS = [(state, output) for state in Input for output in Output]


class Scene:
    """A connection that has sent its hello, what its session was asked, and what it has answered."""

    def __init__(self) -> None:
        self.made, self.theirs, self.context = connection()
        self.asked: list[int] = []
        self.sent: list[Any] = []
        self.made.session.role = "scheduler"
        self.made.session.handle = self.handle  # type: ignore[method-assign]
        self.made._protocol.state = ProtocolState.READY
        self.made.start()

    def handle(self, message: Any, fds: list[int]) -> Any:
        self.asked.append(message.seq)
        return m.Done(seq=message.seq)

    def receive(self, *seqs: int) -> None:
        """Pings have come, as far as the connection knows."""
        self.made._protocol.receive_data(b"".join(frame({"type": "ping", "seq": seq}) for seq in seqs))

    def begin_frame(self, size: int) -> None:
        """The first bytes of a frame have come, and were looked at."""
        self.made._protocol.receive_data(frame({"type": "ping", "seq": 1, "more": bytes(size)})[:20])
        self.made.serve()

    def set_output(self, output: Output) -> None:
        """The peer reads, or not."""
        if output is Output.CONGESTED:
            self.made._outbox.put(UNREAD)
        else:
            self.made._writer.close()
        self.made._on_written()

    def is_read(self) -> bool:
        """Whether the loop reads the socket; it does not after that."""
        return bool(self.context.loop.remove_reader(self.made._sock.fileno()))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    made.theirs.close()
    await made.made.end("the test ends")


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_the_table_knows_every_pair() -> None:
    assert {(state, output) for state, row in INTAKES.items() for output in row} == set(PAIRS)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(("state", "output"), PAIRS)
async def test_the_socket_is_read_and_a_frame_is_late_as_the_table_says(
    scene: Scene, state: Input, output: Output, size: int
) -> None:
    made = scene.made
    scene.begin_frame(size)
    watch: Any = made._deadline.watch
    assert watch is not None
    scene.set_output(output)
    if state is Input.SERVING:
        before, made._input = made._intake, state
        made._settle(state)
        assert made._intake is before
        return
    made._settle(state)
    assert scene.is_read() is ((state, output) in READ)
    if state is Input.ENDING:
        assert made._deadline.watch is None
    else:
        late = {*READ, *PRESSED} if size == LARGE else READ
        assert (watch.paused_s is None) is ((state, output) in late)


@pytest.mark.parametrize("output", Output)
async def test_a_turn_leaves_the_socket_as_it_is(scene: Scene, output: Output) -> None:
    """Even if what is written meanwhile is too much: that is looked at in the end."""
    seen = []

    def handle(message: Any, fds: list[int]) -> Any:
        before = scene.made._intake
        scene.set_output(output)
        seen.append(scene.made._intake is before)
        return m.Done(seq=message.seq)

    scene.made.session.handle = handle  # type: ignore[method-assign]
    scene.receive(1)
    scene.made.serve()
    assert seen == [True]
    assert scene.is_read() is (output is Output.FLOWING)


async def test_what_has_to_queue_is_served_in_its_turn_and_then_more_is_read(scene: Scene) -> None:
    scene.receive(1, 2)
    scene.made._settle(Input.QUEUED)
    assert scene.asked == []
    scene.theirs.send(frame({"type": "ping", "seq": 3}))
    await turns()
    assert scene.asked == [1, 2, 3]


async def test_who_is_held_up_is_served_when_replies_are_read(scene: Scene) -> None:
    scene.set_output(Output.CONGESTED)
    scene.receive(1, 2)
    scene.made.serve()
    await turns()
    assert (scene.asked, scene.made._input) == ([], Input.HELD_UP)
    scene.set_output(Output.FLOWING)
    assert (scene.asked, scene.made._input) == ([], Input.QUEUED), "in its turn"
    await turns()
    assert (scene.asked, scene.made._input) == ([1, 2], Input.OPEN)
    assert scene.is_read()


async def test_who_gets_in_line_while_nothing_is_read_is_held_up_there(scene: Scene) -> None:
    scene.receive(1)
    scene.made._settle(Input.QUEUED)
    scene.set_output(Output.CONGESTED)
    await turns()
    assert (scene.asked, scene.made._input) == ([], Input.HELD_UP)
    scene.set_output(Output.FLOWING)
    await turns()
    assert (scene.asked, scene.made._input) == ([1], Input.OPEN)


async def test_a_reply_that_is_too_much_holds_up_the_next_request(scene: Scene) -> None:
    scene.made._send = lambda message, fds=(): scene.set_output(Output.CONGESTED)  # type: ignore[method-assign]
    scene.receive(1, 2)
    scene.made.serve()
    assert (scene.asked, scene.made._input) == ([1], Input.HELD_UP)


async def test_a_large_frame_waits_for_room_and_is_read_when_there_is_some(scene: Scene) -> None:
    account = scene.context.accounts.of(UID)
    others = account.resources["frame_bytes"].cap
    other = Other()
    assert account.receive(other, others)
    scene.begin_frame(LARGE)
    watch: Any = scene.made._deadline.watch
    assert (scene.made._input, watch.paused_s is not None) == (Input.NO_ROOM, True)
    scene.set_output(Output.CONGESTED)
    scene.set_output(Output.FLOWING)
    assert scene.made._input is Input.NO_ROOM, "that its peer reads gives no room"
    account.received(other)
    assert (scene.made._input, watch.paused_s) == (Input.OPEN, None)
    assert scene.is_read()


class Other:
    """Another connection of the same user."""

    def go_on(self) -> None:
        raise AssertionError("it waits for nothing")


@pytest.mark.parametrize("state", Input)
async def test_nothing_leaves_the_end(scene: Scene, state: Input) -> None:
    scene.receive(1)
    ending = scene.made.end("the test ends")
    scene.made._settle(state)
    scene.made.serve()
    scene.made._on_written()
    scene.made.go_on()
    assert scene.made._input is Input.ENDING
    assert not scene.is_read()
    assert scene.made.end("again") is ending
    await ending
    assert scene.asked == []


@pytest.mark.parametrize("in_steps", [False, True])
async def test_what_ends_a_session_is_the_last_that_is_served(
    scene: Scene, in_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer is gone: the first reply can't be written."""
    monkeypatch.setattr(connections, "TURN_S", 60.0)

    def work(seq: int) -> Steps[m.Reply]:
        yield
        return m.Done(seq=seq)

    def handle(message: Any, fds: list[int]) -> Any:
        scene.asked.append(message.seq)
        return work(message.seq) if in_steps else m.Done(seq=message.seq)

    scene.made.session.handle = handle  # type: ignore[method-assign]
    scene.theirs.close()
    scene.receive(1, 2)
    scene.made.serve()
    assert (scene.asked, scene.made._input) == ([1], Input.ENDING)


# --- errors that nobody expects ---


def fail(*_: object) -> Any:
    raise MemoryError


@pytest.mark.parametrize("method", ["next_message", "receive_data", "send"])
async def test_a_shortage_outside_of_requests_ends_the_session(
    scene: Scene, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever: a request or some bytes of the stream may be lost."""
    monkeypatch.setattr(scene.made._protocol, method, fail)
    scene.theirs.send(frame({"type": "ping", "seq": 1}))
    await turns()
    assert scene.made._input is Input.ENDING
    await asyncio.wait([scene.made.end("it has ended already")])
    assert scene.made.ended.is_set()
    assert scene.theirs.recv(1) == b"", "the socket is closed"


async def test_a_shortage_in_a_turn_ends_a_session_that_is_not_read(scene: Scene) -> None:
    scene.receive(1)
    scene.made._settle(Input.QUEUED)
    scene.made._protocol.next_message = fail  # type: ignore[method-assign]
    await turns()
    assert scene.made._input is Input.ENDING


async def test_descriptors_that_come_with_bytes_that_can_t_be_kept_are_closed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.made._protocol, "pending", "takes no bytes")
    theirs, left = os.pipe()
    socket.send_fds(scene.theirs, [b"12345"], [left])
    os.close(left)
    await turns()
    await scene.made.end("it has ended already")
    ready: Any = await asyncio.to_thread(select.select, [theirs], [], [], 5.0)
    os.close(theirs)
    assert ready[0], "no descriptor of the pipe's other end is open"


@pytest.mark.parametrize("in_steps", [False, True])
async def test_an_error_that_hides_a_torn_cache_ends_the_daemon(scene: Scene, in_steps: bool) -> None:
    ends: list[str] = []
    scene.context.fatal = ends.append

    def refuse() -> None:
        try:
            with changing:
                [][7]
        finally:
            raise LimitError("there is no room")

    def work(seq: int) -> Steps[m.Reply]:
        yield
        refuse()
        return m.Done(seq=seq)

    def handle(message: Any, fds: list[int]) -> Any:
        return work(message.seq) if in_steps else refuse()

    scene.made.session.handle = handle  # type: ignore[method-assign]
    scene.receive(1)
    scene.made.serve()
    await turns()
    assert len(ends) == 1
