"""A segment: its state in memory, and the functions that create, reuse and seal its file.

The functions block; OSError passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvoffloadd.changes import Changes
from kvoffloadd.errors import UsageError
from kvoffloadd.model import PAGE_BYTES, U8Array, U64Array
from kvoffloadd.storage.disk.files import DiskError, Files, aligned_pages
from kvoffloadd.storage.disk.format import (
    HEADER_PAGES,
    KeyspaceId,
    Records,
    SegmentHeader,
    encode_footer,
    encode_segment_header,
    encode_spaces,
    record_pages,
)

SEGMENTS_MIN = 8
"""A root has room for at least so many segments, so that giving one up costs an eighth of it at most."""

PLACE_MAX: Final = 1 << 62
"""Places in history are below this. No daemon gets there by counting."""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment file of this run. Owned by the event loop; threads read what does not change while they are counted
    in `writers` or `readers`: the file's name and descriptor, its header, rows of `keyspaces`.
    """

    ordinal: int  # its name in memory, never used twice while the daemon runs
    name: str  # of the file
    header: SegmentHeader
    size_bytes: int  # of the file, which a start may have found shorter or longer than the header says
    fd: int = -1  # -1 once it is sealed: readers open the file for themselves
    next_page: int = 1
    keyspaces: dict[KeyspaceId, tuple[int, Records]] = field(default_factory=dict)  # index in the footer, row of SPACE
    entries: list[Records] = field(default_factory=list)  # what was written, for the footer
    num_entries: int = 0  # of these, and of those that are being written
    writers: int = 0
    readers: int = 0
    broken: bool = False  # a write has failed: no more is written here, and what it holds stays readable

    def keyspace_entry(self, keyspace: KeyspaceId) -> tuple[int, Records]:
        """The entry of a keyspace in `keyspaces`, made if it is new."""
        entry = self.keyspaces.get(keyspace)
        if entry is None:
            entry = self.keyspaces[keyspace] = len(self.keyspaces), encode_spaces([keyspace])
        return entry


@dataclass(slots=True)
class SequenceNumbers:
    """What all roots of a tier share: the count of segments of this run, of segments ever, of records ever; and
    `changes`: a root has more room, less to do, or another state.
    """

    changes: Changes = field(default_factory=Changes)
    _ordinal: int = 0
    _number: int = 0
    _sequence: int = 0

    def ordinal(self) -> int:
        """A name for a segment in this run."""
        self._ordinal += 1
        return self._ordinal

    def number(self) -> int:
        """A segment's place in history."""
        self._number += 1
        return self._number

    def sequences(self, count: int) -> U64Array:
        """`count` records' places in history."""
        first = self._sequence + 1
        self._sequence += count
        return np.arange(first, first + count, dtype=np.uint64)

    def seen(self, number: int, sequence: int) -> None:
        """These are in use on disk. A place beyond `PLACE_MAX` is not counted on from: nothing could follow."""
        if number <= PLACE_MAX:
            self._number = max(self._number, number)
        if sequence <= PLACE_MAX:
            self._sequence = max(self._sequence, sequence)


# --- the file ---


def create_segment(files: Files, segments_fd: int, name: str, header: SegmentHeader, direct: bool) -> int:
    """Make a segment file with all its space, durably. Returns its descriptor, which the caller closes.

    Raises:
        OSError: there is no such file afterwards, as far as it can still be removed.
    """
    _check_size(header)
    fd = files.open(segments_fd, name, create=True, direct=direct, write=True)
    try:
        files.allocate(fd, header.segment_bytes)
        write_header(files, fd, header)
        files.sync(fd)
        files.sync_directory(segments_fd)
    except BaseException:
        with suppress(OSError):
            files.close(fd)
        with suppress(OSError):
            files.unlink(segments_fd, name)
        raise
    return fd


def recycle_segment(files: Files, segments_fd: int, name: str, header: SegmentHeader, direct: bool) -> int:
    """Begin a new use of a segment file: all that is in it is void, durably. Returns its descriptor, which the caller
    closes.

    Raises:
        DiskError: the file is longer than a segment.
        OSError: the old contents may be valid still.
    """
    _check_size(header)
    fd = files.open(segments_fd, name, create=False, direct=direct, write=True)
    try:
        size = files.size_bytes(fd)
        if size > header.segment_bytes:
            raise DiskError(f"segment {name} has {size} bytes, more than the {header.segment_bytes} of a segment")
        if size < header.segment_bytes:
            files.allocate(fd, header.segment_bytes)
        # The old trailer goes too: if the new header were damaged one day, it would be taken at its word.
        empty = aligned_pages(1)
        empty[:] = 0
        files.write(fd, header.segment_bytes - PAGE_BYTES, [empty])
        write_header(files, fd, header)
        files.sync(fd)
    except BaseException:
        with suppress(OSError):
            files.close(fd)
        raise
    return fd


def seal_segment(
    files: Files, fd: int, header: SegmentHeader, entries: Records, keyspaces: Sequence[KeyspaceId]
) -> None:
    """Write the footer, and make the whole segment durable.

    Raises:
        UsageError: the records leave no room for it.
        OSError: the segment may have no footer; its records are what they were.
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
    """Write page 0. Not durable before a sync."""
    files.write(fd, 0, [_aligned(encode_segment_header(header))])


def _aligned(raw: U8Array) -> U8Array:
    pages = aligned_pages(len(raw) // PAGE_BYTES)
    pages.reshape(-1)[:] = raw
    return pages


def _check_size(header: SegmentHeader) -> None:
    if header.segment_bytes % PAGE_BYTES or header.segment_bytes < (HEADER_PAGES + 1) * PAGE_BYTES:
        raise UsageError(f"a segment can't have {header.segment_bytes} bytes")
