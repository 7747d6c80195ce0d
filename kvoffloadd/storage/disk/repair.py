"""Offline check and repair of a root: reads every byte and removes bad records. Blocks for the whole time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvoffloadd.model import PAGE_BYTES, BoolArray
from kvoffloadd.storage.disk.files import DiskError, DiskVersionError, Files, aligned_pages, is_segment_name
from kvoffloadd.storage.disk.format import SegmentHeader
from kvoffloadd.storage.disk.manifest import read_manifest_in
from kvoffloadd.storage.disk.opening import open_root
from kvoffloadd.storage.disk.recovery import Kind, Recovered, Walk, recover_open_segment, walk_segment
from kvoffloadd.storage.disk.segment import seal_segment, write_header

_LEFT_ALONE = {
    Kind.FOREIGN: "is nothing of ours; it is left alone",
    Kind.UNREADABLE: "is of another format version; it is left alone",
}


@dataclass(slots=True)
class RootReport:
    """Counts of the data read: segment files, records, bytes. `repaired`: the number of findings that were fixed."""

    segments: int = 0
    records: int = 0
    bytes: int = 0
    findings: list[str] = field(default_factory=list)
    repaired: int = 0


def check_root(
    path: str | Path,
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
    files: Files | None = None,
) -> RootReport:
    """Reads every segment of the root directory `path`, including payloads. Holds the root's lock meanwhile.

    `repair`: bad records are removed from their segments, and segments without any known contents are deleted.
    `progress(bytes_done, bytes_total)`.

    Raises:
        DiskError: this is no root, belongs to another user, or a daemon uses it.
        OSError: its directories can't be read.
    """
    root = _Check(Path(path), repair, files or Files())
    try:
        root.check_manifest()
        root.check_segments(progress)
        return root.report
    finally:
        root.close()


class _Check:
    """One check of one root."""

    def __init__(self, path: Path, repair: bool, files: Files) -> None:
        self.report = RootReport()
        self._path = path
        self._repair = repair
        self._files = files
        try:
            fds = open_root(files, path, make_lock=True)
        except (FileNotFoundError, NotADirectoryError):
            raise DiskError(f"{path} is not a root of a disk tier: it has no directory with segments") from None
        except BlockingIOError:
            raise DiskError(f"a daemon uses {path}: run `kvoffloadd verify --disk` instead") from None
        self._directory_fd, self._segments_fd, self._lock_fd = fds

    def close(self) -> None:
        """Releases the lock and the directories."""
        for fd in (self._segments_fd, self._directory_fd, self._lock_fd):
            self._files.close(fd)

    def check_manifest(self) -> None:
        """Checks the manifest, without which nothing is served. It can't be repaired: the clears are unknown."""
        try:
            if read_manifest_in(self._files, self._directory_fd) is None:
                self.report.findings.append("there is no manifest: a daemon will not serve what is here")
        except DiskVersionError as error:
            self._repair = False  # a newer version may know more about the segments than this one
            self.report.findings.append(f"{error}: nothing is repaired")
        except DiskError as error:
            self.report.findings.append(f"{error}: a daemon will not serve what is here")

    def check_segments(self, progress: Callable[[int, int], None] | None) -> None:
        """Checks all segments, by name."""
        names = sorted(self._files.names(self._segments_fd))
        for name in names:
            if not is_segment_name(name):
                self.report.findings.append(f"segments/{name} is nothing of ours; it is left alone")
        segment_names = [name for name in names if is_segment_name(name)]
        sizes = [self._files.stat(name, self._segments_fd).st_size for name in segment_names]
        done = 0
        for name, size in zip(segment_names, sizes, strict=True):
            if progress is not None:
                progress(done, sum(sizes))
            try:
                self._check_segment(name)
            except OSError as error:
                self.report.findings.append(f"segment {name} can't be read: {error}")
            done += size
        if progress is not None:
            progress(done, sum(sizes))

    def _check_segment(self, name: str) -> None:
        fd = self._files.open(self._segments_fd, name, create=False, direct=False, write=self._repair)
        try:
            found = recover_open_segment(self._files, fd, name)
            self.report.segments += 1
            self.report.bytes += found.size_bytes
            if found.kind in _LEFT_ALONE:
                self.report.findings.append(f"segment {name} {_LEFT_ALONE[found.kind]}")
            elif found.kind is Kind.DAMAGED:
                self.report.findings.append(f"segment {name}: page 0 is damaged, and no footer tells what it was")
                if self._repair:
                    self._files.unlink(self._segments_fd, name)
                    self._files.sync_directory(self._segments_fd)
                    self.report.repaired += 1
            elif found.header is not None:
                self._check_header(fd, found, found.header)
                self._check_records(fd, found, found.header)
            self._files.drop_cached(fd, 0, found.size_bytes)
        finally:
            self._files.close(fd)

    def _check_header(self, fd: int, found: Recovered, header: SegmentHeader) -> None:
        if found.size_bytes != header.segment_bytes:
            wrong = f"has {found.size_bytes} bytes, should have {header.segment_bytes}"
            self.report.findings.append(f"segment {found.name} {wrong}")
        if found.header_lost:
            self.report.findings.append(f"segment {found.name}: page 0 is damaged")
            if self._repair:
                write_header(self._files, fd, header)
                self._files.sync(fd)
                self.report.repaired += 1

    def _check_records(self, fd: int, found: Recovered, header: SegmentHeader) -> None:
        self.report.records += len(found.entries) + found.damaged
        bad = np.array(found.bad_pages, np.int64)
        good = np.ones(len(found.entries), bool)
        if found.kind is Kind.SEALED:
            good = _confirmed(found, walk_segment(self._files, fd, header.uuid))
            bad = found.entries["page"][~good]
        for page in bad.tolist():
            self.report.findings.append(f"segment {found.name}: the record at page {page} is damaged or torn")
        if not self._repair or not len(bad):
            return
        empty = aligned_pages(1)
        empty[:] = 0
        for page in bad.tolist():
            self._files.write(fd, page * PAGE_BYTES, [empty])
        if found.kind is Kind.SEALED:
            seal_segment(self._files, fd, header, found.entries[good], found.keyspaces)
        else:
            self._files.sync(fd)
        self.report.repaired += len(bad)


def _confirmed(found: Recovered, walk: Walk) -> BoolArray:
    """Returns which entries of a footer match a walk's findings completely."""
    entries, there = found.entries, walk.entries
    good: BoolArray = np.full(len(entries), len(there) > 0)
    if not len(there):
        return good
    positions = np.minimum(np.searchsorted(there["page"], entries["page"]), len(there) - 1)
    good &= there["page"][positions] == entries["page"]
    for name in ("sequence", "payload_bytes", "part"):
        good &= there[name][positions] == entries[name]
    good &= (there["key"][positions] == entries["key"]).all(axis=1)
    numbers = {keyspace: number for number, keyspace in enumerate(walk.keyspaces)}
    theirs = np.array([numbers.get(keyspace, -1) for keyspace in found.keyspaces], np.int64)
    good &= theirs[entries["space"]] == there["space"][positions]
    return good
