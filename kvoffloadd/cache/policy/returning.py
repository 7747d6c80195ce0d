"""Recognises sweeps: periods in which few of the used keys were used before. Pure."""

from __future__ import annotations

from kvoffloadd.model import U8Array

RECENT_SHARE = 1 / 8
RECENT_MIN = 256
"""The size of the recent window: about this share of the capacity, and at least this number of keys."""

CALL_SHARE_MAX = 1 / 4
"""A call counts as at most this share of the recent window: a single long prompt is no sweep."""

LONG_TIMES = 64
"""The long window is this many times the recent one."""

SWEEP_BELOW = 0.5
"""In a sweep the recent share of keys used before is less than this fraction of the long-run share."""

SWEEP_FACTOR_MIN = 0.01
"""The minimum worth factor of keys used once in a sweep: above that of keys that can't be restored."""


class Returning:
    """The share of used keys that were used before: recently, and in the long run."""

    def __init__(self, capacity_rows: int) -> None:
        self.resize(capacity_rows)
        self._seen = self._lately = self._in_the_long_run = 0.0
        self.factor = 1.0
        """The factor that remains of the worth of keys used once in a sweep; otherwise 1."""

    def resize(self, capacity_rows: int) -> None:
        """Adapts to a new capacity."""
        self._recent = max(RECENT_MIN, RECENT_SHARE * capacity_rows)

    def record(self, uses: U8Array) -> None:
        """Records used keys, including first uses; `uses`: their counts now."""
        share = (len(uses) - uses.tobytes().count(1)) / len(uses)  # quicker than numpy for few bytes
        count = min(len(uses), CALL_SHARE_MAX * self._recent)
        self._seen = min(self._seen + count, LONG_TIMES * self._recent)  # at first, the average of all
        self._in_the_long_run += count / self._seen * (share - self._in_the_long_run)
        self._lately += count / min(self._seen, self._recent) * (share - self._lately)
        low = SWEEP_BELOW * self._in_the_long_run
        self.factor = max(self._lately / low, SWEEP_FACTOR_MIN) if self._lately < low else 1.0
