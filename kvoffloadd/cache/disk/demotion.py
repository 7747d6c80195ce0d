"""Demotion: writes complete, sealed keys to disk in the background, within a budget.

Event loop only. The write lanes read slots of rows that are held here until the write has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.cache.lower.backlog import LOOK_AHEAD_S, Backlog, BacklogBatch, Budget
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import BoolArray, U32Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.storage.disk.format import ENTRY, Records
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import PLACE_END, Segment
from kvoffloadd.storage.disk.writer import WriteBatch

BATCH_BYTES = 8 << 20
BATCH_SHARE = 64
"""The maximum size of one write: bytes, and a fraction (1/n) of memory, since keys that are being written can't be
evicted.
"""

ROOM_S = 5.0
"""The time for which a batch waits for a segment before it is dropped."""


@dataclass(slots=True, eq=False)
class DemotionWrite:
    """Describes one batch under way. Its rows are held until all records are written."""

    offer: BacklogBatch
    disk_keyspace: DiskKeyspace
    left: int  # records that are not written yet
    failed: bool = False
    dropped: bool = False  # no root took some of the records
    again: bool = False  # and the keys must be offered again
    first_sequence: int = 0  # of its records


@dataclass(slots=True)
class DemotionCounters:
    """Counts what was written since the start."""

    keys: int = 0
    records: int = 0
    bytes: int = 0
    not_demoted: Counter[str] = field(default_factory=Counter)  # keys that were due and not written, by reason


def only_in_memory(disk: DiskContents, keyspace: Keyspace, rows: U32Array) -> BoolArray:
    """Returns which of these keys could be on disk, and are not."""
    disk_keyspace = disk.of(keyspace)
    if disk_keyspace is None or not disk_keyspace.open or not len(rows):
        return np.zeros(len(rows), bool)
    found: BoolArray = disk.catalog.find(disk_keyspace, disk.cache.entries.index.keys[rows]) < 0
    return found


class Demotion:
    """Keeps the backlog of keys that wait to be written, and the writes under way."""

    def __init__(self, disk: DiskContents) -> None:
        self._disk = disk
        self._cache = disk.cache
        self._config = config = disk.config
        self.counters = DemotionCounters()
        self._writes: set[DemotionWrite] = set()
        self._again: set[Keyspace] = set()
        self._again_changes = Changes()
        self._budget = Budget(config.write_bytes_per_s, config.write_ops_per_s)
        self.backlog = Backlog(
            disk.cache,
            partial(only_in_memory, disk),
            self.counters.not_demoted,
            on_evict=config.on_evict,
            second_use=config.second_use,
            backlog_bytes=config.backlog_bytes,
            batch_bytes=min(BATCH_BYTES, disk.cache.tier.capacity_bytes // BATCH_SHARE),
        )

    @property
    def holds(self) -> int:
        """Returns the number of rows that are being written."""
        return sum(len(write.offer.rows) for write in self._writes)

    @property
    def oldest_sequence(self) -> int:
        """Returns the first place in history of the records that are being written; PLACE_END: none are."""
        return min((write.first_sequence for write in self._writes), default=PLACE_END)

    @property
    def backlog_bytes(self) -> int:
        """Returns the bytes that wait to be written."""
        return self.backlog.bytes

    @property
    def unwritten_bytes(self) -> int:
        """Returns the bytes that wait to be written or are being written."""
        return self.backlog_bytes + sum(sum(w.offer.keyspace.part_bytes) * len(w.offer.rows) for w in self._writes)

    # --- offers ---

    @changing
    def adopted(self, rows: U32Array) -> None:
        """Offers sealed keys that were found in memory at the start."""
        if not self._config.second_use:
            for keyspace, _ in self._cache.entries.by_keyspace(rows):
                self.offer_again(keyspace)  # there may be more than the backlog has room for

    @changing
    def offer_again(self, keyspace: Keyspace) -> None:
        """Offers all keys of this keyspace that only memory has, as soon as some root may take them. Called if its keys
        were not written, or their records are void.
        """
        if not self._config.on_evict:  # otherwise they are offered before they are evicted
            self._again.add(keyspace)
            self._again_changes.notify_all()

    # --- writing ---

    async def run(self) -> None:
        """Writes the offered keys, until cancelled."""
        with changing:
            while True:
                await self._write_next()
                await asyncio.sleep(0)  # while there is room for the next batch, `_write` does not wait

    async def _write_next(self) -> None:
        """Runs in a separate frame, so that nothing refers to a keyspace while there is nothing to write."""
        if (batch := await self.backlog.next()) is not None:
            await self._write(batch)

    async def run_again(self) -> None:
        """Offers the keyspaces of `offer_again` as soon as they may be written, until cancelled."""
        with changing:
            while True:
                await self._again_changes.wait_for(lambda: bool(self._again))
                ready = [keyspace for keyspace in self._again if keyspace.retired or self._may_write(keyspace)]
                for keyspace in ready:
                    self._again.discard(keyspace)  # a write that fails from now on adds it again
                    await self._offer_all(keyspace, math.inf)
                if not ready:
                    await self._disk.numbers.changes.wait(self._config.retry_s)

    def _may_write(self, keyspace: Keyspace) -> bool:
        """Returns whether a root works that has the keyspace's epoch in its manifest."""
        disk_keyspace = self._disk.of(keyspace)
        return disk_keyspace is not None and any(
            r.state == RootState.OK and r.directory.has_epoch(disk_keyspace.name) for r in self._disk.roots
        )

    async def flush(self, deadline_s: float) -> int:
        """Writes all keys that only memory has, until the deadline. Returns the bytes that were not written by then."""
        until = self._disk.loop.time() + deadline_s
        left_bytes = {
            keyspace: await self._offer_all(keyspace, until)
            for keyspace in list(self._cache.entries.keyspaces.values())
        }
        await self._until(0, until)
        for keyspace in [keyspace for keyspace in self._again if not keyspace.retired]:  # no root took its keys
            left_bytes[keyspace] = await self._left_bytes(keyspace)
        return sum(left_bytes.values()) + self.unwritten_bytes

    async def _left_bytes(self, keyspace: Keyspace) -> int:
        """Returns the bytes of a keyspace that only memory has, without those that wait or are being written."""
        left, entries = 0, self._cache.entries
        for rows in entries.scan(keyspace):
            rows = entries.live(rows)
            rows = self.backlog.known(rows[self.backlog.writable(keyspace, rows)])
            left += self.backlog.num_outside(rows)
            await asyncio.sleep(0)
        return left * sum(keyspace.part_bytes)

    async def _offer_all(self, keyspace: Keyspace, until: float) -> int:
        """Offers the keys of a keyspace that only memory has, as the backlog has room, until the loop time `until`.
        Returns the bytes that were not offered.
        """
        left = 0
        entries, size = self._cache.entries, max(sum(keyspace.part_bytes), 1)
        step = max(1, self._config.backlog_bytes // 2 // size)
        for rows in entries.scan(keyspace):
            rows = entries.live(rows)
            rows = self.backlog.known(rows[self.backlog.writable(keyspace, rows)])
            for start in range(0, len(rows), step):
                await self._until(max(0, self._config.backlog_bytes - step * size), until)
                if self._disk.loop.time() >= until:
                    left += self.backlog.num_outside(rows[start:])  # the others are in the backlog
                    break
                self.backlog.offer(rows[start : start + step])
            await asyncio.sleep(0)
        return left * size

    async def _until(self, backlog_bytes: int, until: float) -> None:
        """Waits until at most `backlog_bytes` wait to be written (0: and no write is under way), or until loop time
        `until`.
        """
        while self._disk.loop.time() < until:
            if self.backlog_bytes <= backlog_bytes and (backlog_bytes or not self._writes):
                return
            await self._disk.numbers.changes.wait(LOOK_AHEAD_S)

    async def _write(self, offer: BacklogBatch) -> None:
        keyspace, disk_keyspace = offer.keyspace, self._disk.of(offer.keyspace)
        if disk_keyspace is None:  # it was open when the offer was taken
            return
        sizes = keyspace.part_bytes
        usable = [
            root
            for root in self._disk.roots
            if root.state == RootState.OK and root.directory.may_get_epoch(disk_keyspace.name)
        ]
        if not usable or max(sizes) > max(root.writer.payload_bytes_max for root in usable):
            self.counters.not_demoted["too large" if usable else self._why_not()] += len(offer.rows)
            self.backlog.settle(offer.rows)
            if not usable:
                self.offer_again(keyspace)
            return
        entries = self._cache.entries
        records = entries.parts.run(entries.first[offer.rows], keyspace.schema.parts).ravel()
        batch = np.zeros(len(records), ENTRY)
        batch["key"] = np.repeat(entries.index.keys[offer.rows], keyspace.schema.parts, axis=0)
        batch["sequence"] = self._disk.numbers.sequences(len(records))
        batch["payload_bytes"] = np.tile(np.asarray(sizes, np.uint64), len(offer.rows))
        batch["part"] = np.tile(np.arange(keyspace.schema.parts, dtype=np.uint32), len(offer.rows))
        write = DemotionWrite(offer, disk_keyspace, len(records), first_sequence=int(batch["sequence"][0]))
        self._cache.hold(offer.rows)
        self._writes.add(write)
        now = self._disk.loop.time()
        total = int(batch["payload_bytes"].sum())
        if delay := self._budget.delay_s(now):
            await asyncio.sleep(delay)
            live = np.repeat(entries.state[offer.rows] == RowState.LIVE, keyspace.schema.parts)
            if not live.all():  # some were deleted meanwhile
                batch, records = batch[live], records[live]
                self._settle(write, int(np.count_nonzero(~live)), failed=False)
        self._budget.spend(total, len(records), self._disk.loop.time())
        digests, addresses = entries.parts.digest[records], self._cache.entries.payload_addresses(records)
        begin = 0
        while begin < len(records):
            part = WriteBatch(disk_keyspace.name, batch[begin:], digests[begin:], addresses[begin:])
            took = await self._append(write, part)
            if not took:
                noted = any(
                    root.state == RootState.OK and root.directory.has_epoch(disk_keyspace.name)
                    for root in self._disk.roots
                )
                self.counters.not_demoted["no room" if noted else self._why_not()] += len(offer.rows)
                write.dropped, write.again = True, not noted
                self._settle(write, len(records) - begin, failed=False)
                return
            begin += took

    def _why_not(self) -> str:
        """Returns why no root takes keys of a keyspace: a label of the metric."""
        states = {root.state for root in self._disk.roots}
        return "clear not noted" if RootState.OK in states else "no room" if RootState.FULL in states else "no disk"

    async def _append(self, write: DemotionWrite, batch: WriteBatch) -> int:
        """Appends the head of a batch to the root with the least load. Returns how many records it took; 0: no room."""
        until = self._disk.loop.time() + ROOM_S
        while True:
            largest = int(batch.entries["payload_bytes"].max())
            roots = [
                r for r in self._disk.roots if r.state == RootState.OK and r.directory.may_get_epoch(batch.keyspace)
            ]
            roots = [root for root in roots if root.writer.payload_bytes_max >= largest]
            for root in sorted(roots, key=lambda root: root.writer.load):
                if root.writer.writing < root.writer.depth:
                    took = root.writer.append(batch, partial(self._written, write, root))
                    if took:
                        return took
            left = until - self._disk.loop.time()
            busy = any(root.writer.writing >= root.writer.depth for root in roots)
            if not roots or (left <= 0 and not busy):
                return 0
            await self._disk.numbers.changes.wait(max(left, LOOK_AHEAD_S))

    @changing
    def _written(
        self, write: DemotionWrite, root: Root, segment: Segment, entries: Records, error: BaseException | None
    ) -> None:
        if error is None and root.holds(segment):
            self._disk.put(write.disk_keyspace, entries, segment.ordinal)
            self.counters.records += len(entries)
            self.counters.bytes += int(entries["payload_bytes"].sum())
        self._settle(write, len(entries), failed=error is not None)

    def _settle(self, write: DemotionWrite, count: int, *, failed: bool) -> None:
        write.left -= count
        write.failed |= failed
        if write.left:
            return
        self._writes.discard(write)
        offer = write.offer
        self.backlog.settle(offer.rows)
        if write.again:
            self.offer_again(offer.keyspace)
        elif write.dropped:
            pass  # counted
        elif write.failed and not offer.tries:
            rows = self._cache.entries.live(offer.rows)
            self.backlog.enqueue(offer.keyspace, rows, 1)
        elif write.failed:
            self.counters.not_demoted["write failed"] += len(offer.rows)
        elif write.disk_keyspace is not self._disk.of(
            offer.keyspace
        ):  # the clears of a root that came late have voided the written records
            self.backlog.offer(offer.rows)
        else:
            self.counters.keys += len(offer.rows)
        self._cache.unhold(offer.rows)
