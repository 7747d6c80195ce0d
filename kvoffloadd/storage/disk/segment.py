"""A segment: its state in memory, and the functions that create, reuse and seal its file.

The functions block; OSError passes through.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvoffloadd.errors import UsageError
from kvoffloadd.model import PAGE_BYTES, I64Array, U8Array, U64Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import AGAIN, Again
from kvoffloadd.storage.disk.files import DiskError, Files, aligned_pages, lacks_allocation
from kvoffloadd.storage.disk.format import (
    HEADER_PAGES,
    KeyspaceId,
    Records,
    SegmentHeader,
    encode_footer,
    encode_segment_header,
    encode_spaces,
    footer_pages,
    record_pages,
)

FILL_BYTES: Final = 4 << 20
"""The zeros that one turn writes to a new file on a file system that can't allocate space."""

TRIAL_BYTES: Final = 1 << 20
TRIAL_SHARE: Final = 16
"""The size of the trial write to a new segment: bytes, and a fraction (1/n) of it."""

SEGMENTS_MIN = 8
"""The minimum number of segments in a root, so that giving one up costs an eighth of it at most."""

RECORD_PAGES_MIN: Final = 2
"""The smallest record: its header, and a page of its payload."""

PLACE_MAX: Final = 1 << 62
"""The limit of places in history. No daemon reaches it by counting."""

PLACE_END: Final = 1 << 64
"""A place behind all others."""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment file of this run. The event loop owns it; threads read fields that are constant while `writers` or
    `readers` counts them: the file's name and descriptor, its header, rows of `keyspaces`.
    """

    ordinal: int  # its name in memory, never used twice while the daemon runs
    name: str  # of the file
    header: SegmentHeader
    size_bytes: int  # of the file, which a start may have found shorter or longer than in the header
    fd: int = -1  # -1 once it is sealed: each reader opens the file
    next_page: int = 1
    keyspaces: dict[KeyspaceId, tuple[int, Records]] = field(default_factory=dict)  # index in the footer, row of SPACE
    entries: list[Records] = field(default_factory=list)  # written records, for the footer
    num_entries: int = 0  # of these, and of those that are being written
    writers: int = 0
    readers: int = 0
    broken: bool = False  # a write has failed: no more is written here, and its contents stay readable
    gone: bool = False  # its file was removed
    spared_at: int = 0  # a place in history: when it was due for reclaiming, but much of it had been read
    oldest_sequence: int = PLACE_END  # of all records that it may have; PLACE_END: it has none

    @property
    def place(self) -> int:
        """The place in the order of reclaiming: lower ones come first."""
        return self.spared_at or self.header.number

    def room_end(self, more_entries: int = 0, more_keyspaces: int = 0) -> int:
        """Returns the page up to which there is room for records, with this number of further records in the footer."""
        return self.size_bytes // PAGE_BYTES - footer_pages(
            self.num_entries + more_entries, len(self.keyspaces) + more_keyspaces
        )

    def room_ends(self, count: int) -> I64Array:
        """Returns, for each number of further records from 1 to `count`, the page up to which there is room for them.
        Their keyspace may be new.
        """
        entries = self.num_entries + np.arange(1, count + 1, dtype=np.int64)
        return self.size_bytes // PAGE_BYTES - footer_pages(entries, len(self.keyspaces) + 1)

    @property
    def free_pages(self) -> int:
        """The number of pages for further records and their share of the footer."""
        return max(self.room_end() - self.next_page, 0)

    @property
    def is_full(self) -> bool:
        """Whether the smallest record does not fit."""
        return self.next_page + RECORD_PAGES_MIN > self.room_end(1, 1)

    def keyspace_entry(self, keyspace: KeyspaceId) -> tuple[int, Records]:
        """Returns the entry of a keyspace in `keyspaces`, made if it is new."""
        entry = self.keyspaces.get(keyspace)
        if entry is None:
            entry = self.keyspaces[keyspace] = len(self.keyspaces), encode_spaces([keyspace])
        return entry


@dataclass(slots=True)
class SequenceNumbers:
    """Counters that all roots of a tier share: segments of this run, segments ever, records ever; and `changes`: a root
    has more room, less to do, or another state.
    """

    changes: Changes = field(default_factory=Changes)
    _ordinal: int = 0
    _number: int = 0
    _sequence: int = 0

    def ordinal(self) -> int:
        """Returns a name for a segment in this run."""
        self._ordinal += 1
        return self._ordinal

    def number(self) -> int:
        """Returns a segment's place in history."""
        self._number += 1
        return self._number

    def sequences(self, count: int) -> U64Array:
        """Returns `count` records' places in history."""
        first = self._sequence + 1
        self._sequence += count
        return np.arange(first, first + count, dtype=np.uint64)

    @property
    def last_sequence(self) -> int:
        """The last record's place in history."""
        return self._sequence

    def seen(self, number: int, sequence: int) -> None:
        """Notes numbers in use on disk. Counting does not continue from a place beyond `PLACE_MAX`: nothing could
        follow.
        """
        if number <= PLACE_MAX:
            self._number = max(self._number, number)
        if sequence <= PLACE_MAX:
            self._sequence = max(self._sequence, sequence)


# --- the file ---


class SegmentMaker:
    """Makes a segment file ready for appending, a new one or (`reuse`) an existing one, with contents that are void
    from then on, durably. Work of a lane: a call takes one turn, and returns AGAIN, or at the end the descriptor, which
    the caller closes. `copy_on_write`: files are overwritten in place only with FS_NOCOW_FL. `min_free_bytes`: free
    space of the file system that a new file leaves.

    Raises, in any turn:
        DiskError: the existing file is longer than a segment.
        OSError: there is no new file, unless it could not be removed; the old contents may still be valid. ENOSPC
            also for `min_free_bytes`.
    """

    def __init__(
        self, files: Files, segments_fd: int, name: str, header: SegmentHeader, *,
        direct: bool, reuse: bool, copy_on_write: bool = False, min_free_bytes: int = 0,
    ) -> None:  # fmt: skip
        if header.segment_bytes % PAGE_BYTES or header.segment_bytes < (HEADER_PAGES + 1) * PAGE_BYTES:
            raise UsageError(f"a segment can't have {header.segment_bytes} bytes")
        self._files = files
        self._segments_fd = segments_fd
        self._name = name
        self._header = header
        self._direct = direct
        self._reuse = reuse
        self._copy_on_write = copy_on_write
        self._min_free_bytes = min_free_bytes
        self._fd = -1
        self._filled = header.segment_bytes  # the end of allocated space; lower where the file system can't allocate it

    def __call__(self) -> int | Again:
        try:
            if self._fd == -1:
                self._open()
            if self._filled < self._header.segment_bytes:
                self._fill()
                return AGAIN
            self._begin()
        except BaseException:
            self._undo()
            raise
        return self._fd

    def _open(self) -> None:
        files, size = self._files, 0
        if self._reuse and self._copy_on_write:
            self._replace()
        elif (
            not self._reuse and files.free_bytes(self._segments_fd) < self._header.segment_bytes + self._min_free_bytes
        ):
            raise OSError(errno.ENOSPC, "the file system has too little space left, with disk.min_free_bytes")
        self._fd = files.open(self._segments_fd, self._name, create=not self._reuse, direct=self._direct, write=True)
        if self._reuse:
            size = files.size_bytes(self._fd)
            if size > self._header.segment_bytes:
                allowed = self._header.segment_bytes
                raise DiskError(f"segment {self._name} has {size} bytes, more than the {allowed} of a segment")
        elif self._copy_on_write:
            files.overwrite_in_place(self._fd)
        if size < self._header.segment_bytes:
            try:
                files.allocate(self._fd, self._header.segment_bytes)
            except OSError as error:
                if not lacks_allocation(error):
                    raise
                self._filled = size // PAGE_BYTES * PAGE_BYTES

    def _replace(self) -> None:
        """Makes a new file in place of one that would take its size twice: the space of data overwritten elsewhere is
        free only when all data written with it has been overwritten.
        """
        with self._files.open_to_read(self._segments_fd, self._name, direct=False) as fd:
            in_place = self._files.is_overwritten_in_place(fd)
        if not in_place:
            self._files.unlink(self._segments_fd, self._name)
            self._reuse = False

    def _fill(self) -> None:
        """Writes zeros where space could not be allocated: a bounded number in each turn, so that the disk does not
        appear to hang.
        """
        size = min(FILL_BYTES, self._header.segment_bytes - self._filled)
        self._files.write(self._fd, self._filled, [_zeros(size)])
        self._files.sync(self._fd)
        self._filled += size

    def _begin(self) -> None:
        if self._reuse:
            # The old trailer goes too: if the new header were damaged later, the trailer would be believed.
            self._files.write(self._fd, self._header.segment_bytes - PAGE_BYTES, [_zeros(PAGE_BYTES)])
        # Allocated space can still be missing, on a thin volume for example: a segment is used only if it can be
        # written.
        if size := trial_bytes(self._header.segment_bytes):
            self._files.write(self._fd, HEADER_PAGES * PAGE_BYTES, [_zeros(size)])
        write_header(self._files, self._fd, self._header)
        self._files.sync(self._fd)
        if not self._reuse:
            self._files.sync_directory(self._segments_fd)

    def _undo(self) -> None:
        if self._fd == -1:
            return
        with suppress(OSError):
            self._files.close(self._fd)
        if not self._reuse:
            with suppress(OSError):
                self._files.unlink(self._segments_fd, self._name)


def create_segment(
    files: Files, segments_fd: int, name: str, header: SegmentHeader, direct: bool, copy_on_write: bool = False
) -> int:
    """Makes a new segment file, durably, in one go: see `SegmentMaker`."""
    make = SegmentMaker(files, segments_fd, name, header, direct=direct, reuse=False, copy_on_write=copy_on_write)
    return _at_once(make)


def recycle_segment(files: Files, segments_fd: int, name: str, header: SegmentHeader, direct: bool) -> int:
    """Begins a new use of a segment file, in one go: see `SegmentMaker`."""
    return _at_once(SegmentMaker(files, segments_fd, name, header, direct=direct, reuse=True))


def _at_once(make: SegmentMaker) -> int:
    while (made := make()) is AGAIN:
        pass
    return made


def trial_bytes(segment_bytes: int) -> int:
    """Returns the size of the first write behind the header in a new use of a segment."""
    return min(TRIAL_BYTES, segment_bytes // TRIAL_SHARE // PAGE_BYTES * PAGE_BYTES)


def try_segment(files: Files, segments_fd: int, name: str, *, direct: bool) -> None:
    """Rewrites unchanged the first pages that a segment's next use writes (see `SegmentMaker`), so that its contents
    are not given up for a file that can't be written.

    Raises:
        OSError: a write fails.
    """
    with files.open_to_write(segments_fd, name, direct=direct) as fd:
        size = files.size_bytes(fd) // PAGE_BYTES * PAGE_BYTES
        for start, length in ((0, HEADER_PAGES * PAGE_BYTES + trial_bytes(size)), (size - PAGE_BYTES, PAGE_BYTES)):
            pages = aligned_pages(length // PAGE_BYTES)
            if start >= 0 and files.read(fd, start, [pages]) == length:
                files.write(fd, start, [pages])
        files.sync(fd)


def try_pages(files: Files, segments_fd: int, name: str, start: int, stop: int, *, direct: bool) -> None:
    """Writes zeros to unused pages of a segment, durably. Raises OSError if that fails."""
    with files.open_to_write(segments_fd, name, direct=direct) as fd:
        files.write(fd, start * PAGE_BYTES, [_zeros((stop - start) * PAGE_BYTES)])
        files.sync(fd)


def seal_segment(
    files: Files, fd: int, header: SegmentHeader, entries: Records, keyspaces: Sequence[KeyspaceId]
) -> None:
    """Writes the footer, and makes the whole segment durable.

    Raises:
        UsageError: the records leave no room for it.
        OSError: the segment may have no footer; its records are unchanged.
    """
    footer = encode_footer(header.uuid, header.number, entries, keyspaces, header.segment_bytes)
    start = header.segment_bytes - len(footer)
    end_page = int((entries["page"] + record_pages(entries["payload_bytes"])).max(initial=HEADER_PAGES))
    if end_page * PAGE_BYTES > start:
        raise UsageError(f"{len(entries)} records up to page {end_page} leave no room for their footer")
    pages = _aligned(footer)
    files.write(fd, start, [pages])
    files.sync(fd)
    files.drop_cached(fd, 0, header.segment_bytes)


def write_header(files: Files, fd: int, header: SegmentHeader) -> None:
    """Writes page 0. Not durable before a sync."""
    files.write(fd, 0, [_aligned(encode_segment_header(header))])


def _aligned(raw: U8Array) -> U8Array:
    pages = aligned_pages(len(raw) // PAGE_BYTES)
    pages.reshape(-1)[:] = raw
    return pages


def _zeros(size_bytes: int) -> U8Array:
    pages = aligned_pages(size_bytes // PAGE_BYTES)
    pages[:] = 0
    return pages
