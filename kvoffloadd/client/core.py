"""Every call of both clients, once: generators that yield what they wait for. The I/O shells run them.

Ownership: an Exchange and all below it belong to whoever runs its steps, one thread (or event loop) at a time: the
blocking client's lock sees to that. Nothing here waits; a step that must wait yields `Wait`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from kvoffloadd.client import calls
from kvoffloadd.client.calls import Call, JobSpec
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.connector import Connector, Settings, backoffs
from kvoffloadd.client.job import Job, JobConnectionLostError, JobDeadlineError, JobResult
from kvoffloadd.client.kvcache import KvCache
from kvoffloadd.client.lines import Lines, Poller
from kvoffloadd.client.registration import Registration
from kvoffloadd.client.results import Event, Found
from kvoffloadd.client.session import Session
from kvoffloadd.client.waiting import Gen, Wait
from kvoffloadd.errors import ClientError, ConnectionLostError, DeadlineError, KvOffloadError, RemoteError, UsageError
from kvoffloadd.model import U8Array

R = TypeVar("R")


@dataclass(slots=True)
class _Tries:
    """What a call may still try again: after a loss in mid-call, and after one before anything was sent."""

    lost: int
    unsent: int = 2
    pauses: Iterator[float] | None = None


class ClientCore:
    """The calls of one client. Every `until` is a time.monotonic; every call ends by then, or at once after it."""

    def __init__(self, settings: Settings, poller: Poller) -> None:
        self.settings = settings
        self.session = Session(None if settings.namespace is None else settings.namespace.key_bytes)
        self._lines = Lines(settings.socket_path, self.session, poller)
        self._dialer = Connector(settings, self.session, self._lines)
        self._closing = False

    @property
    def key_bytes(self) -> int:
        """Width of this client's keys. Raises UsageError where it has no namespace."""
        if self.session.key_bytes is None:
            raise UsageError("an observer without a namespace has no keys")
        return self.session.key_bytes

    # --- requests ------------------------------------------------------------------------------------

    def connect(self, until: float) -> Gen[None]:
        """Connect, if not connected."""
        self._check_open()
        yield from self._dialer.connected(until, explicit=True)

    def call(self, op: Call[R], until: float) -> Gen[R]:
        """Ask, and wait for the answer. Raises what `Client` says of every call."""
        tries = _Tries(lost=1 if op.repeatable else 0)
        while True:
            link = self._usable() or (yield from self._connected(until))
            pending = self._lines.ask(link, op)
            yield from self._dialer.settled(pending, until)
            if pending.error is None:
                value: R = pending.value
                return value
            yield from self._retry(pending.error, pending.sent, tries, until)

    def submit(self, what: JobSpec, until: float) -> Gen[Job]:
        """Ask for a job. JobDeadlineError and JobConnectionLostError name the job whose blocks may be the daemon's."""
        tries = _Tries(lost=0)
        while True:
            link = self._usable() or (yield from self._connected(until))
            if self.session.is_void(what.lease):
                raise ConnectionLostError("the lease ended with the daemon that granted it")
            job = self.session.new_job(what)
            pending = self._lines.ask(link, calls.submit(what, job), job)
            try:
                yield from self._dialer.settled(pending, until)
                if pending.error is None:
                    return job
                yield from self._retry(pending.error, pending.sent, tries, until)
            except DeadlineError as error:
                raise JobDeadlineError(f"{error}; the blocks of {job} may be the daemon's", job) from error
            except ConnectionLostError as error:
                if job.blocks_free:
                    raise
                raise JobConnectionLostError(f"{error}; the blocks of {job} may be the daemon's", job) from error

    def wait_ready(self, found: Found, until: float) -> Gen[Found]:
        """The answer anew. Raises DeadlineError, ConnectionLostError, or UsageError for another client's `found`."""
        promotion = found.promotion
        if promotion is None:
            return found
        if not promotion.done:
            link = self.session.link
            if link is None or not link.promotes(promotion):
                raise UsageError("this answer came from another client")
            yield Wait((promotion,), until)
        return promotion.outcome()

    def release(self, lease: int, until: float) -> Gen[None]:
        """End a lease; nothing where it has ended already."""
        if int(lease) == 0:
            return
        for last in (False, True):
            link = self._usable() or (yield from self._connected(until))
            if self.session.is_void(lease):
                return
            try:
                yield from self._dialer.ask_on(link, calls.release(lease), until)
                return
            except RemoteError as error:
                if error.code in ("unknown_name", "bad_lease"):  # the daemon knows it no more
                    return
                raise
            except ConnectionLostError:
                if last:
                    raise

    def register(self, caches: KvCache, until: float) -> Gen[Registration]:
        """Attach and register; from now on after every reconnect again."""
        registration = Registration(caches)
        for last in (False, True):
            link = self._usable() or (yield from self._connected(until))
            try:
                yield from self._dialer.enroll(link, registration, until)
            except ConnectionLostError:
                if last:
                    raise
            if not link.ended.done:
                self.session.registrations.append(registration)
                return registration
        raise ConnectionLostError("the connection was lost twice while registering")

    def unregister(self, registration: Registration, until: float) -> Gen[None]:
        """End a registration. After a loss of the connection it is forgotten too; its memory may still be mapped."""
        if registration.closed:
            return
        link = self._usable() or (yield from self._connected(until))
        try:
            yield from self._dialer.ask_on(link, calls.unregister(registration), until)
        except RemoteError as error:
            if error.code != "unknown_name":
                raise
        except ConnectionLostError:
            self._forget(registration)
            raise
        self._forget(registration)

    def cancel(self, job: Job, until: float) -> Gen[None]:
        """End a job early. Nothing where it has ended, or where its connection has: then it can't be reached."""
        link = self.session.link
        if job.done or link is None or not self.session.holds(job):
            return
        try:
            yield from self._dialer.ask_on(link, calls.cancel(job), until)
        except RemoteError:
            if not job.done:  # else it ended while we asked
                raise

    def subscribe(self, until: float) -> Gen[None]:
        """Have events sent, after every reconnect again."""
        if self.key_bytes and not self.session.subscribed:
            self.session.subscribed = True  # before the reply, since events may come together with it
            try:
                yield from self.call(calls.subscribe(), until)
            except RemoteError:
                self.session.subscribed = False
                raise

    def events(self, until: float) -> Gen[list[Event]]:
        """What came so far; waits until `until` for the first if there is none."""
        if self.session.subscribed and self._usable() is None:
            yield from self._connected(until)
        link = self._usable()
        ended = () if link is None else (link.ended,)
        yield Wait((self.session.news, *ended), until)
        return self.session.take_events()

    def snapshot(self, group: int, until: float) -> Gen[U8Array]:
        """All complete keys of a group."""
        pages, cursor = [], 0
        while True:
            page, cursor = yield from self.call(calls.snapshot(group, cursor, self.key_bytes), until)
            pages.append(page)
            if cursor == 0:
                return calls.join_pages(pages, self.key_bytes)

    # --- jobs ----------------------------------------------------------------------------------------

    def wait(self, job: Job, until: float) -> Gen[JobResult]:
        """How it ended. Raises as `wait_any`."""
        yield from self.wait_any([job], until)
        if job.result is None:
            raise UsageError(f"{job} has no result")
        return job.result

    def wait_any(self, jobs: Sequence[Job], until: float) -> Gen[list[Job]]:
        """Those of `jobs` that are done, one at least. Reconnects meanwhile, since that may prove their blocks free.

        Raises JobDeadlineError, naming the first of them.
        """
        if not jobs:
            return []
        pauses = backoffs()
        while True:
            done = [job for job in jobs if job.done]
            if done:
                return done
            yield from self._wait_once(tuple(jobs), until, pauses)
            if monotonic() >= until and not any(job.done for job in jobs):
                raise JobDeadlineError(f"{jobs[0]} has not ended in time; its blocks are still the daemon's", jobs[0])

    def _wait_once(self, jobs: tuple[Job, ...], until: float, pauses: Iterator[float]) -> Gen[None]:
        link = self.session.link
        over = self._dialer.dialing
        if link is not None and link.usable:
            yield Wait((*jobs, link.ended), until)
        elif over is not None:
            yield Wait((*jobs, over), until)
        elif not self.settings.reconnect:
            yield Wait(jobs, until)
        else:
            now = monotonic()
            try:
                yield from self._dialer.dial(now, min(until, now + self.settings.deadline_s))
            except ClientError:
                yield Wait(jobs, min(until, monotonic() + next(pauses)))

    # --- the end -------------------------------------------------------------------------------------

    def close(self, until: float, *, force: bool = False) -> Gen[None]:
        """End the session and close everything.

        Raises JobDeadlineError if jobs' blocks are not free by then: the client stays half closed, so that nothing new
        can be asked, but jobs can be waited for, and it can be closed again. `force`: closes all the same.
        """
        self._closing = True
        try:
            if self.session.link is None:
                yield from self._wait_all(until)
            link = self.session.link
            if link is not None and link.usable:
                yield from self._say_bye(link, until)
            yield from self._wait_all(until)
        except JobDeadlineError:
            if not force:
                raise
        self._lines.close()

    def _say_bye(self, link: ConnectionState, until: float) -> Gen[None]:
        if link.bye is None:
            link.bye = self._lines.ask(link, calls.bye())
        with suppress(DeadlineError):  # what jobs it leaves open, `close` tells
            yield from self._dialer.settled(link.bye, until)
            if link.bye.error is None:
                link.lose_jobs("the session ended before the daemon told how it ended")

    def _wait_all(self, until: float) -> Gen[None]:
        while jobs := self.session.open_jobs():
            yield from self.wait_any(jobs, until)

    # --- helpers ---------------------------------------------------------------------------------------

    def _usable(self) -> ConnectionState | None:
        link = self.session.link
        return link if link is not None and link.usable and not self._closing else None

    def _connected(self, until: float) -> Gen[ConnectionState]:
        self._check_open()
        return (yield from self._dialer.connected(until))

    def _check_open(self) -> None:
        if self._closing:
            raise UsageError("the client is closed")

    def _forget(self, registration: Registration) -> None:
        registration.closed = True
        registration.id = None
        if registration in self.session.registrations:
            self.session.registrations.remove(registration)

    def _retry(self, error: KvOffloadError, sent: bool, tries: _Tries, until: float) -> Gen[None]:
        """Return if the request may be asked again, after a pause where one is due; raises its error if not."""
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
