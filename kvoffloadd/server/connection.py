"""One accepted socket: bytes and descriptors in and out, back-pressure, deadlines, and the end of the session.

The module uses a non-blocking socket with `recvmsg`, because asyncio's transports drop descriptors. All code runs on
the event loop; an exception in one connection does not reach another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any

from kvoffloadd.errors import (
    BusyError,
    DescriptorsLostError,
    FramingError,
    InternalError,
    KvOffloadError,
    LimitError,
    PeerError,
    StateError,
)
from kvoffloadd.linux.sockets import unpack_fds
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import Connection, Encoded
from kvoffloadd.scheduling.steps import TURN_S, Steps, take_turn
from kvoffloadd.scheduling.turns import FIRST_TURN_US
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.connectionstate import INTAKES, Input, Intake, Output
from kvoffloadd.server.peers.framedeadline import FrameDeadline
from kvoffloadd.server.peers.framewriter import FLUSH_S, FrameWriter
from kvoffloadd.server.peers.outbox import Outbox
from kvoffloadd.server.peers.peer import Peer
from kvoffloadd.server.peers.pendingrequests import PendingRequests
from kvoffloadd.server.session.session import Session

log = logging.getLogger(__name__)

_READ = bytearray(256 << 10)  # shared: received data is copied out before the loop runs on
_FDS_MAX = 253  # SCM_MAX_FD: one message carries no more
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * _FDS_MAX)
"""Room for all descriptors of a message: the kernel would close the others within `recvmsg`, on the event loop."""
MESSAGES_PER_TURN = 32
"""The most messages that one turn of a session serves; none begins more than TURN_S after the turn's start."""
_DESCRIPTORS_LOST = int(socket.MSG_CTRUNC)  # a plain number: the operators of flags run in Python
LARGE_BYTES = len(_READ)
"""Frames up to this size do not wait for room: a single read takes as much."""
REQUESTS_UNDER_WAY_MAX = 64
"""The number of requests of one session that may wait (unregister, drain...); more are answered `busy`."""


class PeerConnection:
    """Owns socket, peer and session from accept to the end."""

    def __init__(self, context: Context, sock: socket.socket, peer: Peer) -> None:
        self._context = context
        self._loop = context.loop
        self._closer = context.closer
        self._sock = sock
        self._peer = peer
        self._protocol = Connection(daemon=True)
        self._account = context.accounts.of(peer.uid)
        self._outbox = Outbox(context.config.limits.outbox_bytes, self._account)
        self.session = Session(context, peer, self._outbox, self._send)
        self._writer = FrameWriter(self._loop, sock, self._outbox, self._on_written, self._on_write_error)
        self._under_way = PendingRequests()
        self._steps: tuple[Steps[m.Reply], int] | None = None  # the request in progress, and its seq
        self._deadline = FrameDeadline(self._loop, self._on_late)
        self._input = Input.OPEN
        self._intake = Intake.REST
        self.turn_us = FIRST_TURN_US
        self._ending: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()

    def start(self) -> None:
        """Starts to serve. The session ends when the peer closes the socket or dies."""
        self._context.sessions.add(self.session)
        self._context.counters.sessions += 1
        self._settle(Input.OPEN)
        if self._peer.pidfd >= 0:
            self._loop.add_reader(self._peer.pidfd, self._on_peer_death)

    # --- in ---

    def _on_readable(self) -> None:
        self._context.lag.wake()
        try:
            size, ancillary, flags, _ = self._sock.recvmsg_into([_READ], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(f"read failed: {error.strerror}")
            return
        fds = unpack_fds(ancillary) if ancillary else []
        if fds and not self._keep(fds):
            return
        if size == 0:
            self._close_fds(fds)
            self.end("the peer closed the socket")
            return
        if flags & _DESCRIPTORS_LOST:  # the kernel has closed the others
            self._close_fds(fds)
            self._refuse(DescriptorsLostError("not all descriptors arrived: the daemon has run out of descriptors"))
            return
        try:
            with memoryview(_READ)[:size] as data:
                self._protocol.receive_data(data, fds)
        except FramingError as error:
            self._refuse(error)
            return
        except Exception as error:  # noqa: BLE001  MemoryError: bytes of the stream are lost
            self._break_off(error)
            return
        if not self._context.turns.begin(self):
            self._settle(Input.QUEUED)

    def _keep(self, fds: list[int]) -> bool:
        """Counts these descriptors, whether or not a frame ever states them. Returns False if there are too many."""
        uid = self._peer.uid
        self._closer.hold(uid, len(fds))
        try:
            self._closer.check(uid, self._context.config.limits.fds)
        except LimitError as error:
            self._close_fds(fds)
            self.turn_away(error)
            return False
        return True

    def _close_fds(self, fds: list[int]) -> None:
        self._closer.close(self._peer.uid, fds)

    @property
    def flow(self) -> tuple[int, int, int]:
        """The flow of a `turns.Served`: uid, instance, session."""
        return self._peer.uid, self.session.instance_id, self.session.id

    @property
    def _output(self) -> Output:
        """The state of the output, which also depends on the unread data of the user's other sessions."""
        return Output.CONGESTED if self._outbox.frames and self._outbox.congested else Output.FLOWING

    @property
    def _is_held_up(self) -> bool:
        """Whether further service also has to wait for the peer. A request or a large frame that is between two steps
        continues.
        """
        if self._output is Output.FLOWING:
            return False
        return self._steps is None and self._protocol.unpacking is None

    def serve(self) -> None:
        """Serves requests that have arrived, a bounded number per turn, while the peer reads its replies."""
        if self._input is Input.ENDING:
            return
        self._input = Input.SERVING
        began_s = time.monotonic()
        try:
            after = self._take_turn(began_s + TURN_S)
        except Exception as error:  # noqa: BLE001  no request failed, but the service of them
            self._break_off(error)
            return
        self.turn_us = int((time.monotonic() - began_s) * 1e6)
        self._settle(after)

    def _take_turn(self, turn_ends: float) -> Input:
        """Serves some requests. Returns the next state of the input, unless the session ends meanwhile."""
        protocol = self._protocol
        for served in range(MESSAGES_PER_TURN):
            is_over = served > 0 and time.monotonic() > turn_ends
            if self._steps is not None:
                if is_over or not self._go_on_with(*self._steps, turn_ends):
                    break
                is_over = served > 0 and time.monotonic() > turn_ends
            if not protocol.pending and protocol.unpacking is None:
                return Input.OPEN
            if self._input is Input.ENDING or is_over or self._is_held_up:
                break
            try:
                got = protocol.next_message()
            except FramingError as error:
                self._refuse(error)
                break
            except PeerError as error:
                self._reply_error(error, error.seq)
                self._end_partial()
                continue
            if got is not None:
                self._serve(*got)
                self._end_partial()
            elif protocol.unpacking is None:
                return self._await_rest()
        return Input.QUEUED

    def _await_rest(self) -> Input:
        """Sets a deadline for the rest of a frame that has begun, and requests room if the frame is large. Returns the
        next state of the input.
        """
        self._watch_partial()
        size = self._protocol.frame_bytes
        return Input.OPEN if size <= LARGE_BYTES or self._account.receive(self, size) else Input.NO_ROOM

    def _end_partial(self) -> None:
        """Ends the wait for a complete frame, whatever its outcome. The next frame gets new room and a new deadline."""
        if self._deadline.watch is not None or self._input is Input.ENDING:  # the end has cleared the watch
            self._account.received(self)
            if self.session.role:
                self._deadline.end()

    def go_on(self) -> None:
        """Continues to receive: implements `account.Receiver`."""
        self._settle(Input.OPEN)

    def _on_written(self) -> None:
        self._settle(self._input)

    def _settle(self, state: Input) -> None:
        """Moves the input to this state, or keeps it there after a change of the output. Only this method decides
        whether the socket is read, whether a frame's deadline runs, and whether the session waits for its turn.
        """
        if self._input is Input.ENDING:
            return
        if state in (Input.QUEUED, Input.HELD_UP):
            state = Input.HELD_UP if self._is_held_up else Input.QUEUED
        self._input = state
        intake = INTAKES[state][self._output]
        if intake is not Intake.STAY:
            self._take_in(intake)
        if state is Input.QUEUED:
            self._context.turns.queue(self)

    def _take_in(self, intake: Intake) -> None:
        before, self._intake = self._intake, intake
        if intake is Intake.READ:
            if before is not Intake.READ:
                self._loop.add_reader(self._sock.fileno(), self._on_readable)
                self._watch_partial()
            return
        if before is Intake.READ:
            self._loop.remove_reader(self._sock.fileno())
        if intake is Intake.STOP:
            self._deadline.end()
        elif intake is Intake.PRESS and self._takes_room:
            self._deadline.go_on()
        elif self.session.role:
            self._deadline.pause()

    @property
    def _takes_room(self) -> bool:
        """Whether the current frame is large, so that others may wait for its room. A frame that is being unpacked has
        arrived.
        """
        return self._protocol.frame_bytes > LARGE_BYTES and self._protocol.unpacking is None

    def _serve(self, message: m.Message, fds: list[int]) -> None:
        seq: int = getattr(message, "seq", 0)
        self._context.counters.requests += 1
        try:
            last = isinstance(message, m.Bye)
            others = len(self._under_way.seqs)
            if others >= REQUESTS_UNDER_WAY_MAX and not last and self.session.waits(message):
                raise BusyError(f"{others} requests of this session are under way")
            answer = self.session.handle(message, fds)
            if isinstance(answer, m.Reply):
                self._send(answer, (self._context.pidfd,) if isinstance(answer, m.Welcome) else ())
            elif isinstance(answer, Generator):
                self._steps = answer, seq  # `serve` continues them
            else:
                task = self._loop.create_task(self._finish_request(answer, seq, last=last))
                self._under_way.add(task, seq)
                task.add_done_callback(partial(self._close_later, fds))
                fds = []
        except Exception as error:  # noqa: BLE001  the end of a request
            self._reply_failure(error, seq)
        finally:
            if fds:
                self._close_fds(fds)

    def _go_on_with(self, steps: Steps[m.Reply], seq: int, turn_ends: float) -> bool:
        """Continues the current request, behind which the others wait. Returns False if it has not ended."""
        try:
            reply = take_turn(steps, turn_ends)
            if reply is None:
                return False
            self._steps = None
            self._send(reply)
        except Exception as error:  # noqa: BLE001  the end of a request
            self._steps = None
            self._reply_failure(error, seq)
        return True

    def _reply_failure(self, error: Exception, seq: int) -> None:
        if isinstance(error, InternalError):
            log.error("a request failed because of a bug in the daemon: %s", error)
        elif not isinstance(error, KvOffloadError):
            log.error("a request failed because of a bug in the daemon", exc_info=error)
        self._context.end_if_torn(error)  # an error that was raised on purpose may hide another one
        if not isinstance(error, KvOffloadError):
            error = InternalError("the request met a bug in the daemon; its log has the details")
        self._reply_error(error, seq)

    def _close_steps(self) -> None:
        if self._steps is not None:
            self._steps[0].close()
            self._steps = None

    def _close_later(self, fds: list[int], _task: asyncio.Task[None]) -> None:
        self._close_fds(fds)

    async def _finish_request(self, answer: Coroutine[Any, Any, m.Reply], seq: int, *, last: bool) -> None:
        try:
            reply = await answer
            if last:
                await self._finish_others()
            self._send(reply)
        except Exception as error:  # noqa: BLE001  the end of a request
            self._reply_failure(error, seq)
        if last:
            self.end("the peer said bye")

    async def _finish_others(self) -> None:
        """Completes every request that came before `bye`, and sends its reply first."""
        for seq in await self._under_way.finish_others(FLUSH_S):
            self._reply_error(StateError("the session sent bye before this request was done"), seq)

    # --- out ---

    def _send(self, message: m.Message | Encoded, fds: tuple[int, ...] = ()) -> None:
        """Sends a message. `fds` stay the caller's."""
        if self._sock.fileno() >= 0:  # after the session's end, its last completions have no reader
            self._writer.send(self._protocol.send(message), fds)

    def _reply_error(self, error: KvOffloadError, seq: int) -> None:
        self._context.counters.errors += 1
        self._context.counters.busy += isinstance(error, BusyError)
        if isinstance(error, LimitError):
            log.warning("refused uid %(uid)d: %(reason)s", {"uid": self._peer.uid, "reason": error})
        text = str(error)[:400]
        self._send(m.Error(seq=seq, code=error.code, message=text, fault=error.fault, retryable=error.retryable))
        if error.ends_session:
            self.end(text)

    def _refuse(self, error: FramingError | DescriptorsLostError) -> None:
        """Sends the error, which ends the session: the stream is unusable."""
        self._reply_error(error, 0)

    def _break_off(self, error: Exception) -> None:
        """Ends the session after an unexpected error outside of its requests: a request may have lost its answer."""
        log.error("a session failed because of a bug in the daemon", exc_info=error)
        self._context.end_if_torn(error)
        self.end("it met a bug in the daemon")

    def _on_write_error(self, error: OSError) -> None:
        self.end(f"write failed: {error.strerror}")

    # --- deadlines and the end ---

    def _watch_partial(self) -> None:
        """Starts the deadline `partial_frame_s` for a frame that has begun, or for the hello."""
        if self._protocol.pending or not self.session.role:
            self._deadline.begin(self._context.config.server.partial_frame_s)

    def _on_late(self, limit_s: float) -> None:
        unread = "replies are not read, and " if self._output is Output.CONGESTED else ""
        self._refuse(FramingError(f"{unread}no complete frame within {limit_s} s"))

    def _on_peer_death(self) -> None:
        self._context.counters.peers_killed += 1
        self.end("the peer died")

    def turn_away(self, error: KvOffloadError) -> None:
        """Ends the session of a peer that was accepted but may not stay, after an error reply."""
        self._reply_error(error, 0)
        self.end(str(error))

    def end(self, reason: str) -> asyncio.Task[None]:
        """Ends the session once: drains its copies, frees its resources, closes the socket. Later calls return the same
        task.
        """
        if self._ending is None:
            level = logging.DEBUG if self.session.leaving else logging.INFO  # a regular end is no news
            about = {"session": self.session.id, "pid": self._peer.pid, "uid": self._peer.uid, "reason": reason}
            log.log(level, "session %(session)d of pid %(pid)d ends: %(reason)s", about)
            self._settle(Input.ENDING)
            self._context.turns.forget(self)
            if self._peer.pidfd >= 0:
                self._loop.remove_reader(self._peer.pidfd)
            self._ending = self._context.spawn(self._end())
        return self._ending

    async def _end(self) -> None:
        # The callbacks run from the last to the first, each one even after a failure.
        async with contextlib.AsyncExitStack() as chain:
            chain.callback(self._account.received, self)
            chain.callback(self._context.sessions.discard, self.session)
            chain.callback(self._peer.close)
            chain.callback(self._close_socket)
            chain.push_async_callback(self._writer.drain)
            chain.callback(self._under_way.cancel)
            chain.push_async_callback(self.session.close)
            chain.callback(self._close_steps)

    def _close_socket(self) -> None:
        """Closes the socket, and the descriptors in its queue; the session counts until that is done."""
        self._writer.close()
        self._close_fds(self._protocol.take_fds())
        self._closer.close_socket(self._peer.uid, self._sock, self.ended.set)

    def take_apart(self) -> None:
        """Breaks the references between the parts of an ended connection: see `Collector`."""
        del self.session, self._writer, self._deadline
