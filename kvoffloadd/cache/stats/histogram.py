"""Counts by size, for `status` and metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values at most each bound, and above the previous one; `inf`: above all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def figures(self) -> dict[str, float | dict[str, int]]:
        """Returns the figures for `status`: the sum of all values, and their number by bound."""
        names = [*(f"{bound:g}" for bound in self._bounds), "inf"]
        return {"sum": round(self._sum, 6), "counts": dict(zip(names, self._counts, strict=True))}
