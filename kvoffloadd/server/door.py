"""A rate limit on connections per user: a token bucket, so that one user's connections leave room in the backlog of the
socket, which all users share.
"""

from __future__ import annotations

import time
from collections.abc import Callable

RATE = 500.0
"""Connections a second, in the long run. One that is let in costs some tenths of a millisecond."""
BURST = 2000
"""Connections at once: all engines of a machine that come back to a new daemon."""


class Door:
    """A bucket of tokens for each user, full at first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int, tuple[float, float]] = {}
        self._away: set[int] = set()

    def lets_in(self, uid: int) -> bool:
        """Take a token. False: the user has none left now."""
        now = self._clock()
        left, since = self._buckets.get(uid, (float(BURST), now))
        left = min(left + (now - since) * RATE, float(BURST))
        if left < 1:
            self._buckets[uid] = (left, now)
            return False
        self._buckets[uid] = (left - 1, now)
        self._away.discard(uid)
        return True

    def is_news(self, uid: int) -> bool:
        """Whether this is the user's first refusal since a connection was let in: only the first is logged."""
        if uid in self._away:
            return False
        self._away.add(uid)
        return True
