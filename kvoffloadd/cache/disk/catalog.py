"""The catalog of the disk tier: where the records of each key lie. Event loop only; no I/O.

A **disk keyspace** holds the keys of one group in one epoch of a namespace, with one schema and one set of part sizes:
records of two disk keyspaces are never taken for each other. A row is a key; it has one place (segment, page) for each
part. A key is complete when every part has its place. Lookups find only complete keys.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace, DiskKeyspaces
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import Index, count_down, count_up, distinct
from kvoffloadd.cache.memory.keys import has_duplicates, pack
from kvoffloadd.cache.memory.runallocator import RunAllocator
from kvoffloadd.errors import LimitError
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array
from kvoffloadd.storage.disk.format import Records, record_pages

_FREE = 0xFFFF
"""`missing` of a row that is free: more than any disk keyspace has parts."""

AUDIT_RECORDS = 32_768
"""The number of records that one step of the audit checks."""

STEP_RECORDS = 4096
"""The number of records that one step of a walk removes, so that no step blocks the loop for more than a few
milliseconds.
"""


class Catalog:
    """Records the places of keys. Rows and record numbers are dense small numbers, as in memory; no record's place is
    page 0 of a segment.
    """

    def __init__(self, max_records: int, seed: int) -> None:
        self.index = Index(max_records, seed)
        self.runs = RunAllocator(max_records)
        # Columns, by row.
        self.first: U32Array = reserve_array((max_records,), np.uint32)  # its first record number
        self.missing: U16Array = reserve_array((max_records,), np.uint16)  # parts without a place; or _FREE
        self.used: U8Array = reserve_array((max_records,), np.uint8)  # 1: read since it was written
        self.claimed: U8Array = reserve_array((max_records,), np.uint8)  # 1: a claim keeps it
        # Columns, by record number.
        self.row: U32Array = reserve_array((max_records,), np.uint32)
        self.segment: U32Array = reserve_array((max_records,), np.uint32)  # ordinal
        self.page: U32Array = reserve_array((max_records,), np.uint32)  # 0: it has no place
        self.records = 0
        self.disk_keyspaces = DiskKeyspaces()
        # Called with keys that get rows, and with rows that are not used any more.
        self.on_insert: Callable[[DiskKeyspace, U64Array, U32Array], None] = lambda disk_keyspace, keys, rows: None
        self.on_drop: Callable[[U32Array], None] = lambda rows: None
        # Called with the rows of keys that have become complete.
        self.on_complete: Callable[[DiskKeyspace, U32Array], None] = lambda disk_keyspace, rows: None
        self._members: dict[int, list[U32Array]] = {}
        # By segment, pages of records that have their place there; of those whose keys were read; and of those whose
        # keys are claimed.
        self._live_pages: Counter[int] = Counter()
        self._used_pages: Counter[int] = Counter()
        self._claimed_pages: Counter[int] = Counter()
        self._cleared_records: Counter[int] = Counter()  # by segment; no key has them any more

    # --- disk keyspaces ---

    def empty(self, disk_keyspace: DiskKeyspace) -> Iterator[U64Array]:
        """Forgets a closed disk keyspace, some keys in each step. Each step yields those of its keys that were
        complete.
        """
        for start in range(0, self.index.rows_end, STEP_RECORDS * 16):
            span = slice(start, min(start + STEP_RECORDS * 16, self.index.rows_end))
            mask = (self.index.keyspace[span] == disk_keyspace.id) & (self.missing[span] < disk_keyspace.name.parts)
            rows = (np.flatnonzero(mask) + start).astype(np.uint32)
            for begin in range(0, len(rows), STEP_RECORDS):
                batch = rows[begin : begin + STEP_RECORDS]
                # Again: rows that went in the meantime keep their values, though other keys may have their runs now.
                held = (self.index.keyspace[batch] == disk_keyspace.id) & (
                    self.missing[batch] < disk_keyspace.name.parts
                )
                batch = batch[held]
                keys = self.index.keys[batch[self.missing[batch] == 0]]
                self.forget(self.count_deleted(batch))
                yield keys
        if self.disk_keyspaces.get(disk_keyspace.id) is disk_keyspace:
            self.disk_keyspaces.discard(disk_keyspace)

    # --- keys ---

    def find(self, disk_keyspace: DiskKeyspace, keys: U64Array) -> I64Array:
        """Returns the row of each key that is complete on disk; -1 for the others. Changes nothing."""
        rows = self.index.find(disk_keyspace.id, keys) if disk_keyspace.open else np.full(len(keys), -1, np.int64)
        rows[self.missing[rows] != 0] = -1  # row -1 reads some other row, and is -1 either way
        return rows

    def find_all(self, disk_keyspaces: U16Array, keys: U64Array) -> I64Array:
        """Finds keys of several open disk keyspaces, by each one's number, as `find`."""
        rows = self.index.find(disk_keyspaces, keys)
        rows[self.missing[rows] != 0] = -1
        return rows

    def complete(self, disk_keyspace: DiskKeyspace, keys: U64Array) -> BoolArray:
        """Returns which keys are complete on a disk keyspace that may be closed."""
        rows = self.index.find(disk_keyspace.id, keys)
        found: BoolArray = (rows >= 0) & (self.missing[rows] == 0)
        return found

    def places(self, disk_keyspace: DiskKeyspace, rows: U32Array) -> I64Array:
        """Returns the record numbers, shape (n, parts)."""
        return RunAllocator.of(self.first[rows], disk_keyspace.name.parts)

    def put(self, disk_keyspace: DiskKeyspace, entries: Records, segment: int) -> None:
        """Enters records (format.ENTRY) that have been written to a segment. Each replaces the previous place of its
        part of its key.

        Records that do not fit into the catalog any more are left out: they are garbage.
        """
        if not disk_keyspace.open:
            self.count_cleared(segment, len(entries))
            return
        if not len(entries):
            return
        self.learn_sizes(disk_keyspace, entries["part"], entries["payload_bytes"])
        keys, parts = np.ascontiguousarray(entries["key"]), entries["part"].astype(np.uint16)
        pages = entries["page"].astype(np.uint32)
        width = disk_keyspace.name.parts
        keys, parts, pages, row_of, names = self._distinct(keys, parts, pages, width)
        hashes = self.index.hash(disk_keyspace.id, names)
        rows = self.index.find(disk_keyspace.id, names, hashes)
        new = np.flatnonzero(rows < 0)
        fits = self.runs.ready(width, min(len(new), self.index.max_keys - len(self.index)))
        if fits < len(new):
            rows[new[fits:]] = -1
            new = new[:fits]
        if len(new):
            with contextlib.suppress(LimitError):
                rows[new] = self._insert(disk_keyspace, names[new], hashes[new])
        record_rows = rows[row_of]
        held = np.flatnonzero(record_rows >= 0)
        record_rows, parts, pages = record_rows[held], parts[held], pages[held]
        records = self.first[record_rows].astype(np.int64) + parts
        self._place(disk_keyspace, record_rows, records, segment, pages)

    def learn_sizes(self, disk_keyspace: DiskKeyspace, parts: np.ndarray, payload_bytes: np.ndarray) -> None:
        """Records the payload sizes of these parts of its keys. Known sizes stay."""
        new = disk_keyspace.part_bytes[parts] == 0
        if new.any():
            disk_keyspace.part_bytes[parts[new]] = payload_bytes[new]

    def mark_used(self, rows: I64Array) -> None:
        """Marks keys that were read since they were written: their records move on when their segment is reclaimed."""
        self._mark(rows, self.used, self._used_pages, 1)

    @changing
    def mark_unused(self, rows: I64Array) -> None:
        """Marks keys as not read from now on."""
        self._mark(rows, self.used, self._used_pages, 0)

    def mark_claimed(self, rows: U32Array, *, claimed: bool) -> None:
        """Marks keys as claimed or not: the records of claimed keys move on before others."""
        self._mark(rows, self.claimed, self._claimed_pages, int(claimed))

    def _mark(self, rows: I64Array | U32Array, column: U8Array, pages: Counter[int], value: int) -> None:
        changed = distinct(rows[column[rows] != value].astype(np.uint32))
        column[changed] = value
        for disk_keyspace, mask in self._by_keyspace(changed):
            records = RunAllocator.of(self.first[changed[mask]], disk_keyspace.name.parts).ravel()
            self._count_pages(pages, records[self.page[records] != 0], +1 if value else -1)

    def forget(self, records: I64Array) -> U32Array:
        """Forgets records that are gone or bad. Returns the rows of the keys that were complete and are not any
        more.
        """
        records = records[self.page[records] != 0]
        rows = self.row[records]
        lost: U32Array = distinct(rows[self.missing[rows] == 0])
        self._count_places(records, -1)
        self.page[records] = 0
        self.records -= len(records)
        count_up(self.missing, rows)
        for disk_keyspace, mask in self._by_keyspace(lost):
            disk_keyspace.keys -= int(mask.sum())
        affected = distinct(rows)
        for disk_keyspace, mask in self._by_keyspace(affected):
            own_rows = affected[mask]
            self._drop_rows(disk_keyspace, own_rows[self.missing[own_rows] == disk_keyspace.name.parts])
        return lost

    # --- segments ---

    def in_segment(self, segment: int) -> I64Array:
        """Returns the records that lie in this segment, by page."""
        members = np.concatenate([np.zeros(0, np.uint32), *self._members.get(segment, ())])
        members = distinct(members).astype(np.int64)
        members = members[(self.segment[members] == segment) & (self.page[members] != 0)]
        found: I64Array = members[np.argsort(self.page[members], kind="stable")]
        return found

    def live_pages(self, segment: int) -> int:
        """Returns the pages of a segment that hold the current records of keys."""
        return self._live_pages[segment]

    def used_pages(self, segment: int) -> int:
        """Returns how many of the live pages hold records of keys that were read since they were written."""
        return self._used_pages[segment]

    def claimed_pages(self, segment: int) -> int:
        """Returns how many of the live pages hold records of claimed keys."""
        return self._claimed_pages[segment]

    @changing
    def close_segment(self, segment: int) -> None:
        """Drops the counts of a segment after all its records are forgotten."""
        self._members.pop(segment, None)
        self._live_pages.pop(segment, None)
        self._used_pages.pop(segment, None)
        self._claimed_pages.pop(segment, None)
        self._cleared_records.pop(segment, None)

    # --- questions ---

    @property
    def keys(self) -> int:
        """Returns the number of keys that lookups can find."""
        return sum(disk_keyspace.keys for disk_keyspace in self.disk_keyspaces.values() if disk_keyspace.open)

    @property
    def cleared_records(self) -> int:
        """Returns the number of records of cleared namespaces, and of deleted keys, whose space has not been reused
        yet.
        """
        return self._cleared_records.total()

    def count_cleared(self, segment: int, records: int) -> None:
        """Counts records of a segment that belong to an epoch that is over, or to deleted keys."""
        self._cleared_records[segment] += records

    def count_deleted(self, rows: U32Array) -> I64Array:
        """Counts the records of keys that are about to be forgotten as cleared. Returns the records."""
        places = (self.places(disk_keyspace, rows[mask]).ravel() for disk_keyspace, mask in self._by_keyspace(rows))
        every = np.concatenate([np.zeros(0, np.int64), *places])
        records: I64Array = every[self.page[every] != 0]
        for segment, count in zip(*np.unique(self.segment[records], return_counts=True), strict=True):
            self.count_cleared(int(segment), int(count))
        return records

    @property
    def claimed_rows(self) -> BoolArray:
        """Returns whether each row below the end of the rows is one of a claimed key."""
        end = self.index.rows_end
        flags: BoolArray = (self.claimed[:end] != 0) & (self.missing[:end] != _FREE)
        return flags

    def packed(self, rows: U32Array, key_bytes: int) -> bytes:
        """Returns the rows' keys packed, `key_bytes` each."""
        return pack(self.index.keys[rows], key_bytes)

    def listing(self, disk_keyspace: DiskKeyspace, start: int, count: int) -> U32Array:
        """Returns the rows of complete keys of a disk keyspace among the `count` rows from `start` on."""
        end = min(start + count, self.index.rows_end)
        mask = (self.index.keyspace[start:end] == disk_keyspace.id) & (self.missing[start:end] == 0)
        rows = (np.flatnonzero(mask) + start).astype(np.uint32)
        live: U32Array = rows[self.page[self.first[rows]] != 0]
        return live

    def memory_bytes(self) -> int:
        """Returns the used bytes of the index and the columns."""
        rows = self.first.itemsize + self.missing.itemsize + self.used.itemsize + self.claimed.itemsize
        records = self.row.itemsize + self.segment.itemsize + self.page.itemsize
        members = 4 * sum(len(records) for group in self._members.values() for records in group)
        used = self.runs.used * records + self.runs.memory_bytes()
        return self.index.memory_bytes() + self.index.rows_end * rows + used + members

    def steps(self, segments: Callable[[], set[int]]) -> Iterator[list[str]]:
        """Checks the whole catalog in steps. Each step yields a list of errors, empty if there are none, which is true
        at its moment: the catalog may change before the next one. `segments` returns the tier's segments.
        """
        yield [f"catalog: {finding}" for finding in self.index.check_table()]
        yield self._check_count() + self._check_cleared(segments())
        yield self.disk_keyspaces.check() + self._check_rows_of_shelves()
        for start in range(0, self.runs.used, AUDIT_RECORDS):
            yield self._check_places(start, segments())
        for segment in list(self._members):
            yield self._check_segment(segment)
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
        taken = sum(disk_keyspace.rows * disk_keyspace.name.parts for disk_keyspace in self.disk_keyspaces.values())
        if taken != self.runs.taken:
            findings.append(f"catalog: keys have {taken} records, {self.runs.taken} are given out")
        return findings

    def _check_cleared(self, segments: set[int]) -> list[str]:
        gone = sorted(self._cleared_records.keys() - segments)
        return [f"catalog: cleared records are counted in segments {gone}, which are gone"] if gone else []

    def _check_segment(self, segment: int) -> list[str]:
        findings, records = [], self.in_segment(segment)
        if (np.diff(self.page[records]) == 0).any():
            findings.append("catalog: two records share a place")
        pages, rows = self._pages_of(records), self.row[records]
        found = tuple(int(pages[mask].sum()) for mask in (rows == rows, self.used[rows] != 0, self.claimed[rows] != 0))
        counted = self.live_pages(segment), self.used_pages(segment), self.claimed_pages(segment)
        if found != counted:
            findings.append(f"catalog: {found} pages of segment {segment} are live, used, claimed; counted {counted}")
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

    def _check_rows_of_shelves(self) -> list[str]:
        findings = []
        used = np.zeros(self.index.rows_end, bool)
        used[self.row[np.flatnonzero(self.page[: self.runs.used] != 0)]] = True
        keyspaces = self.index.keyspace[: len(used)]
        end = 1 + max(self.disk_keyspaces, default=0)
        rows = np.bincount(keyspaces[used], minlength=end)
        keys = np.bincount(keyspaces[used & (self.missing[: len(used)] == 0)], minlength=end)
        for disk_keyspace in self.disk_keyspaces.values():
            found = int(rows[disk_keyspace.id]), int(keys[disk_keyspace.id])
            if disk_keyspace.open and found != (disk_keyspace.rows, disk_keyspace.keys):
                counted = (disk_keyspace.rows, disk_keyspace.keys)
                findings.append(f"catalog: keyspace {disk_keyspace.id} has {found}, counted {counted}")
        return findings

    def _check_rows(self, start: int, stop: int) -> list[str]:
        """Checks the keys that the records from `start` to `stop` belong to."""
        findings = []
        rows = distinct(self.row[start + np.flatnonzero(self.page[start:stop] != 0)])
        keyspaces = self.index.keyspace[rows]
        for number in distinct(keyspaces).tolist():
            disk_keyspace, own_rows = self.disk_keyspaces[number], rows[keyspaces == number]
            missing = (self.page[RunAllocator.of(self.first[own_rows], disk_keyspace.name.parts)] == 0).sum(axis=1)
            if (missing != self.missing[own_rows]).any():
                findings.append(f"catalog: missing parts of keyspace {disk_keyspace.id} are miscounted")
            if disk_keyspace.open and (self.index.find(disk_keyspace.id, self.index.keys[own_rows]) != own_rows).any():
                findings.append(f"catalog: a key of keyspace {disk_keyspace.id} is not found")
        return findings

    def _distinct(
        self, keys: U64Array, parts: U16Array, pages: U32Array, width: int
    ) -> tuple[U64Array, U16Array, U32Array, I64Array, U64Array]:
        """Returns the last place of each (key, part), the index of its key for each, and the distinct keys."""
        if width == 1 and not has_duplicates(keys):
            return keys, parts, pages, np.arange(len(keys)), keys
        names, row_of = np.unique(keys, axis=0, return_inverse=True)
        row_of = row_of.reshape(-1).astype(np.int64)
        # The last of equals: the later record of a segment lies at the higher page.
        place = row_of * width + parts
        order = np.lexsort((pages, place))
        last = order[np.append(place[order][1:] != place[order][:-1], True)]
        return keys[last], parts[last], pages[last], row_of[last], names

    def _insert(self, disk_keyspace: DiskKeyspace, keys: U64Array, hashes: U64Array) -> U32Array:
        rows = self.index.insert(disk_keyspace.id, keys, hashes)
        first = self.runs.allocate(disk_keyspace.name.parts, len(rows))
        self.first[rows] = first
        self.missing[rows] = disk_keyspace.name.parts
        self.used[rows] = self.claimed[rows] = 0
        records = RunAllocator.of(first, disk_keyspace.name.parts)
        self.row[records] = rows[:, None]
        self.page[records] = 0
        disk_keyspace.rows += len(rows)
        self.on_insert(disk_keyspace, keys, rows)
        return rows

    def _place(
        self, disk_keyspace: DiskKeyspace, rows: I64Array, records: I64Array, segment: int, pages: U32Array
    ) -> None:
        empty = self.page[records] == 0
        self._count_places(records[~empty], -1)
        self.segment[records] = segment
        self.page[records] = pages
        self._count_places(records, +1)
        self.records += int(empty.sum())
        touched: U32Array = distinct(rows).astype(np.uint32)
        before = self.missing[touched] == 0
        count_down(self.missing, rows[empty])
        came = touched[(self.missing[touched] == 0) & ~before]
        disk_keyspace.keys += len(came)
        self._members.setdefault(segment, []).append(records.astype(np.uint32))
        self.on_complete(disk_keyspace, came)

    def _count_places(self, records: I64Array, sign: int) -> None:
        """Counts the places of these records, which have them now (+1), or are about to lose them (-1)."""
        self._count_pages(self._live_pages, records, sign)
        self._count_pages(self._used_pages, records[self.used[self.row[records]] != 0], sign)
        self._count_pages(self._claimed_pages, records[self.claimed[self.row[records]] != 0], sign)

    def _count_pages(self, pages: Counter[int], records: I64Array, sign: int) -> None:
        """Adds the pages of these records to those of their segments, or subtracts them."""
        segments, numbers = np.unique(self.segment[records], return_inverse=True)
        sums = np.bincount(numbers, weights=self._pages_of(records), minlength=len(segments))  # exact below 2^53
        for segment, count in zip(segments.tolist(), sums.astype(np.int64).tolist(), strict=True):
            pages[segment] += sign * count

    def _pages_of(self, records: I64Array) -> I64Array:
        """Returns the number of pages that each record takes in its segment."""
        rows = self.row[records]
        parts, sizes = records - self.first[rows], np.zeros(len(records), np.int64)
        for disk_keyspace, mask in self._by_keyspace(rows):
            sizes[mask] = disk_keyspace.part_bytes[parts[mask]]
        pages: I64Array = record_pages(sizes).astype(np.int64)
        return pages

    def _drop_rows(self, disk_keyspace: DiskKeyspace, rows: U32Array) -> None:
        if not len(rows):
            return
        self.on_drop(rows)
        self.index.remove(rows)
        self.runs.free(disk_keyspace.name.parts, self.first[rows])
        self.index.free(rows)
        self.missing[rows] = _FREE  # or `empty` would take them for rows of a later disk keyspace of this number
        disk_keyspace.rows -= len(rows)

    def _by_keyspace(self, rows: U32Array) -> Iterator[tuple[DiskKeyspace, BoolArray]]:
        keyspaces = self.index.keyspace[rows]
        for number in distinct(keyspaces).tolist():
            yield self.disk_keyspaces[number], keyspaces == number
