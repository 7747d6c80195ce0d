"""LRU eviction: the least recently used keys go first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffloadd.cache.policy.base import Clock
from kvoffloadd.cache.policy.prompts import backwards
from kvoffloadd.cache.policy.rowqueue import RowQueues
from kvoffloadd.cache.policy.selection import Selection
from kvoffloadd.model import BoolArray, F64Array, I64Array, U32Array, U64Array

_USED, _DONE, _LOST = range(3)


class Lru:
    """A `Policy` with one queue, and two that are evicted first, of keys that will not be used again. A request's keys
    enter last key first, so that prefixes outlive their tails.
    """

    def __init__(self, capacity_rows: int, max_rows: int, clock: Clock | None = None) -> None:
        """This policy ignores `capacity_rows`."""
        self._queues = RowQueues(3, max_rows)
        self._clock = clock or Clock()
        self._stamp = np.zeros(max_rows, np.uint32)

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        self._use(rows)
        self._queues.append(_USED, rows[::-1] if begins is None else rows[backwards(begins, len(rows))])

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        self._use(rows)
        self._queues.move(_USED, rows[::-1] if begins is None else rows[backwards(begins, len(rows))])

    def keep(self, rows: U32Array, *, soon: bool) -> None:
        self._stamp[rows] = self._clock.now if soon else self._clock.long_ago
        self._queues.move(_USED if soon else _DONE, rows[::-1])

    def lose(self, rows: U32Array) -> None:
        self._stamp[rows] = self._clock.long_ago
        self._queues.move(_LOST, rows[::-1])

    def set_aside(self, rows: U32Array) -> None:
        self._queues.set_aside_each(rows, self._queues.queues_of(rows))

    def remove(self, rows: U32Array) -> None:
        self._queues.discard(rows)

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        selection = Selection(wanted, evictable)
        for queue in (_LOST, _DONE, _USED):
            for rows in self._queues.scan(queue, selection.block):
                if selection.done:
                    break
                selection.offer(rows, queue)
        for queue, rows in selection.in_use():
            self._queues.set_aside(queue, rows)
        return selection.chosen()

    def worth(self, rows: U32Array) -> F64Array:
        return 1 / (1.0 + self._clock.ages(self._stamp[rows]))

    def readmit(self, rows: U32Array) -> None:
        self._stamp[self._queues.readmit(rows[::-1])] = self._clock.now

    @property
    def num_aside(self) -> int:
        return self._queues.num_aside

    def resize(self, capacity_rows: int) -> None:
        """See `Policy`. Changes nothing."""

    def __len__(self) -> int:
        return len(self._queues)

    def _use(self, rows: U32Array) -> None:
        self._stamp[rows] = self._clock.now
        self._clock.advance(len(rows))
