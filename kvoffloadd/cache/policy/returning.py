"""How sweeps are recognised: by the keys in use of which few were used before. Pure."""

from __future__ import annotations

from kvoffloadd.model import U8Array

RECENT_SHARE = 1 / 8
RECENT_MIN = 256
"""The keys used lately are about this share of the capacity, and at least so many."""

CALL_SHARE_MAX = 1 / 4
"""A call counts as at most this share of the keys used lately: a single long prompt is no sweep."""

LONG_TIMES = 64
"""Those used in the long run are so many times as many."""

SWEEP_BELOW = 0.5
"""There is a sweep where the share of keys used before is lately less than so much of what it is in the long run."""

SWEEP_FACTOR_MIN = 0.01
"""What keys used once are worth in a sweep, at least: more than what can't be restored."""


class Returning:
    """Which share of the keys used had been used before: lately, and in the long run."""

    def __init__(self, capacity_rows: int) -> None:
        self.resize(capacity_rows)
        self._seen = self._lately = self._in_the_long_run = 0.0
        self.factor = 1.0
        """What is left in a sweep of the worth of keys used once; otherwise 1."""

    def resize(self, capacity_rows: int) -> None:
        """The capacity is now this."""
        self._recent = max(RECENT_MIN, RECENT_SHARE * capacity_rows)

    def record(self, uses: U8Array) -> None:
        """Keys were used, which is the first use of some; `uses`: theirs now."""
        share = (len(uses) - uses.tobytes().count(1)) / len(uses)  # of a few bytes, quicker than numpy
        count = min(len(uses), CALL_SHARE_MAX * self._recent)
        self._seen = min(self._seen + count, LONG_TIMES * self._recent)  # at first, the average of all
        self._in_the_long_run += count / self._seen * (share - self._in_the_long_run)
        self._lately += count / min(self._seen, self._recent) * (share - self._lately)
        low = SWEEP_BELOW * self._in_the_long_run
        self.factor = max(self._lately / low, SWEEP_FACTOR_MIN) if self._lately < low else 1.0
