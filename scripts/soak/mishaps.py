"""What goes wrong in a soak, and when: at random, and much of it at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Mishap:
    """`begin(seconds)` makes it happen, for so long; `end()` undoes it. About `mean_s` between two of them, each of up
    to `longest_s`. `name`: what is counted; several may have the same.
    """

    name: str
    mean_s: float
    longest_s: float
    begin: Callable[[float], None]
    end: Callable[[], None] | None = None


class Mishaps:
    """Call `look` often. `counts`: how many of each kind there were."""

    def __init__(self, rng: np.random.Generator, seconds: float, mishaps: Sequence[Mishap]) -> None:
        self.counts: Counter[str] = Counter({mishap.name: 0 for mishap in mishaps})
        self._rng = rng
        self._seconds = seconds
        self._due = {mishap: self._gap(mishap) for mishap in mishaps}
        self._until: dict[Mishap, float] = {}

    def _gap(self, mishap: Mishap) -> float:
        """A short run has some of everything, too."""
        mean_s = min(mishap.mean_s, self._seconds / 6)
        return float(self._rng.uniform(0.3 * mean_s, 1.7 * mean_s))

    def look(self, now_s: float) -> None:
        """`now_s`: since the begin of the run."""
        for mishap, until_s in list(self._until.items()):
            if now_s >= until_s:
                self._undo(mishap)
        for mishap, due_s in self._due.items():
            if now_s >= due_s and mishap not in self._until:
                lasts_s = float(self._rng.uniform(0.05, 1.0) * mishap.longest_s)
                self.counts[mishap.name] += 1
                mishap.begin(lasts_s)
                self._until[mishap] = now_s + lasts_s
                self._due[mishap] = now_s + lasts_s + self._gap(mishap)

    def undo_all(self) -> None:
        """What has not ended yet."""
        for mishap in list(self._until):
            self._undo(mishap)

    def _undo(self, mishap: Mishap) -> None:
        del self._until[mishap]
        if mishap.end is not None:
            mishap.end()
