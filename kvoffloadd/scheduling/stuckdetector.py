"""Detects work that never ends by repeated looks, since elapsed time alone proves nothing."""

from __future__ import annotations

import math
from typing import Final

LOOKS_MIN: Final = 3
"""Even the least patience takes this many looks."""


class StuckDetector:
    """Decides whether work never ends. The owner looks every `look_s` seconds, more often or later. Elapsed time alone
    is no reason: the process may have been stopped (a frozen cgroup, a debugger, a paused machine) while the clock went
    on. The time between two looks counts for at most `look_s`, and time before the work began does not count.

    `since_s`: when the watch began; before its first look otherwise.
    """

    def __init__(self, look_s: float, since_s: float = -math.inf) -> None:
        self.look_s = look_s
        self._last_s = since_s
        self._watched_s = 0.0

    def is_over(self, busy_s: float, now: float, patience_s: float) -> bool:
        """Records a look at work that has been under way for `busy_s` seconds; 0: there is none. Returns True if it has
        lasted longer than `patience_s`, and was watched for as long, and at several looks.
        """
        since_s, self._last_s = now - self._last_s, now
        slack_s = self.look_s / 16  # timers may be a little early, and sums are not exact
        if busy_s > 0 and since_s <= busy_s + slack_s:
            self._watched_s = min(self._watched_s, busy_s - since_s) + min(since_s, self.look_s)
        else:  # it has begun since the last look
            self._watched_s = 0.0
        return min(busy_s, self._watched_s) > max(patience_s, LOOKS_MIN * self.look_s) - slack_s
