"""The blocking client: a plain socket and poll.

Ownership: one lock guards everything. Whoever holds it runs the steps of one call, and takes in whatever the daemon
says meanwhile; other threads' calls wait for the lock within their own deadlines.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from kvoffloadd.client import calls
from kvoffloadd.client.calls import Call, First, Groups, Transfers
from kvoffloadd.client.connector import Settings
from kvoffloadd.client.core import ClientCore
from kvoffloadd.client.job import Job, JobResult
from kvoffloadd.client.kvcache import KvCache
from kvoffloadd.client.registration import Registration
from kvoffloadd.client.results import Audit, Cleared, Drained, Event, Found, Reserved
from kvoffloadd.client.timeline import Ready
from kvoffloadd.client.waiting import Gen, Wait
from kvoffloadd.errors import DeadlineError
from kvoffloadd.model import Direction, U8Array
from kvoffloadd.protocol.messages import Limits, NamespaceSpec

R = TypeVar("R")

_POLL_MS_MAX = 3_600_000.0


class _Poll:
    """A `lines.Poller` on select.poll."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._readers[fd] = ready
        self._poll.register(fd, select.POLLIN)

    def watch_writable(self, fd: int, ready: Callable[[], None]) -> None:
        self._writers[fd] = ready
        self._poll.register(fd, select.POLLIN | select.POLLOUT)

    def unwatch_writable(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._writers.pop(fd, None)
        if self._readers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def carry_out(self, wait: Wait) -> None:
        """Poll, once at least, until a target is done or the time has passed."""
        while True:
            left_ms = min(max(wait.until - monotonic(), 0.0) * 1000.0, _POLL_MS_MAX)
            for fd, events in self._poll.poll(left_ms):
                self._serve(fd, events)
            for target in wait.targets:
                if target.done:
                    return
            if monotonic() >= wait.until:
                return

    def _serve(self, fd: int, events: int) -> None:
        writer = self._writers.get(fd)
        if writer is not None and events & select.POLLOUT:
            writer()
        reader = self._readers.get(fd)  # looked up late: what came before may have ended it
        if reader is not None and events & ~select.POLLOUT:
            reader()


class Client:
    """A session with the daemon, for callers that wait.

    Threads may share it: one lock, one call at a time. A fork may not. Use it as a context manager, or call `close`.

    Unless said otherwise every call connects if it must, answers or raises within `deadline_s` (wait for the lock
    included), and raises: DaemonUnreachableError; ConnectionLostError (the connection was lost in mid-call; `lookup`,
    `ping`, `status`, `snapshot` are asked once more first); DeadlineError; RemoteError (an error reply; `busy` is asked
    again until the deadline unless `retry_busy` is False); UsageError. None of them frees a job's blocks: see `Job`.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        namespace: NamespaceSpec | None,
        role: Literal["worker", "scheduler", "observer"] = "worker",
        instance: bytes | None = None,
        deadline_s: float = 10.0,
        connect_deadline_s: float = 5.0,
        reconnect: bool = True,
        retry_busy: bool = True,
    ) -> None:
        """Connects to nothing yet.

        Args:
            socket_path: where the daemon listens.
            namespace: who may share; None for an observer only.
            role: what this session may ask.
            instance: 16 unguessable bytes that an engine's scheduler and ranks share; None: an instance of its own.
            deadline_s: bound of every call.
            connect_deadline_s: how long attempts to connect are repeated; 0: a single one.
            reconnect: make a new connection when the old one was lost; if False, only `connect` does.
            retry_busy: ask again when the daemon is busy.
        """
        settings = Settings(
            socket_path=os.fspath(socket_path),
            namespace=namespace,
            role=role,
            instance=os.urandom(16) if instance is None else instance,
            deadline_s=deadline_s,
            connect_deadline_s=connect_deadline_s,
            reconnect=reconnect,
            retry_busy=retry_busy,
        )
        self._lock = threading.Lock()
        self._poll = _Poll()
        self._deadline_s = deadline_s
        self._exchange = ClientCore(settings, self._poll)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def boot_id(self) -> bytes:
        """16 bytes that name the daemon's run that was greeted last; empty before the first greeting."""
        return self._exchange.session.boot_id

    @property
    def limits(self) -> Limits | None:
        """What the daemon that was greeted last takes: of a frame, of a request; None before the first greeting."""
        return self._exchange.session.limits

    # --- the connection --------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect now, and register everything again. Nothing if connected."""
        self._run(self._deadline_s, self._exchange.connect)

    def close(self, deadline_s: float | None = None, *, force: bool = False) -> None:
        """Say bye, wait until the daemon's copies for this session have ended, and close.

        Raises JobDeadlineError if blocks are still the daemon's at the deadline (default: `deadline_s`). Then nothing
        new can be asked, but jobs can be waited for and `close` called again. `force`: closes at the deadline without
        an error; jobs that are open then never become free here.
        """
        self._run(self._or_default(deadline_s), lambda until: self._exchange.close(until, force=force))

    def ping(self) -> None:
        """Round trip."""
        self._call(calls.ping())

    # --- registration ----------------------------------------------------------------------------

    def register(self, caches: KvCache) -> Registration:
        """Attach the memory and register tensors and groups; repeated after every reconnect.

        The registration, and the client until `unregister`, hold the tensors and so keep the memory.
        """
        return self._run(self._deadline_s, lambda until: self._exchange.register(caches, until))

    def unregister(self, registration: Registration) -> None:
        """End a registration; returns when the daemon has unmapped the memory.

        After ConnectionLostError it is ended too, but the memory may still be mapped for a moment.
        """
        self._run(self._deadline_s, lambda until: self._exchange.unregister(registration, until))

    # --- keys ------------------------------------------------------------------------------------

    def lookup(self, groups: Groups, first: First = 0) -> Found:
        """Which keys hit and which prefixes can be restored. Changes nothing.

        `groups`: group -> consecutive keys of one prompt, packed bytes or u8 (keys, key_bytes). `first`: index in the
        prompt of the first of them, for all groups or by group.
        """
        return self._call(calls.lookup(groups, first, self._exchange.key_bytes))

    def pin(self, groups: Groups, first: First = 0) -> Found:
        """Lookup, and a read lease on every key that hits; end it with `release`.

        Keys on disk are brought into memory, and join the lease: `promoting` of the answer says how many are on their
        way, `wait_ready` when they are there. Until then a load should not name the lease.
        """
        return self._call(calls.pin(groups, first, self._exchange.key_bytes))

    def prefetch(self, groups: Groups, first: First = 0) -> Found:
        """Lookup that also has the daemon bring keys on disk into memory, after what others pin or load. No lease."""
        return self._call(calls.prefetch(groups, first, self._exchange.key_bytes))

    def wait_ready(self, found: Found, deadline_s: float) -> Found:
        """The answer to a `pin` or `prefetch` anew, once the keys it was promoting have come from disk, or could not.

        With `promoting` 0, and for a pin with the same lease (0 if it was released before the keys had come). At once
        the same `found` if that promotes nothing. Raises DeadlineError: not yet, it can be waited for again; or
        ConnectionLostError: it will not be told, and the lease may have ended; pin again.
        """
        return self._run(deadline_s, lambda until: self._exchange.wait_ready(found, until))

    def touch(self, groups: Groups, first: First = 0) -> None:
        """Say that keys were used without being loaded."""
        self._call(calls.touch(groups, first, self._exchange.key_bytes))

    def release(self, lease: int) -> None:
        """End a lease. Nothing where it has ended: with its daemon, with its instance, or by an earlier release."""
        self._run(self._deadline_s, lambda until: self._exchange.release(lease, until))

    def reserve(self, groups: Groups, parts: Sequence[int] | None = None, first: First = 0) -> Reserved:
        """Slots for keys that are to be stored: for all parts of each key, or for those named."""
        named = None if parts is None else list(parts)
        return self._call(calls.reserve(groups, first, named, self._exchange.key_bytes))

    def clear(self, *, everything: bool = False) -> Cleared:
        """Drop every key of the own namespace; `everything`: of all (root or the daemon's uid only)."""
        return self._call(calls.clear(everything))

    def snapshot(self, group: int) -> U8Array:
        """u8 (keys, key_bytes): the complete keys of a group. Keys that come or go meanwhile may be in it or not."""
        return self._run(self._deadline_s, lambda until: self._exchange.snapshot(group, until))

    def snapshot_page(self, group: int, cursor: int = 0) -> tuple[U8Array, int]:
        """Some keys of `snapshot`, and the cursor to go on with; 0: those were the last.

        A key that is in memory and on disk is in it twice. Of another run of the daemon a cursor says nothing.
        """
        return self._call(calls.snapshot(group, cursor, self._exchange.key_bytes))

    # --- jobs ------------------------------------------------------------------------------------

    def store(
        self,
        registration: Registration,
        groups: Transfers,
        *,
        lease: int = 0,
        first: First = 0,
        deadline_s: float = 60.0,
        ready: Ready | None = None,
    ) -> Job:
        """Start copying blocks to the daemon. The blocks must not be written until the job is done.

        Args:
            registration: whose tensors.
            groups: group -> (keys, block ids); ids are (keys,) or (keys, blocks_per_key) integers.
            lease: a reservation that covers the keys; 0: the job reserves this rank's part itself.
            first: as in `lookup`.
            deadline_s: the daemon gives the job up after so long. The request's own deadline is the client's.
            ready: when the blocks are final; None: they are. The daemon touches none of them before, and gives the job
                up at its deadline if that does not come.

        Raises JobDeadlineError or JobConnectionLostError where the daemon may have taken the job: its `job` owns the
        blocks until it is done. After any other error the blocks are free.
        """
        terms = calls.JobOptions(first, lease, deadline_s, ready)
        return self._submit(calls.transfer(Direction.STORE, registration, groups, self._exchange.key_bytes, terms))

    def load(
        self,
        registration: Registration,
        groups: Transfers,
        *,
        lease: int = 0,
        first: First = 0,
        deadline_s: float = 60.0,
        ready: Ready | None = None,
        expedited: bool = False,
    ) -> Job:
        """Start copying keys into blocks, which are the daemon's to write until the job is done.

        As `store`; `lease`: a pin that covers the keys; 0: held for the job's time. `expedited`: before other loads.
        Keys on disk are in state HIT, too, and read first; those that can't be are in the result's `failed`.
        """
        terms = calls.JobOptions(first, lease, deadline_s, ready, expedited)
        return self._submit(calls.transfer(Direction.LOAD, registration, groups, self._exchange.key_bytes, terms))

    def wait(self, job: Job, deadline_s: float) -> JobResult:
        """How the job ended. Outcome LOST: nobody can tell, but its blocks are free.

        Raises JobDeadlineError: it has not, or that is not proven; its blocks are still the daemon's, and it can be
        waited for again. No other error ends the wait: a lost connection is made anew meanwhile.
        """
        return self._run(deadline_s, lambda until: self._exchange.wait(job, until))

    def wait_any(self, jobs: Sequence[Job], deadline_s: float) -> list[Job]:
        """Those of `jobs` that are done, at least one unless there are none. Raises JobDeadlineError as `wait`."""
        return self._run(deadline_s, lambda until: self._exchange.wait_any(jobs, until))

    def cancel(self, job: Job) -> None:
        """Ask for an early end. The job's blocks are free when it is done, not when this returns."""
        self._run(self._deadline_s, lambda until: self._exchange.cancel(job, until))

    def open_jobs(self) -> list[Job]:
        """Every job whose blocks are not proven free, oldest first; also those whose request failed in mid-call."""
        return self._exchange.session.open_jobs()

    # --- observing -------------------------------------------------------------------------------

    def drain(self, deadline_s: float, *, everything: bool = False) -> Drained:
        """Wait for the namespace's jobs (or all) and the seals of what they stored, `deadline_s` at most."""
        return self._run(
            deadline_s + self._deadline_s, lambda until: self._exchange.call(calls.drain(everything, deadline_s), until)
        )

    def status(self) -> dict[str, Any]:
        """Counters and gauges by their stable names."""
        return self._call(calls.status())

    def verify(
        self, *, payloads: bool = False, disk: bool = False, repair: bool = False, deadline_s: float | None = None
    ) -> Audit:
        """The daemon's self-audit; `payloads`: it hashes every sealed slot again, so give it time.

        `disk`: it reads and checks every record on disk, which takes longer still. `repair`: drops those found bad.
        """
        op = calls.verify(payloads, disk, repair)
        return self._run(self._or_default(deadline_s), lambda until: self._exchange.call(op, until))

    def subscribe(self) -> None:
        """From now on keys that become complete or go are told, see `events`; repeated after every reconnect."""
        self._run(self._deadline_s, self._exchange.subscribe)

    def events(self, deadline_s: float = 0.0) -> list[Event]:
        """What came since the last call; waits `deadline_s` for the first if there is none.

        An `EventGap` among them says that some were lost there, as happens with every lost connection.
        """
        return self._run(deadline_s, self._exchange.events)

    # --- helpers ---------------------------------------------------------------------------------

    def _or_default(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else deadline_s

    def _call(self, op: Call[R]) -> R:
        return self._run(self._deadline_s, lambda until: self._exchange.call(op, until))

    def _submit(self, what: calls.JobSpec) -> Job:
        return self._run(self._deadline_s, lambda until: self._exchange.submit(what, until))

    def _run(self, deadline_s: float, begin: Callable[[float], Gen[R]]) -> R:
        until = monotonic() + deadline_s
        if not self._lock.acquire(timeout=min(max(deadline_s, 0.0), threading.TIMEOUT_MAX)):
            raise DeadlineError("another thread's call held the client until the deadline")
        steps = begin(until)
        try:
            while True:
                self._poll.carry_out(next(steps))
        except StopIteration as end:
            value: R = end.value
            return value
        finally:
            steps.close()
            self._lock.release()
