"""Scans a root's directory: segments with contents, reusable files, the rest."""

from __future__ import annotations

import asyncio
import errno
import logging
from dataclasses import dataclass, field
from functools import partial

from kvoffloadd.model import EPOCH_MAX
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.disk.files import lacks_resources
from kvoffloadd.storage.disk.format import KeyspaceId
from kvoffloadd.storage.disk.recovery import Kind, Recovered, recover_segment
from kvoffloadd.storage.disk.rootdirectory import RootDirectory
from kvoffloadd.storage.disk.segment import Segment, SequenceNumbers

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RootScan:
    """The contents of a root."""

    kept: list[tuple[Segment, Recovered]] = field(default_factory=list)  # segments with contents, oldest first
    reusable: list[tuple[str, int]] = field(default_factory=list)  # segment files without: names and bytes
    foreign_bytes: int = 0  # of files that are no segments, and stay
    damaged_records: int = 0  # dropped
    damaged_segments: int = 0  # dropped
    # By fingerprint, the latest epoch in any record, valid or not: its namespace was cleared then, even if no manifest
    # has the clear.
    epochs: dict[bytes, int] = field(default_factory=dict)
    is_whole: bool = True  # all that the files hold is known

    def add_epochs(self, keyspaces: list[KeyspaceId]) -> None:
        """Merges the epochs of keyspaces with records in a segment."""
        for keyspace in keyspaces:
            if self.epochs.get(keyspace.fingerprint, 0) < keyspace.epoch <= EPOCH_MAX:
                self.epochs[keyspace.fingerprint] = keyspace.epoch


async def scan_root(directory: RootDirectory, lane: Lane, numbers: SequenceNumbers, *, trusted: bool) -> RootScan:
    """Reads every file. Not `trusted`: none of the contents may be served.

    Raises:
        OSError: the directory can't be read, or descriptors or memory are lacking now. An unreadable file is left
            out, with a warning.
    """
    names = await lane.perform(directory.segment_names)
    found = await _recover_all(directory, lane, names)
    scan = RootScan()
    if names and not any(found):
        raise OSError(errno.EIO, "no segment can be read")
    for name, recovered in zip(names, found, strict=True):
        if recovered is None:
            scan.is_whole = False
            scan.foreign_bytes += await lane.perform(partial(directory.left_bytes, name, 0))
            continue
        if recovered.kind is Kind.FOREIGN:
            log.warning(
                "%s/segments/%s is not a segment of kvoffloadd and is left alone", directory.name, recovered.name
            )
            scan.foreign_bytes += recovered.size_bytes
            continue
        if recovered.header is not None:
            numbers.seen(recovered.header.number, 0)
        scan.add_epochs(recovered.keyspaces)
        if recovered.header is None or not len(recovered.entries) or not trusted:
            if recovered.kind is Kind.UNREADABLE:
                scan.is_whole = False
                log.warning(
                    "%s/segments/%s has another version and is kept until its space is needed",
                    directory.name,
                    recovered.name,
                )
            scan.reusable.append((recovered.name, recovered.size_bytes))
        else:
            segment = Segment(numbers.ordinal(), recovered.name, recovered.header, recovered.size_bytes)
            segment.oldest_sequence = int(recovered.entries["sequence"].min())
            numbers.seen(recovered.header.number, int(recovered.entries["sequence"].max()))
            scan.kept.append((segment, recovered))
        scan.damaged_records += recovered.damaged
        if recovered.kind is Kind.DAMAGED:
            scan.damaged_segments += 1
            log.warning("%s/segments/%s is damaged: its contents are lost", directory.name, recovered.name)
        if recovered.damaged:
            log.warning("%s/segments/%s: %d damaged records dropped", directory.name, recovered.name, recovered.damaged)
    scan.kept.sort(key=lambda pair: pair[0].header.number)
    return scan


async def _recover_all(directory: RootDirectory, lane: Lane, names: list[str]) -> list[Recovered | None]:
    """Returns the contents of each file; None: it can't be read. Raises OSError when all have ended, as `_recover`
    does.
    """
    ended = await asyncio.gather(*(_recover(directory, lane, name) for name in names), return_exceptions=True)
    recovered: list[Recovered | None] = []
    for result in ended:
        if isinstance(result, BaseException):
            raise result
        recovered.append(result)
    return recovered


async def _recover(directory: RootDirectory, lane: Lane, name: str) -> Recovered | None:
    work = partial(
        recover_segment,
        directory.files,
        directory.segments_fd,
        name,
        direct=directory.is_direct,
        on_progress=directory.on_progress,
    )
    try:
        return await lane.perform(work)
    except (OSError, MemoryError) as error:
        if lacks_resources(error):  # this shows nothing about the segment
            raise OSError(errno.ENOMEM, f"the system is out of descriptors or memory: {error}") from error
        log.warning("%s/segments/%s can't be read: %s", directory.name, name, error)
        return None
