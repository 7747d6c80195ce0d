"""Makes, and restores, a usable connection: connects, greets, compares boot ids, registers everything again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from kvoffloadd.client import calls
from kvoffloadd.client.arguments import check_message, instance_of, seconds
from kvoffloadd.client.calls import Call
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.dialing import DialError
from kvoffloadd.client.events import EventQueue
from kvoffloadd.client.memory.allocation import Allocation
from kvoffloadd.client.memory.gpu import IpcMemory, VmmMemory
from kvoffloadd.client.memory.kvcache import Registration
from kvoffloadd.client.transport import Transport
from kvoffloadd.client.waiting import Gen, Wait, Waitable
from kvoffloadd.errors import (
    ConnectionLostError,
    DaemonUnreachableError,
    DeadlineError,
    KvOffloadError,
    RemoteError,
    UsageError,
)
from kvoffloadd.linux.sockets import PATH_BYTES_MAX
from kvoffloadd.protocol.messages import FDS_PER_FRAME_MAX, TOKEN_BYTES, Limits, NamespaceSpec, Welcome

R = TypeVar("R")

_BACKOFF_FIRST_S = 0.002
_BACKOFF_DOUBLINGS = 7


def backoffs() -> Iterator[float]:
    """Yields seconds to pause before each further attempt: 2 ms, doubling up to a quarter of a second."""
    steps = [_BACKOFF_FIRST_S * 2**n for n in range(_BACKOFF_DOUBLINGS)]
    return itertools.chain(steps, itertools.repeat(steps[-1] * 2))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of how a client connects and how long it tries; see `Client`."""

    socket_path: str | None
    namespace: NamespaceSpec | None
    role: str
    instance: bytes
    deadline_s: float
    connect_deadline_s: float
    reconnect: bool
    retry_busy: bool

    def __post_init__(self) -> None:
        """Checks the settings. Raises UsageError."""
        path = self.socket_path
        if path is not None and (not path or "\0" in path or len(os.fsencode(path)) > PATH_BYTES_MAX):
            raise UsageError(f"the kernel takes socket paths of 1 to {PATH_BYTES_MAX} bytes: {path!r}")
        if len(instance_of(bytes, self.instance, "instance")) != TOKEN_BYTES:
            raise UsageError(f"the name of an instance must have {TOKEN_BYTES} bytes, not {len(self.instance)}")
        if self.role not in ("worker", "scheduler", "observer"):
            raise UsageError(f"role must be worker, scheduler or observer, not {self.role!r}")
        if self.namespace is None and self.role != "observer":
            raise UsageError("only an observer can connect without a namespace")
        if self.namespace is not None:
            check_message(instance_of(NamespaceSpec, self.namespace, "namespace"), "namespace")
        if seconds(self.deadline_s) <= 0 or seconds(self.connect_deadline_s, "connect_deadline_s") < 0:
            raise UsageError("deadline_s must be above 0, and connect_deadline_s must be at least 0")


class Connector:
    """Keeps one connection usable.

    `registrations`: made again on every new connection. `boot_id`, `limits` and `features`: those of the daemon that
    was greeted last.
    `connecting`: done when the attempt under way is over; None: no attempt is under way.
    """

    def __init__(self, settings: Settings, transport: Transport, events: EventQueue) -> None:
        self.registrations: list[Registration] = []
        self.boot_id = b""
        self.limits: Limits | None = None
        self.features: frozenset[str] = frozenset()
        self.connecting: Waitable | None = None
        self._settings = settings
        self._transport = transport
        self._events = events
        self._connected_once = False

    def connected(self, until: float, *, explicit: bool = False) -> Gen[ConnectionState]:
        """Returns the usable connection; makes one if there is none, trying for `connect_deadline_s` at most.

        Raises DaemonUnreachableError, DeadlineError, RemoteError (the greeting or a registration was refused), or
        ConnectionLostError (also where the connection was lost and the client may not reconnect by itself).
        """
        while True:
            connection = self._transport.current
            if connection is not None and connection.usable:
                return connection
            if self._connected_once and not (explicit or self._settings.reconnect):
                raise ConnectionLostError("the connection was lost; call `connect()` to make a new one")
            if self.connecting is None:
                return (yield from self.connect(min(until, monotonic() + self._settings.connect_deadline_s), until))
            yield Wait((self.connecting,), until)
            if monotonic() >= until:
                raise DeadlineError("another task was still connecting when the deadline passed")

    def connect(self, attempts_until: float, until: float) -> Gen[ConnectionState]:
        """Makes a new connection: at least one attempt, further ones until `attempts_until`. Raises as `connected`."""
        over = self.connecting = Waitable()
        pauses = backoffs()
        try:
            yield from self._await_close(until)
            while True:
                try:
                    return (yield from self._attempt(until))
                except (OSError, KvOffloadError) as error:
                    again_at = monotonic() + next(pauses)
                    if not _may_pass(error) or again_at > attempts_until:
                        raise _explained(error) from error
                yield Wait((), again_at)
        finally:
            self.connecting = None
            over.settle()

    def ask_on(self, connection: ConnectionState, call: Call[R], until: float) -> Gen[R]:
        """Sends the request once, on this connection. Raises RemoteError, ConnectionLostError, DeadlineError."""
        self._transport.ask(connection, call)
        yield from answered(call, until)
        if call.error is not None:
            raise call.error
        value: R = call.value
        return value

    def enroll(self, connection: ConnectionState, registration: Registration, until: float) -> Gen[None]:
        """Attaches a registration's memory and registers its tensors and groups on this connection. If that fails, the
        daemon is asked to release what was attached. Raises as `ask_on`.
        """
        numbers: dict[Hashable, int] = {}
        try:
            yield from self._attach(connection, registration, numbers, until)
            call = calls.register(registration, numbers, composition="composition" in self.features)
            registration.bind((yield from self.ask_on(connection, call, until)), connection.ended)
        except RemoteError:
            taking_back = self._take_back(connection, numbers)
            if taking_back is not None:
                with suppress(DeadlineError):  # the next attempt must find the caps unchanged
                    yield from answered(taking_back, until)
            raise
        finally:
            if registration.id is None:
                self._take_back(connection, numbers)

    def _take_back(self, connection: ConnectionState, numbers: dict[Hashable, int]) -> Call[None] | None:
        attached = list(numbers.values())
        numbers.clear()
        if not attached or self._undo is None or connection.ended.done or connection.bye is not None:
            return None
        call = self._undo(attached)
        self._transport.ask(connection, call)
        return call

    @property
    def _undo(self) -> calls.Undo:
        return calls.detach if "detach" in self.features else None

    def _attach(
        self, connection: ConnectionState, registration: Registration, numbers: dict[Hashable, int], until: float
    ) -> Gen[None]:
        """Fills `numbers`: identity of the memory -> the daemon's number."""
        allocations = registration.caches.allocations()
        allowed = FDS_PER_FRAME_MAX if connection.limits is None else connection.limits.fds_per_frame
        at_once = max(1, min(FDS_PER_FRAME_MAX, allowed))
        shared = [allocation for allocation in allocations if isinstance(allocation, Allocation)]
        for start in range(0, len(shared), at_once):
            batch = shared[start : start + at_once]
            fds = tuple(allocation.fd for allocation in batch)
            found = yield from self.ask_on(connection, calls.attach(fds, registration, self._undo), until)
            numbers.update(zip((allocation.identity for allocation in batch), found, strict=True))
        for memory in allocations:
            if isinstance(memory, IpcMemory):
                call = calls.attach_ipc(memory, self._undo)
                (numbers[memory.identity],) = yield from self.ask_on(connection, call, until)
            elif isinstance(memory, VmmMemory):
                for start in range(0, len(memory.chunks), at_once):
                    chunks = range(start, min(start + at_once, len(memory.chunks)))
                    extends = numbers.get(memory.identity, 0)
                    call = calls.attach_vmm(memory, chunks, extends, None if extends else self._undo)
                    (numbers[memory.identity],) = yield from self.ask_on(connection, call, until)

    def _await_close(self, until: float) -> Gen[None]:
        # A greeting proves that old copies have ended only if it comes after the daemon closed their connection.
        for connection in list(self._transport.former):
            if self._transport.awaits_close(connection):
                yield Wait((connection.closed, connection.dead), until)
                if not (connection.closed.done or connection.dead.done):
                    raise DeadlineError("the daemon has not closed the previous, broken connection yet")

    def _attempt(self, until: float) -> Gen[ConnectionState]:
        connection = self._transport.open()
        try:
            hello = calls.hello(self._settings.role, self._settings.instance, self._settings.namespace)
            self._greeted(connection, (yield from self.ask_on(connection, hello, until)))
            self._transport.watch_daemon(connection)
            self._transport.reap()
            for registration in list(self.registrations):
                yield from self.enroll(connection, registration, until)
            if self._events.subscribed:
                tiers = self._events.tiers and "event_tiers" in self.features
                yield from self.ask_on(connection, calls.subscribe(lambda: tiers), until)
            if connection.ended.done:
                raise ConnectionLostError("the daemon closed the connection after its greeting")
            connection.usable = self._connected_once = True
            return connection
        finally:
            if not connection.usable:
                self._transport.break_off(connection, "the connection did not become usable")

    def _greeted(self, connection: ConnectionState, welcome: Welcome) -> None:
        self._transport.dialer.stay()
        connection.boot_id = self.boot_id = welcome.boot_id
        connection.limits = self.limits = welcome.limits
        self.features = frozenset(welcome.features)
        for former in self._transport.former:
            if former.closed.done and former.boot_id == welcome.boot_id:
                former.lose_jobs("its connection ended before the daemon told how it ended")


def answered(call: Call[Any], until: float) -> Gen[None]:
    """Waits for the reply. Raises DeadlineError; a reply that comes later is dropped."""
    try:
        if not call.done:
            yield Wait((call,), until)
        if not call.done:
            raise DeadlineError(f"no {call.reply_type.__name__.lower()!r} from the daemon in time")
    finally:
        call.abandoned = not call.done


def _may_pass(error: OSError | KvOffloadError) -> bool:
    """Returns whether another attempt may succeed."""
    if isinstance(error, RemoteError):
        return error.retryable
    return isinstance(error, ConnectionLostError) or (isinstance(error, DialError) and error.may_pass)


def _explained(error: OSError | KvOffloadError) -> KvOffloadError:
    return error if isinstance(error, KvOffloadError) else DaemonUnreachableError(str(error))
