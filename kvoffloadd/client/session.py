"""What a client knows over all its connections, without I/O: registrations, jobs, events, what proves blocks free."""

from __future__ import annotations

from collections import deque

from kvoffloadd.client.calls import JobSpec
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.job import Job
from kvoffloadd.client.keys import unpack_keys
from kvoffloadd.client.registration import Registration
from kvoffloadd.client.results import Event, EventGap, KeyEvents, Lease
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import MessageError
from kvoffloadd.protocol import messages
from kvoffloadd.protocol.messages import Push

EVENTS_MAX = 10_000
"""Events kept for a caller who does not fetch them; beyond that they are dropped and a gap is told."""


class Session:
    """State of one client. `link` is the present connection; `old` are ended ones on which jobs' blocks still hang.

    A job's blocks are proven free by one of these: its `completed`; an error in reply to its request; the `done` that
    answers `bye`; its daemon's pidfd; or a greeting by the same daemon (boot id) on a connection made after that daemon
    closed the job's connection, since a daemon that lives drains a session's copies before it closes its socket. The
    end of the connection alone proves nothing: a killed daemon's socket ends before its copies do.
    """

    def __init__(self, key_bytes: int | None) -> None:
        self.key_bytes = key_bytes
        self.link: ConnectionState | None = None
        self.old: list[ConnectionState] = []
        self.boot_id = b""
        self.limits: messages.Limits | None = None
        self.registrations: list[Registration] = []
        self.subscribed = False
        self.news = Waitable()
        self._events: deque[Event] = deque()
        self._next_job = 1

    # --- connections -----------------------------------------------------------------------------

    def begin(self) -> ConnectionState:
        """A new connection's state; the one before has ended."""
        self.link = ConnectionState()
        return self.link

    def greeted(self, link: ConnectionState, welcome: messages.Welcome) -> None:
        """The daemon's answer to `hello`."""
        link.boot_id = self.boot_id = welcome.boot_id
        link.limits = self.limits = welcome.limits
        for old in self.old:
            if old.closed.done and old.boot_id == welcome.boot_id:
                old.lose_jobs("its connection ended before the daemon told how it ended")

    def receive(self, link: ConnectionState, data: bytes | memoryview, fds: list[int]) -> None:
        """Take what the socket gave. Raises PeerError: break the link off."""
        link.receive(data, fds)
        while (push := link.next_push()) is not None:
            self._take(link, push)

    def end(self, link: ConnectionState, reason: str) -> None:
        """Nothing more will come on this connection. Without jobs nobody needs to remember it."""
        if link.ended.done:
            return
        if self.subscribed and link.usable:
            self._add(EventGap())
        link.end(reason)
        for registration in self.registrations:
            registration.id = None
        self.old.append(link)  # first: another thread may ask for `open_jobs`
        if self.link is link:
            self.link = None

    def died(self, link: ConnectionState) -> None:
        """The pidfd of this connection's daemon says that it is dead: so are its copies."""
        self.end(link, "the daemon died")
        link.dead.settle()
        link.lose_jobs("the daemon died")

    def finished(self) -> list[ConnectionState]:
        """Takes out the ended connections on which nothing hangs any more; their descriptors can be closed."""
        done = [link for link in self.old if not link.jobs]
        self.old = [link for link in self.old if link.jobs]
        return done

    # --- jobs and leases ---------------------------------------------------------------------------

    def new_job(self, what: JobSpec) -> Job:
        """A job that nobody was asked for yet. Its id never comes again in this client's life."""
        job = Job(self._next_job, what.direction, what.registration, what.counts)
        self._next_job += 1
        return job

    def open_jobs(self) -> list[Job]:
        """Every job whose blocks are not proven free, oldest first."""
        # Copied at one go, and in this order: another thread may be in a call meanwhile.
        link = self.link
        links = list(self.old) if link is None else [*self.old, link]
        found = {job.id: job for one in links for job in list(one.jobs.values())}
        return [found[number] for number in sorted(found)]

    def holds(self, job: Job) -> bool:
        """Whether the present connection is the one that this job was asked for on."""
        return self.link is not None and self.link.jobs.get(job.id) is job

    def is_void(self, lease: int) -> bool:
        """Whether a lease ended with an earlier run of the daemon. Plain numbers are not known to be."""
        return isinstance(lease, Lease) and lease.boot_id not in (b"", self.boot_id)

    # --- pushes ------------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """What came since the last call."""
        events = list(self._events)
        self._events.clear()
        self.news = Waitable()
        return events

    def _take(self, link: ConnectionState, push: Push) -> None:
        if isinstance(push, messages.Completed):
            job = link.jobs.get(push.job)
            if job is None:
                raise MessageError(f"completion of job {push.job}, which does not run")
            job.complete(push)
            del link.jobs[push.job]
        elif isinstance(push, messages.Ready):
            link.take_ready(push)
        elif isinstance(push, messages.Events):
            width = self.key_bytes or 0
            if not self.subscribed or not width:
                raise MessageError("events that nobody subscribed to")
            self._add(KeyEvents(push.group, unpack_keys(push.added, width), unpack_keys(push.removed, width)))
        elif isinstance(push, messages.Gap):
            self._add(EventGap())

    def _add(self, event: Event) -> None:
        if len(self._events) >= EVENTS_MAX:
            self._events.clear()
            event = EventGap()
        self._events.append(event)
        self.news.settle()
