"""Bounds the memory that can't be evicted, by user: the slots of keys that are held, and reserved slots. Event loop
only.

The holder of memory decides how long: only its release ends a lease. So users other than root and the daemon's user
hold at most three quarters of all pages together, and each of them no more than is then left for the others (see
`shares`). A key counts with all its slots, once, for any number of holds.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvoffloadd.cache.memory.keyspaces import NUMBERS, Keyspaces
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, I64Array
from kvoffloadd.scheduling.shares import share_left
from kvoffloadd.units import format_bytes

UNBOUNDED = 1 << 62


class HeldMemory:
    """Keeps what is held of each keyspace, by its number, and computes how much more a user may hold."""

    def __init__(self, keyspaces: Keyspaces, num_pages: int) -> None:
        self.rows: I64Array = np.zeros(NUMBERS, np.int64)  # keys that are held
        self.reserved: I64Array = np.zeros(NUMBERS, np.int64)  # pages of slots that are reserved
        self.trusted: Collection[int] | None = None  # users without a bound; None: all users
        self._keyspaces = keyspaces
        self._total = num_pages * 3 // 4

    def bounds(self, uid: int) -> bool:
        """Returns whether the memory that this user may hold is bounded."""
        return self.trusted is not None and uid not in self.trusted

    def pages(self, uid: int | None) -> int:
        """Returns the number of pages that a user holds; None: all users."""
        numbers = self._keyspaces.numbers_of(uid)
        return int(self.rows[numbers] @ self._keyspaces.pages[numbers] + self.reserved[numbers].sum())

    def left(self, uid: int, beside: int = 0) -> int:
        """Returns how many pages more a user may hold. The first `beside` pages of its holdings do not count, since
        they are held only during the caller's check.
        """
        if self.trusted is None or uid in self.trusted:
            return UNBOUNDED
        by_all = self.pages(None) - sum(self.pages(trusted) for trusted in self.trusted)
        return share_left(self._total, by_all - beside, self.pages(uid) - beside)

    def check(self, uid: int, more: int) -> None:
        """Raises LimitError if a user may not hold this many pages more."""
        if more > self.left(uid):
            used, wanted, total = (format_bytes(pages * PAGE_BYTES) for pages in (self.pages(uid), more, self._total))
            raise LimitError(
                f"uid {uid} holds {used} of memory by leases and jobs; {wanted} more would exceed its share of the "
                f"{total} that users may hold: release leases"
            )
