"""The backlog of a tier below memory: complete, sealed keys that wait to be written there, within a budget.

Event loop only. The same rules decide for every tier which keys are offered, and when: as soon as they are sealed, when
they are used again, or before memory evicts them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.policy.ghost import UseCounts
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array
from kvoffloadd.scheduling.changes import Changes

BATCH_KEYS = 256
LOOK_AHEAD_S = 0.05
"""How often the next victims of the memory tier are inspected."""

LOOK_AHEAD_KEYS = 4096
OFFERS_PER_TURN = 64
"""The number of batches that one turn of the loop inspects: after a clear all waiting batches may be void."""

ADMISSION_SLOTS = 1 << 20


@dataclass(slots=True)
class Budget:
    """A token bucket for bytes and operations a second; 0: no limit. One batch may overdraw it."""

    bytes_per_s: int
    ops_per_s: int
    free_at_s: float = 0.0

    def delay_s(self, now: float) -> float:
        """Returns the seconds until the next batch may begin."""
        return max(0.0, self.free_at_s - now)

    def spend(self, num_bytes: int, ops: int, now: float) -> None:
        """Counts a batch that begins now."""
        for_bytes = num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        for_ops = ops / self.ops_per_s if self.ops_per_s else 0.0
        self.free_at_s = max(self.free_at_s, now) + max(for_bytes, for_ops)


@dataclass(frozen=True, slots=True, eq=False)
class BacklogBatch:
    """Keys of one keyspace that wait to be written."""

    keyspace: Keyspace
    rows: U32Array  # of memory
    records: U32Array  # the first part record of each key
    generations: U16Array  # of these records: a changed one shows that its row is another key's
    tries: int = 0  # so far

    def only(self, chosen: BoolArray | slice) -> BacklogBatch:
        """Returns the batch with only these of its keys."""
        return replace(self, rows=self.rows[chosen], records=self.records[chosen], generations=self.generations[chosen])


class Backlog:
    """Keys that wait. `missing(keyspace, rows)`: which of these keys the tier could have but lacks. `dropped` counts
    keys that were not written as intended, by reason. `on_evict`: only keys that memory is about to evict are written.
    `second_use`: only keys that were used again are written. `batch_bytes`: the limit of one write; it may change.
    """

    def __init__(
        self,
        cache: Cache,
        missing: Callable[[Keyspace, U32Array], BoolArray],
        dropped: Counter[str],
        *,
        on_evict: bool,
        second_use: bool,
        backlog_bytes: int,
        batch_bytes: int,
    ) -> None:
        self._cache = cache
        self._on_evict = on_evict
        self._backlog_bytes = backlog_bytes
        self.batch_bytes = batch_bytes
        self._missing = missing
        self._dropped = dropped
        self.bytes = 0
        self.queue: deque[BacklogBatch] = deque()
        self.changes = Changes()
        """Reports keys that begin to wait."""
        # By row of memory: 1 if it waits for a write, or is being written.
        self._waiting: U8Array = reserve_array((cache.entries.max_rows,), np.uint8)
        self._uses = UseCounts(ADMISSION_SLOTS) if second_use else None

    # --- calls from memory, see `LowerTier` ---

    def reset(self, rows: U32Array) -> None:
        """Resets rows that get new keys."""
        self._waiting[rows] = 0

    def sealed(self, parts: I64Array) -> None:
        """Takes parts with newly known checksums."""
        rows = distinct(self._cache.entries.parts.row[parts])
        if self._uses is not None:
            # Ranks store their parts one after another: that is one use of the key, not many.
            rows = self._admitted(self._whole(rows))
        if not self._on_evict:
            self.offer(rows)

    def used(self, rows: U32Array) -> None:
        """Takes keys that were used in memory."""
        if self._uses is not None:
            rows = self._admitted(rows)
            if not self._on_evict:
                self.offer(rows)

    def evicted(self, rows: U32Array) -> None:
        """Counts keys that are about to leave memory and should have been written, but never were offered: they had no
        checksum yet; or, where eviction decides, memory needed their room before the look-ahead reached them.
        """
        rows = self.known(rows)
        for keyspace, indices in self._cache.entries.by_keyspace(rows):
            gone = rows[indices]
            offered = self._sealed(keyspace, gone)
            if self._on_evict:
                offered &= self._waiting[gone] > 0
            lost = self._missing(keyspace, gone[~offered])
            if lost.any():
                self._dropped["evicted"] += int(np.count_nonzero(lost))

    # --- offers ---

    @changing
    def offer(self, rows: U32Array) -> None:
        """Queues these keys for writing, if they are complete, sealed and missing in the tier."""
        rows = self._cache.entries.live(rows)
        for keyspace, indices in self._cache.entries.by_keyspace(rows):
            offered = rows[indices]
            wanted = offered[self.writable(keyspace, offered)]
            if len(wanted):
                self.enqueue(keyspace, wanted, 0)

    def enqueue(self, keyspace: Keyspace, rows: U32Array, tries: int) -> None:
        """Lets these keys wait, as far as there is room."""
        size = sum(keyspace.part_bytes)
        if not tries:
            rows = rows[self._waiting[rows] == 0]
        room = max(0, self._backlog_bytes - self.bytes) // size
        if room < len(rows):
            self._dropped["backlog"] += len(rows) - room
            rows = rows[:room]
        if not len(rows):
            return
        records = self._cache.entries.first[rows]
        self._waiting[rows] = 1
        self.queue.append(BacklogBatch(keyspace, rows, records, self._cache.entries.parts.generation[records], tries))
        self.bytes += size * len(rows)
        self.changes.notify_all()

    def settle(self, rows: U32Array) -> None:
        """Releases keys that are written, or will not be: they may be offered again."""
        self._waiting[rows] = 0

    def num_outside(self, rows: U32Array) -> int:
        """Returns how many of these keys neither wait nor are being written."""
        return int(np.count_nonzero(self._waiting[rows] == 0))

    def writable(self, keyspace: Keyspace, rows: U32Array) -> BoolArray:
        """Returns which keys are complete, sealed and missing in the tier."""
        flags = self._sealed(keyspace, rows)
        flags[flags] = self._missing(keyspace, rows[flags])
        return flags

    def known(self, rows: U32Array) -> U32Array:
        """Returns the subset of the keys that were used twice; all, if `second_use` is off."""
        index = self._cache.entries.index
        if self._uses is None or not len(rows):
            return rows
        tags = index.hash(index.keyspace[rows], index.keys[rows]).astype(np.uint32)
        return rows[self._uses.look_up(tags)[1] >= 2]

    @changing
    def look_ahead(self) -> None:
        """Offers the next victims of the memory tier."""
        tier, eviction = self._cache.tier, self._cache.eviction
        for size in {place.size for place in eviction.queues}:
            queues = [queue for place, queue in eviction.queues.items() if place.size == size]
            # Counts the keys' present slots, not their maximum.
            num_keys = sum(len(queue.policy) for queue in queues)
            per_key = max(1, (tier.num_slots(size) - tier.num_free(size)) // max(1, num_keys))
            ahead = min(LOOK_AHEAD_KEYS, max(1, tier.num_slots(size) // per_key // 8))
            if tier.num_free(size) // per_key >= ahead or self.bytes >= self._backlog_bytes // 2:
                continue
            self.offer(self.known(eviction.victims(queues, ahead)))

    def _whole(self, rows: U32Array) -> U32Array:
        """Returns the subset of keys with all parts sealed."""
        rows = self._cache.entries.live(rows)
        whole = np.zeros(len(rows), bool)
        for keyspace, indices in self._cache.entries.by_keyspace(rows):
            whole[indices] = self._sealed(keyspace, rows[indices])
        return rows[whole]

    def _sealed(self, keyspace: Keyspace, rows: U32Array) -> BoolArray:
        entries = self._cache.entries
        records = entries.parts.run(entries.first[rows], keyspace.schema.parts)
        sealed: BoolArray = (entries.parts.state[records] == PartState.SEALED).all(axis=1)
        return sealed

    def _admitted(self, rows: U32Array) -> U32Array:
        """Counts a use of each key. Returns the subset that was used before."""
        index = self._cache.entries.index
        if self._uses is None or not len(rows):
            return rows
        tags = index.hash(index.keyspace[rows], index.keys[rows]).astype(np.uint32)
        known, uses = self._uses.look_up(tags)
        self._uses.record(tags, np.minimum(uses + np.uint8(1), np.uint8(15)))
        return rows[known]

    # --- writing ---

    async def next(self) -> BacklogBatch | None:
        """Returns `take`, and if nothing waits, waits for an offer. None: it is too early to write."""
        batch = self.take()
        if batch is not None or self.queue:
            return batch
        if not await self.changes.wait(LOOK_AHEAD_S if self._on_evict else None):
            self.look_ahead()
        return None

    @changing
    def take(self) -> BacklogBatch | None:
        """Takes the next keys to write out of the queue: of one keyspace, still valid, no more than one write takes.
        None: there are none, at least not among the first batches.
        """
        for _ in range(min(OFFERS_PER_TURN, len(self.queue))):
            offer = self.queue.popleft()
            size = sum(offer.keyspace.part_bytes)
            count = max(1, min(BATCH_KEYS, self.batch_bytes // size))
            if len(offer.rows) > count:
                self.queue.appendleft(offer.only(slice(count, None)))
                offer = offer.only(slice(count))
            self.bytes -= size * len(offer.rows)
            same = self._still(offer)
            self._dropped["evicted"] += int(len(same) - same.sum())
            offer = offer.only(same)
            writable = self.writable(offer.keyspace, offer.rows)
            self._waiting[offer.rows[~writable]] = 0
            if writable.any():
                return offer.only(writable)
        return None

    def _still(self, offer: BacklogBatch) -> BoolArray:
        """Returns which rows still belong to the offered keys."""
        entries = self._cache.entries
        same: BoolArray = entries.state[offer.rows] == RowState.LIVE
        same &= entries.parts.generation[offer.records] == offer.generations
        return same
