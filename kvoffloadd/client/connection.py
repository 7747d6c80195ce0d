"""One connection to the daemon, without I/O: what was asked on it, what came back, whose blocks hang on it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from kvoffloadd.client.calls import Call
from kvoffloadd.client.job import Job
from kvoffloadd.client.results import Promotion
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import ConnectionLostError, KvOffloadError, MessageError, RemoteError
from kvoffloadd.protocol import messages
from kvoffloadd.protocol.connection import Connection
from kvoffloadd.protocol.messages import REPLIES, Message, Push, Reply
from kvoffloadd.sockets import close_fds


class Pending(Waitable):
    """A request that awaits its reply. When done, either `error` is set or `value` is the call's value.

    `data` and `fds`: the frame, or what of it is still to be sent, and the descriptors that go with its first byte.
    `sent`: at least one byte has gone to the kernel; what was not sent, the daemon never saw. `abandoned`: its deadline
    passed; the reply, if it comes, still tells whether its job was admitted and what must be taken back.
    """

    __slots__ = ("abandoned", "data", "error", "fds", "job", "op", "reply_type", "sent", "value")

    def __init__(self, op: Call[Any], reply_type: type[Message], data: memoryview | bytes, job: Job | None) -> None:
        super().__init__()
        self.op = op
        self.reply_type = reply_type
        self.data = data
        self.fds = op.fds
        self.job = job
        self.sent = False
        self.abandoned = False
        self.value: Any = None
        self.error: KvOffloadError | None = None


class ConnectionState:
    """One connection, from its `hello` to its end.

    `jobs`: those asked for on it whose blocks are not proven free. `unclaimed`: what takes back
    values that came after their callers had given up; to be asked. `pidfd`: says when its daemon is dead; owned by the
    I/O side, which closes it. `usable`: greeted, and everything is registered. `ended`: nothing more will come of it.
    `closed`: the daemon closed it, so that its copies have ended if it still lives. `dead`: its daemon is dead.
    """

    def __init__(self) -> None:
        self.connection = Connection(daemon=False)
        self.outbox: deque[Pending] = deque()
        self.jobs: dict[int, Job] = {}
        self.unclaimed: list[Call[None]] = []
        self.boot_id = b""
        self.pidfd = -1
        self.limits: messages.Limits | None = None
        self.usable = False
        self.bye: Pending | None = None
        self.ended = Waitable()
        self.closed = Waitable()
        self.dead = Waitable()
        self._seq = 0
        self._pendings: dict[int, Pending] = {}
        # Whose `ready` is due, by the seq of their requests; weakly, so that a forgotten one costs a dead reference.
        self._promotions: dict[int, weakref.ref[Promotion]] = {}

    def ask(self, op: Call[Any], job: Job | None = None) -> Pending:
        """Put the request into the outbox. From now on the job's blocks are the daemon's.

        On a link that has ended nothing is asked: the pending is done, with its error. Raises StateError or
        FramingError; nothing is asked then either.
        """
        seq = self._next_seq()
        request = op.build(seq)
        frame = self.connection.send(request)
        self._seq = seq
        pending = Pending(op, REPLIES[request.reply], frame, job)
        if self.ended.done:
            self._fail(pending, "the connection has ended")
            return pending
        self._pendings[seq] = pending
        if job is not None:
            self.jobs[job.id] = job
        self.outbox.append(pending)
        return pending

    def _next_seq(self) -> int:
        """One that names nothing: never 0, which the daemon uses for "can't tell which", nor what awaits an answer."""
        seq = self._seq % 0xFFFFFFFF + 1
        while seq in self._pendings or seq in self._promotions:
            seq = seq % 0xFFFFFFFF + 1
        return seq

    def receive(self, data: bytes | memoryview, fds: list[int]) -> None:
        """Take what the socket gave. Raises PeerError: the daemon broke the protocol, the link must be broken off."""
        self.connection.receive_data(data, fds)

    def next_push(self) -> Push | None:
        """Settle replies until a push comes; None: more bytes are needed. Raises PeerError as `receive` does."""
        while True:
            found = self.connection.next_message()
            if found is None:
                return None
            message, fds = found
            if fds:
                self._take_pidfd(message, fds)
            if isinstance(message, Push):
                return message
            if isinstance(message, Reply):
                self._settle(message)

    def _take_pidfd(self, message: Message, fds: list[int]) -> None:
        if not isinstance(message, messages.Welcome) or len(fds) != 1:
            close_fds(fds)
            raise MessageError(f"{len(fds)} descriptors with a {type(message).__name__}")
        self.pidfd = fds[0]

    def _settle(self, reply: Reply) -> None:
        seq = reply.seq
        if isinstance(reply, messages.Error) and not (seq or self.boot_id):
            seq = next(iter(self._pendings), seq)  # turned away without being heard: that answers the greeting
        pending = self._pendings.get(seq)
        if pending is None:
            said = f": {reply.code}: {reply.message}" if isinstance(reply, messages.Error) else ""
            raise MessageError(f"a reply to request {reply.seq}, which awaits none{said}")
        if isinstance(reply, messages.Error):
            pending.error = RemoteError(reply.code, reply.message, reply.fault, reply.retryable)
            if pending.job is not None and self.jobs.pop(pending.job.id, None) is not None:
                pending.job.refuse(str(pending.error))
        elif type(reply) is not pending.reply_type:
            raise MessageError(f"a {type(reply).__name__} where a {pending.reply_type.__name__} was due")
        else:
            pending.value = pending.op.parse(reply, self.boot_id)
            if pending.job is not None:
                pending.job.accept(pending.value)
            if pending.abandoned and pending.op.undo is not None:
                undo = pending.op.undo(pending.value)
                self.unclaimed += [] if undo is None else [undo]
            promotion = None if pending.op.promotion is None else pending.op.promotion(pending.value)
            if promotion is not None:
                self._promotions[promotion.seq] = weakref.ref(promotion)
        del self._pendings[seq]
        pending.settle()

    def promotes(self, promotion: Promotion) -> bool:
        """Whether this one's `ready` is due on this connection."""
        reference = self._promotions.get(promotion.seq)
        return reference is not None and reference() is promotion

    def take_ready(self, ready: messages.Ready) -> None:
        """Settle what it tells of, unless that is forgotten. Raises MessageError if none is due."""
        reference = self._promotions.get(ready.seq)
        if reference is None:
            raise MessageError(f"`ready` for request {ready.seq}, for which none is due")
        promotion = reference()
        if promotion is not None:
            promotion.fulfil(ready)
        del self._promotions[ready.seq]

    def end(self, reason: str) -> None:
        """Nothing more will come: fail what awaits a reply or a `ready`. Jobs stay, but for those never sent."""
        if self.ended.done:
            return
        self.usable = False
        pendings, self._pendings = self._pendings, {}
        for pending in pendings.values():
            self._fail(pending, reason)
        promotions, self._promotions = self._promotions, {}
        for reference in promotions.values():
            if (promotion := reference()) is not None:
                promotion.lose(reason)
        self.outbox.clear()
        self.ended.settle()

    def _fail(self, pending: Pending, reason: str) -> None:
        pending.error = ConnectionLostError(reason)
        if pending.job is not None and not pending.sent:
            self.jobs.pop(pending.job.id, None)
            pending.job.refuse("its request was never sent")
        pending.settle()

    def lose_jobs(self, reason: str) -> None:
        """It is proven that no copy of this link's jobs runs any more."""
        jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            job.lose(reason)
