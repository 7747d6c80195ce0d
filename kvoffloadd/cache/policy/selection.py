"""Victims being chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffloadd.model import BoolArray, U32Array

NO_ROWS = np.zeros(0, np.uint32)
BLOCK_MIN, BLOCK_MAX = 64, 4096


class Selection:
    """What one call of `victims` has gathered: rows to evict, and per queue the rows it met that are in use."""

    def __init__(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> None:
        self.missing = max(0, wanted)
        """Victims still to be found."""
        self.block = min(max(wanted, BLOCK_MIN), BLOCK_MAX)
        """Rows to look at in one step."""
        self._evictable = evictable
        self._chosen: list[U32Array] = []
        self._in_use: list[tuple[int, U32Array]] = []

    def offer(self, rows: U32Array, queue: int = 0) -> int:
        """Choose from rows, first to go first, until none is missing. Returns how many were looked at."""
        yes = self._evictable(rows)
        able = np.flatnonzero(yes)[: self.missing]
        looked_at = int(able[-1]) + 1 if len(able) == self.missing else len(rows)
        if len(able) < looked_at:
            self._in_use.append((queue, rows[:looked_at][~yes[:looked_at]]))
        self._chosen.append(rows[able])
        self.missing -= len(able)
        return looked_at

    def chosen(self) -> U32Array:
        """The victims, first to go first."""
        return np.concatenate(self._chosen) if self._chosen else NO_ROWS

    def in_use(self) -> Iterator[tuple[int, U32Array]]:
        """Queue and rows that were met there and may not go now."""
        yield from self._in_use
