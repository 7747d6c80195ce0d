"""The table of the keys that claims name in one tier, whether the tier has them or not. Event loop only.

A claimed key has a number here, as a key in a tier has a row; each names the other while both exist. A key can be named
by several claims: the one of the highest priority counts. A priority is stored as a rank, which is one higher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.memory.index import Index, count_down, count_up, distinct
from kvoffloadd.cache.memory.keyspaces import NUMBERS
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.errors import LimitError
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array

KEYS_MAX = 1 << 19
"""The maximum number of keys that all claims together name, each counted for every claim: of 32 tokens each, 16 million
tokens. It bounds what the end of a claim costs, and what the claims of the same keys take.
"""

NO_NUMBERS = np.zeros(0, np.uint32)


@dataclass(slots=True, eq=False)
class ClaimedGroup:
    """Counts the keys of a keyspace that claims name. It exists as long as there are any."""

    number: int  # in the table of claimed keys
    keyspace: Keyspace
    keys: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Released:
    """Describes what the end of claims has left."""

    rows: U32Array  # in the tier, and named by no claim any more
    lowered: U32Array  # numbers of keys that other claims name, all of lower ranks


class ClaimedKeys:
    """Keeps the columns of claimed keys, by number, and the number of each row of the tier.

    `max_rows`: rows are below it. `seed`: see `Index`. `pages_of`: the pages that a key of a keyspace takes in the
    tier.
    """

    def __init__(self, max_rows: int, seed: int, pages_of: Callable[[Keyspace], int]) -> None:
        self.pages_of = pages_of
        self.index = Index(KEYS_MAX, seed)
        self.claims: U16Array = reserve_array((KEYS_MAX,), np.uint16)  # that name the key
        self.rank: U8Array = reserve_array((KEYS_MAX,), np.uint8)  # the highest of them
        self.tops: U16Array = reserve_array((KEYS_MAX,), np.uint16)  # claims of this rank
        self.row: U32Array = reserve_array((KEYS_MAX,), np.uint32)  # in the tier, + 1; 0: the tier does not have it
        self.uses: U32Array = reserve_array((KEYS_MAX,), np.uint32)  # since it is claimed
        self.number: U32Array = reserve_array((max_rows,), np.uint32)  # of each row, + 1; 0: it is not claimed
        # By the number of a group: claimed keys in the tier, the pages of one of them, and its user.
        self.rows: I64Array = np.zeros(NUMBERS, np.int64)
        self.pages: I64Array = np.zeros(NUMBERS, np.int64)
        self.uids: I64Array = np.zeros(NUMBERS, np.int64)
        self._groups: dict[Keyspace, ClaimedGroup] = {}
        self._by_number: dict[int, ClaimedGroup] = {}
        self._of_user: dict[int, dict[int, ClaimedGroup]] = {}
        self.num_rows = 0  # claimed keys in the tier
        self.version = 0  # grows when rows begin or end to be claimed
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has(self, keyspace: Keyspace) -> bool:
        """Returns whether claims name keys of this keyspace."""
        return keyspace in self._groups

    def numbers_of(self, keyspace: Keyspace, keys: U64Array) -> U32Array:
        """Returns the numbers of those of these keys that claims name."""
        if (group := self._groups.get(keyspace)) is None:
            return NO_NUMBERS
        numbers = self.index.find(group.number, keys)
        claimed: U32Array = numbers[numbers >= 0].astype(np.uint32)
        return claimed

    # --- rows that come, are used and go ---

    def came(self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array, rows: U32Array) -> U32Array:
        """Notes that keys have come to the tier, in these rows: for each keyspace in turn, the given number of the
        keys. Returns the rows of those that are claimed.
        """
        found, begin = [NO_NUMBERS], 0
        for keyspace, count in keyspaces:
            group = self._groups.get(keyspace)
            if group is not None and count:
                span = slice(begin, begin + count)
                numbers = self.index.find(group.number, keys[span])
                claimed = numbers >= 0
                self._link(numbers[claimed].astype(np.uint32), rows[span][claimed])
                found.append(rows[span][claimed])
            begin += count
        return np.concatenate(found)

    def went(self, rows: U32Array) -> None:
        """Notes that keys have left the tier. Claims go on to name them."""
        rows = rows[self.number[rows] != 0]
        if len(rows):
            self._unlink(self.number[rows] - np.uint32(1), rows)

    def used(self, rows: U32Array) -> U32Array:
        """Counts uses of those of these distinct rows that are claimed. Returns them."""
        claimed: U32Array = rows[self.number[rows] != 0]
        self.uses[self.number[claimed] - 1] += np.uint32(1)
        return claimed

    def by_keyspace(self, numbers: U32Array) -> list[tuple[Keyspace, I64Array]]:
        """Returns the keyspaces of these keys, and the indices of the keys of each, ascending."""
        groups = self.index.keyspace[numbers]
        order = np.argsort(groups, kind="stable")
        split = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else []
        return [(self._by_number[int(groups[indices[0]])].keyspace, indices) for indices in split]

    def is_claimed(self, rows: I64Array | U32Array) -> BoolArray:
        """Returns whether each row is claimed."""
        flags: BoolArray = self.number[rows] != 0
        return flags

    def users_of(self, rows: U32Array) -> list[int]:
        """Returns the users of these rows, which are claimed."""
        users: list[int] = distinct(self.uids[self.index.keyspace[self.number[rows] - np.uint32(1)]]).tolist()
        return users

    def _link(self, numbers: U32Array, rows: U32Array) -> None:
        self.row[numbers] = rows + np.uint32(1)
        self.number[rows] = numbers + np.uint32(1)
        count_up(self.rows, self.index.keyspace[numbers].astype(np.int64))
        self.num_rows += len(rows)
        self.version += 1

    def _unlink(self, numbers: U32Array, rows: U32Array) -> None:
        self.row[numbers] = 0
        self.number[rows] = 0
        count_down(self.rows, self.index.keyspace[numbers].astype(np.int64))
        self.num_rows -= len(rows)
        self.version += 1

    # --- pages ---

    def count_pages(self, keyspace: Keyspace) -> None:
        """Counts the pages of a keyspace again after the sizes of its parts have changed."""
        if (group := self._groups.get(keyspace)) is not None:
            self.pages[group.number] = self.pages_of(keyspace)

    def pages_of_user(self, uid: int) -> int:
        """Returns the pages of all claimed keys of a user that are in the tier."""
        numbers = list(self._of_user.get(uid, ()))
        return int(self.rows[numbers] @ self.pages[numbers])

    def pages_each(self, numbers: U32Array) -> I64Array:
        """Returns the pages of each key in the tier, 0 if it is not there."""
        pages: I64Array = self.pages[self.index.keyspace[numbers]] * (self.row[numbers] != 0)
        return pages

    def rows_of(self, numbers: U32Array) -> U32Array:
        """Returns the rows of those of these keys that are in the tier."""
        rows = self.row[numbers]
        resident: U32Array = rows[rows != 0] - np.uint32(1)
        return resident

    def every_row(self) -> U32Array:
        """Returns the rows of all claimed keys in the tier."""
        return self.rows_of(np.flatnonzero(self.row[: self.index.rows_end]).astype(np.uint32))

    # --- claims that begin and end ---

    def add(
        self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array, rank: int, rows: I64Array
    ) -> tuple[U32Array, U32Array]:
        """Adds a claim of these keys, which have these rows (-1: none): for each keyspace in turn, the given number of
        the keys, which are distinct. Returns their numbers, and the rows that were not claimed before.

        Raises:
            LimitError: too many keys have almost equal hashes. Nothing was added.
        """
        groups = [self._groups.get(keyspace) or self._open_group(keyspace) for keyspace, _ in keyspaces]
        of_key = np.repeat(np.array([group.number for group in groups], np.uint16), [count for _, count in keyspaces])
        numbers = self.index.find(of_key, keys)
        fresh = np.flatnonzero(numbers < 0)
        if len(fresh):
            try:
                numbers[fresh] = added = self.index.insert(of_key[fresh], keys[fresh])
            except LimitError:
                for group in groups:
                    self._close_if_empty(group)
                raise
            self.claims[added] = self.tops[added] = self.rank[added] = self.row[added] = self.uses[added] = 0
            self._count_keys(added, +1)
        found: U32Array = numbers.astype(np.uint32)
        self.claims[found] += np.uint16(1)
        self._raise(found, rank)
        resident = fresh[rows[fresh] >= 0]
        newly = rows[resident].astype(np.uint32)
        self._link(found[resident], newly)
        return found, newly

    def _count_keys(self, numbers: U32Array, sign: int) -> None:
        """Counts keys of their groups that have come (+1) or gone (-1)."""
        which, counts = np.unique(self.index.keyspace[numbers], return_counts=True)
        for number, count in zip(which.tolist(), counts.tolist(), strict=True):
            self._by_number[number].keys += sign * count

    def remove(self, numbers: U32Array, ranks: U8Array) -> Released:
        """Removes claims of these ranks from these keys, each named for every claim of it that is removed."""
        count_down(self.claims, numbers)
        tops = numbers[self.rank[numbers] == ranks]
        count_down(self.tops, tops)
        every, tops = _each_once(numbers, self.index.rows_end), _each_once(tops, self.index.rows_end)
        gone = every[self.claims[every] == 0]
        resident = gone[self.row[gone] != 0]
        rows = self.rows_of(resident)
        self._unlink(resident, rows)
        self._count_keys(gone, -1)
        for number in distinct(self.index.keyspace[gone]).tolist():
            self._close_if_empty(self._by_number[number])
        self.index.remove(gone)
        self.index.free(gone)
        lowered = tops[(self.claims[tops] > 0) & (self.tops[tops] == 0)]
        self.rank[lowered] = 0
        return Released(rows, lowered)

    def change_rank(self, numbers: U32Array, before: int, after: int) -> U32Array:
        """Changes the rank of a claim of these distinct keys. Returns those that may have a lower rank now, as
        `Released.lowered`; `restore` must count the claim itself for them.
        """
        tops = numbers[self.rank[numbers] == before]
        self.tops[tops] -= np.uint16(1)
        lowered: U32Array = tops[self.tops[tops] == 0]
        self.rank[lowered] = 0
        self._raise(numbers[self.rank[numbers] != 0], after)
        return lowered

    def restore(self, lowered: U32Array, numbers: U32Array, ranks: U8Array) -> None:
        """Finds the ranks of the keys in `lowered` again. `numbers`: of all keys that claims name, each for every claim
        of it, which has the rank in `ranks`.
        """
        wanted = np.zeros(self.index.rows_end, bool)
        wanted[lowered[self.rank[lowered] == 0]] = True
        counts = np.flatnonzero(wanted[numbers])
        numbers, ranks = numbers[counts], ranks[counts]
        np.maximum.at(self.rank, numbers, ranks)
        self.tops[numbers] = 0
        count_up(self.tops, numbers[ranks == self.rank[numbers]])

    def _raise(self, numbers: U32Array, rank: int) -> None:
        """Counts a claim of this rank for each of these distinct keys."""
        old = self.rank[numbers]
        self.tops[numbers[old < rank]] = 1
        self.tops[numbers[old == rank]] += np.uint16(1)
        self.rank[numbers] = np.maximum(old, np.uint8(rank))

    def relink(self, keyspace: Keyspace, find: Callable[[U64Array], I64Array]) -> tuple[U32Array, U32Array]:
        """Links the claimed keys of a keyspace to other rows, which `find` returns (-1: none). Returns the rows that
        were claimed before, and those that are now.
        """
        if (group := self._groups.get(keyspace)) is None:
            return NO_NUMBERS, NO_NUMBERS
        numbers = np.flatnonzero(self.index.keyspace[: self.index.rows_end] == group.number).astype(np.uint32)
        numbers = numbers[self.claims[numbers] > 0]
        linked = numbers[self.row[numbers] != 0]
        before = self.rows_of(linked)
        self._unlink(linked, before)
        rows = find(self.index.keys.take(numbers, axis=0))
        there = rows >= 0
        self._link(numbers[there], rows[there].astype(np.uint32))
        return before, rows[there].astype(np.uint32)

    def _open_group(self, keyspace: Keyspace) -> ClaimedGroup:
        while self._next in self._by_number:
            self._next = (self._next + 1) % NUMBERS
        group = self._groups[keyspace] = self._by_number[self._next] = ClaimedGroup(self._next, keyspace)
        uid = keyspace.namespace.uid
        self._of_user.setdefault(uid, {})[group.number] = group
        self.rows[group.number], self.pages[group.number] = 0, self.pages_of(keyspace)
        self.uids[group.number] = uid
        return group

    def _close_if_empty(self, group: ClaimedGroup) -> None:
        if group.keys:
            return
        del self._groups[group.keyspace], self._by_number[group.number]
        own = self._of_user[group.keyspace.namespace.uid]
        del own[group.number]
        if not own:
            del self._of_user[group.keyspace.namespace.uid]

    def check(self, numbers: U32Array, rows_end: int) -> list[str]:
        """Returns a list of errors. `numbers`: of all keys that claims name, ascending. `rows_end`: as in `Index`."""
        index, findings = self.index, []
        groups = list(self._groups.values())
        if len(index) != len(numbers) or (index.find(index.keyspace[numbers], index.keys[numbers]) != numbers).any():
            findings.append(
                f"claims: {len(numbers)} keys are claimed, the table has {len(index)}, or does not find them"
            )
        counted = np.bincount(index.keyspace[numbers], minlength=NUMBERS)
        expected = np.zeros(NUMBERS, np.int64)
        expected[[group.number for group in groups]] = [group.keys for group in groups]
        if not np.array_equal(counted, expected):
            findings.append("claims: the keys of a group are miscounted")
        if not all(group.keys for group in groups):
            findings.append("claims: a group has lost its keys")
        if any(self.pages[group.number] != self.pages_of(group.keyspace) for group in groups):
            findings.append("claims: the pages of a key are wrong")
        rows = self.rows_of(numbers)
        named = np.count_nonzero(self.number[:rows_end])
        if named != len(rows) or (self.number[rows] != numbers[self.row[numbers] != 0] + 1).any():
            findings.append("claims: a row and a claimed key do not name each other")
        in_tier = np.bincount(index.keyspace[numbers[self.row[numbers] != 0]], minlength=NUMBERS)
        if not np.array_equal(in_tier, self.rows) or in_tier.sum() != self.num_rows:
            findings.append("claims: the claimed rows of a keyspace are miscounted")
        return findings


def _each_once(numbers: U32Array, end: int) -> U32Array:
    """Returns each number once, ascending: very many of them may be equal."""
    named = np.zeros(end, bool)
    named[numbers] = True
    return np.flatnonzero(named).astype(np.uint32)
