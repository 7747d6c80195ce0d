"""The objects and settings that all sessions of one daemon share."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvoffloadd import socketpath
from kvoffloadd.cache.claimsaver import ClaimSaver
from kvoffloadd.cache.clearing import Clearings
from kvoffloadd.cache.deleting import Deletions
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.cache.lowertiers import LowerTiers
from kvoffloadd.cache.memory import audit
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import torn_by
from kvoffloadd.cache.memory.lease import ReleasedLease
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.config import Config
from kvoffloadd.cudadriver import has_bindings
from kvoffloadd.device.base import Device, Gpus, HostMemory
from kvoffloadd.device.signals import Signals
from kvoffloadd.errors import BusyError
from kvoffloadd.scheduling.lag import Lag
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.scheduling.steps import Steps, in_turns
from kvoffloadd.scheduling.turns import Turns
from kvoffloadd.server.events import EventFeeds
from kvoffloadd.server.peers.account import Accounts
from kvoffloadd.server.peers.clears import RequestedClears
from kvoffloadd.server.peers.descriptorcloser import DescriptorCloser
from kvoffloadd.server.peers.instance import Instance, Instances
from kvoffloadd.server.peers.peer import Peer
from kvoffloadd.server.peers.quarantine import Quarantine

log = logging.getLogger(__name__)

ENDED_PER_TURN = 4096
"""The number of rows and parts that one turn takes out of leases of ended instances; see `Leases.end_some`."""

EXPIRY_PAUSE_S = 0.001
"""The time between two turns that end claims."""

USES_WAIT_S = 0.005
"""The delay until the first waiting uses of keys are counted: see `cache.memory.deferredtouches`."""


@dataclass(slots=True, eq=False)
class SessionCounters:
    """Counters since the daemon's start."""

    sessions: int = 0
    sessions_refused: int = 0
    requests: int = 0
    errors: int = 0  # error replies
    busy: int = 0  # error replies with code `busy`
    peers_killed: int = 0  # sessions with a peer that died without closing
    drains_late: int = 0  # sessions with copies that did not end in time


class OpenSession(Protocol):
    """The part of an open session that the daemon uses."""

    peer: Peer
    role: str
    requests: int

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""

    def slow_jobs(self, least_s: float) -> list[dict[str, Any]]:
        """Returns for `status` the session's jobs that have been under way for at least `least_s`."""


@dataclass(slots=True, eq=False)
class Context:
    """The state that all sessions share; the daemon owns it."""

    config: Config
    boot_id: bytes
    loop: asyncio.AbstractEventLoop
    cache: Cache
    jobs: Jobs
    host: HostMemory
    gpus: Gpus
    signals: Signals
    hash_lane: Lane
    fatal: Callable[[str], None]  # ends the process, with this reason
    accounts: Accounts
    lag: Lag
    turns: Turns
    closer: DescriptorCloser
    instances: Instances = field(default_factory=Instances)
    sessions: set[OpenSession] = field(default_factory=set)
    counters: SessionCounters = field(default_factory=SessionCounters)
    draining: bool = False
    accepts: int = 0  # connections taken from the backlog, including refused ones
    lower: LowerTiers | None = None
    own_uid: int = field(default_factory=os.getuid)
    unmapped_uid: int | None = field(default_factory=socketpath.unmapped_uid)
    # The daemon's own pidfd, sent to every peer. It is opened once, since a hello may come when no descriptor is left.
    pidfd: int = field(default_factory=lambda: os.pidfd_open(os.getpid()))
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    started_s: float = field(default_factory=time.monotonic)
    # Found once: looking for them reads the disk. Whether a driver works shows only when a worker names a GPU.
    has_cuda_bindings: bool = field(default_factory=has_bindings)
    clearings: Clearings = field(init=False)
    deletions: Deletions = field(init=False)
    claims: ClaimSaver = field(init=False)
    requested_clears: RequestedClears = field(init=False)
    quarantine: Quarantine = field(init=False)
    events: EventFeeds = field(init=False)
    _ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    _expiry: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.claims = ClaimSaver(self.cache, self.disk, self.config.disk.stuck_s)
        self.clearings = Clearings(self.cache, self.disk, self.remote, self.spawn)
        self.deletions = Deletions(self.cache, self.disk, self.remote, self.spawn)
        self.requested_clears = RequestedClears(self.clearings)
        self.quarantine = Quarantine(self.jobs, self.trusted_uids, self.fatal)

        self.events = EventFeeds(self.cache.entries.events.waiting, self.turns)
        # The delay lets a peer that waits for its replies send its next request first.
        self.cache.uses.wake = partial(self.loop.call_later, USES_WAIT_S, self._count_uses)
        self.cache.retention.clock = self.loop.time
        self.cache.retention.wake = self._expire_at

    def admit(self, uid: int) -> None:
        """Makes the threads that touch this user's memory and descriptors, if there are none yet.

        Raises:
            LimitError: the user's threads are stuck.
            BusyError: no threads can be made.
        """
        self.closer.admit(uid)
        try:
            self.host.admit(uid)
            self.signals.admit(uid)
        except RuntimeError as error:
            raise BusyError(f"the daemon can't start threads for uid {uid}: {error}") from None

    def spawn(self, work: Coroutine[Any, Any, Any], *, errors_are_handled: bool = False) -> asyncio.Task[Any]:
        """Runs a task that the daemon owns until it ends. Logs its failure, unless the caller handles it."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(partial(self._ended, errors_are_handled))
        return task

    def _ended(self, errors_are_handled: bool, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not errors_are_handled:
            log.error("a background task failed", exc_info=error)
        self.end_if_torn(error)  # the task that handles the error may have ended

    def end_if_torn(self, error: BaseException) -> None:
        """Logs the exception and ends the process if it has left the cache's tables half-written."""
        if (torn := torn_by(error)) is not None:
            log.error("an exception has broken off a change of the cache's tables", exc_info=torn)
            self.fatal(f"a bug in the cache, whose tables may be half-written: {torn}")

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        """Handles the loop's exceptions, which come from callbacks, including those of lanes' completions."""
        loop.default_exception_handler(about)
        error = about.get("exception")
        if error is not None:
            self.end_if_torn(error)

    @property
    def trusted_uids(self) -> frozenset[int]:
        """The users that may do everything: root, and the daemon's own."""
        return frozenset((0, self.own_uid))

    @property
    def disk(self) -> DiskTier | None:
        return self.lower.disk if self.lower is not None else None

    @property
    def remote(self) -> RemoteTier | None:
        return self.lower.remote if self.lower is not None else None

    @property
    def devices(self) -> list[Device]:
        """The host device and the GPUs in use."""
        return [self.host, *self.gpus.devices()]

    def features(self) -> list[str]:
        """Returns the features that a welcome announces."""
        optional = {
            "disk": self.disk is not None,
            "remote": self.remote is not None,
            "cuda": self.config.cuda.enabled and self.has_cuda_bindings,
        }
        always = [
            "host",
            "memory",
            "keep",
            "retain",
            "prefetch_claims",
            "clear_token",
            "clear_namespaces",
            "clear_user",
            "delete",
            "composition",
            "detach",
            "tiers",
            "event_tiers",
            "local",
        ]
        return [*always, *(name for name, has in optional.items() if has)]

    def _count_uses(self) -> None:
        if self.cache.uses.settle_due():
            self.loop.call_later(0, self._count_uses)

    def _expire_at(self, at_s: float) -> None:
        """Ends the claims that are over at this time, then or before."""
        if self._expiry is None or self._expiry.when() > at_s:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = self.loop.call_at(at_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        next_s = self.cache.retention.expire()
        if next_s is not None:  # the loop may call a moment too early
            self._expire_at(max(next_s, self.loop.time() + EXPIRY_PAUSE_S))

    def let_go(self, ended: ReleasedLease, uid: int) -> None:
        """Releases the contents of ended leases: rows may be evicted, and reserved parts without a job are freed."""
        if len(ended.rows):
            self.cache.unhold(ended.rows)
        if len(ended.parts):
            self.cache.abort(ended.parts)
        self.accounts.of(uid).refund(leases=ended.charged)

    def end_lease(self, instance: Instance, lease_id: int) -> Steps[None]:
        """Ends one lease; if the steps are closed early, a task completes them. Raises LeaseError if there is no such
        lease.
        """
        ending = self._end_lease(instance, lease_id)
        try:
            for _ in ending:
                yield
        except GeneratorExit:
            self.spawn(in_turns(ending))
            raise

    def _end_lease(self, instance: Instance, lease_id: int) -> Steps[None]:
        self.let_go(instance.leases.end(lease_id, ENDED_PER_TURN), instance.uid)
        yield
        while lease_id in instance.leases:  # another session may end it, or it ends with its instance
            self.let_go(instance.leases.end(lease_id, ENDED_PER_TURN), instance.uid)
            yield

    async def end_leases(self, instance: Instance) -> None:
        """Ends all leases of an ended instance: some in each turn of the loop, and only one instance's in a turn,
        however many have ended. Call it in a task that the daemon owns. Until then the leases count as held.
        """
        async with self._ending:
            while len(instance.leases):
                self.let_go(instance.leases.end_some(ENDED_PER_TURN), instance.uid)
                await asyncio.sleep(0)
        self.instances.forget(instance)

    def audit(self) -> Iterator[list[str]]:
        """Runs the self-audit in steps, so that the loop can run in between. Each step yields the errors found."""
        yield from audit.steps(self.cache, self._accounts)
        if self.disk is not None:
            yield from self.disk.steps()
        if self.remote is not None:
            yield self.remote.check()
        if not self.sessions and not self.quarantine:
            yield self.accounts.leaks()
            if len(self.instances):
                yield [f"instances: {len(self.instances)} without a session"]

    def _accounts(self) -> tuple[int, int]:
        """Returns the numbers of held rows and reserved parts, from the records of all their holders."""
        held = self.instances.held()
        holds, reserved = held.keys + self.jobs.holds, held.parts + self.jobs.reserved
        holds += sum(reservation.num_held for reservation in self.cache.unfinished)
        reserved += sum(reservation.num_reserved for reservation in self.cache.unfinished)
        disk, remote = self.disk, self.remote
        if disk is not None:
            holds += disk.promotion.holds + disk.demotion.holds
            reserved += disk.promotion.reserved
        if remote is not None:
            holds += remote.holds
            reserved += remote.reserved
        return holds, reserved
