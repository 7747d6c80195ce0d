"""One directory of the disk tier: its segments, its lanes, its health.

Ownership: every field belongs to the event loop. Threads of the two lanes run the functions of `records`, `segments`
and `recovery` on file descriptors and memory that their arguments name; whoever submits them keeps both alive.
A system call that hangs can't be ended: whoever waits for one here has a deadline of his own, or nothing depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.lanes import CancelledWork, Lane, Ticket
from kvoffloadd.model import PAGE_BYTES, I64Array, U64Array
from kvoffloadd.sharedmem import reserve_array
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.format import SegmentHeader, encode_records, footer_pages, record_pages
from kvoffloadd.storage.disk.health import Health, RootState, is_trouble, said
from kvoffloadd.storage.disk.manifest import Manifest
from kvoffloadd.storage.disk.probe import Probe
from kvoffloadd.storage.disk.reader import Reader
from kvoffloadd.storage.disk.records import write_records
from kvoffloadd.storage.disk.recovery import Recovered
from kvoffloadd.storage.disk.rootdirectory import FIRST, RootDirectory
from kvoffloadd.storage.disk.scan import may_seal, seal_found, take_census
from kvoffloadd.storage.disk.segment import SEGMENTS_MIN, Records, Segment, SequenceNumbers, WriteBatch
from kvoffloadd.storage.disk.segments import seal_segment

log = logging.getLogger(__name__)

OVERHEAD_BYTES = 128 << 10
"""Of the capacity, for the manifest, the directories and the block maps of the file system."""


@dataclass(frozen=True, slots=True)
class RootSettings:
    """What all roots share. `direct`: True, False, or None for where the file system allows."""

    segment_bytes: int
    read_threads: int
    write_threads: int
    direct: bool | None
    min_free_bytes: int
    retry_s: float
    stuck_s: float


@dataclass(slots=True)
class RootCounters:
    """Since the start. `damaged_*`: found whenever the root was taken in."""

    written_bytes: int = 0
    segments_recycled: int = 0
    damaged_at_start: int = 0
    damaged_segments: int = 0


class Root:
    """`ordinals` and `numbers` are shared by all roots of a tier: the next segment's name in this run, and on disk."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        settings: RootSettings,
        files: Files,
        loop: asyncio.AbstractEventLoop,
        numbers: SequenceNumbers,
    ) -> None:
        self.path = path
        self.home = RootDirectory(path, files, settings.direct, Lane(f"probe-{path.name}", 1, loop))
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = min(settings.segment_bytes, capacity_bytes // SEGMENTS_MIN // PAGE_BYTES * PAGE_BYTES)
        self.health = Health(path)
        self.segments: dict[int, Segment] = {}
        self.counters = RootCounters()
        self.changes = numbers.changes
        self.read_lane = Lane(f"read-{path.name}", settings.read_threads, loop)
        self.write_lane = Lane(f"write-{path.name}", settings.write_threads, loop)
        self.probe = Probe(
            self.home, self.health, (self.read_lane, self.write_lane), settings.retry_s, settings.stuck_s
        )
        self.reader = Reader(self.home, files, self.read_lane, self.health, numbers.changes)
        self._settings = settings
        self._files = files
        self._loop = loop
        self._numbers = numbers
        self._open: Segment | None = None
        self._spare: Segment | None = None
        self._void: list[tuple[str, int]] = []  # segment files without contents: name, bytes
        self._foreign_bytes = 0
        self.kept_pages = 0  # at the end of the open segment, for records that move on
        self.epochs: dict[bytes, int] = {}  # see `Census`
        self._trusted = True
        self._grow_after = 0.0
        self._batches: dict[int, Ticket] = {}
        self._next_batch = 0
        self._sealing: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> str:
        """See `RootState`."""
        return self.health.state

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All its threads."""
        return self.read_lane, self.write_lane, self.probe.lane

    # --- start ---

    async def open(self) -> Manifest | None:
        """Take the directory, and read its manifest: what was cleared. None, and `state` OFF with a reason, if it
        can't be used.
        """
        try:
            await self.write_lane.perform(self.home.enter, urgent=FIRST)
            self._trusted = await self.home.remember()
        except (OSError, KvOffloadError) as error:
            self.home.leave()
            self.health.become(RootState.OFF, said(error))
        return self.home.manifest

    async def recover(self) -> list[tuple[Segment, Recovered]]:
        """Every segment with contents, oldest first; the caller says OK when it knows them. Files beyond the capacity
        are removed.

        Raises:
            OSError: the directory can't be read.
        """
        census = await take_census(self.home, self._files, self.read_lane, self._numbers, trusted=self._trusted)
        if not self._trusted:
            await self._begin_anew(census.void)
        self._void, self._foreign_bytes, self.epochs = census.void, census.foreign_bytes, census.epochs
        self.counters.damaged_at_start += census.damaged_records
        self.counters.damaged_segments += census.damaged_segments
        kept = census.kept
        self.segments = {segment.ordinal: segment for segment, _ in kept}
        while self.used_bytes > self.capacity_bytes and (self._void or kept):
            name = self._void.pop()[0] if self._void else self.segments.pop(kept.pop(0)[0].ordinal).name
            await self.home.perform(self.write_lane, partial(self._files.unlink, self.home.segments_fd, name))
        for segment, found in kept:
            if may_seal(segment, found):
                segment.readers += 1  # not to be recycled meanwhile
                work = partial(seal_found, self.home, self._files, segment, found)
                self.write_lane.submit(work, partial(self._sealed_found, segment))
        return kept

    async def _begin_anew(self, void: list[tuple[str, int]]) -> None:
        """A manifest vouches for all that is here, so the old contents go before there is a new one."""
        await self.home.perform(self.write_lane, partial(self.home.remove, [name for name, _ in void]))
        void.clear()
        await self.home.begin()
        self._trusted = True

    def _sealed_found(self, segment: Segment, result: BaseException | None) -> None:
        segment.readers -= 1
        self.changes.notify_all()
        if result is not None:
            self._write_failed(result)

    # --- keyspace ---

    @property
    def used_bytes(self) -> int:
        """Bytes of the files here, and what the file system needs for them."""
        segments = sum(segment.size_bytes for segment in self.segments.values())
        return OVERHEAD_BYTES + segments + sum(size for _, size in self._void) + self._foreign_bytes

    @property
    def wants_segment(self) -> bool:
        """The segment that comes after the open one is not ready."""
        return self.state in (RootState.OK, RootState.FULL) and (self._spare is None or self._open is None)

    @property
    def _may_create(self) -> bool:
        fits = self.used_bytes + self.segment_bytes <= self.capacity_bytes
        return fits and self._loop.time() >= self._grow_after

    @property
    def may_grow(self) -> bool:
        """There is capacity for one more segment, as far as is known, without giving up another."""
        return bool(self._void) or self._may_create

    def oldest(self) -> Segment | None:
        """The segment to be given up next."""
        closed = [s for s in self.segments.values() if s.fd == -1 and s is not self._open and s is not self._spare]
        return min(closed, key=lambda segment: segment.header.number, default=None)

    async def grow(self) -> bool:
        """Add the next segment: a new file, or an old one without contents. False, and maybe another `state`, if that
        failed.
        """
        while self._void and self._void[-1][1] != self.segment_bytes and not self._may_create:
            if not await self._discard():
                return False
        if not self.may_grow:
            return False
        name, size = (secrets.token_hex(8), 0) if self._may_create else self._void.pop()
        return await self._prepare(name, size, self._header())

    async def _discard(self) -> bool:
        """Remove the last file without contents: what counts is its keyspace."""
        void = self._void.pop()  # what others add meanwhile stays
        try:
            await self.home.perform(self.write_lane, partial(self._files.unlink, self.home.segments_fd, void[0]))
        except OSError as error:
            if self.state != RootState.OFF:
                self._void.append(void)
            self._write_failed(error)
            return False
        return True

    async def recycle(self, segment: Segment) -> bool:
        """Make this closed segment, of which nobody wants anything any more, the next one; one of another size only
        leaves its keyspace to `grow`. False as in `grow`.
        """
        await self.changes.wait_for(lambda: not segment.readers)
        if self.state == RootState.OFF or self.segments.pop(segment.ordinal, None) is None:
            return False  # it went meanwhile
        self.counters.segments_recycled += 1
        if segment.size_bytes != self.segment_bytes:
            self._void.append((segment.name, segment.size_bytes))
            return True
        return await self._prepare(segment.name, segment.size_bytes, self._header())

    def _header(self) -> SegmentHeader:
        return SegmentHeader(secrets.token_bytes(16), self._numbers.number(), self.segment_bytes, int(time.time()))

    async def _prepare(self, name: str, size_bytes: int, header: SegmentHeader) -> bool:
        make = partial(self.home.make_segment, name, header, self._settings.min_free_bytes, reuse=bool(size_bytes))
        try:
            fd = await self.home.perform(self.write_lane, make)
        except (OSError, KvOffloadError) as error:
            # Also a new one: what made it fail may keep it from being removed, and then its keyspace is taken.
            size = partial(self.home.left_bytes, name, size_bytes)
            if left_bytes := await self.home.perform(self.write_lane, size):
                self._void.append((name, left_bytes))
            self._write_failed(error)
            return False
        if self.state == RootState.OFF:
            self._files.close(fd)
            return False
        segment = Segment(self._numbers.ordinal(), name, header, self.segment_bytes, fd)
        self.segments[segment.ordinal] = segment
        self._open, self._spare = (segment, self._spare) if self._open is None else (self._open, segment)
        if self.state == RootState.FULL:
            self.health.become(RootState.OK)
        self.health.wrote()
        self.changes.notify_all()
        return True

    # --- writing ---

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload that a segment can hold."""
        return self.segment_bytes - (2 + footer_pages(1, 1)) * PAGE_BYTES

    @property
    def writing(self) -> int:
        """Batches that wait or are being written."""
        return sum(segment.writers for segment in self.segments.values())

    @property
    def depth(self) -> int:
        """Batches that keep the disk busy; more only wait."""
        return 2 * self._settings.write_threads

    @property
    def load(self) -> tuple[int, float]:
        """Roots with less of it should get the next batch."""
        return self.writing, self.counters.written_bytes / self.capacity_bytes

    @property
    def opened(self) -> bool:
        """The directory and its manifest are ours, and it is no copy of another root in use."""
        return self.home.accepted

    def append(
        self, batch: WriteBatch, done: Callable[[Segment, Records, BaseException | None], None], *, moves: bool = False
    ) -> int:
        """Write the first records of a batch behind one another; returns how many, 0 if there is no room right now.

        `moves`: they may take `kept_pages`, too. `done(segment, entries, error)` is called once, later, if any were
        taken; with an error none of them is valid.
        """
        segment = self._open
        if self.state != RootState.OK or segment is None or not self.home.has_noted(batch.keyspace):
            return 0
        pages = record_pages(batch.entries["payload_bytes"]).astype(np.int64)
        ends = segment.next_page + np.cumsum(pages)
        room = segment.size_bytes // PAGE_BYTES
        room -= footer_pages(segment.num_entries + len(pages), len(segment.keyspaces) + 1)
        if ends[0] > room or segment.broken:
            self._roll(segment)
            return 0
        count = int(np.searchsorted(ends, room if moves else room - self.kept_pages, side="right"))
        if count == 0:
            return 0
        entries = batch.entries[:count].copy()
        entries["page"] = ends[:count] - pages[:count]
        entries["space"], keyspace = segment.known(batch.keyspace)
        segment.next_page = int(ends[count - 1])
        segment.num_entries += count
        segment.writers += 1
        work = partial(_write, self._files, segment, entries, keyspace, batch.digests[:count], batch.addresses[:count])
        self._next_batch += 1
        finish = partial(self._written, self._next_batch, segment, entries, done)
        self._batches[self._next_batch] = self.write_lane.submit(work, finish)
        return count

    def _written(
        self,
        batch: int,
        segment: Segment,
        entries: Records,
        done: Callable[[Segment, Records, BaseException | None], None],
        result: BaseException | None,
    ) -> None:
        del self._batches[batch]
        segment.writers -= 1
        if result is None:
            segment.entries.append(entries)
            self.counters.written_bytes += int(entries["payload_bytes"].sum())
            self.health.wrote()
        elif not isinstance(result, CancelledWork):
            segment.broken |= is_trouble(result)  # then no more into this one; what it holds stays readable
            self._write_failed(result)
        done(segment, entries, result)
        self.changes.notify_all()

    def _roll(self, segment: Segment) -> None:
        self._open, self._spare = self._spare, None
        self._finish(segment)

    def _finish(self, segment: Segment) -> None:
        task = self._loop.create_task(self._seal(segment))
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)
        self.changes.notify_all()

    async def _seal(self, segment: Segment) -> None:
        await self.changes.wait_for(lambda: not segment.writers)
        entries = np.concatenate(segment.entries) if segment.entries else None
        try:
            if entries is not None and not segment.broken:
                entries = entries[np.argsort(entries["page"], kind="stable")]
                work = partial(seal_segment, self._files, segment.fd, segment.header, entries, list(segment.keyspaces))
                await self.write_lane.perform(work, urgent=FIRST)
        except (OSError, KvOffloadError) as error:
            self._write_failed(error)
        finally:  # also after a bug: the loop logs it
            fd, segment.fd = segment.fd, -1
            self._files.close(fd)
            segment.entries, segment.keyspaces = [], {}
            if entries is None:
                del self.segments[segment.ordinal]
                self._void.append((segment.name, segment.size_bytes))
            self.changes.notify_all()

    # --- health ---

    def _write_failed(self, error: BaseException) -> None:
        if self.health.write_failed(error):
            self._grow_after = self._loop.time() + self._settings.retry_s
            if self.oldest() is None and self._open is None:
                self.health.become(RootState.FULL, said(error))
        self.changes.notify_all()

    def give_up(self) -> None:
        """It is off: what waits to be written is not, and who waits for an inspection is told. Pair with `settle`, then
        `take_off` once nobody names its segments any more; then `open` and `recover` may bring it back.
        """
        for ticket in self._batches.values():
            ticket.cancel()
        self.reader.give_up()

    def holds(self, segment: Segment) -> bool:
        """Whether what is in this segment can be read."""
        return self.state != RootState.OFF and segment.ordinal in self.segments

    async def take_off(self) -> None:
        """Let the directory go; segments and contents are forgotten here, not on disk. Returns when no thread uses
        them any more, which a disk that hangs may put off for ever.
        """
        await self.settle()
        await self.home.idle()
        while any(segment.readers for segment in self.segments.values()):
            await self.changes.wait()
            await self.home.idle()
        self.segments.clear()
        self._void.clear()
        self.health.forget()
        self.home.leave()

    def _finish_open(self) -> None:
        unfinished = [segment for segment in (self._open, self._spare) if segment is not None]
        self._open = self._spare = None
        for segment in unfinished:
            self._finish(segment)

    async def settle(self) -> None:
        """Seal what is open, as far as that is possible; when this returns nothing is being written."""
        self._finish_open()
        if self._sealing:
            await asyncio.wait(set(self._sealing))

    def figures(self) -> dict[str, Any]:
        """For `status`."""
        now = time.monotonic()
        return {
            "path": str(self.path),
            **self.health.figures(),
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used_bytes if self.state != RootState.OFF else 0,
            "segment_bytes": self.segment_bytes,
            "segments": len(self.segments),
            "direct": self.home.is_direct,
            "writing": self.writing,
            "reads_queued": self.read_lane.queued,
            "slowest_s": round(max(lane.oldest_running_s(now) for lane in self.lanes), 3),
            **self.reader.figures(),
            **asdict(self.counters),
        }

    # --- the end ---

    async def close(self, deadline_s: float) -> bool:
        """Seal what is open, and end the lanes. False: some I/O does not end, and its memory can't be released."""
        if self.state != RootState.OFF:
            try:
                async with asyncio.timeout(deadline_s):
                    await self.settle()
                    await self.home.written()
            except TimeoutError:
                log.warning("disk %s: segments could not be sealed, or clears not be noted, in time", self.path)
        ended = all(await asyncio.gather(*(lane.close(deadline_s) for lane in self.lanes)))
        if ended:
            self.home.leave()
        return ended


def _write(
    files: Files, segment: Segment, entries: Records, keyspace: Records, digests: U64Array, addresses: U64Array
) -> None:
    """In a thread of the write lane. `keyspace`: of all the entries, see `Segment.keyspaces`."""
    headers = reserve_array((len(entries), PAGE_BYTES), np.uint8)
    encode_records(headers, segment.header.uuid, entries, keyspace, digests, int(time.time()))
    sizes: I64Array = entries["payload_bytes"].astype(np.int64)
    write_records(files, segment.fd, int(entries["page"][0]), headers, addresses, sizes)
