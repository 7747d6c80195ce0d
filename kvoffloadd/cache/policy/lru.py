"""LRU eviction: the least recently used keys go first."""

from __future__ import annotations

from collections.abc import Callable

from kvoffloadd.cache.policy.prompts import backwards
from kvoffloadd.cache.policy.rowqueue import RowQueues
from kvoffloadd.cache.policy.selection import Selection
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array


class Lru:
    """A `Policy` with one queue. A request's keys enter it last key first, so that prefixes outlive their tails."""

    def __init__(self, capacity_rows: int, max_rows: int) -> None:
        """`capacity_rows` is of no use to this policy."""
        self._queues = RowQueues(1, max_rows)

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        self._queues.append(0, rows[::-1] if begins is None else rows[backwards(begins, len(rows))])

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        self._queues.move(0, rows[::-1] if begins is None else rows[backwards(begins, len(rows))])

    def remove(self, rows: U32Array) -> None:
        self._queues.discard(rows)

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        selection = Selection(wanted, evictable)
        if wanted > 0:
            for rows in self._queues.scan(0, selection.block):
                selection.offer(rows)
                if selection.done:
                    break
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
