"""`lookup`, `pin` and `prefetch`: the reply about keys, a lease, and a `ready` once the disk has been read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvoffloadd.cache.disk.disktier import DiskTier, find_on_disk, keys_on_disk
from kvoffloadd.cache.disk.promotion import Fetch, Promotion, Urgency
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.lease import LEASE_KEYS, ReadLease
from kvoffloadd.cache.memory.lookup import GroupHits, LookupResult, restorable_boundaries
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.errors import LimitError
from kvoffloadd.model import BoolArray, U32Array, U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.account import Account
from kvoffloadd.server.context import Context
from kvoffloadd.server.instance import Instance
from kvoffloadd.server.outbox import Outbox

READY_BYTES, READY_BYTES_PER_GROUP, READY_BYTES_PER_KEY = 128, 8, 6
"""A `ready` at most: a state and a boundary per key, and the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupLookup:
    """One group's keys of a request, and where each stands. `on_disk`: those on disk, or on their way from there."""

    keyspace: Keyspace
    first: int
    keys: U64Array
    found: LookupResult
    on_disk: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """The answer to a lookup, before it is a message."""

    shares: list[GroupLookup]

    @property
    def states(self) -> list[bytes]:
        """Packed, per group."""
        return [share.found.states.tobytes() for share in self.shares]

    @property
    def boundaries(self) -> bytes:
        """Packed."""
        hits = [GroupHits(share.keyspace.schema, share.first, share.found.hits) for share in self.shares]
        return restorable_boundaries(hits).astype("<u4").tobytes()

    @property
    def rows(self) -> U32Array:
        """Rows of all keys that hit."""
        return np.concatenate([np.zeros(0, np.uint32), *(share.found.hit_rows for share in self.shares)])

    @property
    def num_keys(self) -> int:
        return sum(len(share.keys) for share in self.shares)

    @property
    def num_on_disk(self) -> int:
        """Keys that a promotion could bring."""
        return sum(int(share.on_disk.sum()) for share in self.shares)


def find_all(cache: Cache, disk: DiskTier | None, asked: list[tuple[Keyspace, int, U64Array]]) -> Lookups:
    """Look keys up in memory and on disk. Changes nothing."""
    named = [(keyspace, keys) for keyspace, _, keys in asked]
    founds = cache.find_all(named)
    aways = find_on_disk(disk, named, founds) if disk else [np.zeros(len(keys), bool) for _, keys in named]
    return Lookups(
        [GroupLookup(*one, found, on_disk) for one, found, on_disk in zip(asked, founds, aways, strict=True)]
    )


@dataclass(slots=True, eq=False)
class PendingPin:
    """A pin or prefetch whose `ready` is due. `charged`: paid in advance, for keys that may join the lease."""

    seq: int
    answered: Lookups
    lease: ReadLease | None
    charged: int
    outbox_bytes: int
    fetch: Fetch | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class PendingPins:
    """All pins and prefetches of one session that wait for the disk. `push` queues a message for the peer."""

    context: Context
    instance: Instance
    account: Account
    outbox: Outbox
    push: Callable[[m.Push], None]
    waiting: set[PendingPin] = field(default_factory=set)

    def pin(self, seq: int, answered: Lookups) -> m.Found:
        """Lease what hits, and bring the rest from disk into the lease."""
        rows, on_disk = answered.rows, answered.num_on_disk
        reserved = self._reserve(answered)
        # Whatever hits when the disk has been read joins the lease, also what others store meanwhile.
        later = answered.num_keys - len(rows) if on_disk else 0
        lease = None
        if len(rows) or on_disk:
            try:
                self.account.charge("leases", LEASE_KEYS + len(rows) + later)
            except LimitError:
                self.outbox.unreserve(reserved)
                raise
            self.context.cache.hold(rows)
            lease = self.instance.leases.add_read(rows)
        cache = self.context.cache
        cache.use_all([(share.keyspace, share.found, share.first) for share in answered.shares])
        for share in answered.shares:
            cache.lookups.record(share.keyspace, share.keys, share.found, share.on_disk)
        if cache.lookups.waiting:
            self.context.loop.call_soon(cache.lookups.classify_misses)  # behind the reply
        if on_disk and lease is not None:
            lease.growing = True
            self._fetch(PendingPin(seq, answered, lease, later, reserved), Urgency.PIN)
        return self._found(seq, answered, lease)

    def prefetch(self, seq: int, answered: Lookups) -> m.Found:
        """Bring from disk what is there."""
        reserved = self._reserve(answered)
        if answered.num_on_disk:
            waiting = PendingPin(seq, answered, None, 0, reserved)
            self._fetch(waiting, Urgency.PREFETCH)
            if waiting.fetch is not None:
                self._promotion.keep(waiting.fetch, answered.rows)
        return self._found(seq, answered, None)

    def close(self) -> None:
        """The session ends: no `ready` will be sent."""
        for waiting in list(self.waiting):
            self._end(waiting)

    def _found(self, seq: int, answered: Lookups, lease: ReadLease | None) -> m.Found:
        return m.Found(
            seq=seq,
            states=answered.states,
            boundaries=answered.boundaries,
            lease=lease.id if lease else 0,
            promoting=answered.num_on_disk,
        )

    def _reserve(self, answered: Lookups) -> int:
        """Room for the `ready`, if there will be one."""
        if not answered.num_on_disk:
            return 0
        size = READY_BYTES + READY_BYTES_PER_GROUP * len(answered.shares) + READY_BYTES_PER_KEY * answered.num_keys
        self.outbox.reserve(size)
        return size

    @property
    def _promotion(self) -> Promotion:
        disk = self.context.disk
        if disk is None:
            raise LookupError("there is no disk tier")  # and so nothing is ever away
        return disk.promotion

    def _fetch(self, waiting: PendingPin, urgent: int) -> None:
        on_disk = [
            keys_on_disk(share.keyspace, share.keys, share.first, share.on_disk)
            for share in waiting.answered.shares
            if share.on_disk.any()
        ]
        self.waiting.add(waiting)
        waiting.fetch = self._promotion.fetch(on_disk, urgent, partial(self._ready, waiting), self.instance.flow)
        deadline_s = self.context.config.copy.deadline_max_s
        waiting.timer = self.context.loop.call_later(deadline_s, self._ready, waiting)

    def _ready(self, waiting: PendingPin) -> None:
        """What came is in memory, held by the fetch until this returns."""
        cache = self.context.cache
        asked = waiting.answered.shares
        shares = [
            GroupLookup(share.keyspace, share.first, share.keys, found, found.hits & ~share.found.hits)
            for share, found in zip(asked, cache.find_all([(s.keyspace, s.keys) for s in asked]), strict=True)
        ]
        answered = Lookups(shares)
        lease = waiting.lease if waiting.lease and self.instance.leases.holds(waiting.lease) else None
        if lease is not None:
            fresh = np.concatenate([share.found.rows[share.on_disk].astype(np.uint32) for share in shares])
            cache.hold(fresh)
            self.instance.leases.grow(lease, fresh)
            waiting.charged -= len(fresh)
        cache.use_all([(share.keyspace, replace(share.found, hits=share.on_disk), share.first) for share in shares])
        self._end(waiting)
        states, boundaries = answered.states, answered.boundaries
        self.push(m.Ready(seq=waiting.seq, states=states, boundaries=boundaries, lease=lease.id if lease else 0))

    def _end(self, waiting: PendingPin) -> None:
        self.waiting.discard(waiting)
        if waiting.lease is not None:
            waiting.lease.growing = False  # also if the session has ended: what it waited for will not join
        if waiting.timer is not None:
            waiting.timer.cancel()
        if waiting.fetch is not None:
            self._promotion.cancel(waiting.fetch)
        if waiting.charged:
            self.account.refund("leases", waiting.charged)
        self.outbox.unreserve(waiting.outbox_bytes)
