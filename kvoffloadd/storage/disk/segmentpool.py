"""The segments of a root: creating them, the open one, and the order in which they are reclaimed.

Space is used as in a log of segments: a new segment is a new file within the capacity, then an old file, used again.
Two are kept ready: the open one, and a clean one that follows at once when the open one is full. A start resumes the
segment written last.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.disk.files import describe_error
from kvoffloadd.storage.disk.format import SegmentHeader, footer_pages
from kvoffloadd.storage.disk.health import Health, RootState, is_full
from kvoffloadd.storage.disk.recovery import Recovered
from kvoffloadd.storage.disk.resuming import SegmentResumer
from kvoffloadd.storage.disk.rootdirectory import RootDirectory
from kvoffloadd.storage.disk.scan import RootScan
from kvoffloadd.storage.disk.segment import TRIAL_BYTES, Segment, SequenceNumbers

log = logging.getLogger(__name__)

RESUME_SHARE = 8
"""A start resumes a segment with at least this fraction (1/n) free."""

OVERHEAD_BYTES = 128 << 10
"""The share of the capacity for the manifest, the directories and the block maps of the file system."""


class SegmentPool:
    """The segments of one root, owned by the event loop. `lane`: makes and removes segment files. `retry_s`: the delay
    before new files where the file system is full.
    """

    def __init__(
        self,
        directory: RootDirectory,
        health: Health,
        lane: Lane,
        numbers: SequenceNumbers,
        *,
        capacity_bytes: int,
        segment_bytes: int,
        retry_s: float,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}  # by ordinal: those with contents, the open one and the clean one
        self.open_segment: Segment | None = None
        self.gone: list[Segment] = []  # with removed files, see `lost`
        self.recycled = 0  # since the start
        self._directory = directory
        self._files = directory.files
        self._health = health
        self._lane = lane
        self._numbers = numbers
        self._changes = numbers.changes
        self._retry_s = retry_s
        self._clean: Segment | None = None  # follows the open one
        self._reusable: list[tuple[str, int]] = []  # segment files without contents: name, bytes
        self._foreign_bytes = 0
        self._create_after = self._reuse_after = 0.0

    # --- the space ---

    @property
    def used_bytes(self) -> int:
        """Bytes of the files here, and of the file system's metadata for them."""
        segments = sum(segment.size_bytes for segment in self.segments.values())
        return OVERHEAD_BYTES + segments + sum(size for _, size in self._reusable) + self._foreign_bytes

    @property
    def wants_segment(self) -> bool:
        """Whether the segment that follows the open one is not ready."""
        if self._clean is not None:
            return False
        has_room = self.open_segment is not None and not self.open_segment.is_full
        return self._health.state == RootState.OK or (self._health.state == RootState.FULL and not has_room)

    @property
    def _may_create(self) -> bool:
        """Whether there is capacity for another file, and, as far as is known, space."""
        fits = self.used_bytes + self.segment_bytes <= self.capacity_bytes
        return fits and self._lane.loop.time() >= self._create_after

    @property
    def _fitting(self) -> list[tuple[str, int]]:
        """Files without contents that can be the next segment, as far as is known."""
        if self._lane.loop.time() < self._reuse_after:
            return []
        return [file for file in self._reusable if file[1] == self.segment_bytes]

    @property
    def _misfits(self) -> list[tuple[str, int]]:
        """Files without contents that only take space."""
        return [file for file in self._reusable if file[1] != self.segment_bytes]

    @property
    def may_grow(self) -> bool:
        """Whether there seems to be room for one more segment without reclaiming another."""
        return bool(self._fitting or self._misfits) or self._may_create

    def sealed(self) -> list[Segment]:
        """Returns the segments that may be reclaimed."""
        return [segment for segment in self.segments.values() if segment.fd == -1]

    def oldest(self) -> Segment | None:
        """Returns the first to be reclaimed among equally full segments; None: there is none."""
        return min(self.sealed(), key=lambda segment: segment.place, default=None)

    # --- adding segments ---

    async def adopt(self, scan: RootScan) -> list[tuple[Segment, Recovered]]:
        """Takes the segments that a scan found. Removes files beyond the capacity, the oldest first; returns the rest.

        Raises:
            OSError: a file can't be removed.
        """
        kept, self._reusable, self._foreign_bytes = scan.kept, scan.reusable, scan.foreign_bytes
        self.segments = {segment.ordinal: segment for segment, _ in kept}
        while self.used_bytes > self.capacity_bytes and (self._reusable or kept):
            name = self._reusable.pop()[0] if self._reusable else self.segments.pop(kept.pop(0)[0].ordinal).name
            await self._unlink(name)
        return kept

    async def resume(self, segment: Segment, found: Recovered) -> bool:
        """Resumes this sealed segment behind its last record, if there is much room and nothing else lies there.
        Otherwise, or if that fails, its records are unchanged.
        """
        room = (
            segment.size_bytes // PAGE_BYTES - found.end_page - footer_pages(len(found.entries), len(found.keyspaces))
        )
        fits = segment.size_bytes == segment.header.segment_bytes == self.segment_bytes
        if not fits or found.header_lost or room * PAGE_BYTES < self.segment_bytes // RESUME_SHARE:
            return False
        directory, direct = self._directory, self._directory.is_direct
        work = SegmentResumer(self._files, directory.segments_fd, segment.header, found, direct=direct)
        try:
            segment.fd = await directory.perform(self._lane, work)
        except (OSError, MemoryError, KvOffloadError) as error:
            log.warning("%s/segments/%s takes no more records: %s", directory.name, segment.name, describe_error(error))
            return False
        segment.next_page, segment.entries, segment.num_entries = found.end_page, [found.entries], len(found.entries)
        for keyspace in found.keyspaces:
            segment.keyspace_entry(keyspace)
        self.open_segment = segment
        return True

    async def grow(self) -> bool:
        """Adds the next segment: a new file, or an old one without contents. Returns False, with a possible change of
        the root's state, if that failed.
        """
        while not self._fitting and self._misfits and not self._may_create:
            if not await self._remove(self._misfits[-1]):
                return False
            self._create_after = 0.0
        if fitting := self._fitting:  # first: it has its space, even on a full file system
            self._reusable.remove(fitting[-1])
            return await self._prepare(*fitting[-1])
        return self._may_create and await self._prepare(secrets.token_hex(8), 0)

    async def may_recycle(self, segment: Segment) -> bool:
        """Returns whether this sealed segment's contents may be given up for new records: its file can be written."""
        if self._health.state != RootState.OK:
            return False
        try:
            await self._directory.perform(self._lane, partial(self._directory.try_segment, segment.name))
        except FileNotFoundError:
            self.lost(segment)
            return False
        except (OSError, KvOffloadError, MemoryError) as error:
            self.write_failed(error)
            return False
        return True

    async def recycle(self, segment: Segment) -> bool:
        """Makes this sealed segment, which has no records in the catalog any more, the next one. One of another size
        only leaves its space to `grow`. Returns False as `grow` does.
        """
        await self._changes.wait_for(lambda: not segment.readers)
        if self._health.state == RootState.OFF or segment.ordinal not in self.segments:
            return False  # it was removed meanwhile
        self.recycled += 1
        if segment.size_bytes != self.segment_bytes:
            self.empty(segment)
            return True
        del self.segments[segment.ordinal]
        return await self._prepare(segment.name, segment.size_bytes)

    async def _prepare(self, name: str, size_bytes: int) -> bool:
        """Makes a file the clean segment, or the open one if there is none. `size_bytes`: 0 for a new file."""
        number = self._numbers.number()
        header = SegmentHeader(secrets.token_bytes(16), number, self.segment_bytes, int(time.time()))
        make = self._directory.make_segment(name, header, reuse=bool(size_bytes))
        try:
            fd = await self._directory.perform(self._lane, make)
        except (OSError, KvOffloadError, MemoryError) as error:
            # A new file, too: the cause of its failure may prevent its removal, and then its space is taken.
            size = partial(self._directory.left_bytes, name, size_bytes)
            if left_bytes := await self._directory.perform(self._lane, size):
                self._reusable.append((name, left_bytes))
            if not isinstance(error, FileNotFoundError):  # otherwise it was removed, which is no fault of the disk
                self._not_made(error, is_new=not size_bytes)
            return False
        if self._health.state == RootState.OFF:
            with suppress(OSError):
                await self._directory.perform(self._lane, partial(self._files.close, fd))
            return False
        segment = Segment(self._numbers.ordinal(), name, header, self.segment_bytes, fd)
        self.segments[segment.ordinal] = segment
        if self.open_segment is None:
            self.open_segment = segment
        else:
            self._clean = segment
        self._changes.notify_all()
        return True

    def _not_made(self, error: BaseException, *, is_new: bool) -> None:
        """Notes that a file could not be made the next segment. Without space for a new one, none is made for a while,
        and the root is FULL if it has no segment to write to or to recycle. Without space in a file that had it
        allocated, the root is FULL: other files would fail likewise, so their contents are kept.
        """
        if not is_full(error):
            self.write_failed(error)
            return
        self._health.write_errors += 1
        after = self._lane.loop.time() + self._retry_s
        if is_new:
            self._create_after = after
        else:
            self._reuse_after = after
        is_last = self.oldest() is None and self.open_segment is None
        if (is_last or not is_new) and self._health.state != RootState.OFF:
            self._health.stop_writing(error)
        self._changes.notify_all()

    # --- removing segments ---

    def advance(self) -> None:
        """Replaces the open segment, which is full, by the clean one."""
        self.open_segment, self._clean = self._clean, None

    def withdraw(self, segment: Segment) -> bool:
        """Stops writing to this segment. Returns whether it could have been written."""
        if segment is self.open_segment:
            self.advance()
        elif segment is self._clean:
            self._clean = None
        else:
            return False
        return True

    def release_unsealed(self) -> list[Segment]:
        """Returns the segments open for writing, from now on without a successor; the caller seals them."""
        unsealed = [segment for segment in (self.open_segment, self._clean) if segment is not None]
        self.open_segment = self._clean = None
        return unsealed

    def empty(self, segment: Segment) -> None:
        """Makes the file of this closed segment, which has no contents any more, reusable."""
        if self.segments.pop(segment.ordinal, None) is not None and not segment.gone:
            self._reusable.append((segment.name, segment.size_bytes))

    def clear(self) -> None:
        """Forgets all segments of a root that is gone; its files stay unchanged."""
        self.segments.clear()
        self.gone.clear()
        self._reusable.clear()

    async def _remove(self, file: tuple[str, int]) -> bool:
        """Removes a file without contents, to free its space."""
        self._reusable.remove(file)  # concurrent additions stay
        try:
            await self._unlink(file[0])
        except (OSError, MemoryError) as error:
            if self._health.state != RootState.OFF:
                self._reusable.append(file)
            self.write_failed(error)
            return False
        return True

    async def _unlink(self, name: str) -> None:
        await self._directory.perform(self._lane, partial(self._files.unlink, self._directory.segments_fd, name))

    # --- health ---

    def write_failed(self, error: BaseException, *, lasting: bool = False) -> None:
        """Counts a failure of the root: see `Health.write_failed`."""
        self._health.write_failed(error, lasting=lasting)
        self._changes.notify_all()

    async def try_write(self, lane: Lane) -> bool:
        """Performs operations like those of the next writes. Returns False if there is no segment to write to, and no
        space for one. Raises OSError if they would fail.
        """
        directory, oldest = self._directory, self.oldest()
        segment = next((one for one in (self.open_segment, self._clean) if one is not None and not one.is_full), None)
        works: list[Callable[[], None]] = []
        if self._health.state != RootState.FULL:
            works.append(directory.try_directory)
        held = None
        if segment is not None:
            stop = min(segment.next_page + TRIAL_BYTES // PAGE_BYTES, segment.room_end())
            works.append(partial(directory.try_pages, segment.name, segment.next_page, stop))
        elif oldest is not None:
            held = oldest
            held.readers += 1  # the data read is written again: the place must not change meanwhile
            works.append(partial(directory.try_segment, oldest.name))
        elif not works:
            return False

        def work() -> None:
            for each in works:
                each()

        await directory.perform(lane, work, partial(self._tried, held))
        return True

    def _tried(self, held: Segment | None) -> None:
        if held is not None:
            held.readers -= 1
            self._changes.notify_all()

    def lost(self, segment: Segment) -> None:
        """Notes that the file of this segment was removed. It is in `gone` until its contents are forgotten."""
        if not segment.gone:
            segment.gone = True
            self.gone.append(segment)
            self._changes.notify_all()

    async def look(self, lane: Lane) -> None:
        """Detects removed files."""
        segments, reusable = list(self.segments.values()), [name for name, _ in self._reusable]
        names = [segment.name for segment in segments]
        try:
            missing = set(await self._directory.perform(lane, partial(self._directory.missing, names + reusable)))
        except OSError:
            return  # reads and writes show the state of the disk
        for segment in segments:
            # A file may have been replaced meanwhile, under the name of this segment.
            if segment.name in missing and self.segments.get(segment.ordinal) is segment:
                self.lost(segment)
        self._reusable = [file for file in self._reusable if file[0] not in missing]
