"""Every call of both clients, once: generators that yield what they wait for. The I/O shells run them.

Ownership: a ClientCore and all below it belong to the thread (or event loop) that runs its steps, one at a time: the
blocking client's lock ensures that. Nothing here waits; a step that must wait yields `Wait`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

from kvoffloadd.client import calls
from kvoffloadd.client.arguments import IDS_END, instance_of, integer, several
from kvoffloadd.client.calls import Call, First, Groups, JobSpec
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.connector import Connector, Settings, answered, backoffs
from kvoffloadd.client.dialing import Dialer
from kvoffloadd.client.events import Event, EventQueue
from kvoffloadd.client.jobs import Job, JobConnectionLostError, JobDeadlineError, JobResult
from kvoffloadd.client.memory.kvcache import KvCache, Registration
from kvoffloadd.client.results import Cleared, Found, Lease, PrefetchedClaims
from kvoffloadd.client.transport import Poller, Transport
from kvoffloadd.client.waiting import Gen, Wait
from kvoffloadd.errors import (
    ClientError,
    ConnectionLostError,
    DeadlineError,
    KvOffloadError,
    NotDurableError,
    RemoteError,
    UsageError,
)
from kvoffloadd.model import Tier, U8Array
from kvoffloadd.protocol.messages import TOKEN_BYTES, ClaimFigures, KeepHow, Limits

R = TypeVar("R")


@dataclass(slots=True)
class _Tries:
    """The retries that a call has left: after a loss in mid-call, and after one before anything was sent."""

    lost: int
    unsent: int = 2
    pauses: Iterator[float] | None = None


class ClientCore:
    """The calls of one client. Every `until` is a time.monotonic; every call ends by then, or at once after it."""

    def __init__(self, settings: Settings, poller: Poller) -> None:
        self.settings = settings
        self._events = EventQueue(None if settings.namespace is None else settings.namespace.key_bytes)
        self._dialer = Dialer(settings.socket_path)
        self._transport = Transport(self._dialer, self._events, poller)
        self._connector = Connector(settings, self._transport, self._events)
        self._jobs_requested = 0
        self._closing = False

    @property
    def key_bytes(self) -> int:
        """Width of this client's keys. Raises UsageError where it has no namespace."""
        if self.settings.namespace is None:
            raise UsageError("an observer without a namespace has no keys")
        return self.settings.namespace.key_bytes

    @property
    def socket_path(self) -> str | None:
        """See `BaseClient.socket_path`."""
        return self._dialer.path

    @property
    def boot_id(self) -> bytes:
        """See `BaseClient.boot_id`."""
        return self._connector.boot_id

    @property
    def is_connected(self) -> bool:
        """See `BaseClient.is_connected`."""
        return self._usable() is not None

    @property
    def limits(self) -> Limits | None:
        """See `BaseClient.limits`."""
        return self._connector.limits

    @property
    def features(self) -> frozenset[str]:
        """See `BaseClient.features`."""
        return self._connector.features

    def asks(self, feature: str, wanted: bool = True) -> Callable[[], bool]:
        """Returns a function that decides whether a request uses this feature: it must be wanted, and the daemon that
        gets the request must have it.
        """
        return lambda: bool(wanted) and feature in self._connector.features

    def open_jobs(self) -> list[Job]:
        """Returns the jobs that may still use their blocks, oldest first."""
        # Copied in one step, and in this order: another thread may be in a call meanwhile.
        current = self._transport.current
        connections = list(self._transport.former) if current is None else [*self._transport.former, current]
        found = {job.id: job for connection in connections for job in list(connection.jobs.values())}
        return [found[number] for number in sorted(found)]

    def mend(self) -> None:
        """Repairs what an interrupted call left; requests under way end as if the connection had been lost."""
        self._connector.connecting = None
        self._connector.registrations = [
            registration for registration in self._connector.registrations if not registration.closed
        ]
        self._transport.mend()

    def abandon(self, reason: str) -> None:
        """See `Transport.abandon`."""
        self._closing = True
        self._transport.abandon(reason)

    # --- requests ------------------------------------------------------------------------------------

    def connect(self, until: float) -> Gen[None]:
        """Connects, if not connected."""
        self._check_open()
        yield from self._connector.connected(until, explicit=True)

    def call(self, call: Call[R], until: float) -> Gen[R]:
        """Sends a request, and waits for the reply. Raises the errors that `Client` lists for every call."""
        tries = _Tries(lost=1 if call.repeatable else 0)
        while True:
            connection = self._usable() or (yield from self._connected(until))
            self._transport.ask(connection, call)
            yield from answered(call, until)
            if call.error is None:
                value: R = call.value
                return value
            yield from self._retry(call.error, call.sent, tries, until)
            call = call.again()

    def submit(self, spec: JobSpec, until: float) -> Gen[Job]:
        """Requests a job. JobDeadlineError and JobConnectionLostError name the job, since the daemon may own its
        blocks.
        """
        tries = _Tries(lost=0)
        while True:
            connection = self._usable() or (yield from self._connected(until))
            if self._is_void(spec.lease):
                raise ConnectionLostError("the lease ended with the daemon that granted it")
            self._jobs_requested += 1  # an id is never used again in this client's life
            job = Job(self._jobs_requested, spec.direction, spec.registration, spec.counts)
            call = calls.submit(spec, job, self.asks("local", spec.options.local))
            self._transport.ask(connection, call)
            try:
                yield from answered(call, until)
                if call.error is None:
                    return job
                yield from self._retry(call.error, call.sent, tries, until)
            except DeadlineError as error:
                raise JobDeadlineError(f"{error}; the daemon may still use the blocks of {job}", job) from error
            except ConnectionLostError as error:
                if job.blocks_free:
                    raise
                raise JobConnectionLostError(f"{error}; the daemon may still use the blocks of {job}", job) from error

    def wait_ready(self, found: Found, until: float) -> Gen[Found]:
        """Returns the new answer. Raises DeadlineError, ConnectionLostError, or UsageError for another client's
        `found`.
        """
        promotion = instance_of(Found, found, "found").promotion
        if promotion is None:
            return found
        if not promotion.done:
            connection = self._transport.current
            if connection is None or not connection.promotes(promotion):
                raise UsageError("this answer came from another client")
            yield Wait((promotion,), until)
        return promotion.outcome()

    def keep(self, groups: Groups, how: KeepHow, first: First, until: float) -> Gen[None]:
        """See `Client.keep`."""
        call = calls.keep(groups, how, first, self.key_bytes)
        if "keep" in (yield from self._features(until)):
            yield from self.call(call, until)

    def _features(self, until: float) -> Gen[frozenset[str]]:
        """Returns what the daemon that it is connected to can do."""
        if self._usable() is None:
            yield from self._connected(until)
        return self._connector.features

    def call_feature(self, feature: str, call: Call[R], until: float) -> Gen[R]:
        """Sends a request that needs a feature, such as those about claims. Raises UsageError if the daemon does not
        have it.
        """
        if feature not in (yield from self._features(until)):
            raise UsageError(f"this daemon is older, and does not know `{feature}`: nothing was changed")
        return (yield from self.call(call, until))

    def claims(self, until: float) -> Gen[list[ClaimFigures]]:
        """See `Client.claims`."""
        found, cursor = yield from self.call_feature("retain", calls.claims(0), until)
        while cursor:
            page, cursor = yield from self.call_feature("retain", calls.claims(cursor), until)
            found += page
        return found

    def prefetch_claims(self, name: str, number: int, until: float) -> Gen[PrefetchedClaims]:
        """See `Client.prefetch_claims`."""
        memory_keys = cursor = 0
        while True:
            call = calls.prefetch_claims(name, number, cursor)
            found, cursor = yield from self.call_feature("prefetch_claims", call, until)
            memory_keys += found.memory_keys
            if not cursor:
                return replace(found, memory_keys=memory_keys)

    def clear(
        self,
        everything: bool,
        namespaces: str | None,
        uid: int | None,
        wait_s: float,
        token: bytes | None,
        until: float,
    ) -> Gen[Cleared]:
        """See `Client.clear`. If the connection is lost, the same token is sent once more."""
        named = os.urandom(TOKEN_BYTES) if token is None else token
        call = calls.clear(everything, namespaces, uid, wait_s, named, self.asks("clear_token"))
        for feature, wanted, what in (
            ("clear_namespaces", namespaces, "namespaces by their names"),
            ("clear_user", uid, "the namespaces of a user"),
        ):
            if wanted is not None and feature not in (yield from self._features(until)):
                raise UsageError(f"this daemon is older, and can't clear {what}: nothing was cleared")
        try:
            return (yield from self.call(call, until))
        except RemoteError as error:
            if error.code != NotDurableError.code:
                raise
            return Cleared(0, 0, (str(error),))  # an older daemon: it has cleared, and retries the rest, too

    def release(self, lease: int, until: float) -> Gen[None]:
        """Ends a lease; does nothing if it has ended already."""
        if integer(lease, "lease", IDS_END) == 0:
            return
        for last in (False, True):
            connection = self._usable() or (yield from self._connected(until))
            if self._is_void(lease):
                return
            try:
                yield from self._connector.ask_on(connection, calls.release(lease), until)
                return
            except RemoteError as error:
                if error.code in ("unknown_name", "bad_lease"):  # the daemon no longer knows it
                    return
                raise
            except ConnectionLostError:
                if last:
                    raise

    def register(self, caches: KvCache, until: float) -> Gen[Registration]:
        """Attaches and registers; repeated after every reconnect from now on."""
        registration = Registration(instance_of(KvCache, caches, "caches"))
        for last in (False, True):
            connection = self._usable() or (yield from self._connected(until))
            try:
                yield from self._connector.enroll(connection, registration, until)
            except ConnectionLostError:
                if last:
                    raise
            if not connection.ended.done:
                self._connector.registrations.append(registration)
                return registration
        raise ConnectionLostError("the connection was lost twice while registering")

    def unregister(self, registration: Registration, until: float) -> Gen[None]:
        """Ends a registration. A loss of the connection ends it too, but its memory may then still be mapped."""
        if instance_of(Registration, registration, "registration").closed:
            return
        connection = self._usable() or (yield from self._connected(until))
        try:
            yield from self._connector.ask_on(connection, calls.unregister(registration), until)
        except RemoteError as error:
            if error.code != "unknown_name":
                raise
        except ConnectionLostError:
            self._forget(registration)
            raise
        self._forget(registration)

    def cancel(self, job: Job, until: float) -> Gen[None]:
        """Ends a job early. Does nothing if it has ended, or its connection has: then no request can reach it."""
        connection = self._transport.current
        if instance_of(Job, job, "job").done or connection is None or connection.jobs.get(job.id) is not job:
            return
        try:
            yield from self._connector.ask_on(connection, calls.cancel(job), until)
        except RemoteError:
            if not job.done:  # else it ended during the request
                raise

    def subscribe(self, tiers: bool, until: float) -> Gen[None]:
        """Subscribes to events, again after every reconnect. The first subscription decides about `tiers`."""
        if self.key_bytes and not self._events.subscribed:
            with self._events.subscribing(tiers=bool(tiers)):  # before the reply: events may come together with it
                yield from self.call(calls.subscribe(self.asks("event_tiers", tiers)), until)

    def events(self, until: float) -> Gen[list[Event]]:
        """Returns the events so far; waits until `until` for the first if there is none."""
        if self._events.subscribed and self._usable() is None:
            yield from self._connected(until)
        connection = self._usable()
        ended = () if connection is None else (connection.ended,)
        yield Wait((self._events.news, *ended), until)
        return self._events.take()

    def snapshot(self, group: int, tier: Tier | None, until: float) -> Gen[U8Array]:
        """Returns all complete keys of a group."""
        pages, cursor = [], 0
        while True:
            page, cursor = yield from self.snapshot_page(group, cursor, tier, until)
            pages.append(page)
            if cursor == 0:
                return calls.join_pages(pages, self.key_bytes)

    def snapshot_page(self, group: int, cursor: int, tier: Tier | None, until: float) -> Gen[tuple[U8Array, int]]:
        """See `Client.snapshot_page`."""
        call = calls.snapshot(group, cursor, self.key_bytes, tier)
        return (yield from (self.call(call, until) if tier is None else self.call_feature("event_tiers", call, until)))

    # --- jobs ----------------------------------------------------------------------------------------

    def wait(self, job: Job, until: float) -> Gen[JobResult]:
        """Returns how the job ended. Raises as `wait_any`."""
        yield from self.wait_any([job], until)
        if job.result is None:
            raise UsageError(f"{job} has no result")
        return job.result

    def wait_any(self, jobs: Sequence[Job], until: float) -> Gen[list[Job]]:
        """Returns those of `jobs` that are done, one at least. Reconnects meanwhile, since that may prove their blocks
        free.

        Raises JobDeadlineError, naming the first of them.
        """
        jobs = [instance_of(Job, job, "job") for job in several(jobs, "jobs")]
        if not jobs:
            return []
        pauses = backoffs()
        while True:
            done = [job for job in jobs if job.done]
            if done:
                return done
            yield from self._wait_once(tuple(jobs), until, pauses)
            if monotonic() >= until and not any(job.done for job in jobs):
                raise JobDeadlineError(f"{jobs[0]} has not ended in time; the daemon still uses its blocks", jobs[0])

    def _wait_once(self, jobs: tuple[Job, ...], until: float, pauses: Iterator[float]) -> Gen[None]:
        connection = self._transport.current
        over = self._connector.connecting
        if connection is not None and connection.usable:
            yield Wait((*jobs, connection.ended), until)
        elif over is not None:
            yield Wait((*jobs, over), until)
        elif not self.settings.reconnect:
            yield Wait(jobs, until)
        else:
            now = monotonic()
            try:
                yield from self._connector.connect(now, min(until, now + self.settings.deadline_s))
            except ClientError:
                yield Wait(jobs, min(until, monotonic() + next(pauses)))

    # --- the end -------------------------------------------------------------------------------------

    def close(self, until: float, *, force: bool = False) -> Gen[None]:
        """Ends the session and closes everything.

        Raises JobDeadlineError if jobs' blocks are not free by then: the client stays half closed and accepts no new
        requests, but jobs can be waited for, and it can be closed again. `force`: closes all the same.
        """
        self._closing = True
        try:
            if self._transport.current is None:
                yield from self._wait_all(until)
            connection = self._transport.current
            if connection is not None and connection.usable:
                yield from self._say_bye(connection, until)
            yield from self._wait_all(until)
        except JobDeadlineError:
            if not force:
                raise
        self._transport.close()

    def _say_bye(self, connection: ConnectionState, until: float) -> Gen[None]:
        if connection.bye is None:
            bye = calls.bye()
            self._transport.ask(connection, bye)
            connection.bye = bye
        with suppress(DeadlineError):  # `close` reports the jobs that it leaves open
            yield from answered(connection.bye, until)
            if connection.bye.error is None:
                connection.lose_jobs("the session ended before the daemon told how it ended")

    def _wait_all(self, until: float) -> Gen[None]:
        while jobs := self.open_jobs():
            yield from self.wait_any(jobs, until)

    # --- helpers ---------------------------------------------------------------------------------------

    def _usable(self) -> ConnectionState | None:
        connection = self._transport.current
        return connection if connection is not None and connection.usable and not self._closing else None

    def _connected(self, until: float) -> Gen[ConnectionState]:
        self._check_open()
        return (yield from self._connector.connected(until))

    def _check_open(self) -> None:
        if self._closing:
            raise UsageError("the client is closed")

    def _is_void(self, lease: int) -> bool:
        """Returns whether a lease ended with an earlier run of the daemon; False for plain numbers, which name no
        run.
        """
        return isinstance(lease, Lease) and lease.boot_id not in (b"", self.boot_id)

    def _forget(self, registration: Registration) -> None:
        registration.closed = True
        if registration in self._connector.registrations:
            self._connector.registrations.remove(registration)

    def _retry(self, error: KvOffloadError, sent: bool, tries: _Tries, until: float) -> Gen[None]:
        """Returns if the request may be repeated, after a pause where one is due; raises its error if not."""
        if isinstance(error, ConnectionLostError) and self.settings.reconnect:
            if sent:
                tries.lost -= 1
            else:
                tries.unsent -= 1
            if tries.lost >= 0 and tries.unsent >= 0:
                return
        elif isinstance(error, RemoteError) and error.code == "busy" and self.settings.retry_busy:
            tries.pauses = tries.pauses or backoffs()
            again_at = monotonic() + next(tries.pauses)
            if again_at < until:
                yield Wait((), again_at)
                return
        raise error
