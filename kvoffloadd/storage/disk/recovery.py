"""Recovers the contents of a segment file, at start or for a check. Blocks; no file contents make it raise.

A sealed segment is known from its footer; its payloads are verified when they are read. Any other segment is walked:
only records with whole headers and payloads are believed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from kvoffloadd.model import PAGE_BYTES, BoolArray, I64Array, U8Array, U32Array
from kvoffloadd.storage.disk.files import Files, aligned_pages
from kvoffloadd.storage.disk.format import (
    ENTRY,
    HEADER_PAGES,
    SPACE,
    SPACE_FIELDS,
    KeyspaceId,
    Problem,
    Records,
    SegmentHeader,
    Trailer,
    decode_footer,
    decode_records,
    decode_segment_header,
    decode_spaces,
    decode_trailer,
    record_pages,
)

WALK_BYTES = 8 << 20
"""The size of one read of a walk."""


class Kind(enum.Enum):
    """SEALED: known from its footer. WALKED: without a footer, known from a search for records. UNREADABLE: of another
    format version. EMPTY: left during its creation, never used. DAMAGED: a segment with unknown contents. FOREIGN:
    another program's file.
    """

    SEALED = "sealed"
    WALKED = "walked"
    UNREADABLE = "unreadable"
    EMPTY = "empty"
    DAMAGED = "damaged"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """A segment file. `entries` (ENTRY) ascend by page. `end_page`: the first one behind the last record. `damaged`:
    number of records dropped; `bad_pages`: their places. `header_lost`: page 0 is damaged, and the trailer replaces it.
    """

    name: str
    kind: Kind
    header: SegmentHeader | None = None
    keyspaces: list[KeyspaceId] = field(default_factory=list)
    entries: Records = field(default_factory=lambda: np.zeros(0, ENTRY))
    end_page: int = HEADER_PAGES
    damaged: int = 0
    size_bytes: int = 0
    bad_pages: tuple[int, ...] = ()
    header_lost: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The contents of a segment, whatever its footer lists. `bad_pages`: whole headers without a matching payload."""

    keyspaces: list[KeyspaceId]
    entries: Records
    bad_pages: tuple[int, ...]


def recover_segment(
    files: Files, segments_fd: int, name: str, *, direct: bool, on_progress: Callable[[], None] = lambda: None
) -> Recovered:
    """Returns the contents of this segment file. `on_progress` is called after each of many reads.

    Raises:
        OSError: the file can't be opened or read.
    """
    with files.open_to_read(segments_fd, name, direct=direct) as fd:
        found = recover_open_segment(files, fd, name, on_progress)
        if not direct:
            files.drop_cached(fd, 0, found.size_bytes)
        return found


def recover_open_segment(files: Files, fd: int, name: str, on_progress: Callable[[], None] = lambda: None) -> Recovered:
    """Does what `recover_segment` does, for an open file."""
    size = files.size_bytes(fd)
    unknown = Recovered(name, Kind.DAMAGED, size_bytes=size)
    header = decode_segment_header(_read(files, fd, 0, 1)[0])
    if header is Problem.VERSION:
        return replace(unknown, kind=Kind.UNREADABLE)
    trailer = _trailer(files, fd, size, header if isinstance(header, SegmentHeader) else None)
    header_lost = not isinstance(header, SegmentHeader)
    if not isinstance(header, SegmentHeader):
        if trailer is None:
            if header is Problem.FOREIGN:
                return replace(unknown, kind=Kind.FOREIGN)
            # A file gets its header, and then records from the next page on.
            never_used = header is Problem.UNWRITTEN and not _read(files, fd, HEADER_PAGES, 1).any()
            return replace(unknown, kind=Kind.EMPTY if never_used else Kind.DAMAGED)
        header = SegmentHeader(trailer.uuid, trailer.number, trailer.segment_bytes, 0)
    known = replace(unknown, header=header, header_lost=header_lost)
    footer = _footer(files, fd, trailer) if trailer is not None else None
    if footer is not None:
        entries, keyspaces = footer
        return replace(known, kind=Kind.SEALED, entries=entries, keyspaces=keyspaces, end_page=_end_page(entries))
    walk = walk_segment(files, fd, header.uuid, on_progress)
    return replace(
        known,
        kind=Kind.WALKED,
        entries=walk.entries,
        keyspaces=walk.keyspaces,
        end_page=_end_page(walk.entries),
        damaged=len(walk.bad_pages),
        bad_pages=walk.bad_pages,
    )


def _trailer(files: Files, fd: int, size: int, header: SegmentHeader | None) -> Trailer | None:
    end = header.segment_bytes if header is not None else size // PAGE_BYTES * PAGE_BYTES
    if end > size or end < 2 * PAGE_BYTES:
        return None
    trailer = decode_trailer(_read(files, fd, end // PAGE_BYTES - 1, 1)[0])
    if trailer is None or trailer.segment_bytes != end:
        return None
    if header is not None and (trailer.uuid, trailer.number) != (header.uuid, header.number):
        return None
    return trailer


def _footer(files: Files, fd: int, trailer: Trailer) -> tuple[Records, list[KeyspaceId]] | None:
    count = trailer.segment_bytes // PAGE_BYTES - trailer.footer_page
    if trailer.footer_page < HEADER_PAGES or count < 1:
        return None
    return decode_footer(_read(files, fd, trailer.footer_page, count).reshape(-1), trailer.uuid)


def _end_page(entries: Records) -> int:
    if not len(entries):
        return HEADER_PAGES
    return int(entries["page"][-1]) + int(record_pages(entries["payload_bytes"][-1:])[0])


def _read(files: Files, fd: int, page: int, count: int) -> U8Array:
    """Returns (count, 4096): pages of the file; zeros behind its end."""
    pages = aligned_pages(count)
    came = files.read(fd, page * PAGE_BYTES, [pages])
    pages.reshape(-1)[came:] = 0
    return pages


# --- the walk ---


def walk_segment(files: Files, fd: int, uuid: bytes, on_progress: Callable[[], None] = lambda: None) -> Walk:
    """Examines every page for a header of this use of the file, and the payload behind it: skips whole records, and
    passes anything else page by page.

    Raises:
        OSError: the file can't be read.
    """
    return _Walker(files, fd, uuid, on_progress).walk()


def inspect_records(
    files: Files, segments_fd: int, name: str, uuid: bytes, pages: U32Array, *, direct: bool
) -> BoolArray:
    """Returns, for each page of a segment file, whether a record begins there with a header and a payload that match
    their checksums, whichever user it belongs to.

    Raises:
        OSError: the file can't be opened or read.
    """
    with files.open_to_read(segments_fd, name, direct=direct) as fd:
        walker = _Walker(files, fd, uuid, lambda: None)
        return np.array([walker.is_record(page) for page in pages.tolist()], bool)


class _Walker:
    """One walk. Reads windows of WALK_BYTES; payloads that reach out of theirs are hashed piece by piece."""

    def __init__(self, files: Files, fd: int, uuid: bytes, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._files = files
        self._fd = fd
        self._uuid = uuid
        self._num_pages = files.size_bytes(fd) // PAGE_BYTES
        self._bad: list[int] = []
        self._entries: list[Records] = [np.zeros(0, ENTRY)]
        self._keyspaces: list[Records] = [np.zeros(0, SPACE)]
        self._window = aligned_pages(min(WALK_BYTES // PAGE_BYTES, max(self._num_pages, 1)))
        self._piece: U8Array | None = None

    def walk(self) -> Walk:
        """Walks the whole file."""
        page = HEADER_PAGES
        while page < self._num_pages:
            window = self._fill(self._window, page, self._num_pages - page)
            if not len(window):
                break
            page = self._read_records(window, page)
        table = np.concatenate(self._keyspaces)
        entries = np.concatenate(self._entries)
        # As raw bytes: numpy does not sort structures that hold arrays.
        _, first, number = np.unique(table.view("V64"), return_index=True, return_inverse=True)
        entries["space"] = number
        return Walk(decode_spaces(table[first]), entries, tuple(self._bad))

    def is_record(self, page: int) -> bool:
        """Returns whether a whole record begins at this page."""
        header = self._fill(self._window, page, 1)
        records, valid = decode_records(header, self._uuid)
        return bool(valid.any()) and self._is_whole(header[1:], page, _end_of(records[0], page), records[0])

    def _read_records(self, window: U8Array, start: int) -> int:
        """Takes the whole records that begin in this window, which itself begins at page `start`. Returns the page to
        continue from.
        """
        records, valid = decode_records(window, self._uuid)
        free = start
        kept = []
        for index in np.flatnonzero(valid).tolist():
            if start + index < free:
                continue
            record = records[index]
            end = _end_of(record, start + index)
            if self._is_whole(window[index + 1 :], start + index, end, record):
                free = end
                kept.append(index)
            else:
                self._bad.append(start + index)
        self._keep(records, np.array(kept, np.int64), start)
        return max(start + len(window), free)

    def _keep(self, records: Records, kept: I64Array, start: int) -> None:
        entries = np.zeros(len(kept), ENTRY)
        for name in ("key", "sequence", "payload_bytes", "part"):
            entries[name] = records[name][kept]
        entries["page"] = start + kept
        table = np.zeros(len(kept), SPACE)
        for name in SPACE_FIELDS:
            table[name] = records[name][kept]
        self._entries.append(entries)
        self._keyspaces.append(table)

    def _is_whole(self, rest: U8Array, page: int, end: int, record: Records) -> bool:
        """Returns whether the payload matches its header's checksum. `rest`: the pages of the window behind it."""
        if end > self._num_pages:
            return False
        left = int(record["payload_bytes"])
        state = xxhash.xxh3_128()
        near = rest.reshape(-1)[:left]
        state.update(near.data)
        left -= len(near)
        page += 1 + len(rest)
        while left > 0:
            if self._piece is None:
                self._piece = aligned_pages(len(self._window))
            piece = self._fill(self._piece, page, end - page)
            if not len(piece):
                return False
            far = piece.reshape(-1)[:left]
            state.update(far.data)
            left -= len(far)
            page += len(piece)
        high, low = record["digest"].tolist()
        return bool(state.intdigest() == high << 64 | low)

    def _fill(self, buffer: U8Array, page: int, count: int) -> U8Array:
        """Reads up to `count` pages from `page` on; fewer if the buffer or the file ends."""
        wanted = buffer[: min(count, len(buffer))]
        came = self._files.read(self._fd, page * PAGE_BYTES, [wanted])
        self._on_progress()
        return wanted[: came // PAGE_BYTES]


def _end_of(record: Records, page: int) -> int:
    """Returns the first page behind a record with its header at this one."""
    return page + 1 - (-int(record["payload_bytes"]) // PAGE_BYTES)
