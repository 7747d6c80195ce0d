"""Bounds the memory that can't be evicted, by user: the slots of keys that are held, and reserved slots. Event loop
only.

The holder of memory decides how long: only its release ends a lease. So users other than root and the daemon's user
hold at most three quarters of all pages together, and each of them no more than is then left for the others (see
`shares`). And no user holds what quotas grant to others, who could not have it at once. A key counts with all its
slots, once, for any number of holds.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvoffloadd.cache.memory.keyspaces import NUMBERS, Keyspaces
from kvoffloadd.cache.memory.quota import UNBOUNDED
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, I64Array
from kvoffloadd.scheduling.shares import share_left
from kvoffloadd.units import format_bytes


class HeldMemory:
    """Keeps what is held of each keyspace, by its number, and computes how much more a user may hold."""

    def __init__(self, keyspaces: Keyspaces, num_pages: int) -> None:
        self.rows: I64Array = np.zeros(NUMBERS, np.int64)  # keys that are held
        self.reserved: I64Array = np.zeros(NUMBERS, np.int64)  # pages of slots that are reserved
        self.trusted: Collection[int] | None = None  # users without a bound; None: all users
        self._keyspaces = keyspaces
        self._num_pages = num_pages
        self._total = num_pages * 3 // 4

    def bounds(self, uid: int) -> bool:
        """Returns whether the memory that this user may hold is bounded."""
        return self._is_bounded(uid) or self._keyspaces.quotas.has_minimums

    def _is_bounded(self, uid: int) -> bool:
        return self.trusted is not None and uid not in self.trusted

    def pages(self, uid: int | None) -> int:
        """Returns the number of pages that a user holds; None: all users."""
        return self._pages(self._keyspaces.numbers_of(uid))

    def _pages(self, numbers: I64Array) -> int:
        return int(self.rows[numbers] @ self._keyspaces.pages[numbers] + self.reserved[numbers].sum())

    def left(self, uid: int, beside: int = 0) -> int:
        """Returns how many pages more a user may hold. The first `beside` pages of its holdings do not count, since
        they are held only during the caller's check.
        """
        left = self._left_by_others(uid, beside) if self._keyspaces.quotas.has_minimums else UNBOUNDED
        if self.trusted is None or uid in self.trusted:
            return left
        by_all = self.pages(None) - sum(self.pages(trusted) for trusted in self.trusted)
        return min(left, share_left(self._total, by_all - beside, self.pages(uid) - beside))

    def _left_by_others(self, uid: int, beside: int) -> int:
        """Returns how many pages more a user may hold, so that what others hold and what quotas grant to others fits
        beside it.
        """
        granted = 0
        for quota in self._keyspaces.quotas.of_others(uid, self._keyspaces.numbers_of(uid)):
            granted += max(0, quota.min_pages - self._pages(np.fromiter(quota.numbers, np.int64, len(quota.numbers))))
        return max(0, self._num_pages - self.pages(None) + beside - granted)

    def check(self, uid: int, more: int) -> None:
        """Raises LimitError if a user may not hold this many pages more."""
        if more > self.left(uid):
            used, wanted, total = (format_bytes(pages * PAGE_BYTES) for pages in (self.pages(uid), more, self._total))
            share = f"its share of the {total} that users may hold"
            if not self._is_bounded(uid) or more > self._left_by_others(uid, 0):
                share = "what the quotas of others leave"
            raise LimitError(
                f"uid {uid} holds {used} of memory by leases and jobs; {wanted} more would exceed {share}: release "
                "leases"
            )
