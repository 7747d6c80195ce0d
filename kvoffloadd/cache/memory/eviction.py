"""Eviction: making room for new slots, within one slot size and between sizes and users. Event loop only."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.keytable import KeyTable, RowState
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, F64Array, I64Array, U32Array, slot_pages

log = logging.getLogger(__name__)

NO_ROWS = np.zeros(0, np.uint32)

SLABS_TRIED = 8
RECORDS_MAX = 1 << 18
"""A bound on the work of one request, in part records. When keys with about so many are evicted, it ends with the room
that there is: keys of thousands of parts, of which few are there, would take hundreds of milliseconds. When so many
were looked at in vain, it takes over slabs instead.
"""
SPARE_MAX, SPARE_SHARE = 1024, 256
"""Slots that are freed beyond those that are wanted: so many, or so small a share of all slots of the size. Most stores
then find room, and the price of an eviction, hundreds of microseconds for however few keys, is paid once for many.
"""
QUEUES_MAX, QUEUES_PER_USER = 64, 16
"""Each takes memory and mappings. Engines have few slot sizes; one too many shares its user's queue that is next in
size, and a user too many somebody else's.
"""
TAKEOVER_GAIN = 1.25
"""A slab changes hands only if its keys are worth so many times less: it takes more with it than is wanted now."""
SAMPLE_SLOTS = 16
"""Slots of a slab by which it is judged."""
TAKEOVER_SHARE = 2
"""Where no slab of another size was worth so little, they are judged again once this fraction (1/n) of a slab's slots
was evicted: that costs as much as several evictions.
"""
QUEUES_ASKED = 8
"""Queues that are asked at a time what they would evict next: each takes a tenth of a millisecond or more, and there
may be one for each user. They take turns, but for two: whose keys need the room, and which had the least valuable key
the last time.
"""


class Eviction:
    """Queues by user and slot size, and the balance between them. `make_policy(capacity_rows, max_rows)` makes a
    policy; all that it makes share a clock.

    Keys compete by what they are worth in a page of memory. Of the queues of one slot size, each says what it would
    evict next, and the least valuable of these keys go. Between sizes, whole slabs change hands: a size that needs room
    takes over another size's slab if its keys are worth less than its own next victims, or if it has none.
    """

    def __init__(self, entries: KeyTable, make_policy: Callable[[int, int], Policy]) -> None:
        self._entries = entries
        self._tier = entries.tier
        self._make_policy = make_policy
        self.sizes: Counter[int] = Counter()
        self.queues: dict[tuple[int, int], Queue] = {}  # by user and slot size in pages
        self.any_aside = False  # whether a policy may have set rows aside: without any, `readmit` does nothing
        self.keys_evicted = 0
        self.slabs_taken_over = 0
        self._turn = 0
        self._cheapest: Queue | None = None
        self._evicted_since: dict[int, int] = {}  # slots, by size, since slabs of other sizes were judged in vain

    def prepare(self, uid: int, groups: Iterable[Sequence[int]]) -> None:
        """Make the queues that are missing for groups of this user whose parts have payloads of these sizes, so that
        `admit` needs no memory. Raises LimitError if there is none, having changed nothing that matters.
        """
        self.queues = {place: queue for place, queue in self.queues.items() if queue.num_spaces}
        if self._cheapest not in self.queues.values():
            self._cheapest = None  # its tables go with it
        try:
            for sizes in groups:
                pages = [slot_pages(size) for size in sizes]
                if (place := self._queue_place(uid, pages[0])) not in self.queues:
                    capacity_rows = max(1, self._tier.num_pages // sum(pages))
                    policy = self._make_policy(capacity_rows, self._entries.index.max_keys)
                    self.queues[place] = Queue(policy, self.sizes)
        except MemoryError as error:
            raise LimitError(f"the daemon gets no memory for tables of keys of another size: {error}") from None

    def admit(self, keyspace: Keyspace, known: Iterable[int]) -> None:
        """Count parts whose payload sizes, `known`, have become known; with the first a keyspace gets its queue. Raises
        LimitError as `prepare`, unless that was called.
        """
        known, before = list(known), self.num_sizes
        if keyspace.queue is None:
            uid = keyspace.namespace.uid
            if (place := self._queue_place(uid, slot_pages(known[0]))) not in self.queues:
                self.prepare(uid, [known])
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

    def _queue_place(self, uid: int, size: int) -> tuple[int, int]:
        """Which queue is for keys of this user whose first slot has this size."""
        mine = sum(owner == uid for owner, _ in self.queues)
        if (uid, size) in self.queues or max(mine * QUEUES_MAX // QUEUES_PER_USER, len(self.queues)) < QUEUES_MAX:
            return uid, size
        return min(self.queues, key=lambda place: (place[0] != uid, abs(place[1] - size)))

    @property
    def num_sizes(self) -> int:
        """How many slot sizes the keyspaces use."""
        return len(self.sizes)

    def make_room(self, size: int, wanted: int, asking: Queue | None = None) -> int:
        """Evict until `wanted` slots of `size` pages are free, and some to spare. Returns how many of those wanted are:
        fewer if no more keys can be evicted. `asking`: the queue of the keys that need them.
        """
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
                break
            evicted += self._records(rows)
            tries *= 2
            self.drop(rows)
            before, free = free, self._tier.num_free(size)
            if size in self._evicted_since:
                self._evicted_since[size] += free - before
        return min(free, wanted)

    def readmit(self, rows: U32Array) -> None:
        """These rows, in prompt order, were unheld: those that are evictable now enter their queues again."""
        self._entries.uses.settle()
        self.any_aside = any(queue.policy.num_aside for queue in self.queues.values())
        if not self.any_aside:
            return
        rows = rows[first_of_each(rows)]
        rows = rows[self._entries.evictable(rows)]
        for queue, indices in self._entries.by_queue(rows):
            queue.policy.readmit(rows[indices])

    def victims(self, queues: Sequence[Queue], wanted: int) -> U32Array:
        """What queues of keys that compete would evict next, see `Policy.victims`. Nothing is evicted."""
        return self._least_valuable([self._next(queue, wanted) for queue in queues])[:wanted]

    def _next(self, queue: Queue, wanted: int) -> U32Array:
        self._entries.uses.settle()
        rows = queue.policy.victims(wanted, self._entries.evictable)
        self.any_aside = self.any_aside or queue.policy.num_aside > 0
        return rows

    def _least_valuable(self, found: Sequence[U32Array]) -> U32Array:
        """Join what several queues would evict next: each in its order, those first that are worth less in a page."""
        found = [rows for rows in found if len(rows)]
        if len(found) <= 1:
            return found[0] if found else NO_ROWS
        worth = np.concatenate([np.maximum.accumulate(self._worth(rows)) for rows in found])
        return np.concatenate(found)[np.argsort(worth, kind="stable")]

    def _worth(self, rows: U32Array) -> F64Array:
        """What each key is worth in one of its pages."""
        worth = np.zeros(len(rows))
        for queue, indices in self._entries.by_queue(rows):
            worth[indices] = queue.policy.worth(rows[indices])
        return worth / self._pages(rows)

    def _pages(self, rows: U32Array) -> I64Array:
        pages: I64Array = self._entries.keyspaces.pages[self._entries.index.keyspace[rows]]
        return pages

    def _victims(
        self, size: int, slots: int, tries: int, records_max: int, asking: Queue | None
    ) -> tuple[U32Array, int]:
        """Choose keys whose eviction frees up to so many slots: at least one key, if one that may be evicted is among
        the next keys of about `records_max` parts. Returns the rows, and how many parts the inspected keys have.
        """
        found, looked_at = list[U32Array](), 0
        queues = self._in_turn([q for q in self.queues.values() if q.most_per_key(size) and len(q.policy)], asking)
        for number, queue in enumerate(queues):
            if number >= QUEUES_ASKED and found:
                break
            most = (records_max - looked_at) // (len(queues) - number)  # so that no queue uses up all
            rows, more = self._search(queue, size, slots, tries, most)
            looked_at += more
            if len(rows):
                found.append(rows)
        rows = self._least_valuable(found)
        self._cheapest = next((queue for queue, _ in self._entries.by_queue(rows[:1])), None)
        return rows[: 1 + np.searchsorted(self._slots(rows, size).cumsum(), slots)], looked_at

    def _in_turn(self, queues: list[Queue], asking: Queue | None = None) -> list[Queue]:
        """Returns the queues in the order in which they are asked."""
        if len(queues) <= QUEUES_ASKED:
            return queues
        self._turn += QUEUES_ASKED - 2  # beside the two that are asked each time
        at = self._turn % len(queues)
        order = queues[at:] + queues[:at]
        order.sort(key=lambda queue: queue is not self._cheapest and queue is not asking)
        return order

    def _search(self, queue: Queue, size: int, slots: int, tries: int, records_max: int) -> tuple[U32Array, int]:
        """`_victims` of one queue.

        Keys may have fewer slots than the most that their queue counts with, or none: keys without any stay. So each
        further try inspects more keys than would be enough if all had the most, and looks further ahead as long as no
        key has any.
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
        """How many parts all these keys have together."""
        return int(self._entries.widths(rows).sum())

    def _slots(self, rows: U32Array, size: int) -> I64Array:
        """How many slots of this size each key has."""
        entries = self._entries
        counts = np.zeros(len(rows), np.int64)
        for keyspace, indices in entries.by_keyspace(rows):
            records = entries.parts.run(entries.first[rows[indices]], keyspace.schema.parts)
            used = entries.parts.state[records] != PartState.EMPTY
            counts[indices] = (used & (keyspace.part_pages == size)).sum(axis=1)
        return counts

    def _is_takeover_due(self, size: int, victims: U32Array) -> bool:
        """Whether slabs of other sizes are to be judged: there are no victims, or enough was evicted since."""
        since = self._evicted_since.get(size, self._tier.slab_pages)
        return not len(victims) or since * size * TAKEOVER_SHARE >= self._tier.slab_pages

    def _take_slabs(self, size: int, victims: U32Array, wanted: int, evicted: int) -> int:
        """Take over slabs of other sizes whose keys are worth less than these victims, in as much memory; if there are
        no victims, the slabs whose keys are worth the least. It ends when `wanted` slots are free, or when enough
        records were evicted in all, with the `evicted` ones before. Returns as `_take_slab`, of all of them.
        """
        limit = float(np.average(self._worth(victims), weights=self._pages(victims))) if len(victims) else math.inf
        before, judged = evicted, -1
        while evicted != judged and self._wants_more(size, wanted, evicted):
            judged = evicted
            worth = self._worth_of_slabs(self._slabs_to_try(size))
            for slab in sorted(worth, key=worth.__getitem__):
                if worth[slab] * TAKEOVER_GAIN >= limit or not self._wants_more(size, wanted, evicted):
                    break
                evicted += self._take_slab(slab)
        if evicted == before:
            self._evicted_since[size] = 0
            return 0
        self._evicted_since.pop(size, None)
        self._resize(size)
        return evicted - before

    def _wants_more(self, size: int, wanted: int, evicted: int) -> bool:
        return self._tier.num_free(size) < wanted and evicted < RECORDS_MAX

    def _take_slab(self, slab: int) -> int:
        """Evict all that is in a slab, for any size, unless something is held or being written. Returns how many
        records went, at least 1; 0 if the slab was not taken.
        """
        rows = distinct(self._entries.parts.row[self._tier.owners_in(slab)])
        if not self._entries.evictable(rows).all():
            self._tier.touch_slab(slab)  # next time others are tried
            return 0
        records = self._records(rows)
        self.drop(rows)
        self._tier.unassign(slab)
        self.slabs_taken_over += 1
        return max(1, records)

    def _slabs_to_try(self, size: int) -> list[int]:
        """Returns the least recently used slabs of other sizes, and the slabs of the next victims there."""
        slabs = self._tier.coldest_slabs(size)
        if not len(slabs):
            return []
        others = self._in_turn([q for q in self.queues.values() if not q.most_per_key(size) and len(q.policy)])
        rows = np.concatenate([NO_ROWS, *(self._next(queue, 1) for queue in others[:QUEUES_ASKED])])
        owned = self._tier.slabs_of(self._entries.parts.page[self._entries.first[rows]])
        return list({*slabs[:SLABS_TRIED].tolist(), *np.intersect1d(owned, slabs).tolist()})

    def _worth_of_slabs(self, slabs: Sequence[int]) -> dict[int, float]:
        """What the keys in each slab are worth in a page of it, by some of them."""
        samples = [self._sample(slab) for slab in slabs]
        worth = np.split(self._worth(np.concatenate([NO_ROWS, *samples])), np.cumsum([len(some) for some in samples]))
        return {
            slab: float(some.mean()) * self._tier.share_used(slab) if len(some) else 0.0
            for slab, some in zip(slabs, worth, strict=False)  # behind the last sample is nothing
        }

    def _sample(self, slab: int) -> U32Array:
        owners = self._tier.owners_in(slab)
        some = self._entries.parts.row[owners[:: max(1, -(-len(owners) // SAMPLE_SLOTS))]]
        live: U32Array = some[self._entries.state[some] == RowState.LIVE]
        return live  # others wait for a copy alone: no policy has them

    def _resize(self, size: int) -> None:
        """A slab has become one of `size`: set how many keys each policy has to expect. Only slot sizes in use count,
        and no policy is set below the keys that it has.
        """
        slots = {pages: self._tier.num_slots(pages) for pages in {*self._tier.sizes(), size}}
        for queue in self.queues.values():
            rows = [count // most for pages, count in slots.items() if (most := queue.most_per_key(pages))]
            if rows:
                try:
                    queue.policy.resize(max(1, min(rows), len(queue.policy)))
                except MemoryError as error:  # it goes on with the tables that it has
                    log.warning("memory: the tables of an eviction policy can't be resized: %s", error)

    def drop(self, rows: U32Array) -> None:
        """Evict these rows, which must be evictable."""
        self.keys_evicted += len(rows)
        for lower in self._entries.lower:
            lower.evicted(rows[self._entries.complete(rows)])
        self._entries.retire(rows)
