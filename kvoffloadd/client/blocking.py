"""The blocking client: a plain socket and poll.

Ownership: calls form one queue. The first call runs its steps, and receives all messages of the daemon meanwhile; calls
of other threads wait for it within their own deadlines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

from kvoffloadd.client import calls
from kvoffloadd.client.arguments import seconds
from kvoffloadd.client.base import BaseClient
from kvoffloadd.client.callline import CallersLine, CallTicket
from kvoffloadd.client.calls import Call, First, Groups, Transfers
from kvoffloadd.client.events import Event
from kvoffloadd.client.jobs import Job, JobResult
from kvoffloadd.client.memory.kvcache import KvCache, Registration
from kvoffloadd.client.memory.timeline import Ready
from kvoffloadd.client.polling import Poll
from kvoffloadd.client.results import Audit, Cleared, Deleted, Drained, Found, PrefetchedClaims, Reserved, Retained
from kvoffloadd.client.transport import Poller
from kvoffloadd.client.waiting import Gen
from kvoffloadd.model import Direction, Tier, U8Array
from kvoffloadd.protocol.messages import ClaimFigures, KeepHow

R = TypeVar("R")


class Client(BaseClient):
    """Keeps a session with the daemon, for callers that block.

    Threads may share it: one call runs at a time. A forked child may not use it: there every call raises UsageError,
    and `close` does nothing. Use it as a context manager, or call `close`.

    A signal handler may raise in any call (KeyboardInterrupt): the client remains usable. If that interrupts an
    exchange, the connection is broken off and the next call makes a new one; jobs stay `open_jobs` until their blocks
    are proven free. The handler itself can't use the client if it interrupts a call of it: UsageError.

    Unless documented otherwise, every call connects if necessary, returns or raises within `deadline_s` (waiting for
    calls of other threads included), and raises: DaemonUnreachableError; ConnectionLostError (the connection was lost
    in mid-call; `lookup`, `ping`, `status`, `snapshot` are repeated once first); DeadlineError; RemoteError (an error
    reply; after `busy` the request is repeated until the deadline unless `retry_busy` is False); UsageError. None of
    them frees a job's blocks: see `Job`.
    """

    def _make_poller(self) -> Poller:
        self._line = CallersLine()
        self._poll = Poll()
        return self._poll

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the connection --------------------------------------------------------------------------

    def connect(self) -> None:
        """Connects now, and registers everything again. Does nothing if connected."""
        self._run(self._deadline_s, self._core.connect)

    def close(self, deadline_s: float | None = None, *, force: bool = False) -> None:
        """Sends `bye`, waits until the daemon's copies for this session have ended, and closes.

        Raises JobDeadlineError if the daemon still owns blocks at the deadline (default: `deadline_s`). The client then
        accepts no new requests, but jobs can be waited for and `close` called again. `force`: closes at the deadline
        without an error; jobs that are open then never become free here.
        """
        if not self._is_forked:
            self._run(self._or_default(deadline_s), lambda until: self._core.close(until, force=force))

    def ping(self) -> None:
        """Makes one round trip."""
        self._call(calls.ping())

    # --- registration ----------------------------------------------------------------------------

    def register(self, caches: KvCache) -> Registration:
        """Attaches the memory and registers tensors and groups; repeated after every reconnect. The first time, a
        daemon may take seconds to open a GPU, and this call waits for that regardless of the client's `deadline_s`.

        The registration, and the client until `unregister`, hold the tensors and so keep the memory.
        """
        return self._run(self._register_s(caches), lambda until: self._core.register(caches, until))

    def unregister(self, registration: Registration) -> None:
        """Ends a registration; returns when the daemon has unmapped the memory.

        After ConnectionLostError it has ended too, but the memory may still be mapped for a moment.
        """
        self._run(self._deadline_s, lambda until: self._core.unregister(registration, until))

    # --- keys ------------------------------------------------------------------------------------

    def lookup(self, groups: Groups, first: First = 0, *, local: bool = False) -> Found:
        """Returns which keys hit and which prefixes can be restored. Changes nothing.

        `groups`: group -> consecutive keys of one prompt, packed bytes or u8 (keys, key_bytes). `first`: index in the
        prompt of the first of them, for all groups or by group. `local`: PENDING then means on this host's disks; keys
        that are being stored, or come from a store that hosts share, are a MISS. Older daemons answer as without it.
        """
        return self._call(calls.lookup(groups, first, self._core.key_bytes, self._core.asks("local", local)))

    def pin(self, groups: Groups, first: First = 0) -> Found:
        """Looks keys up and takes a read lease on every key that hits; `release` ends it.

        Keys on disk are brought into memory, and join the lease: `promoting` of the answer counts those on their way,
        and `wait_ready` waits for them. Until then a load should not name the lease.
        """
        return self._call(calls.pin(groups, first, self._core.key_bytes, self._core.asks("tiers")))

    def prefetch(self, groups: Groups, first: First = 0, *, local: bool = False) -> Found:
        """Looks keys up and has the daemon bring keys on disk into memory, after those that others pin or load. Takes
        no lease.

        `local`: as in `lookup`. Without it, the store that hosts share is queried for keys that this host does not
        have.
        """
        return self._call(calls.prefetch(groups, first, self._core.key_bytes, self._core.asks("local", local)))

    def wait_ready(self, found: Found, deadline_s: float) -> Found:
        """Returns a new answer to a `pin` or `prefetch` once the keys that it was promoting have come from disk, or
        failed to.

        The answer has `promoting` 0, and for a pin the same lease (0 if it was released before the keys had come).
        Returns `found` itself at once if that promotes nothing. Raises DeadlineError: not yet, the call can be
        repeated; or ConnectionLostError: the daemon will not report it, and the lease may have ended; pin again.
        """
        return self._run(deadline_s, lambda until: self._core.wait_ready(found, until))

    def touch(self, groups: Groups, first: First = 0) -> None:
        """Reports that keys were used without being loaded."""
        self._call(calls.touch(groups, first, self._core.key_bytes))

    def keep(self, groups: Groups, how: KeepHow, first: First = 0) -> None:
        """Announces that a prompt's keys will be used again soon, or not at all (`drop`), until their next use. The
        daemon evicts them later, or earlier, as far as such hints have proved right. Older daemons get no such request.
        """
        self._run(self._deadline_s, lambda until: self._core.keep(groups, how, first, until))

    def retain(
        self,
        groups: Groups,
        seconds: float,
        *,
        priority: int | None = None,
        name: str = "",
        number: int = 0,
        first: First = 0,
    ) -> Retained:
        """Claims keys of a prompt, whether they are stored yet or not: for a time they are evicted after all keys that
        nobody has claimed. A claim is no lease: what the claims of a user keep is bounded, and beyond that claims
        lapse.

        Args:
            groups: as in `lookup`. Empty: the claims named `name`, or the claim with this `number`, get another end,
                and another priority unless that is None. RemoteError: there are none.
            seconds: until the claim ends, at most 30 days.
            priority: 0 to 100; the lowest lapses first, and is evicted first. None: 50.
            name: of the claim. The one that had this name in the namespace ends.
            number: of an existing claim, as `claims` shows it.
            first: as in `lookup`.

        UsageError: the daemon is too old for this.
        """
        call = calls.retain(groups, seconds, priority, name, number, first, self._core.key_bytes if groups else 0)
        return self._run(self._deadline_s, lambda until: self._core.call_feature("retain", call, until))

    def forget(self, name: str = "", number: int = 0) -> Retained:
        """Ends the claims of this name, or the claim of this number: in the session's namespace, or in all that an
        observer may see. RemoteError: there are none. UsageError: the daemon is too old for this.
        """
        call = calls.forget(name, number)
        return self._run(self._deadline_s, lambda until: self._core.call_feature("retain", call, until))

    def claims(self) -> list[ClaimFigures]:
        """Returns the claims that are in force, the oldest first: of the session's namespace; an observer's: of its
        user (root and the daemon's uid: of all users). UsageError: the daemon is too old for this.
        """
        return self._run(self._deadline_s, self._core.claims)

    def prefetch_claims(self, name: str = "", number: int = 0, deadline_s: float = 600.0) -> PrefetchedClaims:
        """Brings the keys of the claims of this name, or of the claim of this number, into memory, from disk and from
        the store that hosts share: before the traffic that needs them. Returns when all that can come is there.

        The claims are those that `forget` would end. RemoteError: there are none. UsageError: the daemon is too old for
        this. DeadlineError: there is more; what has come stays.
        """
        return self._run(deadline_s, lambda until: self._core.prefetch_claims(name, number, until))

    def prefetch_claims_page(self, name: str = "", number: int = 0, cursor: int = 0) -> tuple[PrefetchedClaims, int]:
        """Brings some of the keys that `prefetch_claims` brings, for about a second. Returns what has come to memory,
        and the cursor for the next call, one more than the number of keys that were come to; 0: those were the last.
        """
        call = calls.prefetch_claims(name, number, cursor)
        return self._run(self._deadline_s, lambda until: self._core.call_feature("prefetch_claims", call, until))

    def release(self, lease: int) -> None:
        """Ends a lease. Does nothing if it has ended: with its daemon, with its instance, or by an earlier release."""
        self._run(self._deadline_s, lambda until: self._core.release(lease, until))

    def reserve(self, groups: Groups, parts: Sequence[int] | None = None, first: First = 0) -> Reserved:
        """Reserves slots for keys to store: for all parts of each key, or for `parts` only."""
        return self._call(calls.reserve(groups, first, parts, self._core.key_bytes))

    def clear(
        self,
        *,
        everything: bool = False,
        namespaces: str | None = None,
        uid: int | None = None,
        wait_s: float = 10.0,
        token: bytes | None = None,
    ) -> Cleared:
        """Drops every key: of this session's namespace, of all, or of those that are named (root or the daemon's uid
        only).

        When this returns, the clear has taken effect on this host, and the daemon completes the rest alone.

        Args:
            everything: all namespaces.
            namespaces: those with names, as `status` shows them, that match this shell pattern. RemoteError: none
                match. UsageError: the daemon is too old for this.
            uid: those of this user; with `namespaces`, those of them that match. Errors as above.
            wait_s: how long to wait, in addition to the call's own deadline, until disks and remote store have recorded
                it.
            token: 16 bytes that name this clear. After an error the call can be repeated with the same token: a daemon
                that has cleared answers for that clear, and clears nothing anew. None: a new token.
        """
        limit_s = seconds(wait_s, "wait_s")
        return self._run(
            limit_s + self._deadline_s,
            lambda until: self._core.clear(everything, namespaces, uid, limit_s, token, until),
        )

    def delete(self, groups: Groups, *, wait_s: float = 10.0) -> Deleted:
        """Deletes these keys of the session's namespace: what was stored of them before does not hit any more, also
        after a restart. Keys that are in no tier are no error.

        When this returns, the deletion has taken effect on this host, and the daemon completes the rest alone. A lease
        or a load that holds a key keeps its bytes in memory until it ends. Other hosts that share a store keep their
        own copies.

        RemoteError: `limit` if there are more than 1,024 keys (counted for parts as well), or no room to remember more
        deleted keys. UsageError: the daemon is too old for this.

        Args:
            groups: the keys, by group. A group need not be registered.
            wait_s: how long to wait, in addition to the call's own deadline, until the disks have recorded it and the
                remote store has removed the keys.
        """
        limit_s = seconds(wait_s, "wait_s")
        call = calls.delete(groups, limit_s, self._core.key_bytes)
        return self._run(limit_s + self._deadline_s, lambda until: self._core.call_feature("delete", call, until))

    def snapshot(self, group: int, *, tier: Tier | None = None) -> U8Array:
        """Returns u8 (keys, key_bytes): the complete keys of a group, in this tier (`MEMORY` or `DISK`; None: in
        either). Keys that come or go meanwhile may be in it or not.

        Raises UsageError for a `tier` if the daemon is older (feature `event_tiers`).
        """
        return self._run(self._deadline_s, lambda until: self._core.snapshot(group, tier, until))

    def snapshot_page(self, group: int, cursor: int = 0, *, tier: Tier | None = None) -> tuple[U8Array, int]:
        """Returns some keys of `snapshot`, and the cursor for the next call; 0: those were the last.

        A key that is in memory and on disk is in it twice, unless a `tier` is named. A cursor is meaningless for
        another tier, or another run of the daemon.
        """
        return self._run(self._deadline_s, lambda until: self._core.snapshot_page(group, cursor, tier, until))

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
        """Starts copying blocks to the daemon. The blocks must not be written until the job is done.

        Args:
            registration: the registration that has the tensors.
            groups: group -> (keys, block ids); ids are (keys,) or (keys, blocks_per_key) integers.
            lease: a reservation: keys that were not reserved, or are gone since, are not stored; 0: the job reserves
                this rank's part itself.
            first: as in `lookup`.
            deadline_s: seconds after which the daemon gives the job up. The request's own deadline is the client's.
            ready: the point at which the blocks are final; None: they are. The daemon touches none of them before, and
                gives the job up at its deadline if the point is not reached.

        Raises JobDeadlineError or JobConnectionLostError where the daemon may have taken the job: its `job` owns the
        blocks until it is done. After any other error the blocks are free.
        """
        options = calls.JobOptions(first, lease, deadline_s, ready)
        return self._submit(calls.transfer(Direction.STORE, registration, groups, self._core.key_bytes, options))

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
        local: bool = False,
    ) -> Job:
        """Starts copying keys into blocks, which belong to the daemon for writing until the job is done.

        Arguments and errors are those of `store`; `lease`: a pin that covers the keys; 0: held while the job runs.
        `expedited`: before other loads. Keys on disk are in state HIT, too, and are read first; those that can't be
        read are in the result's `failed`. Without `local`, this also holds for keys that a store that hosts share is
        queried for; with it, the job waits for no such store.
        """
        options = calls.JobOptions(first, lease, deadline_s, ready, expedited, local)
        return self._submit(calls.transfer(Direction.LOAD, registration, groups, self._core.key_bytes, options))

    def wait(self, job: Job, deadline_s: float) -> JobResult:
        """Returns how the job ended. Outcome LOST: its result is unknown, but its blocks are free.

        Raises JobDeadlineError: it has not ended, or that is not proven; the daemon still owns its blocks, and it can
        be waited for again. No other error ends the wait: a lost connection is replaced meanwhile.
        """
        return self._run(deadline_s, lambda until: self._core.wait(job, until))

    def wait_any(self, jobs: Sequence[Job], deadline_s: float) -> list[Job]:
        """Returns those of `jobs` that are done, at least one unless `jobs` is empty. Raises JobDeadlineError as
        `wait`.
        """
        return self._run(deadline_s, lambda until: self._core.wait_any(jobs, until))

    def cancel(self, job: Job) -> None:
        """Requests an early end. The job's blocks are free when it is done, not when this returns."""
        self._run(self._deadline_s, lambda until: self._core.cancel(job, until))

    # --- observing -------------------------------------------------------------------------------

    def drain(self, deadline_s: float, *, everything: bool = False) -> Drained:
        """Waits for the namespace's jobs (or all) and the seals of what they stored, `deadline_s` at most."""
        call = calls.drain(everything, deadline_s)
        return self._run(deadline_s + self._deadline_s, lambda until: self._core.call(call, until))

    def status(self) -> dict[str, Any]:
        """Returns counters and gauges by their stable names."""
        return self._call(calls.status())

    def verify(
        self, *, payloads: bool = False, disk: bool = False, repair: bool = False, deadline_s: float | None = None
    ) -> Audit:
        """Returns the daemon's self-audit; `payloads`: it hashes every sealed slot again, which takes time.

        `disk`: it reads and checks every record on disk, which takes longer still. `repair`: drops those found bad.
        """
        call = calls.verify(payloads, disk, repair)
        return self._run(self._or_default(deadline_s), lambda until: self._core.call(call, until))

    def subscribe(self, *, tiers: bool = False) -> None:
        """Subscribes to keys that become complete or go, see `events`. The subscription is repeated after every
        reconnect. `tiers`: follows memory and disk each, if the daemon can (feature `event_tiers`); see
        `KeyEvents.tier`.
        """
        self._run(self._deadline_s, lambda until: self._core.subscribe(tiers, until))

    def events(self, deadline_s: float = 0.0) -> list[Event]:
        """Returns the events since the last call; waits `deadline_s` for the first if there is none.

        An `EventGap` among them marks where some were lost, as happens with every lost connection.
        """
        return self._run(deadline_s, self._core.events)

    # --- helpers ---------------------------------------------------------------------------------

    def _or_default(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else deadline_s

    def _call(self, call: Call[R]) -> R:
        return self._run(self._deadline_s, lambda until: self._core.call(call, until))

    def _submit(self, spec: calls.JobSpec) -> Job:
        return self._run(self._deadline_s, lambda until: self._core.submit(spec, until))

    def _run(self, deadline_s: float, begin: Callable[[float], Gen[R]]) -> R:
        self._check_process()
        until = monotonic() + seconds(deadline_s)
        ticket = CallTicket(sys._getframe())
        try:
            self._line.enter(ticket, until)
            return self._poll.run(begin(until), self._core.mend)
        finally:
            self._line.leave(ticket)
