"""Reclaim: the oldest segments are reused for new ones; records that were used since they were written are rewritten.

Event loop only, one task per root.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvoffloadd.cache.disk.catalog import STEP_RECORDS, DiskKeyspace
from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.demotion import Demotion
from kvoffloadd.cache.fetches import Urgency
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import PAGE_BYTES, I64Array, U8Array, U32Array, U64Array
from kvoffloadd.sharedmem import reserve_array
from kvoffloadd.storage.disk.format import ENTRY, Records, record_pages
from kvoffloadd.storage.disk.records import OK, READ
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import Segment
from kvoffloadd.storage.disk.writer import WriteBatch

log = logging.getLogger(__name__)

REWRITE_BYTES = 8 << 20
"""Bytes that are read and written again in one go."""

REWRITE_SHARE = 4
"""At most this fraction (1/n) of a segment is rewritten, so that reclaiming it always gains room."""


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Memory between a read and the write that moves what was read."""

    memory: U8Array


class Reclaim:
    """Keeps an empty segment ready for the next writes of each root."""

    def __init__(self, disk: DiskContents, demotion: Demotion, *, rewrite_hot: bool) -> None:
        self._disk = disk
        self._demotion = demotion
        self._rewrite_hot = rewrite_hot
        self.keys_evicted = 0
        self.records_rewritten = 0
        # Threads read to and write from this memory: a task that can be cancelled must not own it.
        self._staging: set[Staging] = set()

    async def keep(self, root: Root, retry_s: float) -> None:
        """Whenever the root has no segment ahead, make one, until cancelled."""
        changes = self._disk.numbers.changes
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
            if root.pool.may_grow:  # it failed, and not for want of space
                return False
        oldest = root.pool.oldest()
        if oldest is None or not root.pool.wants_segment:
            return False
        # Other writes meanwhile must not take the room: then all records in use would be lost.
        root.writer.reserved_pages = oldest.size_bytes // REWRITE_SHARE // PAGE_BYTES if self._rewrite_hot else 0
        try:
            if not await root.pool.may_recycle(oldest):
                return False
            errors = root.health.write_errors
            again = await self._rewrite(root, oldest) if self._rewrite_hot else []
        finally:
            root.writer.reserved_pages = 0
        if root.health.write_errors > errors:
            return False  # what is used of it may be nowhere else
        await self.give_up(oldest, again)
        return oldest.ordinal in root.pool.segments and await root.pool.recycle(oldest)

    async def _forget_gone(self, root: Root, segment: Segment) -> None:
        """The file of this segment was removed: so are its keys."""
        root.writer.withdraw(segment)
        await self._disk.numbers.changes.wait_for(lambda: segment.fd == -1)
        lost = await self.forget(segment.ordinal)
        self._disk.catalog.close_segment(segment.ordinal)
        root.pool.empty(segment)
        log.warning(
            "disk %s: segments/%s was removed, and with it %d keys", root.name, segment.name, sum(map(len, lost))
        )

    async def give_up(self, segment: Segment, again: list[np.ndarray]) -> None:
        """Drop all records of this segment from the catalog; memory rows of `again` are written anew."""
        catalog = self._disk.catalog
        for rows in await self.forget(segment.ordinal):
            self.keys_evicted += len(rows)
        catalog.close_segment(segment.ordinal)
        for rows in again:
            self._demotion.backlog.offer(rows)

    async def forget(self, ordinal: int) -> list[np.ndarray]:
        """Drop every record of a segment from the catalog, some at a time. Returns the catalog rows of the keys that
        were dropped, which other keys may have by now.
        """
        lost = []
        records = self._disk.catalog.in_segment(ordinal)
        for at in range(0, len(records), STEP_RECORDS):
            some = records[at : at + STEP_RECORDS]
            some = some[self._disk.catalog.segment[some] == ordinal]
            lost.append(self._disk.lose(some))
            await asyncio.sleep(0)
        return lost

    # --- rewriting ---

    async def _rewrite(self, root: Root, segment: Segment) -> list[np.ndarray]:
        """Write the used records of a segment again. Returns memory rows of keys that are better written from there."""
        catalog = self._disk.catalog
        left = segment.size_bytes // REWRITE_SHARE
        from_memory = []
        records = catalog.in_segment(segment.ordinal)
        for number in np.unique(catalog.index.keyspace[catalog.row[records]]).tolist():
            disk_keyspace = catalog.disk_keyspaces.get(number)
            if disk_keyspace is None or not disk_keyspace.open:
                continue  # cleared, before this or while others were moved
            # From disk even where memory has them: it may evict them before they are written from there.
            complete = self._complete(segment, disk_keyspace)
            used = complete[catalog.used[catalog.row[complete]] != 0]
            moved = await self._move_used(root, segment, disk_keyspace, used, left)
            if moved is None:
                break
            left -= moved
            # Bounded as well: where memory holds more than the disk, all of it would be written for ever.
            keyspace = self._disk.keyspace_of(disk_keyspace)
            if keyspace is not None:
                size = sum(keyspace.part_bytes)
                again = self._resident(keyspace, self._complete(segment, disk_keyspace))[: left // size]
                left -= len(again) * size
                from_memory.append(again)
        return from_memory

    def _complete(self, segment: Segment, disk_keyspace: DiskKeyspace) -> I64Array:
        """Records of a disk keyspace that lie in this segment now, of keys that are complete."""
        catalog = self._disk.catalog
        records = catalog.in_segment(segment.ordinal)
        rows = catalog.row[records]
        subset: I64Array = records[(catalog.index.keyspace[rows] == disk_keyspace.id) & (catalog.missing[rows] == 0)]
        return subset

    def _resident(self, keyspace: Keyspace, records: I64Array) -> U32Array:
        """Memory rows of those keys of these records that memory has, too."""
        entries = self._disk.cache.entries
        rows = entries.find(keyspace, self._disk.catalog.index.keys[self._disk.catalog.row[records]])
        rows = rows[rows >= 0]
        resident: U32Array = np.unique(rows[entries.complete(rows)]).astype(np.uint32)
        return resident

    async def _move_used(
        self, root: Root, segment: Segment, disk_keyspace: DiskKeyspace, records: I64Array, left: int
    ) -> int | None:
        """Write as many of these records again as `left` bytes take. Returns their bytes; None: there is no room."""
        sizes = self._disk.payload_bytes(disk_keyspace, records)
        if sizes is None:
            return 0  # the group was not registered since the start, so its keys were not used either
        costs = record_pages(sizes) * PAGE_BYTES
        fits = np.cumsum(costs) <= left
        records, sizes = records[fits], sizes[fits]
        step = max(1, REWRITE_BYTES // max(int(sizes.max(initial=1)), 1))
        for at in range(0, len(records), step):
            some = slice(at, at + step)
            if not await self._move(root, segment, disk_keyspace, records[some], sizes[some]):
                return None
        return int(costs[fits].sum())

    async def _move(
        self, root: Root, segment: Segment, disk_keyspace: DiskKeyspace, records: I64Array, sizes: I64Array
    ) -> bool:
        """Read records and write them behind the newest. False: there is no room for more, or the root is off."""
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
        read: asyncio.Future[tuple[U8Array, U64Array]] = self._disk.loop.create_future()

        def on_read(status: U8Array, digests: U64Array) -> None:
            self._staging.discard(staging)
            if not read.done():
                read.set_result((status, digests))

        self._staging.add(staging)
        root.reader.read(segment, disk_keyspace.name, reads, Urgency.REWRITE, on_read)
        status, digests = await read
        good = status == OK
        entries = np.zeros(int(good.sum()), ENTRY)
        if not len(entries):
            return True
        entries["key"], entries["part"], entries["payload_bytes"] = reads["key"][good], parts[good], sizes[good]
        entries["sequence"] = self._disk.numbers.sequences(len(entries))
        written: asyncio.Future[None] = self._disk.loop.create_future()
        batch = WriteBatch(disk_keyspace.name, entries, digests[good], reads["address"][good])
        took = root.writer.append(batch, partial(self._moved, disk_keyspace, root, staging, written), rewrite=True)
        if took:
            self._staging.add(staging)
            await written
        return took == len(entries)

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
            catalog.put(
                disk_keyspace, entries["key"], entries["part"].astype(np.uint16), segment.ordinal, entries["page"]
            )
            rows = catalog.find(disk_keyspace, entries["key"])
            catalog.used[rows[rows >= 0]] = 0
            self.records_rewritten += len(entries)
        if not written.done():
            written.set_result(None)
