"""LRU eviction: the least recently used keys go first."""

from __future__ import annotations

from collections.abc import Callable

from kvoffloadd.cache.policy.prompts import backwards
from kvoffloadd.cache.policy.rowqueue import RowQueues
from kvoffloadd.cache.policy.selection import Selection
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array

_USED, _DONE = range(2)


class Lru:
    """A `Policy` with one queue, and one that is evicted first, of keys that will not be used again. A request's keys
    enter last key first, so that prefixes outlive their tails.
    """

    def __init__(self, capacity_rows: int, max_rows: int) -> None:
        """`capacity_rows` is of no use to this policy."""
        self._queues = RowQueues(2, max_rows)

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        self._queues.append(_USED, rows[::-1] if begins is None else rows[backwards(begins, len(rows))])

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        self._queues.move(_USED, rows[::-1] if begins is None else rows[backwards(begins, len(rows))])

    def keep(self, rows: U32Array, *, soon: bool) -> None:
        self._queues.move(_USED if soon else _DONE, rows[::-1])

    def remove(self, rows: U32Array) -> None:
        self._queues.discard(rows)

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        selection = Selection(wanted, evictable)
        for queue in (_DONE, _USED):
            for rows in self._queues.scan(queue, selection.block):
                if selection.done:
                    break
                selection.offer(rows, queue)
        for queue, rows in selection.in_use():
            self._queues.set_aside(queue, rows)
        return selection.chosen()

    def readmit(self, rows: U32Array) -> None:
        self._queues.readmit(rows[::-1])

    @property
    def num_aside(self) -> int:
        return self._queues.num_aside

    def resize(self, capacity_rows: int) -> None:
        """See `Policy`. Changes nothing."""

    def __len__(self) -> int:
        return len(self._queues)
