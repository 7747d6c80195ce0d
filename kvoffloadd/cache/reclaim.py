"""Reclaim: whole segments are given up for new ones, the oldest first; what was used since it was written moves on.

Event loop only, one task per root.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.cache.catalog import STEP_RECORDS, Shelf
from kvoffloadd.cache.promotion import Urgency
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.sharedmem import reserve_array
from kvoffloadd.tiers.disk.format import ENTRY
from kvoffloadd.tiers.disk.records import OK, READ
from kvoffloadd.tiers.disk.segment import Batch, Segment

if TYPE_CHECKING:
    from kvoffloadd.cache.disk import Disk
    from kvoffloadd.model import I64Array, U8Array, U64Array
    from kvoffloadd.tiers.disk.root import Root
    from kvoffloadd.tiers.disk.segment import Records

REWRITE_BYTES = 8 << 20
"""What is read and written again in one go."""

REWRITE_SHARE = 4
"""At most this fraction (1/n) of a segment moves on, so that giving it up always gains room."""

WRITE_S = 30.0


class Reclaim:
    """Keeps a segment ready for whatever is written next."""

    def __init__(self, disk: Disk, *, rewrite_hot: bool) -> None:
        self._disk = disk
        self._rewrite_hot = rewrite_hot
        self.keys_evicted = 0
        self.records_rewritten = 0

    async def keep(self, root: Root, retry_s: float) -> None:
        """For ever: whenever the root has no segment ahead, make one."""
        while True:
            if not root.wants_segment:
                await self._disk.wait_for_change(retry_s)
            elif not await self._next_segment(root):
                await self._disk.wait_for_change(retry_s)
                await asyncio.sleep(min(retry_s, 0.05))  # a root that fails at once must not keep the loop busy

    async def _next_segment(self, root: Root) -> bool:
        if root.may_grow:
            if await root.grow():
                return True
            if root.may_grow:  # it failed, and not for want of space
                return False
        oldest = root.oldest()
        if oldest is None or not root.wants_segment:
            return False
        await self.give_up(root, oldest)
        return oldest.ordinal in root.segments and await root.recycle(oldest)

    async def give_up(self, root: Root, segment: Segment) -> None:
        """Nothing of this segment is found any more, after what is in use has moved on."""
        catalog = self._disk.catalog
        again = []
        if self._rewrite_hot:
            again = await self._rewrite(root, segment)
        for rows in await self.forget(segment.ordinal):
            self.keys_evicted += len(rows)
        catalog.close_segment(segment.ordinal)
        for rows in again:
            self._disk.demotion.offer(rows)

    async def forget(self, ordinal: int) -> list[np.ndarray]:
        """Drop every record of a segment from the catalog, some at a time. Returns the keys that went, by their rows,
        which may be in use again already.
        """
        lost = []
        records = self._disk.catalog.in_segment(ordinal)
        for at in range(0, len(records), STEP_RECORDS):
            some = records[at : at + STEP_RECORDS]
            some = some[self._disk.catalog.segment[some] == ordinal]
            lost.append(self._disk.lose(some))
            await asyncio.sleep(0)
        return lost

    # --- what moves on ---

    async def _rewrite(self, root: Root, segment: Segment) -> list[np.ndarray]:
        """Write the used records of a segment again. Returns memory rows of keys that are better written from there."""
        catalog, entries = self._disk.catalog, self._disk.cache.entries
        records = catalog.in_segment(segment.ordinal)
        records = records[catalog.missing[catalog.row[records]] == 0]
        left = segment.size_bytes // REWRITE_SHARE
        from_memory = []
        for number in np.unique(catalog.index.space[catalog.row[records]]).tolist():
            # Looked at anew each time: a clear may have passed while others were moved.
            shelf = catalog.shelves.get(number)
            records = records[(catalog.segment[records] == segment.ordinal) & (catalog.page[records] != 0)]
            mine = records[catalog.index.space[catalog.row[records]] == number]
            if shelf is None or not shelf.open:
                continue
            space = self._disk.space_of(shelf)
            if space is not None:
                keys = catalog.index.keys[catalog.row[mine]]
                rows = entries.index.find(space.id, keys)
                resident = rows >= 0
                resident[resident] = entries.complete(rows[resident])
                # Bounded as well: where memory holds more than the disk, all of it would be written for ever.
                again = np.unique(rows[resident]).astype(np.uint32)[: max(left, 0) // sum(space.part_bytes)]
                left -= len(again) * sum(space.part_bytes)
                from_memory.append(again)
                mine = mine[~resident]
            mine = mine[catalog.used[catalog.row[mine]] != 0]
            sizes = self._disk.payload_bytes(shelf, mine)
            if sizes is None:
                continue  # nobody has registered this group since the start: nobody has used it either
            mine, sizes = mine[np.cumsum(sizes) <= left], sizes[np.cumsum(sizes) <= left]
            step = max(1, REWRITE_BYTES // max(int(sizes.max(initial=1)), 1))
            for at in range(0, len(mine), step):
                some = slice(at, at + step)
                left -= int(sizes[some].sum())
                if not await self._move(root, segment, shelf, mine[some], sizes[some]):
                    return from_memory
        return from_memory

    async def _move(self, root: Root, segment: Segment, shelf: Shelf, records: I64Array, sizes: I64Array) -> bool:
        """Read records and write them behind the newest. False: there is no room for more."""
        catalog = self._disk.catalog
        rows = catalog.row[records]
        parts = (records - catalog.first[rows]).astype(np.uint16)
        pages = -(-sizes // PAGE_BYTES)
        staging = reserve_array((int(pages.sum()) * PAGE_BYTES,), np.uint8)
        reads = np.zeros(len(records), READ)
        reads["page"], reads["part"], reads["payload_bytes"] = catalog.page[records], parts, sizes
        reads["address"] = staging.ctypes.data + (np.cumsum(pages) - pages) * PAGE_BYTES
        reads["key"] = catalog.index.keys[rows]
        read: asyncio.Future[tuple[U8Array, U64Array]] = self._disk.loop.create_future()

        def on_read(status: U8Array, digests: U64Array) -> None:
            if not read.done():
                read.set_result((status, digests))

        root.reader.read(segment, shelf.name, reads, Urgency.REWRITE, on_read)
        status, digests = await read
        good = status == OK
        entries = np.zeros(int(good.sum()), ENTRY)
        if not len(entries):
            return True
        entries["key"], entries["part"], entries["payload_bytes"] = reads["key"][good], parts[good], sizes[good]
        entries["sequence"] = self._disk.numbers.sequences(len(entries))
        written: asyncio.Future[None] = self._disk.loop.create_future()
        batch = Batch(shelf.name, entries, digests[good], reads["address"][good])
        took = root.append(batch, partial(self._moved, shelf, root, written))
        if took:
            await written  # `staging` must live as long
        return took == len(entries)

    def _moved(
        self,
        shelf: Shelf,
        root: Root,
        written: asyncio.Future[None],
        segment: Segment,
        entries: Records,
        error: BaseException | None,
    ) -> None:
        catalog = self._disk.catalog
        if error is None and segment.ordinal in root.segments:
            catalog.put(shelf, entries["key"], entries["part"].astype(np.uint16), segment.ordinal, entries["page"])
            rows = catalog.find(shelf, entries["key"])
            catalog.used[rows[rows >= 0]] = 0
            self.records_rewritten += len(entries)
        if not written.done():
            written.set_result(None)
