"""The catalog of the disk tier: which key's records lie where. Event loop only; no I/O.

A **shelf** holds the keys of one group in one epoch of a namespace, with one schema and one set of part sizes: records
of two shelves are never taken for each other. A row is a key; it has one place (segment, page) for each part. A key
is complete when every part has its place, and only then found.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.cache.index import Index, count_down, count_up, distinct
from kvoffloadd.cache.keys import has_duplicates, pack
from kvoffloadd.cache.runs import Runs
from kvoffloadd.errors import LimitError
from kvoffloadd.sharedmem import reserve_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array
    from kvoffloadd.tiers.disk.format import SpaceId

SHELVES_MAX = 1 << 16
_FREE = 0xFFFF
"""`missing` of a row that is free: more than any shelf has parts."""

AUDIT_RECORDS = 32_768
"""Records that one step of the audit looks at."""

STEP_RECORDS = 4096
"""Records that one step of a walk takes out, so that none holds the loop for more than a few milliseconds."""


@dataclass(slots=True, eq=False)
class Shelf:
    """`rows` counts its rows, complete or not; `keys` the complete ones. A closed shelf takes no more records.
    `part_bytes`: payload size of each part; empty until somebody has told them since the start. `uid`: whose it is;
    None until then.
    """

    id: int
    name: SpaceId
    rows: int = 0
    keys: int = 0
    open: bool = True
    part_bytes: tuple[int, ...] = ()
    uid: int | None = None


class Catalog:
    """Rows and record numbers are dense small numbers, as in memory; page 0 of a segment is no record's place."""

    def __init__(self, max_records: int, seed: int) -> None:
        self.index = Index(max_records, seed)
        self.runs = Runs(max_records)
        self.first: U32Array = reserve_array((max_records,), np.uint32)
        self.missing: U16Array = reserve_array((max_records,), np.uint16)
        self.used: U8Array = reserve_array((max_records,), np.uint8)
        self.row: U32Array = reserve_array((max_records,), np.uint32)
        self.segment: U32Array = reserve_array((max_records,), np.uint32)
        self.page: U32Array = reserve_array((max_records,), np.uint32)
        self.records = 0
        self.shelves: dict[int, Shelf] = {}
        self._by_name: dict[SpaceId, Shelf] = {}
        self._by_uid: Counter[int] = Counter()
        self._members: dict[int, list[U32Array]] = {}
        self._next_shelf = 0

    # --- shelves ---

    def shelf(self, name: SpaceId, uid: int | None = None) -> Shelf | None:
        """The shelf of this name, made if it is new; None if there are too many. `uid`: whose it is, if that is known.

        A user has at most as many as there are left for all others then: shelves stay as long as they have keys, also
        when their namespaces are forgotten, and whatever some users do, the next one finds room.
        """
        shelf = self._by_name.get(name)
        left = SHELVES_MAX - 1 - len(self.shelves)
        if shelf is None and left > (0 if uid is None else self._by_uid[uid]):
            while self._next_shelf in self.shelves:
                self._next_shelf = (self._next_shelf + 1) % SHELVES_MAX
            shelf = self._by_name[name] = self.shelves[self._next_shelf] = Shelf(self._next_shelf, name)
        if shelf is not None and shelf.uid is None and uid is not None:
            shelf.uid = uid
            self._by_uid[uid] += 1
        return shelf

    def close(self, shelf: Shelf) -> None:
        """Nothing of it is found from now on. `empty` frees what it takes."""
        shelf.open = False
        self._by_name.pop(shelf.name, None)

    def discard(self, shelf: Shelf) -> None:
        """Forget a shelf without keys; its number may be another's. Who still writes to it finds it closed."""
        self.close(shelf)
        self._take_down(shelf)

    def _take_down(self, shelf: Shelf) -> None:
        del self.shelves[shelf.id]
        if shelf.uid is not None:
            self._by_uid[shelf.uid] -= 1
            if not self._by_uid[shelf.uid]:
                del self._by_uid[shelf.uid]

    def empty(self, shelf: Shelf) -> Iterator[U64Array]:
        """Forget a closed shelf, some keys a step; each step tells those of them that were complete."""
        for start in range(0, self.index.rows_end, STEP_RECORDS * 16):
            span = slice(start, min(start + STEP_RECORDS * 16, self.index.rows_end))
            mine = (self.index.space[span] == shelf.id) & (self.missing[span] < shelf.name.parts)
            rows = (np.flatnonzero(mine) + start).astype(np.uint32)
            for at in range(0, len(rows), STEP_RECORDS):
                some = rows[at : at + STEP_RECORDS]
                # Again: rows that went meanwhile keep what they had, though their runs may be others' now.
                held = (self.index.space[some] == shelf.id) & (self.missing[some] < shelf.name.parts)
                some = some[held]
                keys = self.index.keys[some[self.missing[some] == 0]]
                self._remove(shelf, some)
                yield keys
        if self.shelves.get(shelf.id) is shelf:
            self._take_down(shelf)

    # --- keys ---

    def find(self, shelf: Shelf, keys: U64Array) -> I64Array:
        """The row of each key that is complete on disk; -1 for the others. Changes nothing."""
        rows = self.index.find(shelf.id, keys) if shelf.open else np.full(len(keys), -1, np.int64)
        rows[self.missing[rows] != 0] = -1  # row -1 reads some other row, and is -1 either way
        return rows

    def find_all(self, shelves: U16Array, keys: U64Array) -> I64Array:
        """The same for keys of several open shelves, by each one's number."""
        rows = self.index.find(shelves, keys)
        rows[self.missing[rows] != 0] = -1
        return rows

    def complete(self, shelf: Shelf, keys: U64Array) -> BoolArray:
        """Which keys are complete on a shelf that may be closed."""
        rows = self.index.find(shelf.id, keys)
        found: BoolArray = (rows >= 0) & (self.missing[rows] == 0)
        return found

    def places(self, shelf: Shelf, rows: U32Array) -> I64Array:
        """(n, parts) record numbers."""
        return Runs.of(self.first[rows], shelf.name.parts)

    def put(self, shelf: Shelf, keys: U64Array, parts: U16Array, segment: int, pages: U32Array) -> None:
        """Records have been written: `keys[i]`'s part `parts[i]` lies at `pages[i]`, in place of where it was before.

        What does not fit into the catalog any more is left out: such records are garbage.
        """
        if not shelf.open or not len(keys):
            return
        width = shelf.name.parts
        keys, parts, pages, row_of, names = self._distinct(keys, parts, pages, width)
        hashes = self.index.hash(shelf.id, names)
        rows = self.index.find(shelf.id, names, hashes)
        new = np.flatnonzero(rows < 0)
        fits = self.runs.ready(width, min(len(new), self.index.max_keys - len(self.index)))
        if fits < len(new):
            rows[new[fits:]] = -1
            new = new[:fits]
        if len(new):
            with contextlib.suppress(LimitError):
                rows[new] = self._insert(shelf, names[new], hashes[new])
        mine = rows[row_of]
        held = np.flatnonzero(mine >= 0)
        mine, parts, pages = mine[held], parts[held], pages[held]
        records = self.first[mine].astype(np.int64) + parts
        self._place(shelf, mine, records, segment, pages)

    def mark_used(self, rows: I64Array) -> None:
        """These keys were read since they were written: they move on when their segment goes."""
        self.used[rows] = 1

    def forget(self, records: I64Array) -> U32Array:
        """These records are gone or bad. Returns the rows of the keys that were complete and are not any more."""
        records = records[self.page[records] != 0]
        rows = self.row[records]
        lost: U32Array = distinct(rows[self.missing[rows] == 0])
        self.page[records] = 0
        self.records -= len(records)
        count_up(self.missing, rows)
        for shelf, at in self._by_shelf(lost):
            shelf.keys -= int(at.sum())
        affected = distinct(rows)
        for shelf, at in self._by_shelf(affected):
            mine = affected[at]
            self._drop_rows(shelf, mine[self.missing[mine] == shelf.name.parts])
        return lost

    # --- segments ---

    def in_segment(self, segment: int) -> I64Array:
        """Records that lie in this segment, by page."""
        members = np.concatenate([np.zeros(0, np.uint32), *self._members.get(segment, ())])
        members = distinct(members).astype(np.int64)
        members = members[(self.segment[members] == segment) & (self.page[members] != 0)]
        found: I64Array = members[np.argsort(self.page[members], kind="stable")]
        return found

    def close_segment(self, segment: int) -> None:
        """All records of it are forgotten."""
        self._members.pop(segment, None)

    def shelf_of(self, record: int) -> Shelf:
        """The shelf of a record that has a place."""
        return self.shelves[int(self.index.space[self.row[record]])]

    # --- questions ---

    @property
    def keys(self) -> int:
        """Complete keys."""
        return sum(shelf.keys for shelf in self.shelves.values())

    def packed(self, rows: U32Array, key_bytes: int) -> bytes:
        """The rows' keys, `key_bytes` each."""
        return pack(self.index.keys[rows], key_bytes)

    def listing(self, shelf: Shelf, start: int, count: int) -> U32Array:
        """Rows of complete keys of a shelf among the `count` rows from `start` on."""
        end = min(start + count, self.index.rows_end)
        mine = (self.index.space[start:end] == shelf.id) & (self.missing[start:end] == 0)
        rows = (np.flatnonzero(mine) + start).astype(np.uint32)
        live: U32Array = rows[self.page[self.first[rows]] != 0]
        return live

    def memory_bytes(self) -> int:
        """Bytes of the index and the columns in use."""
        rows = self.first.itemsize + self.missing.itemsize + self.used.itemsize
        records = self.row.itemsize + self.segment.itemsize + self.page.itemsize
        members = 4 * sum(len(some) for group in self._members.values() for some in group)
        used = self.runs.used * records + self.runs.memory_bytes()
        return self.index.memory_bytes() + self.index.rows_end * rows + used + members

    def steps(self, segments: Callable[[], set[int]]) -> Iterator[list[str]]:
        """What is wrong, bit by bit, of everything; nothing: empty lists. `segments`: those that the tier has. What a
        step finds is true of its moment: the catalog may change before the next one.
        """
        yield [f"catalog: {finding}" for finding in self.index.check_table()]
        yield self._check_count()
        yield self._check_shelves()
        for start in range(0, self.runs.used, AUDIT_RECORDS):
            yield self._check_places(start, segments())
        for segment in list(self._members):
            if (np.diff(self.page[self.in_segment(segment)]) == 0).any():
                yield ["catalog: two records share a place"]
            else:
                yield []
        start = 0
        while start < self.runs.used:
            yield self._check_rows(start, min(start + AUDIT_RECORDS, self.runs.used))
            start += AUDIT_RECORDS

    # --- inside ---

    def _check_count(self) -> list[str]:
        findings = [f"catalog: {finding}" for finding in self.runs.check()]
        placed = int(np.count_nonzero(self.page[: self.runs.used]))
        if placed != self.records:
            findings.append(f"catalog: {placed} records have a place, counted {self.records}")
        taken = sum(shelf.rows * shelf.name.parts for shelf in self.shelves.values())
        if taken != self.runs.taken:
            findings.append(f"catalog: keys have {taken} records, {self.runs.taken} are given out")
        return findings

    def _check_places(self, start: int, segments: set[int]) -> list[str]:
        stop = min(start + AUDIT_RECORDS, self.runs.used)
        findings = [f"catalog: {finding}" for finding in self.runs.check_blocks(start, stop)]
        if (self.runs.in_map(start, stop) & (self.page[start:stop] != 0)).any():
            findings.append("catalog: a record that is free has a place")
        placed = start + np.flatnonzero(self.page[start:stop])
        strange = set(distinct(self.segment[placed]).tolist()) - segments
        if strange:
            findings.append(f"catalog: {len(strange)} segments are named that the tier does not have")
        return findings

    def _check_shelves(self) -> list[str]:
        by_uid = Counter(shelf.uid for shelf in self.shelves.values() if shelf.uid is not None)
        counts = [] if by_uid == self._by_uid else [f"catalog: users have {by_uid} shelves, counted {self._by_uid}"]
        return counts + self._check_rows_of_shelves()

    def _check_rows_of_shelves(self) -> list[str]:
        findings = []
        used = np.zeros(self.index.rows_end, bool)
        used[self.row[np.flatnonzero(self.page[: self.runs.used] != 0)]] = True
        spaces = self.index.space[: len(used)]
        end = 1 + max(self.shelves, default=0)
        rows = np.bincount(spaces[used], minlength=end)
        keys = np.bincount(spaces[used & (self.missing[: len(used)] == 0)], minlength=end)
        for shelf in self.shelves.values():
            found = int(rows[shelf.id]), int(keys[shelf.id])
            if shelf.open and found != (shelf.rows, shelf.keys):
                findings.append(f"catalog: shelf {shelf.id} has {found}, counted {(shelf.rows, shelf.keys)}")
        return findings

    def _check_rows(self, start: int, stop: int) -> list[str]:
        """The keys that records from `start` to `stop` belong to."""
        findings = []
        rows = distinct(self.row[start + np.flatnonzero(self.page[start:stop] != 0)])
        spaces = self.index.space[rows]
        for number in distinct(spaces).tolist():
            shelf, mine = self.shelves[number], rows[spaces == number]
            missing = (self.page[Runs.of(self.first[mine], shelf.name.parts)] == 0).sum(axis=1)
            if (missing != self.missing[mine]).any():
                findings.append(f"catalog: missing parts of shelf {shelf.id} are miscounted")
            if shelf.open and (self.index.find(shelf.id, self.index.keys[mine]) != mine).any():
                findings.append(f"catalog: a key of shelf {shelf.id} is not found")
        return findings

    def _distinct(
        self, keys: U64Array, parts: U16Array, pages: U32Array, width: int
    ) -> tuple[U64Array, U16Array, U32Array, I64Array, U64Array]:
        """The last place of each (key, part), the index of its key for each, and the distinct keys."""
        if width == 1 and not has_duplicates(keys):
            return keys, parts, pages, np.arange(len(keys)), keys
        names, row_of = np.unique(keys, axis=0, return_inverse=True)
        row_of = row_of.reshape(-1).astype(np.int64)
        # Last of equals: the later record of a segment lies at the higher page.
        place = row_of * width + parts
        order = np.lexsort((pages, place))
        last = order[np.append(place[order][1:] != place[order][:-1], True)]
        return keys[last], parts[last], pages[last], row_of[last], names

    def _insert(self, shelf: Shelf, keys: U64Array, hashes: U64Array) -> U32Array:
        rows = self.index.insert(shelf.id, keys, hashes)
        first = self.runs.allocate(shelf.name.parts, len(rows))
        self.first[rows] = first
        self.missing[rows] = shelf.name.parts
        self.used[rows] = 0
        records = Runs.of(first, shelf.name.parts)
        self.row[records] = rows[:, None]
        self.page[records] = 0
        shelf.rows += len(rows)
        return rows

    def _place(self, shelf: Shelf, rows: I64Array, records: I64Array, segment: int, pages: U32Array) -> None:
        empty = self.page[records] == 0
        self.segment[records] = segment
        self.page[records] = pages
        self.records += int(empty.sum())
        touched = distinct(rows)
        before = self.missing[touched] == 0
        count_down(self.missing, rows[empty])
        shelf.keys += int((self.missing[touched] == 0).sum() - before.sum())
        self._members.setdefault(segment, []).append(records.astype(np.uint32))

    def _remove(self, shelf: Shelf, rows: U32Array) -> None:
        records = Runs.of(self.first[rows], shelf.name.parts).ravel()
        self.forget(records[self.page[records] != 0])

    def _drop_rows(self, shelf: Shelf, rows: U32Array) -> None:
        if not len(rows):
            return
        self.index.remove(rows)
        self.runs.free(shelf.name.parts, self.first[rows])
        self.index.free(rows)
        self.missing[rows] = _FREE  # or `empty` takes them for rows of a later shelf of this number
        shelf.rows -= len(rows)

    def _by_shelf(self, rows: U32Array) -> Iterator[tuple[Shelf, BoolArray]]:
        spaces = self.index.space[rows]
        for number in distinct(spaces).tolist():
            yield self.shelves[number], spaces == number
