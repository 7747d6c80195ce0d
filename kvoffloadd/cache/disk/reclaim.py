"""Reclaim: frees segments for new records, those with few live records first, and rewrites the useful records in them.

Of the older half of the segments, and of all segments that lose nothing, the one that holds the least is reclaimed
first, and among equals the oldest, as in a log: the records written last were requested last. If a segment is at most
half live, it loses nothing: all its records are rewritten. From a fuller segment, only records of claimed keys are
rewritten, and records that were read since they were written, up to a share of the segment. Segments that would lose
records of claimed keys come after all others, of whatever age. If more records than this share were read, the segment
is spared: it takes its place after the others, and must be read again before it is spared a second time. So each
segment that is reclaimed gains at least half of its space.

Event loop only, one task per root.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffloadd.cache.disk.catalog import STEP_RECORDS
from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.demotion import Demotion
from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.cache.lower.fetches import Urgency
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import PAGE_BYTES, I64Array, U8Array, U32Array, U64Array
from kvoffloadd.storage.disk.format import ENTRY, Records, record_pages
from kvoffloadd.storage.disk.records import NO_RESOURCES, OK, READ
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import PLACE_END, Segment
from kvoffloadd.storage.disk.writer import WriteBatch

log = logging.getLogger(__name__)

REWRITE_BYTES = 8 << 20
"""The number of bytes that are read and written again at a time."""

REWRITE_SHARE, WHOLE_SHARE = 4, 2
"""Fractions (1/n) of a segment. At most a quarter is rewritten of records that were read. If at most half is live, all
live records are. So reclaiming it always gains room.
"""

FILL_STEPS = 8
"""The live shares of segments are compared in steps of this fraction (1/n)."""

SPARED_MAX = 4
"""The number of segments that may be spared before one is reclaimed, so that the search is bounded."""


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Holds memory between a read and the write that moves its records."""

    memory: U8Array


class Allowance(NamedTuple):
    """Describes what of a segment is rewritten: all that is live, or what was read; and how many pages that may
    take.
    """

    all_of_it: bool
    pages: int


class Reclaim:
    """Keeps an empty segment ready for the next writes of each root."""

    def __init__(self, disk: DiskContents, demotion: Demotion, *, rewrite_hot: bool) -> None:
        self._disk = disk
        self._demotion = demotion
        self._rewrite_hot = rewrite_hot
        self.keys_evicted = 0
        self.keys_unkept = 0  # of them, keys that claims were to keep
        self.records_rewritten = self.bytes_rewritten = 0
        # Threads read to and write from this memory: a task that can be cancelled must not own it.
        self._staging: set[Staging] = set()
        self._moving: dict[Root, int] = {}  # the first sequence of the records that were moved last

    async def keep(self, root: Root, retry_s: float) -> None:
        """Makes a segment whenever the root has none ahead, until cancelled."""
        changes = self._disk.numbers.changes
        with changing:
            while True:
                if root.pool.gone:
                    await self._forget_gone(root, root.pool.gone.pop())
                elif not root.pool.wants_segment:
                    await changes.wait_for(lambda: root.pool.wants_segment or bool(root.pool.gone), retry_s)
                elif not await self._next_segment(root):
                    await changes.wait(retry_s)
                    await asyncio.sleep(min(retry_s, 0.05))  # a root that fails at once must not keep the loop busy

    async def _next_segment(self, root: Root) -> bool:
        if root.pool.may_grow:
            if await root.pool.grow():
                return True
            if root.pool.may_grow:  # it failed for another reason than lack of space
                return False
        victim, spared = self.victim(root)
        if victim is None or not root.pool.wants_segment:
            return False
        for segment in spared:
            await self._spare(segment)
        allowance = self._allowance(victim, self._room_pages(root))
        # Other writes must not take the room in the meantime: then all records in use would be lost.
        root.writer.reserved_pages = _with_footer(allowance.pages)
        try:
            if not await root.pool.may_recycle(victim):
                return False
            errors = root.health.write_errors
            again = await self._rewrite(root, victim, allowance) if self._rewrite_hot else []
        except OSError as error:  # it lacks address space or descriptors
            log.warning("disk %s: segments/%s is not reclaimed now: %s", root.name, victim.name, error)
            return False
        finally:
            root.writer.reserved_pages = 0
            self._moving.pop(root, None)
        if root.health.write_errors > errors:
            return False  # records in use may exist only there
        await self.give_up(victim, again)
        return victim.ordinal in root.pool.segments and await root.pool.recycle(victim)

    @property
    def oldest_sequence(self) -> int:
        """Returns the first place in history of the records that may be being moved; PLACE_END: none are."""
        return min(self._moving.values(), default=PLACE_END)

    # --- which segment ---

    def victim(self, root: Root) -> tuple[Segment | None, list[Segment]]:
        """Returns the segment to reclaim next (None: none is sealed), and those that come before it and are spared."""
        by_place, room_pages = sorted(root.pool.sealed(), key=lambda segment: segment.place), self._room_pages(root)
        # The segments written last are reclaimed last, unless they can be rewritten.
        older = -(-len(by_place) // 2)
        eligible = (
            segment
            for number, segment in enumerate(by_place)
            if number < older or self._loses_nothing(segment, room_pages)
        )

        def order(segment: Segment) -> tuple[bool, int, int]:
            return not self._keeps_claimed(segment, room_pages), self._fill(segment), segment.place

        first = heapq.nsmallest(SPARED_MAX + 1, eligible, key=order)
        if first and order(first[0])[0]:  # younger ones may keep what is claimed
            first = heapq.nsmallest(SPARED_MAX + 1, by_place, key=order)
        for number, segment in enumerate(first):
            if not self._is_spared(segment, room_pages):
                return segment, first[:number]
        return (first[0] if first else None), []

    async def _spare(self, segment: Segment) -> None:
        """Moves a segment after the others, until it is read again."""
        catalog = self._disk.catalog
        segment.spared_at = self._disk.numbers.number()
        records = catalog.in_segment(segment.ordinal)
        for start in range(0, len(records), STEP_RECORDS):
            batch = records[start : start + STEP_RECORDS]
            batch = batch[(catalog.segment[batch] == segment.ordinal) & (catalog.page[batch] != 0)]
            catalog.mark_unused(catalog.row[batch])
            await asyncio.sleep(0)

    @staticmethod
    def _room_pages(root: Root) -> int:
        """Returns how many pages of records can be rewritten now, including their entries in the footer."""
        return root.pool.open_segment.free_pages if root.pool.open_segment is not None else 0

    def _fill(self, segment: Segment) -> int:
        """Returns the live share of a segment, in steps."""
        live_bytes = self._disk.catalog.live_pages(segment.ordinal) * PAGE_BYTES
        return -(-live_bytes * FILL_STEPS // segment.size_bytes)

    def _loses_nothing(self, segment: Segment, room_pages: int) -> bool:
        """Returns whether no record of a segment is live, or all live records are rewritten."""
        live_pages = self._disk.catalog.live_pages(segment.ordinal)
        is_little = live_pages * PAGE_BYTES <= segment.size_bytes // WHOLE_SHARE
        return not live_pages or (self._rewrite_hot and is_little and _with_footer(live_pages) <= room_pages)

    def _keeps_claimed(self, segment: Segment, room_pages: int) -> bool:
        """Returns whether all records of claimed keys in a segment can be rewritten."""
        pages = self._disk.catalog.claimed_pages(segment.ordinal)
        most = segment.size_bytes // WHOLE_SHARE // PAGE_BYTES if self._rewrite_hot else 0
        return not pages or (pages <= most and _with_footer(pages) <= room_pages)

    def _is_spared(self, segment: Segment, room_pages: int) -> bool:
        """Returns whether more of a segment was read than would be rewritten, since it was written or was spared
        before.
        """
        allowance = self._allowance(segment, room_pages)
        return self._rewrite_hot and self._disk.catalog.used_pages(segment.ordinal) > allowance.pages

    def _allowance(self, segment: Segment, room_pages: int) -> Allowance:
        """Returns what of a segment is rewritten, if anything is."""
        if self._loses_nothing(segment, room_pages):
            return Allowance(True, self._disk.catalog.live_pages(segment.ordinal))
        if not self._rewrite_hot:
            return Allowance(False, 0)
        claimed_pages = self._disk.catalog.claimed_pages(segment.ordinal)
        whole = segment.size_bytes // WHOLE_SHARE // PAGE_BYTES
        return Allowance(False, min(max(segment.size_bytes // REWRITE_SHARE // PAGE_BYTES, claimed_pages), whole))

    async def _forget_gone(self, root: Root, segment: Segment) -> None:
        """Forgets the keys of a segment with a removed file."""
        root.writer.withdraw(segment)
        await self._disk.numbers.changes.wait_for(lambda: segment.fd == -1)
        lost = await self.forget(segment.ordinal)
        self._disk.catalog.close_segment(segment.ordinal)
        root.pool.empty(segment)
        log.warning(
            "disk %s: segments/%s was removed, and with it %d keys", root.name, segment.name, sum(map(len, lost))
        )

    async def give_up(self, segment: Segment, again: list[np.ndarray]) -> None:
        """Drops all records of this segment from the catalog, and offers the memory rows of `again` for another
        write.
        """
        catalog = self._disk.catalog
        for rows in await self.forget(segment.ordinal):
            self.keys_evicted += len(rows)
        catalog.close_segment(segment.ordinal)
        for rows in again:
            self._demotion.backlog.offer(rows)

    async def forget(self, ordinal: int) -> list[np.ndarray]:
        """Drops every record of a segment from the catalog, some at a time. Returns the catalog rows of the keys that
        were dropped. Other keys may have these rows by now.
        """
        lost = []
        records = self._disk.catalog.in_segment(ordinal)
        for start in range(0, len(records), STEP_RECORDS):
            batch = records[start : start + STEP_RECORDS]
            batch = batch[self._disk.catalog.segment[batch] == ordinal]
            lost.append(self._disk.lose(batch))
            self.keys_unkept += int(np.count_nonzero(self._disk.catalog.claimed[lost[-1]]))
            await asyncio.sleep(0)
        return lost

    # --- rewriting ---

    async def _rewrite(self, root: Root, segment: Segment, allowance: Allowance) -> list[np.ndarray]:
        """Rewrites the claimed and the used records of a segment, or all that are live if they are few. Returns memory
        rows of keys that are better written from memory.
        """
        catalog = self._disk.catalog
        left = allowance.pages * PAGE_BYTES
        from_memory = list[U32Array]()
        records = catalog.in_segment(segment.ordinal)
        numbers = catalog.index.keyspace[catalog.row[records]]
        order = np.argsort(numbers, kind="stable")  # once for all: there may be a thousand keyspaces
        split = np.split(records[order], np.flatnonzero(np.diff(numbers[order])) + 1) if len(records) else []
        by_keyspace = list(zip(distinct(numbers).tolist(), split, strict=True))
        if catalog.claimed_pages(segment.ordinal):
            async for disk_keyspace, complete in self._still_there(segment, by_keyspace):
                claimed = complete[catalog.claimed[catalog.row[complete]] != 0]
                moved = await self._move_some(root, segment, disk_keyspace, claimed, left)
                if moved is None:
                    return from_memory
                left -= moved
        async for disk_keyspace, complete in self._still_there(segment, by_keyspace):
            # From disk even if memory has them: it may evict them before they are written from memory.
            used = catalog.used[catalog.row[complete]] != 0
            wanted = np.concatenate([complete[used], complete[~used]]) if allowance.all_of_it else complete[used]
            moved = await self._move_some(root, segment, disk_keyspace, wanted, left)
            if moved is None:
                break
            left -= moved
            # Bounded as well: if memory holds more than the disk, all of it would be written for ever.
            keyspace = self._disk.keyspace_of(disk_keyspace)
            if keyspace is not None:
                size = int(record_pages(np.asarray(keyspace.part_bytes)).sum()) * PAGE_BYTES
                again = self._resident(keyspace, self._complete(segment, disk_keyspace, complete))[: left // size]
                left -= len(again) * size
                from_memory.append(again)
        return from_memory

    async def _still_there(
        self, segment: Segment, by_keyspace: Sequence[tuple[int, I64Array]]
    ) -> AsyncIterator[tuple[DiskKeyspace, I64Array]]:
        """Yields each disk keyspace with those of its records that are still in this segment, and belong to complete
        keys.
        """
        for number, records in by_keyspace:
            await asyncio.sleep(0)
            disk_keyspace = self._disk.catalog.disk_keyspaces.get(number)
            if disk_keyspace is not None and disk_keyspace.open:  # not cleared before, or while others were moved
                yield disk_keyspace, self._complete(segment, disk_keyspace, records)

    def _complete(self, segment: Segment, disk_keyspace: DiskKeyspace, records: I64Array) -> I64Array:
        """Returns those of these records that lie in this segment now and belong to complete keys of this disk
        keyspace.
        """
        catalog = self._disk.catalog
        rows = catalog.row[records]
        lies_here = (catalog.segment[records] == segment.ordinal) & (catalog.page[records] != 0)
        subset: I64Array = records[
            lies_here & (catalog.index.keyspace[rows] == disk_keyspace.id) & (catalog.missing[rows] == 0)
        ]
        return subset

    def _resident(self, keyspace: Keyspace, records: I64Array) -> U32Array:
        """Returns the memory rows of those keys of these records that memory has, too."""
        entries = self._disk.cache.entries
        rows = entries.find(keyspace, self._disk.catalog.index.keys[self._disk.catalog.row[records]])
        rows = rows[rows >= 0]
        resident: U32Array = np.unique(rows[entries.complete(rows)]).astype(np.uint32)
        return resident

    async def _move_some(
        self, root: Root, segment: Segment, disk_keyspace: DiskKeyspace, records: I64Array, left: int
    ) -> int | None:
        """Rewrites as many of these records as `left` bytes take. Returns their bytes; None: there is no room."""
        sizes = self._disk.payload_bytes(disk_keyspace, records)
        costs = record_pages(sizes) * PAGE_BYTES
        fits = np.cumsum(costs) <= left
        records, sizes = records[fits], sizes[fits]
        step = max(1, REWRITE_BYTES // max(int(sizes.max(initial=1)), 1))
        for start in range(0, len(records), step):
            span = slice(start, start + step)
            if not await self._move(root, segment, disk_keyspace, records[span], sizes[span]):
                return None
        return int(costs[fits].sum())

    async def _move(
        self, root: Root, segment: Segment, disk_keyspace: DiskKeyspace, records: I64Array, sizes: I64Array
    ) -> bool:
        """Reads records and writes them after the newest. Returns False if there is no room for more, or the root is
        off. Raises OSError if the system is out of address space, descriptors or memory.
        """
        if not root.holds(segment):
            return False
        catalog = self._disk.catalog
        rows = catalog.row[records]
        parts = (records - catalog.first[rows]).astype(np.uint16)
        pages = -(-sizes // PAGE_BYTES)
        staging = Staging(reserve_array((int(pages.sum()) * PAGE_BYTES,), np.uint8))
        reads = np.zeros(len(records), READ)
        reads["page"], reads["part"], reads["payload_bytes"] = catalog.page[records], parts, sizes
        reads["address"] = staging.memory.ctypes.data + (np.cumsum(pages) - pages) * PAGE_BYTES
        reads["key"] = catalog.index.keys[rows]
        # Before the read: keys that are deleted from now on are void in their new place, too.
        sequences = self._disk.numbers.sequences(len(records))
        self._moving[root] = int(sequences[0])
        read: asyncio.Future[tuple[U8Array, U64Array]] = self._disk.loop.create_future()

        def on_read(status: U8Array, digests: U64Array) -> None:
            self._staging.discard(staging)
            if not read.done():
                read.set_result((status, digests))

        self._staging.add(staging)
        root.reader.read(segment, disk_keyspace.name, reads, Urgency.REWRITE, on_read)
        status, digests = await read
        if (status == NO_RESOURCES).any():
            raise OSError(errno.ENOMEM, "the system is out of descriptors or memory")
        good = status == OK
        entries = np.zeros(int(good.sum()), ENTRY)
        if not len(entries):
            return True
        entries["key"], entries["part"], entries["payload_bytes"] = reads["key"][good], parts[good], sizes[good]
        entries["sequence"] = sequences[good]
        written: asyncio.Future[None] = self._disk.loop.create_future()
        batch = WriteBatch(disk_keyspace.name, entries, digests[good], reads["address"][good])
        took = root.writer.append(batch, partial(self._moved, disk_keyspace, root, staging, written), rewrite=True)
        if took:
            self._staging.add(staging)
            await written
        return took == len(entries)

    @changing
    def _moved(
        self,
        disk_keyspace: DiskKeyspace,
        root: Root,
        staging: Staging,
        written: asyncio.Future[None],
        segment: Segment,
        entries: Records,
        error: BaseException | None,
    ) -> None:
        self._staging.discard(staging)
        catalog = self._disk.catalog
        if error is None and root.holds(segment):
            self._disk.put(disk_keyspace, entries, segment.ordinal)
            rows = catalog.find(disk_keyspace, entries["key"])
            catalog.mark_unused(rows[rows >= 0])
            self.records_rewritten += len(entries)
            self.bytes_rewritten += int(entries["payload_bytes"].sum())
        if not written.done():
            written.set_result(None)


def _with_footer(pages: int) -> int:
    """Returns the maximum number of pages that this many pages of records take with the footer: for each two of them an
    entry, and a keyspace, of 64 bytes.
    """
    return pages + pages // 64 + 1
