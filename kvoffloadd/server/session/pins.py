"""`lookup`, `pin` and `prefetch`: the reply about keys, a lease, and a `ready` when the tiers below memory have
finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from kvoffloadd.cache.lower.fetches import Urgency
from kvoffloadd.cache.lowertiers import GroupLookup, LowerFetch, LowerTiers
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.deferredtouches import Used
from kvoffloadd.cache.memory.lease import LEASE_KEYS, ReadLease
from kvoffloadd.cache.memory.lookup import TOKENS_MAX, GroupHits, LookupResult, packed_boundaries
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import BoolArray, KeyState, U32Array, U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.instance import Instance
from kvoffloadd.server.peers.outbox import Outbox

READY_BYTES, READY_BYTES_PER_GROUP, READY_BYTES_PER_KEY = 128, 8, 6
"""The parts of the largest `ready`: a state and a boundary per key, and the other fields."""


_MISS, _PENDING = int(KeyState.MISS), int(KeyState.PENDING)


class Lookups(NamedTuple):
    """The lookup results of all groups of a request."""

    groups: list[GroupLookup]

    @property
    def states(self) -> list[bytes]:
        """Packed states of each group, in the form of the reply."""
        return [group.lookup.states.tobytes() for group in self.groups]

    @property
    def boundaries(self) -> bytes:
        """Packed lengths of prefixes that can be restored, in the form of the reply."""
        hits = [GroupHits(group.keyspace.schema, group.first, group.lookup.hits) for group in self.groups]
        return packed_boundaries(hits)

    @property
    def rows(self) -> U32Array:
        """The rows of all keys that hit."""
        if len(self.groups) == 1:
            return self.groups[0].lookup.hit_rows
        return np.concatenate([np.zeros(0, np.uint32), *(group.lookup.hit_rows for group in self.groups)])

    @property
    def num_keys(self) -> int:
        return sum(len(group.keys) for group in self.groups)

    @property
    def num_below(self) -> int:
        """The number of keys that may still come from a tier below."""
        return sum(int(np.count_nonzero(group.below)) for group in self.groups)

    def leave_out_elsewhere(self) -> None:
        """Turns pending keys that are not on this host's disks into misses, although they may be on their way."""
        for group in self.groups:
            group.lookup.states[(group.lookup.states == _PENDING) & ~group.on_disk] = _MISS


def find_all(
    cache: Cache, lower: LowerTiers | None, groups: list[tuple[Keyspace, int, U64Array]], *, ask: bool = False
) -> Lookups:
    """Looks keys up in all tiers of this host; with `ask`, also selects the keys to request from the remote store.
    Changes nothing. The number in each group is the position of its first key.
    """
    lookups = cache.find_all([(keyspace, keys) for keyspace, _, keys in groups])
    if lower is not None:
        return Lookups(lower.find(groups, lookups, ask=ask))
    found = []
    for (keyspace, first, keys), lookup in zip(groups, lookups, strict=True):
        found.append(GroupLookup(keyspace, first, keys, lookup, np.zeros(len(keys), bool)))
    return Lookups(found)


@dataclass(slots=True, eq=False)
class PendingPin:
    """A pin or prefetch that waits for the tiers below memory, to send its `ready`."""

    seq: int
    answered: Lookups  # the lookups in the reply
    lease: ReadLease | None
    charged: int  # keys charged in advance, which may join the lease
    outbox_bytes: int  # reserved for the `ready`
    fetch: LowerFetch | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class PendingPins:
    """The pins and prefetches of one session that wait for the tiers below. `push` queues a message for the peer."""

    context: Context
    instance: Instance
    outbox: Outbox
    push: Callable[[m.Push], None]
    waiting: set[PendingPin] = field(default_factory=set)

    def pin(self, seq: int, answered: Lookups, *, tell_tiers: bool) -> m.Found:
        """Leases the keys that hit, as far as their user may hold them, and brings the others from below into the
        lease.
        """
        self._leave_out(answered.groups, [group.lookup.hits for group in answered.groups])
        rows, below = answered.rows, answered.num_below
        # All keys that hit when the tiers below have finished join the lease, even those that others store meanwhile.
        later = answered.num_keys - len(rows) if below else 0
        ready_bytes = _ready_bytes(answered) if below else 0
        lease = None
        if len(rows) or below:
            self.outbox.reserve(ready_bytes, leases=LEASE_KEYS + len(rows) + later)
            self.context.cache.hold(rows)
            lease = self.instance.leases.add_read(rows)
        tiers = [group.tiers.tobytes() for group in answered.groups] if tell_tiers and below else UNSET
        cache, reply = self.context.cache, _found(seq, answered, lease, below, tiers)
        used = [(group.keyspace, group.lookup, group.first) for group in answered.groups]
        if below:
            cache.uses.add(used)  # keys behind a gap are known when the tiers below have finished
        else:
            cache.uses.add_prompt(used, _reach(reply.boundaries))
        for group in answered.groups:
            cache.lookups.record(group.keyspace, group.keys, group.lookup, group.on_disk, group.requested)
        if not below:
            self._count_tokens(answered.groups, reply.boundaries)
        if cache.lookups.waiting:
            self.context.loop.call_soon(cache.lookups.classify_misses)  # after the reply
        if below and lease is not None:
            lease.growing = True
            self._fetch(PendingPin(seq, answered, lease, later, ready_bytes), Urgency.PIN)
        return reply

    def prefetch(self, seq: int, answered: Lookups) -> m.Found:
        """Brings keys from below into memory. Keys that hit, and keys that have come, are held until all have come, and
        charged as a lease until then.
        """
        below = answered.num_below
        if below:
            ready_bytes, charged = _ready_bytes(answered), LEASE_KEYS + answered.num_keys
            self.context.cache.check_hold(self.instance.uid, answered.rows)
            self.outbox.reserve(ready_bytes, leases=charged)
            waiting = PendingPin(seq, answered, None, charged, ready_bytes)
            self._fetch(waiting, Urgency.PREFETCH)
            if waiting.fetch is not None:
                waiting.fetch.keep(answered.rows)
        return _found(seq, answered, None, below)

    def close(self) -> None:
        """Drops all waiting pins: the session ends, and no `ready` will be sent."""
        for waiting in list(self.waiting):
            self._end(waiting)

    def _fetch(self, waiting: PendingPin, urgent: int) -> None:
        lower = self.context.lower
        if lower is None:
            raise LookupError("there is no tier below memory")  # unreachable: without a tier, no key is below
        self.waiting.add(waiting)
        ready = partial(self._ready, waiting)
        waiting.fetch = lower.fetch(waiting.answered.groups, urgent, ready, self.instance.flow)
        deadline_s = self.context.config.copy.deadline_max_s
        waiting.timer = self.context.loop.call_later(deadline_s, self._ready, waiting)

    def _ready(self, waiting: PendingPin) -> None:
        """Sends the `ready` when the tiers below have finished, or at the deadline. The fetch holds the keys that came
        until this returns.
        """
        cache = self.context.cache
        before = waiting.answered.groups
        groups = [
            GroupLookup(
                group.keyspace, group.first, group.keys, lookup, lookup.hits & ~group.lookup.hits, group.requested
            )
            for group, lookup in zip(before, cache.find_all([(g.keyspace, g.keys) for g in before]), strict=True)
        ]
        answered = Lookups(groups)
        lease = waiting.lease if waiting.lease and self.instance.leases.holds(waiting.lease) else None
        if lease is not None:
            self._leave_out(groups, [group.on_disk for group in groups])
            fresh = np.concatenate([group.lookup.rows[group.on_disk].astype(np.uint32) for group in groups])
            cache.hold(fresh)
            self.instance.leases.grow(lease, fresh)
            waiting.charged -= len(fresh)
        came = _used(before, groups, [group.on_disk for group in groups])
        pinned = _used(before, groups, [group.lookup.hits for group in groups]) if waiting.lease is not None else came
        boundaries = answered.boundaries
        cache.uses.add_prompt(pinned, _reach(boundaries), came)
        for group in groups:
            if group.requested is not None and waiting.lease is not None:
                cache.lookups.record_requested(group.keyspace, group.keys, group.lookup, group.requested)
        if waiting.lease is not None:
            self._count_tokens(groups, boundaries)
        if cache.lookups.waiting:
            self.context.loop.call_soon(cache.lookups.classify_misses)
        self._end(waiting)
        lease_id = lease.id if lease else 0
        self.push(m.Ready(seq=waiting.seq, states=answered.states, boundaries=boundaries, lease=lease_id))

    def _count_tokens(self, groups: list[GroupLookup], boundaries: bytes) -> None:
        """Counts the tokens of a pin, once it is known which of its keys have come from below."""
        if groups:
            begin, end = tokens_of(groups)
            restorable = max(min(_reach(boundaries), end) - begin, 0)
            self.context.cache.lookups.record_tokens(groups[0].keyspace.namespace, end - begin, restorable)

    def _leave_out(self, groups: list[GroupLookup], joining: list[BoolArray]) -> None:
        """Turns keys that would join a lease (`joining`, of each group), but that its user may not hold, into misses:
        from the prompt's end on, in all groups alike, so that the remaining keys can be restored.
        """
        cache, uid = self.context.cache, self.instance.uid
        if not groups or not cache.entries.held.bounds(uid):
            return
        chosen = [np.flatnonzero(mask) for mask in joining]
        rows = [group.lookup.rows[indices].astype(np.uint32) for group, indices in zip(groups, chosen, strict=True)]
        ends = [
            (group.first + indices + 1) * group.keyspace.schema.tokens_per_key
            for group, indices in zip(groups, chosen, strict=True)
        ]
        order = np.argsort(np.concatenate(ends), kind="stable")
        allowed = np.empty(len(order), bool)
        allowed[order] = cache.may_hold(uid, np.concatenate(rows)[order])
        split = np.split(allowed, np.cumsum([len(indices) for indices in chosen])[:-1])
        for group, indices, kept in zip(groups, chosen, split, strict=True):
            left = indices[~kept]
            group.on_disk[left] = group.lookup.hits[left] = False
            group.lookup.states[left] = KeyState.MISS

    def _end(self, waiting: PendingPin) -> None:
        self.waiting.discard(waiting)
        if waiting.lease is not None:
            waiting.lease.growing = False  # also if the session has ended: no more keys will join
        if waiting.timer is not None:
            waiting.timer.cancel()
        if waiting.fetch is not None:
            waiting.fetch.cancel()
            waiting.fetch = None  # breaks a reference cycle: see `Collector`
        self.outbox.unreserve(waiting.outbox_bytes, leases=waiting.charged)


def _used(before: list[GroupLookup], now: list[GroupLookup], hits: list[BoolArray]) -> list[Used]:
    """Returns the uses of these hits, after the tiers below have brought the keys that they could. A key that they
    could not bring this time counts as pending, not as gone.
    """
    used = []
    for first, group, group_hits in zip(before, now, hits, strict=True):
        states = np.where(first.below & (group.lookup.rows < 0), np.uint8(_PENDING), group.lookup.states)
        used.append((group.keyspace, LookupResult(group.lookup.rows, states, group_hits), group.first))
    return used


def tokens_of(groups: list[GroupLookup]) -> tuple[int, int]:
    """Returns where in its prompt a request begins, behind what the engine has itself, and where it ends. A group with
    a window may begin later than the others; one without keys is not part of the request.
    """
    spans = [
        (group.first * tokens, (group.first + len(group.keys)) * tokens)
        for group in groups
        if len(group.keys) and (tokens := group.keyspace.schema.tokens_per_key)
    ]
    begin, end = (min(span[0] for span in spans), max(span[1] for span in spans)) if spans else (0, 0)
    return min(begin, TOKENS_MAX), min(end, TOKENS_MAX)


def _reach(boundaries: bytes) -> int:
    """Returns the number of tokens that can be restored of a prompt that has all groups."""
    return int.from_bytes(boundaries[:4], "little")


def _ready_bytes(answered: Lookups) -> int:
    """Returns the largest size of the `ready` for these lookups."""
    return READY_BYTES + READY_BYTES_PER_GROUP * len(answered.groups) + READY_BYTES_PER_KEY * answered.num_keys


def _found(
    seq: int, answered: Lookups, lease: ReadLease | None, below: int, tiers: list[bytes] | UnsetType = UNSET
) -> m.Found:
    return m.Found(
        seq=seq,
        states=answered.states,
        boundaries=answered.boundaries,
        lease=lease.id if lease is not None else 0,
        promoting=below,
        tiers=tiers,
    )
