"""Chooses victims among rows, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvoffloadd.model import BoolArray, U32Array

NO_ROWS = np.zeros(0, np.uint32)
BLOCK_MIN, BLOCK_MAX = 64, 4096
IN_USE_MAX = 1 << 14
"""The number of rows in use after which one call of `victims` ends with its result so far, to take milliseconds."""


class Selection:
    """The result so far of one call of `victims`: rows to evict, and per queue the rows in use that it met."""

    def __init__(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> None:
        self.missing = max(0, wanted)
        """The number of victims still to find."""
        self._wanted = wanted
        self._evictable = evictable
        self._chosen: list[U32Array] = []
        self._in_use: list[tuple[int, U32Array]] = []
        self._num_in_use = 0

    @property
    def done(self) -> bool:
        """Whether no victim is missing any more, or the search takes too long."""
        return not self.missing or self._num_in_use >= IN_USE_MAX

    def block(self) -> int:
        """The number of rows to examine in the next step: as many as were in vain, so that there are few steps."""
        return min(max(self._wanted, self._num_in_use, BLOCK_MIN), BLOCK_MAX)

    def offer(self, rows: U32Array, queue: int = 0) -> int:
        """Chooses from rows, first to go first, until none is missing. Returns how many it examined."""
        yes = self._evictable(rows)
        able = np.flatnonzero(yes)[: self.missing]
        looked_at = int(able[-1]) + 1 if len(able) == self.missing else len(rows)
        if len(able) < looked_at:
            in_use = rows[:looked_at][~yes[:looked_at]]
            self._in_use.append((queue, in_use))
            self._num_in_use += len(in_use)
        self._chosen.append(rows[able])
        self.missing -= len(able)
        return looked_at

    def chosen(self) -> U32Array:
        """Returns the victims, first to go first."""
        return np.concatenate(self._chosen) if self._chosen else NO_ROWS

    def in_use(self) -> Iterator[tuple[int, U32Array]]:
        """Returns queues and the rows met there that may not go now."""
        yield from self._in_use
