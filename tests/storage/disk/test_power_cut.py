"""A power cut at any moment, whatever of the unsynced writes has reached the disk, and in which order: nothing wrong is
ever read, and nothing is lost that a sync had made durable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.format import KeyspaceId, Records, SegmentHeader
from kvoffloadd.storage.disk.recovery import Kind
from kvoffloadd.storage.disk.segment import create_segment, recycle_segment, seal_segment
from tests.storage.disk.builders import NAME, SPACE_A, Folder, entries_of

pytestmark = pytest.mark.slow

SECTOR_BYTES = 512
SEGMENT_BYTES = 40 * PAGE_BYTES
Record = tuple[KeyspaceId, int, int]  # keyspace, key, part


@dataclass(frozen=True)
class Moment:
    """What is durable for certain, and the writes since the last sync: each may be there, in part, or not at all."""

    durable: bytes
    pending: tuple[tuple[int, bytes], ...]
    promised: frozenset[Record]


@dataclass
class RecordingFiles(Files):
    """Keeps what a power cut would leave of the one file that is written. `promised`: see `Scenario`."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    written: set[Record] = field(default_factory=set)
    promised: set[Record] = field(default_factory=set)

    def allocate(self, fd: int, size_bytes: int) -> None:
        super().allocate(fd, size_bytes)
        self.durable.extend(bytes(size_bytes - len(self.durable)))

    def write(self, fd: int, offset: int, buffers: Sequence[Any]) -> None:
        super().write(fd, offset, buffers)
        self.pending.append((offset, b"".join(bytes(memoryview(one).cast("B")) for one in buffers)))
        self.note()

    def sync(self, fd: int) -> None:
        super().sync(fd)
        for offset, raw in self.pending:
            self.durable[offset : offset + len(raw)] = raw
        self.pending.clear()
        self.promised |= self.written
        self.note()

    def note(self) -> None:
        self.moments.append(Moment(bytes(self.durable), tuple(self.pending), frozenset(self.promised)))


def keyspace_of(epoch: int) -> KeyspaceId:
    return KeyspaceId(SPACE_A.fingerprint, SPACE_A.shape, epoch, 0, 2, 16)


def names(entries: Records, keyspace: KeyspaceId) -> set[Record]:
    return {(keyspace, int(key), int(part)) for key, part in zip(entries["key"][:, 0], entries["part"], strict=True)}


def live(folder: Folder, files: RecordingFiles, rng: np.random.Generator, uses: int) -> None:
    """Several uses of one file. The same keys have other payloads in each, at other places or at the same."""
    fd = -1
    for use in range(uses):
        header = SegmentHeader(rng.bytes(16), use + 1, SEGMENT_BYTES, 0)
        files.written.clear()
        files.promised.clear()  # from now on the old contents may go
        if fd == -1:
            fd = create_segment(files, folder.fd, NAME, header, direct=False)
        else:
            os.close(fd)
            fd = recycle_segment(files, folder.fd, NAME, header, direct=False)
        keyspace, page, key = keyspace_of(use), 1, 1
        written = []
        while True:
            sizes = rng.integers(1, 3 * PAGE_BYTES, int(rng.integers(1, 5))).tolist()
            entries = entries_of(sizes, first_page=page, first_key=key)
            entries["sequence"] += 1000 * header.number
            entries["part"] = rng.integers(0, 2, len(entries))
            page = int(entries["page"][-1]) + 1 - (-sizes[-1] // PAGE_BYTES)
            key += len(entries)
            if page > SEGMENT_BYTES // PAGE_BYTES - 3:
                break
            folder.write(fd, header, entries, [keyspace])
            written.append(entries)
            files.written |= names(entries, keyspace)
            if rng.random() < 0.3:
                files.sync(fd)
        if written and rng.random() < 0.8:
            seal_segment(files, fd, header, np.concatenate(written), [keyspace])
    os.close(fd)


def cut(moment: Moment, rng: np.random.Generator) -> bytes:
    """What the disk holds afterwards: of each write all, nothing, or some sectors; in any order."""
    state = bytearray(moment.durable)
    for at in rng.permutation(len(moment.pending)).tolist():
        offset, raw = moment.pending[at]
        sectors = range(0, len(raw), SECTOR_BYTES)
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        for start in sectors:
            if rng.random() < share:
                state[offset + start : offset + start + SECTOR_BYTES] = raw[start : start + SECTOR_BYTES]
    return bytes(state)


def check(folder: Folder, moment: Moment, state: bytes) -> Kind:
    """Recovers and reads everything; `Folder.read` compares what is OK with the only right payload."""
    (folder.path / NAME).write_bytes(state)
    found = folder.recover()
    good: set[Record] = set()
    if found.header is not None:
        # Nothing of an earlier use.
        assert set((found.entries["sequence"] // 1000).tolist()) <= {found.header.number}
        for number, keyspace in enumerate(found.keyspaces):
            entries = found.entries[found.entries["space"] == number]
            status, _ = folder.read(found.header.uuid, entries, keyspace)
            assert set(status) <= {0, 1}
            if found.kind is Kind.WALKED:
                assert set(status) <= {0}
            good |= names(entries[np.array(status) == 0], keyspace)
    missing = moment.promised - good
    assert not missing, f"{found.kind}: {missing}"
    return found.kind


def test_any_power_cut(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = set()
    after = Folder(tmp_path / "after")
    for life in range(6):
        files = RecordingFiles()
        folder = Folder(tmp_path / f"life{life}", files)
        live(folder, files, rng, uses=4)
        folder.close()
        for moment in files.moments:
            for _ in range(1 if not moment.pending else 10):
                kinds.add(check(after, moment, cut(moment, rng)))
            # The simplest ones always: any prefix of the writes, in order.
            for count in range(len(moment.pending) + 1):
                state = bytearray(moment.durable)
                for offset, raw in moment.pending[:count]:
                    state[offset : offset + len(raw)] = raw
                kinds.add(check(after, moment, bytes(state)))
    after.close()
    assert {Kind.SEALED, Kind.WALKED} <= kinds
    assert Kind.FOREIGN not in kinds
