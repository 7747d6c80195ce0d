"""A root: one directory of the disk tier, with its lanes, its segments and its health.

Ownership: every field belongs to the event loop. Threads of the two lanes run the functions of `records`, `segment` and
`recovery` on file descriptors and memory that their arguments name; the caller of `submit` keeps both alive. A system
call that hangs can't be ended: a caller that waits for one has a deadline, or nothing depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvoffloadd.config import DiskConfig
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.disk.files import Files, describe_error
from kvoffloadd.storage.disk.health import Health, RootState
from kvoffloadd.storage.disk.manifest import Manifest
from kvoffloadd.storage.disk.opening import COPY_ON_WRITE
from kvoffloadd.storage.disk.probe import Probe
from kvoffloadd.storage.disk.reader import Reader
from kvoffloadd.storage.disk.recovery import Recovered
from kvoffloadd.storage.disk.rootdirectory import FIRST, RootDirectory
from kvoffloadd.storage.disk.scan import scan_root
from kvoffloadd.storage.disk.segment import SEGMENTS_MIN, Segment, SequenceNumbers
from kvoffloadd.storage.disk.segmentpool import SegmentPool
from kvoffloadd.storage.disk.writer import Writer
from kvoffloadd.units import format_bytes, format_path

log = logging.getLogger(__name__)

MEMORY: Final = ("tmpfs", "ramfs")
"""File systems that live in memory."""


class Root:
    """One directory of the disk tier. `pool` has the segments, `writer` and `reader` move records, `probe` checks
    whether the directory still answers. All roots of a tier share `numbers`. `name`: its path in UTF-8.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        config: DiskConfig,
        files: Files,
        loop: asyncio.AbstractEventLoop,
        numbers: SequenceNumbers,
    ) -> None:
        self.path = path
        self.name = format_path(path)
        self.capacity_bytes = capacity_bytes
        self.read_lane = Lane(f"read-{format_path(path.name)}", config.read_threads, loop)
        self.write_lane = Lane(f"write-{format_path(path.name)}", config.write_threads, loop)
        probe_lane = Lane(f"probe-{format_path(path.name)}", 1, loop)
        self.directory = RootDirectory(path, files, config.use_direct, config.min_free_bytes, probe_lane)
        self.health = Health(path)
        self.pool = SegmentPool(
            self.directory,
            self.health,
            self.write_lane,
            numbers,
            capacity_bytes=capacity_bytes,
            segment_bytes=min(config.segment_bytes, capacity_bytes // SEGMENTS_MIN // PAGE_BYTES * PAGE_BYTES),
            retry_s=config.retry_s,
        )
        self.probe = Probe(
            self.directory, self.pool, self.health, (self.read_lane, self.write_lane), config.retry_s, config.stuck_s
        )
        self.writer = Writer(self.directory, self.pool, self.health, self.write_lane, numbers.changes)
        self.reader = Reader(self.directory, self.health, self.read_lane, numbers.changes, self.pool.lost)
        self.epochs: dict[bytes, int] = {}  # see `RootScan`
        self.is_whole = False  # see `RootScan`
        self._numbers = numbers
        self._trusted = True
        self._has_remarked = False
        self._damaged_records = 0
        self._damaged_segments = 0

    @property
    def state(self) -> str:
        """See `RootState`."""
        return self.health.state

    @property
    def accepted(self) -> bool:
        """Whether the directory and its manifest belong to this daemon, and are no copy of another root in use."""
        return self.directory.accepted

    @property
    def is_trusted(self) -> bool:
        """Whether its manifest vouches for what else is there."""
        return self._trusted

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes with all threads of the root."""
        return self.read_lane, self.write_lane, self.probe.lane

    def holds(self, segment: Segment) -> bool:
        """Returns whether the contents of this segment can be read."""
        return self.state != RootState.OFF and segment.ordinal in self.pool.segments

    # --- opening ---

    async def open(self) -> Manifest | None:
        """Locks the directory and reads its manifest. None, and `state` OFF with a reason, if it can't be used."""
        try:
            await self.write_lane.perform(self.directory.open, urgent=FIRST)
            self._trusted = await self.directory.load_manifest()
        except (OSError, KvOffloadError) as error:
            self.health.become(RootState.OFF, describe_error(error))
            await self.directory.close()
        else:
            self._remark()
        return self.directory.manifest

    def _remark(self) -> None:
        """Logs any oddity of the file system once."""
        directory = self.directory
        if self._has_remarked:
            return
        self._has_remarked = True
        if directory.file_system in MEMORY:
            log.warning("disk %s: is on %s, which is memory: a reboot loses it", self.name, directory.file_system)
        if self.capacity_bytes > directory.size_bytes:
            log.warning(
                "disk %s: its capacity is %s, but its file system has %s: it takes what is free there",
                self.name, format_bytes(self.capacity_bytes), format_bytes(directory.size_bytes),
            )  # fmt: skip
        if not directory.abilities.allocates:
            log.warning("disk %s: has no fallocate(2): each new segment is filled with zeros first", self.name)
        if directory.file_system == COPY_ON_WRITE and not directory.abilities.in_place:
            log.warning("disk %s: can't overwrite files in place: segments are made anew, not used again", self.name)

    def distrust(self) -> None:
        """Makes `recover` remove the contents, since they may have been cleared."""
        self._trusted = False
        self.directory.unconfirm()

    async def recover(self) -> list[tuple[Segment, Recovered]]:
        """Recovers every segment with contents, oldest first. Removes files beyond the capacity. The caller sets the
        state OK when the records are in its catalog.

        Raises:
            OSError: the directory can't be read.
        """
        scan = await scan_root(self.directory, self.read_lane, self._numbers, trusted=self._trusted)
        if not self._trusted:
            await self._start_empty(scan.reusable)
        self.epochs, self.is_whole = scan.epochs, scan.is_whole
        self._damaged_records += scan.damaged_records
        self._damaged_segments += scan.damaged_segments
        kept = await self.pool.adopt(scan)
        resumed = kept[-1:]
        if resumed and not await self.pool.resume(*resumed[0]):
            resumed = []
        for segment, found in kept[: len(kept) - len(resumed)]:
            self.writer.seal_recovered(segment, found)
        return kept

    async def _start_empty(self, reusable: list[tuple[str, int]]) -> None:
        """Starts an empty root. The old contents go before the new manifest, which vouches for all contents."""
        remove = partial(self.directory.remove, [name for name, _ in reusable])
        await self.directory.perform(self.write_lane, remove)
        reusable.clear()
        await self.directory.perform(self.write_lane, self.directory.remove_claims)
        await self.directory.create_manifest()
        self._trusted = True

    # --- closing ---

    def give_up(self) -> None:
        """Takes the root off: drops queued writes, and ends inspections with an error. `detach` follows once the
        catalog has no records of its segments any more; then `open` and `recover` may bring it back.
        """
        self.writer.give_up()
        self.reader.give_up()

    async def detach(self) -> None:
        """Closes the directory, and forgets segments and contents here, not on disk. Returns when no thread uses them
        any more, which may never happen if the disk hangs.
        """
        await self.writer.settle()
        await self.directory.wait_idle()
        while any(segment.readers for segment in self.pool.segments.values()):
            await self._numbers.changes.wait()
            await self.directory.wait_idle()
        self.pool.clear()
        self.health.reset()
        await self.directory.close()

    async def close(self, deadline_s: float) -> bool:
        """Seals open segments, and ends the lanes. Returns False if some I/O does not end, and keeps its memory."""
        if self.state != RootState.OFF:
            try:
                async with asyncio.timeout(deadline_s):
                    await self.writer.settle()
                    await self.directory.wait_written()
            except TimeoutError:
                log.warning(
                    "disk %s: segments could not be sealed, or clears could not be recorded, in time", self.name
                )
        until = self.read_lane.loop.time() + deadline_s
        ended = all(await asyncio.gather(self.read_lane.close(deadline_s), self.write_lane.close(deadline_s)))
        if ended:  # otherwise they still use its descriptors, which end with the process
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self.directory.close()
        return await self.probe.lane.close(max(until - self.read_lane.loop.time(), 0)) and ended

    # --- figures ---

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        now = time.monotonic()
        return {
            "path": self.name,
            **self.health.figures(),
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.pool.used_bytes if self.state != RootState.OFF else 0,
            "segment_bytes": self.pool.segment_bytes,
            "segments": len(self.pool.segments),
            "direct": self.directory.is_direct,
            "writing": self.writer.writing,
            "reads_queued": self.read_lane.queued,
            "slowest_s": round(max(lane.oldest_running_s(now) for lane in self.lanes), 3),
            **self.reader.figures(),
            "written_bytes": self.writer.written_bytes,
            "segments_recycled": self.pool.recycled,
            "damaged_at_start": self._damaged_records,
            "damaged_segments": self._damaged_segments,
        }
