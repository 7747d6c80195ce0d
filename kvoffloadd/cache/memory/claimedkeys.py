"""The table of claimed keys: those that claims name, whether they are in memory or not. Event loop only.

A claimed key has a number here, as a key in memory has a row; each names the other while both exist. A key can be named
by several claims: the one of the highest priority counts. A priority is stored as a rank, which is one higher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.memory.index import Index, count_down, count_up
from kvoffloadd.cache.memory.keyspaces import NUMBERS, Keyspaces
from kvoffloadd.cache.memory.namespace import ClaimedGroup, Keyspace
from kvoffloadd.errors import LimitError
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array
from kvoffloadd.scheduling.shares import share_left

KEYS_MAX = 1 << 19
"""The maximum number of claimed keys: of 32 tokens each, 16 million tokens."""

NO_NUMBERS = np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Released:
    """Describes what the end of claims has left."""

    rows: U32Array  # in memory, and named by no claim any more
    lowered: U32Array  # numbers of keys that other claims name, all of lower ranks


class ClaimedKeys:
    """Keeps the columns of claimed keys, by number, and the number of each row.

    `keyspace_of`: the keyspace of each row. `seed`: see `Index`.
    """

    def __init__(self, keyspaces: Keyspaces, keyspace_of: U16Array, max_rows: int, seed: int) -> None:
        self._keyspaces = keyspaces
        self._keyspace_of = keyspace_of
        self.index = Index(KEYS_MAX, seed)
        self.claims: U16Array = reserve_array((KEYS_MAX,), np.uint16)  # that name the key
        self.rank: U8Array = reserve_array((KEYS_MAX,), np.uint8)  # the highest of them
        self.tops: U16Array = reserve_array((KEYS_MAX,), np.uint16)  # claims of this rank
        self.row: U32Array = reserve_array((KEYS_MAX,), np.uint32)  # in memory, + 1; 0: it is not in memory
        self.uses: U32Array = reserve_array((KEYS_MAX,), np.uint32)  # since it is claimed
        self.number: U32Array = reserve_array((max_rows,), np.uint32)  # of each row, + 1; 0: it is not claimed
        self.rows: I64Array = np.zeros(NUMBERS, np.int64)  # claimed keys in memory, by keyspace
        self.by_uid: Counter[int] = Counter()
        self._next_group = 0
        self._groups: dict[int, ClaimedGroup] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    # --- rows that come, are used and go ---

    def came(self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array, rows: U32Array) -> U32Array:
        """Notes that keys have come to memory, in these rows: for each keyspace in turn, the given number of the keys.
        Returns the rows of those that are claimed.
        """
        found, begin = [NO_NUMBERS], 0
        for keyspace, count in keyspaces:
            if keyspace.claimed is not None and count:
                span = slice(begin, begin + count)
                numbers = self.index.find(keyspace.claimed.number, keys[span])
                claimed = numbers >= 0
                self._link(numbers[claimed], rows[span][claimed])
                found.append(rows[span][claimed])
            begin += count
        return np.concatenate(found)

    def went(self, rows: U32Array) -> None:
        """Notes that keys have left memory. Claims go on to name them."""
        rows = rows[self.number[rows] != 0]
        if len(rows):
            self.row[self.number[rows] - 1] = 0
            self._unlink(rows)

    def used(self, rows: U32Array) -> U32Array:
        """Counts uses of those of these distinct rows that are claimed. Returns them."""
        claimed: U32Array = rows[self.number[rows] != 0]
        self.uses[self.number[claimed] - 1] += np.uint32(1)
        return claimed

    def is_claimed(self, rows: I64Array | U32Array) -> BoolArray:
        """Returns whether each row is claimed."""
        flags: BoolArray = self.number[rows] != 0
        return flags

    def _link(self, numbers: I64Array | U32Array, rows: U32Array) -> None:
        self.row[numbers] = rows + np.uint32(1)
        self.number[rows] = numbers + 1
        count_up(self.rows, self._keyspace_of[rows].astype(np.int64))

    def _unlink(self, rows: U32Array) -> None:
        self.number[rows] = 0
        count_down(self.rows, self._keyspace_of[rows].astype(np.int64))

    # --- pages ---

    def pages(self, uid: int) -> int:
        """Returns the pages of all claimed keys of a user that are in memory."""
        numbers = self._keyspaces.numbers_of(uid)
        return int(self.rows[numbers] @ self._keyspaces.pages[numbers])

    def pages_of(self, numbers: U32Array) -> I64Array:
        """Returns the pages of each key in memory, 0 if it is not there."""
        rows = self.row[numbers]
        pages: I64Array = self._keyspaces.pages[self._keyspace_of[np.maximum(rows, 1) - np.uint32(1)]]
        return np.where(rows, pages, 0)

    def rows_of(self, numbers: U32Array) -> U32Array:
        """Returns the rows of those of these keys that are in memory."""
        rows = self.row[numbers]
        resident: U32Array = rows[rows != 0] - np.uint32(1)
        return resident

    # --- claims that begin and end ---

    def left(self, uid: int) -> int:
        """Returns how many more keys the claims of a user may name."""
        return share_left(KEYS_MAX, len(self.index), self.by_uid[uid])

    def num_fresh(self, keyspace: Keyspace, keys: U64Array) -> int:
        """Returns how many of these distinct keys no claim names yet."""
        group = keyspace.claimed
        return len(keys) if group is None else int(np.count_nonzero(self.index.find(group.number, keys) < 0))

    def most(self, uid: int) -> int:
        """Returns how many keys the claims of a user may name in all, beside those of the other users."""
        return share_left(KEYS_MAX, len(self.index) - self.by_uid[uid], 0)

    def add(
        self, keyspace: Keyspace, keys: U64Array, rank: int, rows: I64Array
    ) -> tuple[ClaimedGroup, U32Array, U32Array]:
        """Adds a claim of these distinct keys, which have these rows (-1: none). There must be room for them (`left`).
        Returns their group, their numbers, and the rows that were not claimed before.

        Raises:
            LimitError: too many keys have almost equal hashes. Nothing was added.
        """
        group = keyspace.claimed or self._open_group(keyspace)
        numbers = self.index.find(group.number, keys)
        fresh = np.flatnonzero(numbers < 0)
        if len(fresh):
            try:
                numbers[fresh] = added = self.index.insert(group.number, keys[fresh])
            except LimitError:
                self._close_if_empty(group)
                raise
            self.claims[added] = self.tops[added] = self.rank[added] = self.row[added] = self.uses[added] = 0
            group.keys += len(fresh)
            self.by_uid[keyspace.namespace.uid] += len(fresh)
        found: U32Array = numbers.astype(np.uint32)
        self.claims[found] += np.uint16(1)
        self._raise(found, rank)
        resident = fresh[rows[fresh] >= 0]
        newly = rows[resident].astype(np.uint32)
        self._link(found[resident], newly)
        return group, found, newly

    def _open_group(self, keyspace: Keyspace) -> ClaimedGroup:
        while self._next_group in self._groups:
            self._next_group = (self._next_group + 1) % NUMBERS
        group = keyspace.claimed = self._groups[self._next_group] = ClaimedGroup(self._next_group, keyspace)
        return group

    def _close_if_empty(self, group: ClaimedGroup) -> None:
        if not group.keys:
            del self._groups[group.number]
            group.keyspace.claimed = None
            self._keyspaces.emptied.add(group.keyspace.namespace)
            self.by_uid += Counter()  # drops zeros

    def _raise(self, numbers: U32Array, rank: int) -> None:
        """Counts a claim of this rank for each key."""
        old = self.rank[numbers]
        self.tops[numbers[old < rank]] = 1
        self.tops[numbers[old == rank]] += np.uint16(1)
        self.rank[numbers] = np.maximum(old, np.uint8(rank))

    def remove(self, group: ClaimedGroup, numbers: U32Array, rank: int) -> Released:
        """Removes a claim of this rank from these distinct keys of one group."""
        self.claims[numbers] -= np.uint16(1)
        tops = numbers[self.rank[numbers] == rank]
        self.tops[tops] -= np.uint16(1)
        others = self.claims[numbers] > 0
        gone = numbers[~others]
        rows = self.rows_of(gone)
        self._unlink(rows)
        self.index.remove(gone)
        self.index.free(gone)
        group.keys -= len(gone)
        self.by_uid[group.keyspace.namespace.uid] -= len(gone)
        self._close_if_empty(group)
        lowered = tops[(self.claims[tops] > 0) & (self.tops[tops] == 0)]
        self.rank[lowered] = 0
        return Released(rows, lowered)

    def change_rank(self, numbers: U32Array, before: int, after: int) -> U32Array:
        """Changes the rank of a claim of these distinct keys. Returns those that may have a lower rank now, as
        `Released.lowered`; the claim itself counts for them when it is restored.
        """
        tops = numbers[self.rank[numbers] == before]
        self.tops[tops] -= np.uint16(1)
        lowered: U32Array = tops[self.tops[tops] == 0]
        self.rank[lowered] = 0
        self._raise(numbers[self.rank[numbers] != 0], after)
        return lowered

    def restore(self, numbers: U32Array, rank: int) -> None:
        """Counts a claim of this rank again for keys that another claim has left: see `Released.lowered`."""
        self._raise(numbers, rank)

    def check(self, numbers: U32Array, rows_end: int) -> list[str]:
        """Returns a list of errors. `numbers`: of all keys that claims name, ascending. `rows_end`: as in `Index`."""
        index, findings = self.index, []
        groups = list(self._groups.values())
        if len(index) != len(numbers) or (index.find(index.keyspace[numbers], index.keys[numbers]) != numbers).any():
            findings.append(
                f"claims: {len(numbers)} keys are claimed, the table has {len(index)}, or does not find them"
            )
        counts = Counter(index.keyspace[numbers].tolist())
        if counts != Counter({group.number: group.keys for group in groups}):
            findings.append("claims: the keys of a group are miscounted")
        if any(group.keyspace.claimed is not group or group.keyspace.retired for group in groups):
            findings.append("claims: a group has lost its keyspace")
        rows = self.rows_of(numbers)
        named = np.count_nonzero(self.number[:rows_end])
        if named != len(rows) or (self.number[rows] != numbers[self.row[numbers] != 0] + 1).any():
            findings.append("claims: a row and a claimed key do not name each other")
        expected = np.bincount(self._keyspace_of[rows], minlength=NUMBERS)
        if not np.array_equal(expected, self.rows):
            findings.append("claims: the claimed rows of a keyspace are miscounted")
        uids = Counter[int]()
        for group in groups:
            uids[group.keyspace.namespace.uid] += group.keys
        if +uids != +self.by_uid:
            findings.append("claims: the claimed keys of a user are miscounted")
        return findings
