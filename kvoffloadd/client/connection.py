"""One connection to the daemon, without I/O: its requests, their replies, and the jobs that still depend on it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from kvoffloadd.client.calls import Call
from kvoffloadd.client.events import EventQueue
from kvoffloadd.client.jobs import Job
from kvoffloadd.client.results import Found, Promotion
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import ConnectionLostError, MessageError, RemoteError
from kvoffloadd.linux.sockets import close_fds
from kvoffloadd.protocol import messages
from kvoffloadd.protocol.connection import Connection
from kvoffloadd.protocol.messages import REPLIES, Message, Reply


class ConnectionState:
    """One connection, from its `hello` to its end. It becomes `usable` when it is greeted and everything is registered.

    A job's blocks are proven free by one of these: its `completed`; an error in reply to its request; the `done` that
    answers `bye`; its daemon's pidfd; or a greeting by the same daemon (boot id) on a connection made after that daemon
    closed the job's connection, since a daemon that lives drains a session's copies before it closes its socket. The
    end of the connection alone proves nothing: a killed daemon's socket ends before its copies do.
    """

    def __init__(self, events: EventQueue) -> None:
        """Puts events that come on this connection into `events`."""
        self.outbox: deque[Call[Any]] = deque()
        self.jobs: dict[int, Job] = {}
        """Jobs requested on it that have blocks not proven free yet."""
        self.unclaimed: list[Call[None]] = []
        """Calls, still to send, that take back values that came after their callers had given up."""
        self.boot_id = b""
        self.limits: messages.Limits | None = None
        self.pidfd = -1
        """Becomes readable when its daemon is dead. The transport owns it, and closes it."""
        self.usable = False
        self.bye: Call[None] | None = None
        self.ended = Waitable()
        """Nothing more will come on it."""
        self.closed = Waitable()
        """The daemon closed it, so that its copies have ended if it still lives."""
        self.dead = Waitable()
        """Its daemon is dead."""
        self._protocol = Connection(daemon=False)
        self._events = events
        self._seq = 0
        self._pending: dict[int, Call[Any]] = {}
        # Promotions that await their `ready`, by the seq of their requests; weakly, so that a forgotten one costs a
        # dead reference.
        self._promotions: dict[int, weakref.ref[Promotion]] = {}

    def ask(self, call: Call[Any]) -> None:
        """Puts the call's request into the outbox. From now on the blocks of its job, if it has one, belong to the
        daemon.

        On a connection that has ended nothing is sent: the call is done, with its error. Raises StateError or
        FramingError; nothing is sent then either.
        """
        seq = self._next_seq()
        request = call.build(seq)
        frame = self._protocol.send(request)
        self._seq = seq
        call.unsent, call.reply_type = frame, REPLIES[request.reply]
        if self.ended.done:
            self._fail(call, "the connection has ended")
            return
        self._pending[seq] = call
        if call.job is not None:
            self.jobs[call.job.id] = call.job
        self.outbox.append(call)

    def _next_seq(self) -> int:
        """Returns an unused seq: never 0, which the daemon uses for an unknown request, nor one that awaits an
        answer.
        """
        seq = self._seq % 0xFFFFFFFF + 1
        while seq in self._pending or seq in self._promotions:
            seq = seq % 0xFFFFFFFF + 1
        return seq

    def receive(self, data: bytes | memoryview, fds: list[int]) -> None:
        """Takes bytes and descriptors from the socket, and settles the calls that they answer.

        Raises PeerError: the daemon broke the protocol, the connection must be broken off.
        """
        self._protocol.receive_data(data, fds)
        while (found := self._protocol.next_message()) is not None:
            message, fds = found
            if fds:
                self._take_pidfd(message, fds)
            if isinstance(message, Reply):
                self._settle(message)
            elif isinstance(message, messages.Completed):
                self._complete(message)
            elif isinstance(message, messages.Ready):
                self._promoted(message)
            elif isinstance(message, messages.Events | messages.Gap):
                self._events.receive(message)

    def _take_pidfd(self, message: Message, fds: list[int]) -> None:
        if not isinstance(message, messages.Welcome) or len(fds) != 1:
            close_fds(fds)
            raise MessageError(f"{len(fds)} descriptors came with a {type(message).__name__}")
        self.pidfd = fds[0]

    def _settle(self, reply: Reply) -> None:
        seq = reply.seq
        if isinstance(reply, messages.Error) and not (seq or self.boot_id):
            seq = next(iter(self._pending), seq)  # refused before the daemon read anything: that answers the greeting
        call = self._pending.get(seq)
        if call is None:
            error = f": {reply.code}: {reply.message}" if isinstance(reply, messages.Error) else ""
            raise MessageError(f"unexpected reply to request {reply.seq}{error}")
        if isinstance(reply, messages.Error):
            call.error = RemoteError(reply.code, reply.message, reply.fault, reply.retryable)
            if call.job is not None and call.job.id in self.jobs:
                call.job.refuse(str(call.error))
                del self.jobs[call.job.id]
        elif type(reply) is not call.reply_type:
            raise MessageError(f"a {type(reply).__name__} came where a {call.reply_type.__name__} was expected")
        else:
            call.value = call.parse(reply, self.boot_id)
            self._take_value(call)
        del self._pending[seq]
        call.settle()

    def _take_value(self, call: Call[Any]) -> None:
        if call.job is not None:
            call.job.accept(call.value)
        if call.abandoned and call.undo is not None and (undo := call.undo(call.value)) is not None:
            self.unclaimed.append(undo)
        if isinstance(call.value, Found) and (promotion := call.value.promotion) is not None:
            self._promotions[promotion.seq] = weakref.ref(promotion)

    def _complete(self, completed: messages.Completed) -> None:
        job = self.jobs.get(completed.job)
        if job is None:
            raise MessageError(f"completion of job {completed.job}, which is not running")
        job.complete(completed)
        del self.jobs[completed.job]

    def promotes(self, promotion: Promotion) -> bool:
        """Returns whether this promotion's `ready` is due on this connection."""
        reference = self._promotions.get(promotion.seq)
        return reference is not None and reference() is promotion

    def _promoted(self, ready: messages.Ready) -> None:
        """Settles the promotion that it reports, unless that is forgotten. Raises MessageError if none is due."""
        reference = self._promotions.get(ready.seq)
        if reference is None:
            raise MessageError(f"unexpected `ready` for request {ready.seq}")
        promotion = reference()
        if promotion is not None:
            promotion.fulfil(ready)
        del self._promotions[ready.seq]

    def end(self, reason: str) -> None:
        """Fails the calls and promotions that await a reply: nothing more will come. Jobs stay, except those never
        sent. If this was interrupted, another call completes it.
        """
        if self.ended.done:
            return
        if self.usable:
            self._events.connection_lost()
        self.usable = False
        for call in list(self._pending.values()):
            self._fail(call, reason)
        self._pending.clear()
        for reference in list(self._promotions.values()):
            if (promotion := reference()) is not None:
                promotion.lose(reason)
        self._promotions.clear()
        self.outbox.clear()
        self.ended.settle()

    def _fail(self, call: Call[Any], reason: str) -> None:
        call.error = ConnectionLostError(reason)
        if call.job is not None and not call.sent:
            call.job.refuse("its request was never sent")
            self.jobs.pop(call.job.id, None)
        call.settle()

    def lose_jobs(self, reason: str) -> None:
        """Completes the connection's jobs as lost: it is proven that none of their copies runs any more."""
        for job in list(self.jobs.values()):
            job.lose(reason)
        self.jobs.clear()

    def forget_done_jobs(self) -> None:
        """Removes jobs that are done, where a call that received their end was interrupted."""
        self.jobs = {number: job for number, job in self.jobs.items() if not job.done}

    def take_fds(self) -> list[int]:
        """Returns descriptors of incomplete frames; the caller closes them."""
        return self._protocol.take_fds()
