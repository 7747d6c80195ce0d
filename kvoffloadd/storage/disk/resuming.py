"""Resumes a segment that an earlier run of the daemon has written to.

First, nothing may lie behind its last record that a later start could take for another record of this use of the file:
a write that was unfinished when the daemon ended would return among the records of this run, long after it was
abandoned.
"""

from __future__ import annotations

from contextlib import suppress

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling.lanes import AGAIN, Again
from kvoffloadd.storage.disk.files import DiskError, Files, aligned_pages
from kvoffloadd.storage.disk.format import SegmentHeader, decode_records
from kvoffloadd.storage.disk.recovery import WALK_BYTES, Kind, Recovered


class SegmentResumer:
    """Makes a sealed segment file ready for appending behind its last record, durably. Work of a lane, as
    `SegmentMaker`: a call takes one turn, and returns AGAIN, or at the end the descriptor, which the caller closes.

    `found`: its contents. If they are known from its footer, the space behind the last record is examined first.
    Otherwise it was walked, and the headers of all records that are not whole are known: those behind the last record
    are overwritten.

    Raises, in any turn:
        DiskError: there is another record behind the last one, or the file's length differs from the header.
        OSError: it can't be read or written. It may have lost its footer, and holds the same records.
    """

    def __init__(
        self, files: Files, segments_fd: int, header: SegmentHeader, found: Recovered, *, direct: bool
    ) -> None:
        self._files = files
        self._segments_fd = segments_fd
        self._name = found.name
        self._header = header
        self._num_pages = header.segment_bytes // PAGE_BYTES
        self._bad_pages = [page for page in found.bad_pages if page >= found.end_page]
        self._looked_at = found.end_page if found.kind is Kind.SEALED else self._num_pages
        self._direct = direct
        self._fd = -1

    def __call__(self) -> int | Again:
        try:
            if self._fd == -1:
                self._open()
            if self._looked_at < self._num_pages:
                self._look()
                return AGAIN
            self._begin()
        except BaseException:
            if self._fd != -1:
                with suppress(OSError):
                    self._files.close(self._fd)
            raise
        return self._fd

    def _open(self) -> None:
        self._fd = self._files.open(self._segments_fd, self._name, create=False, direct=self._direct, write=True)
        size = self._files.size_bytes(self._fd)
        if size != self._header.segment_bytes:
            raise DiskError(f"it has {size} bytes, not {self._header.segment_bytes}")

    def _look(self) -> None:
        """Examines some of the space behind the last record."""
        pages = aligned_pages(min(WALK_BYTES // PAGE_BYTES, self._num_pages - self._looked_at))
        came = self._files.read(self._fd, self._looked_at * PAGE_BYTES, [pages]) // PAGE_BYTES
        _, valid = decode_records(pages[:came], self._header.uuid)
        if came < len(pages) or valid.any():
            raise DiskError("it has records that its footer does not name")
        if not self._direct:
            self._files.drop_cached(self._fd, self._looked_at * PAGE_BYTES, came * PAGE_BYTES)
        self._looked_at += came

    def _begin(self) -> None:
        """Overwrites damaged headers and the footer, which does not name the coming records."""
        nothing = aligned_pages(1)
        nothing[:] = 0
        for page in (*self._bad_pages, self._num_pages - 1):
            self._files.write(self._fd, page * PAGE_BYTES, [nothing])
        self._files.sync(self._fd)
