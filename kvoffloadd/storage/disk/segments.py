"""The life of a segment file: made, used again, sealed. Blocks; OSError passes through."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvoffloadd.errors import UsageError
from kvoffloadd.model import PAGE_BYTES, U8Array
from kvoffloadd.storage.disk.files import DiskError, Files, aligned_pages
from kvoffloadd.storage.disk.format import (
    HEADER_PAGES,
    KeyspaceId,
    Records,
    SegmentHeader,
    encode_footer,
    encode_segment_header,
    record_pages,
)


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
            raise DiskError(f"segment {name} has {size} bytes, no use for {header.segment_bytes} of them")
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
