"""Eviction makes room for new slots, within one slot size and between sizes and users. Event loop only."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.keytable import KeyTable, RowState
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace, Queue
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.quota import UNBOUNDED, Quota
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.cache.policy.selection import IN_USE_MAX
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, BoolArray, F64Array, I64Array, U32Array, U64Array, slot_pages

log = logging.getLogger(__name__)

NO_ROWS = np.zeros(0, np.uint32)

SLABS_TRIED = 8
RECORDS_MAX = 1 << 18
"""The maximum work of one request, in part records. An eviction that has removed keys with about this many records ends
with the room that it has gained: keys with thousands of parts, most of them empty, would take hundreds of milliseconds.
A search that has inspected this many records without success takes over slabs instead.
"""
SPARE_MAX, SPARE_SHARE = 1024, 256
"""The maximum number of slots that an eviction frees in addition to the wanted ones, and their maximum share (1/n) of
all slots of the size. Most stores then find room. The fixed cost of an eviction, hundreds of microseconds for any
number of keys, is paid once for many stores.
"""
QUEUES_MAX, QUEUES_PER_USER = 64, 16
"""The maximum number of queues. Each takes memory and mappings. Engines have few slot sizes. Beyond the limits, a new
size shares the user's queue with the nearest size, and a new user shares a queue of another user. What a quota counts
shares no queue with other keys: the first queue there comes on top.
"""
TAKEOVER_GAIN = 1.25
"""A slab changes hands only if its keys are worth less by this factor, since a takeover evicts more than is
wanted now.
"""
SAMPLE_SLOTS = 16
"""The number of slots by which a slab is judged."""
TAKEOVER_SHARE = 2
"""If no slab of another size was worth little enough, slabs are judged again after this fraction (1/n) of a slab's
slots has been evicted. Judging slabs costs as much as several evictions.
"""
QUEUES_ASKED = 8
"""The number of queues that one search asks for their next victims. Each takes a tenth of a millisecond or more, and
there may be one for each user. The queues take turns, except for two: the queue of the keys that need the room, and the
queue that had the least valuable key the last time.
"""


class QueuePlace(NamedTuple):
    """What has a queue of its own: a user's keys with slots of this size, in pages, and among them those of the
    namespaces that match the pattern of a quota.
    """

    uid: int
    size: int
    pattern: str = ""


class Eviction:
    """Keeps queues by user and slot size, and the balance between them.

    `make_policy(capacity_rows, max_rows)` makes a policy; all policies that it makes share a clock.

    Keys compete by their worth per page of memory. Each queue of a slot size names the keys that it would evict next,
    and the least valuable of these keys are evicted. Between sizes, whole slabs change hands: a size that needs room
    takes over another size's slab if the keys in it are worth less than its own next victims, or if it has no victims.
    """

    def __init__(self, entries: KeyTable, make_policy: Callable[[int, int], Policy]) -> None:
        self._entries = entries
        self._tier = entries.tier
        # Returns those of some rows, in order, that may all go together for the keys that ask for room now.
        self.displaceable = partial(displaceable, entries)
        self._make_policy = make_policy
        self.sizes: Counter[int] = Counter()
        self.queues: dict[QueuePlace, Queue] = {}
        # Whether a policy may have set rows aside that no claim keeps: without any, `readmit` does nothing.
        self.any_aside = False
        # Called where nothing else is left: returns claimed rows to evict, of those that pass, up to a number.
        self.last_resort: Callable[[Callable[[U32Array], BoolArray], int], U32Array] = lambda wanted, count: NO_ROWS
        self._has_claimed: BoolArray = np.zeros(0, bool)  # by slab, when the table of claimed keys had this version
        self._claimed_version = -1
        self._gave_up = False  # whether the last search met too many keys in use to find all that it could
        self.keys_evicted = 0
        self.keys_unkept = 0  # of them, keys that claims were to keep
        self.slabs_taken_over = 0
        self._turn = 0
        self._cheapest: Queue | None = None
        self._evicted_since: dict[int, int] = {}  # slots, by size, since a judgment found no slab to take

    def prepare(self, namespace: Namespace, groups: Iterable[Sequence[int]]) -> None:
        """Makes the missing queues for this namespace's groups, which have parts with payloads of these sizes, so that
        `admit` needs no memory. Raises LimitError if there is no memory; nothing that matters has changed then.
        """
        self.queues = {place: queue for place, queue in self.queues.items() if queue.num_spaces}
        if self._cheapest not in self.queues.values():
            self._cheapest = None  # its tables go with it
        try:
            for sizes in groups:
                pages = [slot_pages(size) for size in sizes]
                if (place := self._queue_place(namespace, pages[0])) not in self.queues:
                    capacity_rows = max(1, self._tier.num_pages // sum(pages))
                    policy = self._make_policy(capacity_rows, self._entries.index.max_keys)
                    self.queues[place] = Queue(policy, self.sizes, self._entries.keyspaces.quotas.of(namespace))
        except MemoryError as error:
            raise LimitError(f"the daemon gets no memory for tables of keys of another size: {error}") from None

    def admit(self, keyspace: Keyspace, known: Iterable[int]) -> None:
        """Counts parts with payload sizes, `known`, that have become known. The first of them gives a keyspace its
        queue. Raises LimitError as `prepare`, unless `prepare` was called before.
        """
        known, before = list(known), self.num_sizes
        if keyspace.queue is None:
            if (place := self._queue_place(keyspace.namespace, slot_pages(known[0]))) not in self.queues:
                self.prepare(keyspace.namespace, [known])
            keyspace.queue = self.queues[place]
            keyspace.queue.join(keyspace)
        keyspace.queue.add_parts(keyspace, known)
        if max(before, self._tier.num_slabs) < self.num_sizes:
            log.warning(
                "memory: slots of %d sizes share %d slabs, so the sizes displace each other and few lookups hit: lower "
                "memory.slab_bytes (now %d), or raise memory.capacity_bytes; the slots have %s bytes",
                self.num_sizes, self._tier.num_slabs, self._tier.payload_bytes_max,
                ", ".join(str(pages * PAGE_BYTES) for pages in sorted(self.sizes)),
            )  # fmt: skip

    def _queue_place(self, namespace: Namespace, size: int) -> QueuePlace:
        """Returns the queue for this namespace's keys that have a first slot of this size."""
        quota = self._entries.keyspaces.quotas.of_namespace(namespace)
        place = QueuePlace(namespace.uid, size, "" if quota is None else quota.name)
        own = [other for other in self.queues if (other.uid, other.pattern) == (place.uid, place.pattern)]
        if place in own or max(len(own) * QUEUES_MAX // QUEUES_PER_USER, len(self.queues)) < QUEUES_MAX:
            return place
        quotas = self._entries.keyspaces.quotas.of(namespace)
        alike = own if quotas else [other for other, queue in self.queues.items() if not queue.quotas]
        return min(alike, key=lambda other: (other not in own, abs(other.size - size)), default=place)

    @property
    def num_sizes(self) -> int:
        """Returns the number of slot sizes that the keyspaces use."""
        return len(self.sizes)

    def make_room(self, size: int, wanted: int, asking: Queue | None = None) -> int:
        """Evicts keys until `wanted` slots of `size` pages are free, and some to spare. Returns how many of the wanted
        slots are free: fewer than `wanted` if no more keys can be evicted. `asking` is the queue of the keys that need
        the slots.
        """
        if quotas := self._entries.keyspaces.quotas:
            if owed := quotas.begin(asking.quotas if asking is not None else ()):
                quotas.spares_own = True
                self._make_room(size, min(wanted, -(-owed // size)), asking)
            quotas.spares_own = False
        return self._make_room(size, wanted, asking)

    def _make_room(self, size: int, wanted: int, asking: Queue | None) -> int:
        self._entries.uses.settle()
        free = self._tier.num_free(size)
        spare = min(SPARE_MAX, self._tier.num_slots(size) // SPARE_SHARE) if free < wanted else 0
        looked_at, evicted, tries = 0, 0, 1
        while free < wanted and evicted < RECORDS_MAX:
            rows, more = self._victims(size, wanted - free + spare, tries, RECORDS_MAX - looked_at, asking)
            looked_at += more
            taken = self._take_slabs(size, rows, wanted, evicted) if self._is_takeover_due(size, rows) else 0
            if taken:
                evicted, free = evicted + taken, self._tier.num_free(size)
                continue
            if not len(rows):
                rows = self._claimed_victims(size, wanted - free)
            if not len(rows):
                if not (taken := self._take_claimed_slabs(size, wanted, evicted)):
                    break
                evicted, free = evicted + taken, self._tier.num_free(size)
                continue
            evicted += self._records(rows)
            tries *= 2
            self.drop(rows)
            before, free = free, self._tier.num_free(size)
            if size in self._evicted_since:
                self._evicted_since[size] += free - before
        return min(free, wanted)

    def readmit(self, rows: U32Array) -> None:
        """Returns rows that are no longer held, in prompt order, to their queues, as far as they are evictable now."""
        self._entries.uses.settle()
        self.any_aside = self._are_aside()
        if not self.any_aside:
            return
        rows = rows[first_of_each(rows)]
        rows = rows[self._entries.expendable(rows)]
        for queue, indices in self._entries.by_queue(rows):
            queue.policy.readmit(rows[indices])

    # --- memory as claims see it, see `ClaimingTier` ---

    @property
    def num_pages(self) -> int:
        return self._tier.num_pages

    @property
    def rows_end(self) -> int:
        return self._entries.index.rows_end

    def find_all(self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array) -> I64Array:
        return self._entries.find_all(keyspaces, keys)

    def set_aside(self, rows: U32Array) -> None:
        self._entries.uses.settle()
        for queue, indices in self._entries.by_queue(rows):
            queue.policy.set_aside(rows[indices])

    def let_claimed_go(self, rows: U32Array) -> None:
        if self._entries.barren:
            self._entries.barren.let_go(self._entries.first[rows], self._entries.index.keyspace[rows])
        self.readmit(rows)

    def _are_aside(self) -> bool:
        """Returns whether rows are aside that no claim keeps. All rows of claimed keys are."""
        return sum(queue.policy.num_aside for queue in self.queues.values()) > self._entries.claimed.num_rows

    def victims(self, queues: Sequence[Queue], wanted: int) -> U32Array:
        """Returns the keys that these competing queues would evict next, see `Policy.victims`. Evicts nothing."""
        return self._least_valuable([self._next(queue, wanted) for queue in queues])[:wanted]

    def _next(self, queue: Queue, wanted: int) -> U32Array:
        self._entries.uses.settle()
        before = queue.policy.num_aside
        rows = queue.policy.victims(wanted, self._entries.expendable)
        self._gave_up |= queue.policy.num_aside - before >= IN_USE_MAX
        if queue.policy.num_aside and not self.any_aside:
            self.any_aside = self._are_aside()
        return rows

    def _least_valuable(self, found: Sequence[U32Array]) -> U32Array:
        """Joins the next victims of several queues: in the order of each queue, keys that are worth less per page
        first.
        """
        found = [rows for rows in found if len(rows)]
        if len(found) <= 1:
            return found[0] if found else NO_ROWS
        worth = np.concatenate([np.maximum.accumulate(self._worth(rows)) for rows in found])
        return np.concatenate(found)[np.argsort(worth, kind="stable")]

    def _worth(self, rows: U32Array) -> F64Array:
        """Returns what each key is worth per page."""
        worth = np.zeros(len(rows))
        for queue, indices in self._entries.by_queue(rows):
            worth[indices] = queue.policy.worth(rows[indices])
        return worth / self.pages(rows)

    def pages(self, rows: U32Array) -> I64Array:
        """Returns the pages that all slots of each key take."""
        pages: I64Array = self._entries.keyspaces.pages[self._entries.index.keyspace[rows]]
        return pages

    def _victims(
        self, size: int, slots: int, tries: int, records_max: int, asking: Queue | None
    ) -> tuple[U32Array, int]:
        """Chooses keys that free up to `slots` slots by their eviction: at least one key, if an evictable key is among
        the next keys of about `records_max` parts. Returns the rows, and the number of parts of the inspected keys.
        """
        found, looked_at, self._gave_up = list[U32Array](), 0, False
        able = [q for q in self.queues.values() if q.most_per_key(size) and len(q.policy)]
        queues = self._in_turn([q for q in able if self._entries.keyspaces.quotas.spare_pages(q.quotas)], asking)
        for number, queue in enumerate(queues):
            if number >= QUEUES_ASKED and found:
                break
            most = (records_max - looked_at) // (len(queues) - number)  # no queue uses up the limit alone
            rows, more = self._search(queue, size, slots, tries, most)
            looked_at += more
            if len(rows := self.displaceable(rows)):
                found.append(rows)
        rows = self.displaceable(self._least_valuable(found))
        self._cheapest = next((queue for queue, _ in self._entries.by_queue(rows[:1])), None)
        return rows[: 1 + np.searchsorted(self._slots(rows, size).cumsum(), slots)], looked_at

    def _claimed_victims(self, size: int, slots: int) -> U32Array:
        """Chooses claimed keys that free up to `slots` slots, after a search has found no others. None if that search
        did not see all keys.
        """
        if self._gave_up or not self._entries.claimed:
            return NO_ROWS
        rows = self.last_resort(lambda rows: self._entries.evictable(rows) & (self._slots(rows, size) > 0), slots)
        rows = self.displaceable(rows)
        return rows[: 1 + np.searchsorted(self._slots(rows, size).cumsum(), slots)]

    def _in_turn(self, queues: list[Queue], asking: Queue | None = None) -> list[Queue]:
        """Returns the queues in the order in which they are asked."""
        if len(queues) <= QUEUES_ASKED:
            return queues
        self._turn += QUEUES_ASKED - 2  # the two queues that are asked each time take no turn
        start = self._turn % len(queues)
        order = queues[start:] + queues[:start]
        order.sort(key=lambda queue: queue is not self._cheapest and queue is not asking)
        return order

    def _search(self, queue: Queue, size: int, slots: int, tries: int, records_max: int) -> tuple[U32Array, int]:
        """Chooses victims of one queue, as `_victims`.

        Keys may have fewer slots than the maximum that their queue assumes, or none; keys without slots stay. So each
        further try inspects more keys than would be enough if all had the maximum, and looks further ahead as long as
        no key has slots.
        """
        looked_at = 0
        ahead, seen = max(min(-(-slots // queue.most_per_key(size)) * tries, slots), tries), 0
        while looked_at < records_max:
            left = records_max - looked_at if seen else RECORDS_MAX
            count = min(ahead, seen + max(1, left // queue.widest))
            rows = self._next(queue, count)
            looked_at += self._records(rows)
            has = self._slots(rows, size) > 0
            if has.any():
                return rows[has], looked_at
            if len(rows) < count:
                break
            ahead, seen = 4 * count, count
        return NO_ROWS, looked_at

    def _records(self, rows: U32Array) -> int:
        """Returns the number of parts of all these keys together."""
        return int(self._entries.widths(rows).sum())

    def _slots(self, rows: U32Array, size: int) -> I64Array:
        """Returns how many slots of this size each key has."""
        entries = self._entries
        counts = np.zeros(len(rows), np.int64)
        for keyspace, indices in entries.by_keyspace(rows):
            records = entries.parts.run(entries.first[rows[indices]], keyspace.schema.parts)
            used = entries.parts.state[records] != PartState.EMPTY
            counts[indices] = (used & (keyspace.part_pages == size)).sum(axis=1)
        return counts

    def _is_takeover_due(self, size: int, victims: U32Array) -> bool:
        """Returns whether slabs of other sizes must be judged: there are no victims, or enough slots were evicted
        since.
        """
        since = self._evicted_since.get(size, self._tier.slab_pages)
        return not len(victims) or since * size * TAKEOVER_SHARE >= self._tier.slab_pages

    def _take_claimed_slabs(self, size: int, wanted: int, evicted: int) -> int:
        """Takes over slabs of other sizes as `_take_slabs`, also those with claimed keys, after a search has found
        nothing else.
        """
        if self._gave_up or not self._entries.claimed:
            return 0
        return self._take_slabs(size, NO_ROWS, wanted, evicted, self._entries.evictable)

    def _take_slabs(
        self,
        size: int,
        victims: U32Array,
        wanted: int,
        evicted: int,
        able: Callable[[U32Array], BoolArray] | None = None,
    ) -> int:
        """Takes over slabs of other sizes if the keys in them are worth less than these victims, in as much memory. If
        there are no victims, it takes the slabs that have the least valuable keys. It ends when `wanted` slots are
        free, or when enough records were evicted in all, including the `evicted` ones before. Returns the number of
        records as `_take_slab`, for all slabs. `able`: which keys may go, if not only those without claims.
        """
        spares_claimed, able = able is None, able or self._entries.expendable
        limit = float(np.average(self._worth(victims), weights=self.pages(victims))) if len(victims) else math.inf
        before, judged = evicted, -1
        while evicted != judged and self._wants_more(size, wanted, evicted):
            judged = evicted
            worth = self._worth_of_slabs(self._slabs_to_try(size, spares_claimed=spares_claimed))
            for slab in sorted(worth, key=worth.__getitem__):
                if worth[slab] * TAKEOVER_GAIN >= limit or not self._wants_more(size, wanted, evicted):
                    break
                evicted += self._take_slab(slab, able)
        if evicted == before:
            self._evicted_since[size] = 0
            return 0
        self._evicted_since.pop(size, None)
        self._resize(size)
        return evicted - before

    def _wants_more(self, size: int, wanted: int, evicted: int) -> bool:
        return self._tier.num_free(size) < wanted and evicted < RECORDS_MAX

    def _take_slab(self, slab: int, able: Callable[[U32Array], BoolArray]) -> int:
        """Evicts all keys in a slab, with their slots of all sizes, unless one of them is not `able` to go. Returns the
        number of evicted records, at least 1; 0 if the slab was not taken.
        """
        rows = self._rows_in(slab)
        if not able(rows).all() or len(self.displaceable(rows)) < len(rows):
            self._tier.touch_slab(slab)  # the next call tries other slabs
            if self._entries.claimed.is_claimed(rows).any():  # parts of claimed keys have come there since
                self._claimed_version, self._gave_up = -1, True
            return 0
        records = self._records(rows)
        self.drop(rows)
        self._tier.unassign(slab)
        self.slabs_taken_over += 1
        return max(1, records)

    def _rows_in(self, slab: int) -> U32Array:
        rows: U32Array = distinct(self._entries.parts.row[self._tier.owners_in(slab)])
        return rows

    def _slabs_to_try(self, size: int, *, spares_claimed: bool) -> list[int]:
        """Returns the least recently used slabs of other sizes, and the slabs of the next victims there. Leaves out
        slabs with claimed keys if these are to be spared.
        """
        slabs = self._tier.coldest_slabs(size)
        if spares_claimed and self._entries.claimed:
            return self._without_claims(slabs)
        if not len(slabs):
            return []
        others = self._in_turn([q for q in self.queues.values() if not q.most_per_key(size) and len(q.policy)])
        rows = np.concatenate([NO_ROWS, *(self._next(queue, 1) for queue in others[:QUEUES_ASKED])])
        owned = self._tier.slabs_of(self._entries.parts.page[self._entries.first[rows]])
        return list({*slabs[:SLABS_TRIED].tolist(), *np.intersect1d(owned, slabs).tolist()})

    def _without_claims(self, slabs: I64Array) -> list[int]:
        """Returns the first ones of these slabs that have no claimed keys."""
        entries = self._entries
        if self._claimed_version != entries.claimed.version:
            self._claimed_version = entries.claimed.version
            self._has_claimed = np.zeros(self._tier.num_slabs, bool)
            rows = entries.claimed.every_row()
            for width, indices in entries.by_width(rows):
                records = entries.parts.run(entries.first[rows[indices]], width).ravel()
                records = records[entries.parts.state[records] != PartState.EMPTY]
                self._has_claimed[self._tier.slabs_of(entries.parts.page[records])] = True
        free: list[int] = slabs[~self._has_claimed[slabs]][:SLABS_TRIED].tolist()
        return free

    def _worth_of_slabs(self, slabs: Sequence[int]) -> dict[int, float]:
        """Returns the worth per page of the keys in each slab, estimated from some of them."""
        samples = [self._sample(slab) for slab in slabs]
        worth = np.split(
            self._worth(np.concatenate([NO_ROWS, *samples])), np.cumsum([len(sample) for sample in samples])
        )
        return {
            slab: float(values.mean()) * self._tier.share_used(slab) if len(values) else 0.0
            for slab, values in zip(slabs, worth, strict=False)  # nothing follows the last sample
        }

    def _sample(self, slab: int) -> U32Array:
        owners = self._tier.owners_in(slab)
        rows = self._entries.parts.row[owners[:: max(1, -(-len(owners) // SAMPLE_SLOTS))]]
        live: U32Array = rows[self._entries.state[rows] == RowState.LIVE]
        return live  # the other keys only wait for a copy: no policy has them

    def _resize(self, size: int) -> None:
        """Adapts the policies after a slab has become one of `size`: sets how many keys each policy has to expect. Only
        slot sizes in use count, and no policy is set below the number of keys that it has.
        """
        slots = {pages: self._tier.num_slots(pages) for pages in {*self._tier.sizes(), size}}
        for queue in self.queues.values():
            rows = [count // most for pages, count in slots.items() if (most := queue.most_per_key(pages))]
            if rows:
                try:
                    queue.policy.resize(max(1, min(rows), len(queue.policy)))
                except MemoryError as error:  # the policy keeps the tables that it has
                    log.warning("memory: the tables of an eviction policy can't be resized: %s", error)

    def drop(self, rows: U32Array) -> None:
        """Evicts these rows, which must be evictable."""
        self.keys_evicted += len(rows)
        if self._entries.claimed:
            kept = rows[self._entries.claimed.is_claimed(rows)]
            self.keys_unkept += int(np.count_nonzero(self._entries.complete(kept)))
        for lower in self._entries.lower:
            lower.evicted(rows[self._entries.complete(rows)])
        self._entries.retire(rows)


def displaceable(entries: KeyTable, rows: U32Array) -> U32Array:
    """Returns those of these rows, in order, that may all go together, so that no quota falls below its minimum."""
    if not entries.keyspaces.quotas.has_minimums:
        return rows
    counted: dict[Quota, list[I64Array]] = {}
    for keyspace, indices in entries.by_keyspace(rows):
        for quota in keyspace.quotas:
            counted.setdefault(quota, []).append(indices)
    able = np.ones(len(rows), bool)
    for quota, groups in counted.items():
        if (spare := entries.keyspaces.quotas.spare_pages([quota])) < UNBOUNDED:
            indices = np.sort(np.concatenate(groups))
            able[indices[entries.keyspaces.pages[entries.index.keyspace[rows[indices]]].cumsum() > spare]] = False
    return rows[able]
