"""A clock that advances only while the shared store answers. Pure."""

from __future__ import annotations


class StoreClock:
    """Counts the seconds during which the store has answered. Anything overdue by this clock is overdue because of one
    object, not because the store was away.
    """

    def __init__(self, gap_max_s: float) -> None:
        """`gap_max_s`: a longer time between two answers does not count: no question was open."""
        self.now_s = 0.0
        self._gap_max_s = gap_max_s
        self._answered_s: float | None = None

    def answered(self, at_s: float) -> None:
        """Records an answer of the store, at this time of `time.monotonic()`."""
        if self._answered_s is not None:
            self.now_s += min(max(at_s - self._answered_s, 0.0), self._gap_max_s)
        self._answered_s = at_s

    def silent(self) -> None:
        """Records a missing answer: the time since the store's last answer does not count."""
        self._answered_s = None
