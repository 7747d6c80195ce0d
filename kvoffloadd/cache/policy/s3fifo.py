"""S3-FIFO: a small queue that filters, a main queue with second chances, and a ghost list."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffloadd.cache.policy.base import Clock
from kvoffloadd.cache.policy.ghost import slots_for
from kvoffloadd.cache.policy.prompts import backwards, highest_from_here
from kvoffloadd.cache.policy.rowqueue import RowQueues
from kvoffloadd.cache.policy.selection import Selection
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, F64Array, I64Array, U32Array, U64Array

SMALL, MAIN, LEAVING, IN_USE = range(4)
SMALL_SHARE = 0.1
FREQUENCY_MAX = 3
PROMOTION_FREQUENCY = 2
"""Uses since its insertion that take a key from the small to the main queue."""

CHANCES_MIN = 4096
"""The limit of second chances in one call of `victims`, or 16 per victim wanted; then it takes the next rows."""


ONE = np.zeros(1, np.int64)


class S3Fifo:
    """A `Policy` with the queues of Yang et al., SOSP 2023. A request's keys enter last key first.

    Keys about to be evicted wait in a separate queue, since the caller may drop its plan; keys used meanwhile go to the
    main queue.
    """

    def __init__(self, capacity_rows: int, max_rows: int, clock: Clock | None = None) -> None:
        self._queues = RowQueues(4, max_rows)
        self._clock = clock or Clock()
        self._stamp = np.zeros(max_rows, np.uint32)
        self._frequency = np.zeros(max_rows, np.uint8)
        self._tag = np.zeros(max_rows, np.uint32)
        self._from_small = np.zeros(max_rows, np.bool_)
        self._capacity_rows = 0
        self.resize(capacity_rows)

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        tags = hashes.astype(np.uint32)
        ghosts = self._ghosts.contains(tags)
        # A key is used whenever one that follows it is. This repairs losses of the ghost list: a key that looks unused
        # would be evicted first, and all keys behind it would be out of reach.
        begins = ONE if begins is None else begins
        ghosts = highest_from_here(ghosts.view(np.uint8), begins) > 0
        self._tag[rows] = tags
        self._use(rows)
        self._frequency[rows] = 0
        self._from_small[rows] = ~ghosts
        order = backwards(begins, len(rows))
        rows, ghosts = rows[order], ghosts[order]
        self._queues.append(MAIN, rows[ghosts])
        self._queues.append(SMALL, rows[~ghosts])

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        self._frequency[rows] = np.minimum(self._frequency[rows] + np.uint8(1), np.uint8(FREQUENCY_MAX))
        self._use(rows)

    def keep(self, rows: U32Array, *, soon: bool) -> None:
        """See `Policy`. This policy ignores the hint."""

    def lose(self, rows: U32Array) -> None:
        """See `Policy`. Keys that are used meanwhile go to the main queue."""
        self._frequency[rows] = 0
        self._from_small[rows] = True
        self._stamp[rows] = self._clock.long_ago
        self._queues.move(LEAVING, rows[::-1])

    def set_aside(self, rows: U32Array) -> None:
        """See `Policy`. Keys that were about to be evicted will return to the main queue."""
        queues = self._queues.queues_of(rows)
        self._queues.set_aside_each(rows, np.where(queues == SMALL, SMALL, MAIN))

    def remove(self, rows: U32Array) -> None:
        """See `Policy`. Keys that never came to the main queue are remembered as ghosts."""
        self._ghosts.add(self._tag[rows[self._from_small[rows]]])
        self._queues.discard(rows)

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        selection = Selection(wanted, evictable)
        self._chances = max(CHANCES_MIN, 16 * wanted)
        while not selection.done and (queue := self._source()) is not None:
            # One block, since what follows changes the queue.
            self._choose(queue, next(self._queues.scan(queue, selection.block)), selection)
        chosen = selection.chosen()
        self._queues.move(LEAVING, chosen)
        for queue, rows in selection.in_use():
            self._queues.set_aside(queue, rows)
        return chosen

    def worth(self, rows: U32Array) -> F64Array:
        """See `Policy`. All keys that never came to the main queue are worth less than others."""
        return ~self._from_small[rows] + 1 / (1.0 + self._clock.ages(self._stamp[rows]))

    def readmit(self, rows: U32Array) -> None:
        """See `Policy`. The rows go to the end of their previous queue."""
        self._stamp[self._queues.readmit(rows[::-1])] = self._clock.now

    @property
    def num_aside(self) -> int:
        return self._queues.num_aside

    def resize(self, capacity_rows: int) -> None:
        """See `Policy`. Forgets the ghosts, unless nothing changes."""
        small_rows = max(1, int(SMALL_SHARE * capacity_rows))
        if capacity_rows == self._capacity_rows:
            return
        self._ghosts = GhostList(max(1, capacity_rows - small_rows))
        self._small_rows, self._capacity_rows = small_rows, capacity_rows

    def __len__(self) -> int:
        return len(self._queues)

    def _use(self, rows: U32Array) -> None:
        self._stamp[rows] = self._clock.now
        self._clock.advance(len(rows))

    def _source(self) -> int | None:
        size = self._queues.size
        if size(LEAVING):
            return LEAVING
        if size(SMALL) and (size(SMALL) > self._small_rows or not size(MAIN)):
            return SMALL
        return MAIN if size(MAIN) else None

    def _choose(self, queue: int, rows: U32Array, selection: Selection) -> None:
        """Moves the examined rows of one block: to the main queue, or out of the way."""
        least = PROMOTION_FREQUENCY if queue == SMALL else 1
        stays = self._frequency[rows] >= least
        if self._chances <= 0:
            stays[:] = False
        going = np.flatnonzero(~stays)
        looked_at = selection.offer(rows[going], MAIN if queue == LEAVING else queue) if len(going) else 0
        end = len(rows) if looked_at == len(going) and selection.missing else int(going[looked_at - 1]) + 1
        promoted = rows[:end][stays[:end]]
        self._frequency[promoted] = 0 if queue == SMALL else self._frequency[promoted] - np.uint8(1)
        self._from_small[promoted] = False
        self._chances -= len(promoted)
        self._queues.move(MAIN, promoted)
        self._queues.move(IN_USE, rows[going[:looked_at]])


class GhostList:
    """Tags of the last `length` added keys, except those replaced in their slots: 8 bytes per slot."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._mask = np.uint32(slots_for(2 * length) - 1)
        slots = int(self._mask) + 1
        self._tags: U32Array = reserve_array((slots,), np.uint32, scattered=True)
        self._order: U32Array = reserve_array((slots,), np.uint32, scattered=True)  # 0 = empty
        self._added = 0

    def add(self, tags: U32Array) -> None:
        """Adds keys."""
        slots = tags & self._mask
        self._tags[slots] = tags
        self._order[slots] = np.arange(self._added + 1, self._added + 1 + len(tags)).astype(np.uint32)
        self._added += len(tags)

    def contains(self, tags: U32Array) -> BoolArray:
        """Returns which of the keys are among the last `length`."""
        slots = tags & self._mask
        order = self._order[slots]
        age = np.uint32(self._added & 0xFFFFFFFF) - order
        found: BoolArray = (order > 0) & (age < self._length) & (self._tags[slots] == tags)
        return found
