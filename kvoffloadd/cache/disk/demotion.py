"""Demotion: complete, sealed keys are written to disk behind what the engines do, within a budget.

Event loop only. The write lanes read slots of rows that are held here until the write has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvoffloadd.cache.disk.catalog import DiskKeyspace
from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.policy.ghost import UseCounts
from kvoffloadd.changes import Changes
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array
from kvoffloadd.sharedmem import reserve_array
from kvoffloadd.storage.disk.format import ENTRY, Records
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import Segment
from kvoffloadd.storage.disk.writer import WriteBatch

BATCH_BYTES = 8 << 20
BATCH_KEYS = 256
BATCH_SHARE = 64
"""What one write takes at most: bytes, keys, and a fraction (1/n) of memory, since what is written can't be evicted."""

LOOK_AHEAD_S = 0.05
"""How often the next victims of the memory tier are inspected."""

LOOK_AHEAD_KEYS = 4096
ROOM_S = 5.0
"""How long a batch waits for a segment before it is dropped."""

OFFERS_PER_TURN = 64
"""Batches that one turn of the loop inspects: after a clear all that wait may be void."""

ADMISSION_SLOTS = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How the disk tier is used."""

    on_evict: bool  # write only keys that memory is about to evict
    second_use: bool  # write only keys that were used again
    write_bytes_per_s: int  # 0: no limit
    write_ops_per_s: int  # 0: no limit
    backlog_bytes: int
    rewrite_hot: bool
    retry_s: float
    stuck_s: float


@dataclass(frozen=True, slots=True, eq=False)
class DemotionBatch:
    """Keys to be written."""

    keyspace: Keyspace
    rows: U32Array  # of memory
    generations: U16Array  # of each key's first part: if it has changed, the row is another key's
    tries: int = 0  # so far


@dataclass(slots=True, eq=False)
class DemotionWrite:
    """One batch under way. Its rows are held until all records are written."""

    offer: DemotionBatch
    disk_keyspace: DiskKeyspace
    left: int  # records that are not written yet
    failed: bool = False
    dropped: bool = False  # some records were not taken by any root
    again: bool = False  # and the keys are to be offered again


@dataclass(slots=True)
class Budget:
    """A token bucket for bytes and operations a second; 0: no limit. May go into debt for one batch."""

    bytes_per_s: int
    ops_per_s: int
    free_at_s: float = 0.0

    def delay_s(self, now: float) -> float:
        """Seconds until the next batch may begin."""
        return max(0.0, self.free_at_s - now)

    def spend(self, num_bytes: int, ops: int, now: float) -> None:
        """Count a batch that begins now."""
        for_bytes = num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        for_ops = ops / self.ops_per_s if self.ops_per_s else 0.0
        self.free_at_s = max(self.free_at_s, now) + max(for_bytes, for_ops)


@dataclass(slots=True)
class DemotionCounters:
    """What was written since the start."""

    keys: int = 0
    records: int = 0
    bytes: int = 0
    not_demoted: Counter[str] = field(default_factory=Counter)  # keys that were to be written and were not, by reason


def only_in_memory(disk: DiskContents, keyspace: Keyspace, rows: U32Array) -> BoolArray:
    """Which of these keys could be on disk, and are not."""
    disk_keyspace = disk.of(keyspace)
    if disk_keyspace is None or not disk_keyspace.open or not len(rows):
        return np.zeros(len(rows), bool)
    found: BoolArray = disk.catalog.find(disk_keyspace, disk.cache.entries.index.keys[rows]) < 0
    return found


class Demotion:
    """The backlog of keys that wait to be written, and the writes under way."""

    def __init__(self, disk: DiskContents, settings: DiskSettings) -> None:
        self._disk = disk
        self._cache = disk.cache
        self._settings = settings
        self.counters = DemotionCounters()
        self.backlog_bytes = 0
        self._queue: deque[DemotionBatch] = deque()
        self._writes: set[DemotionWrite] = set()
        # By row of memory: 1 if it waits to be written.
        self._demoting: U8Array = reserve_array((disk.cache.entries.max_rows,), np.uint8)
        self._queue_changes = Changes()
        self._again: set[Keyspace] = set()
        self._again_changes = Changes()
        self._batch_bytes = min(BATCH_BYTES, disk.cache.tier.capacity_bytes // BATCH_SHARE)
        self._budget = Budget(settings.write_bytes_per_s, settings.write_ops_per_s)
        self._uses = UseCounts(ADMISSION_SLOTS) if settings.second_use else None

    @property
    def holds(self) -> int:
        """Rows that are being written."""
        return sum(len(write.offer.rows) for write in self._writes)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that wait to be written or are being written."""
        return self.backlog_bytes + sum(sum(w.offer.keyspace.part_bytes) * len(w.offer.rows) for w in self._writes)

    # --- offers ---

    def reset(self, rows: U32Array) -> None:
        """These rows are used for new keys."""
        self._demoting[rows] = 0

    def sealed(self, parts: I64Array) -> None:
        """The checksums of these parts are known now."""
        rows = distinct(self._cache.entries.parts.row[parts])
        if self._uses is not None:
            # Ranks store their parts one after the other: that is one use of the key, not many.
            rows = self._admitted(self._whole(rows))
        if not self._settings.on_evict:
            self.offer(rows)

    def adopted(self, rows: U32Array) -> None:
        """These keys were found in memory at the start, sealed."""
        if self._uses is None:
            for keyspace, _ in self._cache.entries.by_keyspace(rows):
                self.offer_again(keyspace)  # there may be more of them than the backlog has room for

    def used(self, rows: U32Array) -> None:
        """These keys were used in memory."""
        if self._uses is not None:
            rows = self._admitted(rows)
            if not self._settings.on_evict:
                self.offer(rows)

    def evicted(self, rows: U32Array) -> None:
        """These keys are about to leave memory. Count those that were to be written, and never were offered: they had
        no checksum yet; or, where eviction decides, memory needed their room before it was looked ahead to them.
        """
        rows = self._known(rows)
        for keyspace, indices in self._cache.entries.by_keyspace(rows):
            gone = rows[indices]
            offered = self._sealed(keyspace, gone)
            if self._settings.on_evict:
                offered &= self._demoting[gone] > 0
            lost = only_in_memory(self._disk, keyspace, gone[~offered])
            if lost.any():
                self.counters.not_demoted["evicted"] += int(np.count_nonzero(lost))

    def offer(self, rows: U32Array) -> None:
        """Write these keys, if they are complete, sealed and not on disk."""
        rows = self._cache.entries.live(rows)
        for keyspace, indices in self._cache.entries.by_keyspace(rows):
            offered = rows[indices]
            wanted = offered[self._writable(keyspace, offered)]
            if len(wanted):
                self._enqueue(keyspace, wanted, 0)

    def offer_again(self, keyspace: Keyspace) -> None:
        """Keys of this keyspace were not written, or what was written is void: offer all keys that only memory has, as
        soon as some root may take them.
        """
        if not self._settings.on_evict:  # then they are offered before they are evicted
            self._again.add(keyspace)
            self._again_changes.notify_all()

    def _whole(self, rows: U32Array) -> U32Array:
        """The subset of the keys whose parts are all sealed."""
        rows = self._cache.entries.live(rows)
        whole = np.zeros(len(rows), bool)
        for keyspace, indices in self._cache.entries.by_keyspace(rows):
            whole[indices] = self._sealed(keyspace, rows[indices])
        return rows[whole]

    def _sealed(self, keyspace: Keyspace, rows: U32Array) -> BoolArray:
        entries = self._cache.entries
        records = entries.parts.run(entries.first[rows], keyspace.schema.parts)
        sealed: BoolArray = (entries.parts.state[records] == PartState.SEALED).all(axis=1)
        return sealed

    def _admitted(self, rows: U32Array) -> U32Array:
        """Count a use of each key. Returns the subset that was used before."""
        index = self._cache.entries.index
        if self._uses is None or not len(rows):
            return rows
        tags = index.hash(index.keyspace[rows], index.keys[rows]).astype(np.uint32)
        known, uses = self._uses.look_up(tags)
        self._uses.record(tags, np.minimum(uses + np.uint8(1), np.uint8(15)))
        return rows[known]

    def _known(self, rows: U32Array) -> U32Array:
        """The subset of the keys that were used twice; all, if `second_use` is off."""
        index = self._cache.entries.index
        if self._uses is None or not len(rows):
            return rows
        tags = index.hash(index.keyspace[rows], index.keys[rows]).astype(np.uint32)
        return rows[self._uses.look_up(tags)[1] >= 2]

    def _enqueue(self, keyspace: Keyspace, rows: U32Array, tries: int) -> None:
        size = sum(keyspace.part_bytes)
        if not tries:
            rows = rows[self._demoting[rows] == 0]
        room = max(0, self._settings.backlog_bytes - self.backlog_bytes) // size
        if room < len(rows):
            self.counters.not_demoted["backlog"] += len(rows) - room
            rows = rows[:room]
        if not len(rows):
            return
        first = self._cache.entries.first[rows]
        self._demoting[rows] = 1
        self._queue.append(DemotionBatch(keyspace, rows, self._cache.entries.parts.generation[first], tries))
        self.backlog_bytes += size * len(rows)
        self._queue_changes.notify_all()

    def _writable(self, keyspace: Keyspace, rows: U32Array) -> BoolArray:
        """Which keys are complete, sealed and not on disk."""
        flags = self._sealed(keyspace, rows)
        flags[flags] = only_in_memory(self._disk, keyspace, rows[flags])
        return flags

    # --- writing ---

    async def run(self) -> None:
        """Write what is offered, until cancelled."""
        while True:
            offer = self._take()
            if offer is not None:
                await self._write(offer)
            if offer is not None or self._queue:
                await asyncio.sleep(0)  # while there is room for the next batch, `_write` does not wait
                continue
            if not await self._queue_changes.wait(LOOK_AHEAD_S if self._settings.on_evict else None):
                self._look_ahead()

    async def run_again(self) -> None:
        """Offer the keyspaces of `offer_again` as soon as they may be written, until cancelled."""
        while True:
            await self._again_changes.wait_for(lambda: bool(self._again))
            ready = [keyspace for keyspace in self._again if keyspace.retired or self._may_write(keyspace)]
            for keyspace in ready:
                self._again.discard(keyspace)  # a write that fails from now on adds it again
                await self._offer_all(keyspace, math.inf)
            if not ready:
                await self._disk.numbers.changes.wait(self._settings.retry_s)

    def _may_write(self, keyspace: Keyspace) -> bool:
        """Whether a root works whose manifest has the keyspace's epoch."""
        disk_keyspace = self._disk.of(keyspace)
        return disk_keyspace is not None and any(
            r.state == RootState.OK and r.directory.has_epoch(disk_keyspace.name) for r in self._disk.roots
        )

    async def flush(self, deadline_s: float) -> int:
        """Write all that is in memory alone, until the deadline. Returns the bytes that were not written by then."""
        until = self._disk.loop.time() + deadline_s
        left_bytes = {
            keyspace: await self._offer_all(keyspace, until)
            for keyspace in list(self._cache.entries.keyspaces.values())
        }
        await self._until(0, until)
        for keyspace in [keyspace for keyspace in self._again if not keyspace.retired]:  # no root took what it offered
            left_bytes[keyspace] = await self._left_bytes(keyspace)
        return sum(left_bytes.values()) + self.unwritten_bytes

    async def _left_bytes(self, keyspace: Keyspace) -> int:
        """Bytes of a keyspace that only memory has, without those that wait or are being written."""
        left, entries = 0, self._cache.entries
        for rows in entries.scan(keyspace):
            rows = entries.live(rows)
            rows = self._known(rows[self._writable(keyspace, rows)])
            left += int(np.count_nonzero(self._demoting[rows] == 0))
            await asyncio.sleep(0)
        return left * sum(keyspace.part_bytes)

    async def _offer_all(self, keyspace: Keyspace, until: float) -> int:
        """Offer the keys of a keyspace that only memory has, as the backlog has room, until the loop time `until`.
        Returns the bytes that were not offered.
        """
        left = 0
        entries, size = self._cache.entries, max(sum(keyspace.part_bytes), 1)
        step = max(1, self._settings.backlog_bytes // 2 // size)
        for rows in entries.scan(keyspace):
            rows = entries.live(rows)
            rows = self._known(rows[self._writable(keyspace, rows)])
            for at in range(0, len(rows), step):
                await self._until(max(0, self._settings.backlog_bytes - step * size), until)
                if self._disk.loop.time() >= until:
                    left += int(np.count_nonzero(self._demoting[rows[at:]] == 0))  # the others are in the backlog
                    break
                self.offer(rows[at : at + step])
            await asyncio.sleep(0)
        return left * size

    async def _until(self, backlog_bytes: int, until: float) -> None:
        """Wait until no more than this waits to be written (0: nor is being written), or until loop time `until`."""
        while self._disk.loop.time() < until:
            if self.backlog_bytes <= backlog_bytes and (backlog_bytes or not self._writes):
                return
            await self._disk.numbers.changes.wait(LOOK_AHEAD_S)

    def _take(self) -> DemotionBatch | None:
        """Take the next keys to write out of the queue: of one keyspace, still the same keys, no more than one write
        takes. None: there are none, at least not among the first batches.
        """
        for _ in range(min(OFFERS_PER_TURN, len(self._queue))):
            offer = self._queue.popleft()
            size = sum(offer.keyspace.part_bytes)
            count = max(1, min(BATCH_KEYS, self._batch_bytes // size))
            if len(offer.rows) > count:
                self._queue.appendleft(
                    DemotionBatch(offer.keyspace, offer.rows[count:], offer.generations[count:], offer.tries)
                )
            rows, generations = offer.rows[:count], offer.generations[:count]
            self.backlog_bytes -= size * len(rows)
            entries = self._cache.entries
            same = entries.state[rows] == RowState.LIVE
            same &= entries.index.keyspace[rows] == offer.keyspace.id
            live = np.flatnonzero(same)
            same[live] = entries.parts.generation[entries.first[rows[live]]] == generations[live]
            self.counters.not_demoted["evicted"] += int(len(rows) - same.sum())
            rows, generations = rows[same], generations[same]
            writable = self._writable(offer.keyspace, rows)
            self._demoting[rows[~writable]] = 0
            if writable.any():
                return DemotionBatch(offer.keyspace, rows[writable], generations[writable], offer.tries)
        return None

    async def _write(self, offer: DemotionBatch) -> None:
        keyspace, disk_keyspace = offer.keyspace, self._disk.of(offer.keyspace)
        if disk_keyspace is None:  # it was when the offer was taken
            return
        sizes = keyspace.part_bytes
        usable = [
            root
            for root in self._disk.roots
            if root.state == RootState.OK and root.directory.may_get_epoch(disk_keyspace.name)
        ]
        if not usable or max(sizes) > max(root.writer.payload_bytes_max for root in usable):
            self.counters.not_demoted["too large" if usable else self._why_not()] += len(offer.rows)
            self._demoting[offer.rows] = 0
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
        write = DemotionWrite(offer, disk_keyspace, len(records))
        self._cache.hold(offer.rows)
        self._writes.add(write)
        now = self._disk.loop.time()
        total = int(batch["payload_bytes"].sum())
        if delay := self._budget.delay_s(now):
            await asyncio.sleep(delay)
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
        """Why no root takes keys of a keyspace: a label of the metric."""
        states = {root.state for root in self._disk.roots}
        return "clear not noted" if RootState.OK in states else "no room" if RootState.FULL in states else "no disk"

    async def _append(self, write: DemotionWrite, batch: WriteBatch) -> int:
        """Append the head of a batch to the root with the least load. Returns how many records it took; 0: no room."""
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

    def _written(
        self, write: DemotionWrite, root: Root, segment: Segment, entries: Records, error: BaseException | None
    ) -> None:
        if error is None and root.holds(segment):
            parts = entries["part"].astype(np.uint16)
            self._disk.catalog.put(write.disk_keyspace, entries["key"], parts, segment.ordinal, entries["page"])
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
        self._demoting[offer.rows] = 0
        if write.again:
            self.offer_again(offer.keyspace)
        elif write.dropped:
            pass  # counted
        elif write.failed and not offer.tries:
            rows = self._cache.entries.live(offer.rows)
            self._enqueue(offer.keyspace, rows, 1)
        elif write.failed:
            self.counters.not_demoted["write failed"] += len(offer.rows)
        elif write.disk_keyspace is not self._disk.of(
            offer.keyspace
        ):  # a root that came late knew of a clear: what was written is void
            self.offer(offer.rows)
        else:
            self.counters.keys += len(offer.rows)
        self._cache.unhold(offer.rows)

    # --- before they are evicted ---

    def _look_ahead(self) -> None:
        """Offer what the memory tier would evict next."""
        tier = self._cache.tier
        for size, queue in self._cache.eviction.queues.items():
            # Slots per key as the keys have them now, not as they might have at most.
            per_key = max(1, (tier.num_slots(size) - tier.num_free(size)) // max(1, len(queue.policy)))
            ahead = min(LOOK_AHEAD_KEYS, max(1, tier.num_slots(size) // per_key // 8))
            if tier.num_free(size) // per_key >= ahead or self.backlog_bytes >= self._settings.backlog_bytes // 2:
                continue
            self.offer(self._known(self._cache.eviction.victims(queue, ahead)))
