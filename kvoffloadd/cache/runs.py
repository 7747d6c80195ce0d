"""Numbers in runs: which record numbers are free. Event loop only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvoffloadd.model import I64Array, U32Array


class Runs:
    """Gives out runs of consecutive numbers below `max_records`, and takes them back whole, by their width."""

    def __init__(self, max_records: int) -> None:
        self.max_records = max_records
        self.used = 0
        """Every number ever given out is below this."""
        self._free: dict[int, list[U32Array]] = {}

    def room(self, width: int) -> int:
        """Runs of `width` that can still be allocated."""
        return sum(map(len, self._free.get(width, ()))) + (self.max_records - self.used) // width

    def allocate(self, width: int, count: int) -> U32Array:
        """The first number of each of `count` runs. The caller has made sure of `room`."""
        runs: list[U32Array] = []
        pool = self._free.get(width, [])
        while count and pool:
            last = pool.pop()
            if len(last) > count:
                pool.append(last[count:])
                last = last[:count]
            runs.append(last)
            count -= len(last)
        if count:
            end = self.used + count * width
            runs.append(np.arange(self.used, end, width, dtype=np.uint32))
            self.used = end
        return np.concatenate(runs) if runs else np.zeros(0, np.uint32)

    def free(self, width: int, first: U32Array) -> None:
        """Give runs back."""
        if len(first):
            self._free.setdefault(width, []).append(first.copy())

    @staticmethod
    def of(first: U32Array, width: int) -> I64Array:
        """(n, width) numbers of the runs that begin at `first`."""
        return first.astype(np.int64)[:, None] + np.arange(width, dtype=np.int64)

    def memory_bytes(self) -> int:
        """Bytes of the lists of free runs."""
        return 4 * sum(sum(map(len, pool)) for pool in self._free.values())
