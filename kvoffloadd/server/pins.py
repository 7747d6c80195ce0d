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
    """One group's keys of a request, looked up."""

    keyspace: Keyspace
    first: int  # position of the first key in its prompt
    keys: U64Array
    lookup: LookupResult
    on_disk: BoolArray  # keys on disk, or on their way from there


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """The lookup results of all groups of a request."""

    groups: list[GroupLookup]

    @property
    def states(self) -> list[bytes]:
        """Packed states of each group, as the reply has them."""
        return [group.lookup.states.tobytes() for group in self.groups]

    @property
    def boundaries(self) -> bytes:
        """Packed lengths of prefixes that can be restored, as the reply has them."""
        hits = [GroupHits(group.keyspace.schema, group.first, group.lookup.hits) for group in self.groups]
        return restorable_boundaries(hits).astype("<u4").tobytes()

    @property
    def rows(self) -> U32Array:
        """Rows of all keys that hit."""
        return np.concatenate([np.zeros(0, np.uint32), *(group.lookup.hit_rows for group in self.groups)])

    @property
    def num_keys(self) -> int:
        return sum(len(group.keys) for group in self.groups)

    @property
    def num_on_disk(self) -> int:
        """Keys that a promotion could bring."""
        return sum(int(group.on_disk.sum()) for group in self.groups)


def find_all(cache: Cache, disk: DiskTier | None, groups: list[tuple[Keyspace, int, U64Array]]) -> Lookups:
    """Look keys up in memory and on disk. Changes nothing. The number is the position of a group's first key."""
    named = [(keyspace, keys) for keyspace, _, keys in groups]
    lookups = cache.find_all(named)
    masks = find_on_disk(disk, named, lookups) if disk else [np.zeros(len(keys), bool) for _, keys in named]
    return Lookups(
        [GroupLookup(*group, lookup, mask) for group, lookup, mask in zip(groups, lookups, masks, strict=True)]
    )


@dataclass(slots=True, eq=False)
class PendingPin:
    """A pin or prefetch that waits for the disk, to send its `ready`."""

    seq: int
    answered: Lookups  # what the reply said
    lease: ReadLease | None
    charged: int  # keys charged in advance, which may join the lease
    outbox_bytes: int  # reserved for the `ready`
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
        # All keys that hit when the disk has been read join the lease, also those that others store meanwhile.
        later = answered.num_keys - len(rows) if on_disk else 0
        lease = None
        if len(rows) or on_disk:
            try:
                self.account.charge(leases=LEASE_KEYS + len(rows) + later)
            except LimitError:
                self.outbox.unreserve(reserved)
                raise
            self.context.cache.hold(rows)
            lease = self.instance.leases.add_read(rows)
        cache = self.context.cache
        cache.use_all([(group.keyspace, group.lookup, group.first) for group in answered.groups])
        for group in answered.groups:
            cache.lookups.record(group.keyspace, group.keys, group.lookup, group.on_disk)
        if cache.lookups.waiting:
            self.context.loop.call_soon(cache.lookups.classify_misses)  # behind the reply
        if on_disk and lease is not None:
            lease.growing = True
            self._fetch(PendingPin(seq, answered, lease, later, reserved), Urgency.PIN)
        return self._found(seq, answered, lease)

    def prefetch(self, seq: int, answered: Lookups) -> m.Found:
        """Bring keys from disk into memory."""
        reserved = self._reserve(answered)
        if answered.num_on_disk:
            waiting = PendingPin(seq, answered, None, 0, reserved)
            self._fetch(waiting, Urgency.PREFETCH)
            if waiting.fetch is not None:
                self._promotion.keep(waiting.fetch, answered.rows)
        return self._found(seq, answered, None)

    def close(self) -> None:
        """Drop all that wait: the session ends, and no `ready` will be sent."""
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
        """Reserve room in the outbox for the `ready`, if there will be one. Returns its bytes."""
        if not answered.num_on_disk:
            return 0
        size = READY_BYTES + READY_BYTES_PER_GROUP * len(answered.groups) + READY_BYTES_PER_KEY * answered.num_keys
        self.outbox.reserve(size)
        return size

    @property
    def _promotion(self) -> Promotion:
        disk = self.context.disk
        if disk is None:
            raise LookupError("there is no disk tier")  # and so no key is on disk
        return disk.promotion

    def _fetch(self, waiting: PendingPin, urgent: int) -> None:
        on_disk = [
            keys_on_disk(group.keyspace, group.keys, group.first, group.on_disk)
            for group in waiting.answered.groups
            if group.on_disk.any()
        ]
        self.waiting.add(waiting)
        waiting.fetch = self._promotion.fetch(on_disk, urgent, partial(self._ready, waiting), self.instance.flow)
        deadline_s = self.context.config.copy.deadline_max_s
        waiting.timer = self.context.loop.call_later(deadline_s, self._ready, waiting)

    def _ready(self, waiting: PendingPin) -> None:
        """The disk has been read, or the deadline is over. What came is held by the fetch until this returns."""
        cache = self.context.cache
        before = waiting.answered.groups
        groups = [
            GroupLookup(group.keyspace, group.first, group.keys, lookup, lookup.hits & ~group.lookup.hits)
            for group, lookup in zip(before, cache.find_all([(g.keyspace, g.keys) for g in before]), strict=True)
        ]
        answered = Lookups(groups)
        lease = waiting.lease if waiting.lease and self.instance.leases.holds(waiting.lease) else None
        if lease is not None:
            fresh = np.concatenate([group.lookup.rows[group.on_disk].astype(np.uint32) for group in groups])
            cache.hold(fresh)
            self.instance.leases.grow(lease, fresh)
            waiting.charged -= len(fresh)
        cache.use_all([(group.keyspace, replace(group.lookup, hits=group.on_disk), group.first) for group in groups])
        self._end(waiting)
        states, boundaries = answered.states, answered.boundaries
        self.push(m.Ready(seq=waiting.seq, states=states, boundaries=boundaries, lease=lease.id if lease else 0))

    def _end(self, waiting: PendingPin) -> None:
        self.waiting.discard(waiting)
        if waiting.lease is not None:
            waiting.lease.growing = False  # also if the session has ended: no more keys will join
        if waiting.timer is not None:
            waiting.timer.cancel()
        if waiting.fetch is not None:
            self._promotion.cancel(waiting.fetch)
        if waiting.charged:
            self.account.refund(leases=waiting.charged)
        self.outbox.unreserve(waiting.outbox_bytes)
