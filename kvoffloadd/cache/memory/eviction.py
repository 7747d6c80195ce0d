"""Eviction: making room for new slots, within one slot size and between sizes. Event loop only."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.keytable import KeyTable
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.errors import LimitError
from kvoffloadd.model import I64Array, U32Array, slot_pages

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
QUEUES_MAX = 64
"""Each takes memory and mappings. Engines have few slot sizes; one too many shares the queue that is next in size."""


class Eviction:
    """Queues by slot size, and the balance between sizes. `make_policy(capacity_rows, max_rows)` makes a policy.

    Keys compete within one slot size. Between sizes, the slab whose last use is the oldest goes first: a size that
    needs room takes over another size's slab if that is colder than all of its own, or if it has nothing left to evict.
    """

    def __init__(self, entries: KeyTable, make_policy: Callable[[int, int], Policy]) -> None:
        self._entries = entries
        self._tier = entries.tier
        self._make_policy = make_policy
        self.sizes: Counter[int] = Counter()
        self.queues: dict[int, Queue] = {}
        self.any_aside = False  # whether a policy may have set rows aside: without any, `readmit` does nothing
        self.keys_evicted = 0
        self.slabs_taken_over = 0

    def prepare(self, groups: Iterable[Sequence[int]]) -> None:
        """Make the queues that are missing for groups whose parts have payloads of these sizes, so that `admit` needs
        no memory. Raises LimitError if there is none, having changed nothing that matters.
        """
        self.queues = {pages: queue for pages, queue in self.queues.items() if queue.num_spaces}
        try:
            for sizes in groups:
                pages = [slot_pages(size) for size in sizes]
                if (size := self._queue_size(pages)) not in self.queues:
                    capacity_rows = max(1, self._tier.num_pages // sum(pages))
                    policy = self._make_policy(capacity_rows, self._entries.index.max_keys)
                    self.queues[size] = Queue(policy, self.sizes)
        except MemoryError as error:
            raise LimitError(f"the daemon gets no memory for tables of keys of another size: {error}") from None

    def admit(self, keyspace: Keyspace, known: Iterable[int]) -> None:
        """Count parts whose payload sizes, `known`, have become known; with the first a keyspace gets its queue. Raises
        LimitError as `prepare`, unless that was called.
        """
        known, before = list(known), self.num_sizes
        if keyspace.queue is None:
            if (size := self._queue_size([slot_pages(size) for size in known])) not in self.queues:
                self.prepare([known])
            keyspace.queue = self.queues[size]
            keyspace.queue.join(keyspace)
        keyspace.queue.add_parts(keyspace, known)
        if max(before, self._tier.num_slabs) < self.num_sizes:
            log.warning(
                "memory: slots of %d sizes share %d slabs, so the sizes displace each other and few lookups hit: lower "
                "memory.slab_bytes (now %d), or raise memory.capacity_bytes",
                self.num_sizes, self._tier.num_slabs, self._tier.payload_bytes_max,
            )  # fmt: skip

    def _queue_size(self, sizes: list[int]) -> int:
        """Which queue is for keys with slots of these sizes: the first decides, or the next in size if there are too
        many queues.
        """
        size = sizes[0]
        if size not in self.queues and len(self.queues) >= QUEUES_MAX:
            size = min(self.queues, key=lambda pages: abs(pages - size))
        return size

    @property
    def num_sizes(self) -> int:
        """How many slot sizes the keyspaces use."""
        return len(self.sizes)

    def make_room(self, size: int, wanted: int) -> int:
        """Evict until `wanted` slots of `size` pages are free, and some to spare. Returns how many of those wanted are:
        fewer if no more keys can be evicted.
        """
        self._entries.uses.settle()
        free = self._tier.num_free(size)
        spare = min(SPARE_MAX, self._tier.num_slots(size) // SPARE_SHARE) if free < wanted else 0
        looked_at, evicted, tries = 0, 0, 1
        while free < wanted and evicted < RECORDS_MAX:
            rows = NO_ROWS
            if not self._take_colder_slab(size):
                rows, more = self._victims(size, wanted - free + spare, tries, RECORDS_MAX - looked_at)
                looked_at += more
                if not len(rows) and not self._take_slab(size):
                    break
            evicted += self._records(rows)
            tries *= 2
            self.drop(rows)
            free = self._tier.num_free(size)
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

    def victims(self, queue: Queue, wanted: int) -> U32Array:
        """What a queue would evict next, see `Policy.victims`. Nothing is evicted."""
        self._entries.uses.settle()
        rows = queue.policy.victims(wanted, self._entries.evictable)
        self.any_aside = self.any_aside or queue.policy.num_aside > 0
        return rows

    def _victims(self, size: int, slots: int, tries: int, records_max: int) -> tuple[U32Array, int]:
        """Choose keys whose eviction frees up to so many slots: at least one key, if one that may be evicted is among
        the next keys of about `records_max` parts. Returns the rows, and how many parts the inspected keys have.

        Keys may have fewer slots than the most that their queue counts with, or none: keys without any stay. So each
        further try inspects more keys than would be enough if all had the most, and looks further ahead as long as no
        key has any; those that turn out not to be needed are left out.
        """
        looked_at = 0
        queues = [queue for queue in self.queues.values() if queue.most_per_key(size) and len(queue.policy)]
        for after, queue in zip(reversed(range(len(queues))), queues, strict=True):
            until = looked_at + (records_max - looked_at) // (1 + after)  # so that no queue uses up all
            ahead, seen = max(min(-(-slots // queue.most_per_key(size)) * tries, slots), tries), 0
            while looked_at < until:
                left = until - looked_at if seen else RECORDS_MAX
                count = min(ahead, seen + max(1, left // queue.widest))
                rows = self.victims(queue, count)
                looked_at += self._records(rows)
                has = self._slots(rows, size)
                if has.any():
                    rows, has = rows[has > 0], has[has > 0]
                    return rows[: 1 + np.searchsorted(has.cumsum(), slots)], looked_at
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

    def _take_colder_slab(self, size: int) -> bool:
        own = self._tier.coldest_touch(size)
        return own > 0 and self._take_slab(size, colder_than=own)

    def _take_slab(self, size: int, colder_than: int | None = None) -> bool:
        for slab in self._tier.coldest_slabs(size)[:SLABS_TRIED].tolist():
            if colder_than is not None and self._tier.slab_touched[slab] >= colder_than:
                return False
            rows = distinct(self._entries.parts.row[self._tier.owners_in(slab)])
            if self._entries.evictable(rows).all():
                self.drop(rows)
                self._tier.unassign(slab)
                self.slabs_taken_over += 1
                self._resize(size)
                return True
            if colder_than is None:  # something in it is held or being written: next time others are tried before it
                self._tier.touch_slab(slab)
        return False

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
