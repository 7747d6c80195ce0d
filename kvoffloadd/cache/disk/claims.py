"""What the disk tier keeps of claims: their records move on when a segment is reclaimed. Event loop only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.cache.memory.claimedkeys import ClaimedKeys
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.tierclaims import TierClaims
from kvoffloadd.model import PAGE_BYTES, I64Array, U32Array, U64Array
from kvoffloadd.storage.disk.format import record_pages

SHARE = 0.5
"""The default share of each user. No share is larger: a segment of which more is claimed can't be reclaimed."""


class DiskClaims(TierClaims):
    """Keeps claims on disk. A row is one of the catalog."""

    def __init__(self, contents: DiskContents, seed: int) -> None:
        self._contents = contents
        self._catalog = contents.catalog
        super().__init__(self, ClaimedKeys(self._catalog.index.max_keys, seed, _pages_of), SHARE)
        self._catalog.on_insert = self._came
        self._catalog.on_drop = self.claimed.went

    def _came(self, disk_keyspace: DiskKeyspace, keys: U64Array, rows: U32Array) -> None:
        keyspace = self._contents.keyspace_of(disk_keyspace) if self.claimed else None
        if keyspace is not None and len(came := self.claimed.came([(keyspace, len(keys))], keys, rows)):
            self.rows_came(came)

    def check(self) -> list[str]:
        found = super().check()
        if not np.array_equal(self._catalog.claimed_rows, self.claimed.number[: self.rows_end] != 0):
            found.append("claims: the catalog marks other keys than those that claims name")
        return found

    # --- the tier as claims see it, see `ClaimingTier` ---

    @property
    def num_pages(self) -> int:
        return sum(root.capacity_bytes for root in self._contents.roots) // PAGE_BYTES

    @property
    def rows_end(self) -> int:
        return self._catalog.index.rows_end

    def find_all(self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array) -> I64Array:
        numbers, is_open = np.zeros(len(keyspaces), np.uint16), np.zeros(len(keyspaces), bool)
        for place, (keyspace, _) in enumerate(keyspaces):
            disk_keyspace = self._contents.of(keyspace)
            if disk_keyspace is not None and self._contents.keyspace_of(disk_keyspace) is keyspace:
                numbers[place], is_open[place] = disk_keyspace.id, disk_keyspace.open
        counts = [count for _, count in keyspaces]
        rows = self._catalog.index.find(np.repeat(numbers, counts), keys)
        return np.where(np.repeat(is_open, counts), rows, -1)

    def set_aside(self, rows: U32Array) -> None:
        self._catalog.mark_claimed(rows, claimed=True)

    def let_claimed_go(self, rows: U32Array) -> None:
        self._catalog.mark_claimed(rows, claimed=False)


def _pages_of(keyspace: Keyspace) -> int:
    """Returns the pages of the records of a key; 0 until the sizes of all its parts are known."""
    sizes = np.asarray(keyspace.part_bytes, np.int64)
    return int(record_pages(sizes).sum()) if sizes.all() else 0
