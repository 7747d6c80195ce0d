"""Memory that can't be evicted, by user: the slots of keys that are held, and reserved slots. Event loop only.

Whoever holds memory decides how long: a lease has no end but its release. So users who are neither root nor the
daemon's own hold three quarters of all pages together at most, and each of them no more than is then left for the
others (see `shares`). A key counts with all its slots, once, however often it is held.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvoffloadd.cache.memory.keyspaces import NUMBERS, Keyspaces
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, I64Array, U16Array, U32Array
from kvoffloadd.shares import share_left
from kvoffloadd.units import format_bytes


class HeldMemory:
    """What is held of each keyspace, by its number, and how much more a user may hold."""

    def __init__(self, keyspaces: Keyspaces, num_pages: int) -> None:
        self.rows: I64Array = np.zeros(NUMBERS, np.int64)  # keys that are held
        self.reserved: I64Array = np.zeros(NUMBERS, np.int64)  # pages of slots that are reserved
        self.trusted: Collection[int] | None = None  # users without a bound; None: all are
        self._keyspaces = keyspaces
        self._total = num_pages * 3 // 4

    def pages(self, uid: int) -> int:
        """How many pages a user holds."""
        mine = self._keyspaces.numbers_of(uid)
        return int(self.rows[mine] @ self._keyspaces.pages[mine] + self.reserved[mine].sum())

    def left(self, uid: int) -> int | None:
        """How many pages more a user may hold; None: any number."""
        if self.trusted is None or uid in self.trusted:
            return None
        others = [
            pages for other in self._keyspaces.by_uid if other not in self.trusted for pages in [self.pages(other)]
        ]
        return share_left(self._total, sum(others), self.pages(uid))

    def check(self, uid: int, keyspaces: U16Array, leases: U32Array) -> None:
        """Raises LimitError if a user may not hold keys of these keyspaces; `leases`: how often each is held now."""
        left = self.left(uid)
        if left is None:
            return
        more = int(self._keyspaces.pages[keyspaces[leases == 0]].sum())
        if more > left:
            used, wanted, total = (format_bytes(pages * PAGE_BYTES) for pages in (self.pages(uid), more, self._total))
            raise LimitError(
                f"uid {uid} holds {used} of memory by leases and jobs; {wanted} more would exceed its share of the "
                f"{total} that users may hold: release leases"
            )
