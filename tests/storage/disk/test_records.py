"""Every read is verified: wrong bytes are never OK, and damage stays where it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk import records as disk_records
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.format import KeyspaceId, record_pages
from kvoffloadd.storage.disk.opening import probe
from kvoffloadd.storage.disk.records import DAMAGED, FAILED, GONE, OK, READ, read_records
from tests.storage.disk.builders import NAME, SPACE_A, SPACE_B, Folder, RecordSlots, entries_of, header_of

UUID = header_of().uuid


def test_what_was_written_is_read_in_any_order(folder: Folder, seed: int) -> None:
    entries = entries_of([1, 4095, 4096, 4097, 9000, 20000])
    folder.build(entries)
    shuffled = entries[np.random.default_rng(seed).permutation(len(entries))]
    assert folder.read(UUID, shuffled, SPACE_A)[0] == [OK] * 6
    assert folder.read(UUID, entries[[0, 3, 4]], SPACE_A)[0] == [OK] * 3
    assert folder.read(UUID, entries[[2, 2]], SPACE_A)[0] == [OK] * 2


def test_nothing_wanted_reads_nothing(folder: Folder) -> None:
    assert folder.read(UUID, entries_of([]), SPACE_A)[0] == []


def test_neighbours_are_read_together(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_records, "RUN_BYTES", 6 * PAGE_BYTES)
    reads: list[int] = []

    class Counting(Files):
        def read(self, fd: int, offset: int, buffers: Sequence[Any]) -> int:
            reads.append(offset // PAGE_BYTES)
            return super().read(fd, offset, buffers)

    entries = entries_of([10] * 9)
    folder.build(entries)
    folder.files = Counting()
    assert folder.read(UUID, entries, SPACE_A)[0] == [OK] * 9
    assert reads == [1, 7, 13]
    reads.clear()
    assert folder.read(UUID, entries[[0, 1, 5]], SPACE_A)[0] == [OK] * 3
    assert reads == [1, 11]


def test_direct_reads_and_writes(folder: Folder) -> None:
    if not probe(folder.files, folder.fd, None).direct:
        pytest.skip("no O_DIRECT here")
    entries = entries_of([1, 5000, 4096])
    folder.build(entries)
    slots = RecordSlots(entries)
    wanted = np.zeros(3, READ)
    for name in ("page", "part", "payload_bytes", "key"):
        wanted[name] = entries[name]
    wanted["address"] = slots.addresses
    status, _ = read_records(folder.files, folder.fd, NAME, UUID, SPACE_A, wanted, direct=True)
    assert status.tolist() == [OK] * 3


@pytest.mark.slow
def test_each_flipped_byte_costs_exactly_its_record(folder: Folder) -> None:
    """The same flips, seen by a read and by the walk of a segment that was not sealed."""
    entries = entries_of([300, 1500, 700])
    folder.build(entries, sealed=False)
    start = int(entries["page"][1]) * PAGE_BYTES
    fd = os.open(folder.path / NAME, os.O_RDWR)
    whole = os.pread(fd, PAGE_BYTES + 1500, start)
    for at in range(len(whole)):
        os.pwrite(fd, bytes([whole[at] ^ (1 << at % 8)]), start + at)
        assert folder.read(UUID, entries, SPACE_A)[0] == [OK, DAMAGED, OK], at
        if at % 5 == 0 or at < 200:
            found = folder.recover()
            assert found.entries["page"].tolist() == entries["page"][[0, 2]].tolist(), at
            assert found.damaged == (at >= PAGE_BYTES)
        os.pwrite(fd, whole[at : at + 1], start + at)
    os.pwrite(fd, b"\xff", start + len(whole))  # behind the payload: no record's
    assert folder.read(UUID, entries, SPACE_A)[0] == [OK] * 3
    os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": b"X" * 16},
        {"shape": b"X" * 16},
        {"epoch": 9},
        {"group": 9},
        {"parts": 9},
        {"key_bytes": 9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_record_of_another_space_is_not_served(folder: Folder, change: dict[str, Any]) -> None:
    folder.build(entries_of([300]))
    fields = {name: getattr(SPACE_A, name) for name in KeyspaceId.__slots__}
    other = KeyspaceId(**{**fields, **change})
    assert folder.read(UUID, entries_of([300]), other)[0] == [DAMAGED]


@pytest.mark.parametrize(("name", "value"), [("key", 7), ("part", 1), ("payload_bytes", 301), ("page", 2)])
def test_another_record_than_the_wanted_one_is_not_served(folder: Folder, name: str, value: int) -> None:
    folder.build(entries_of([300, 300]))
    wanted = entries_of([300])
    wanted[name] = value
    assert folder.read(UUID, wanted, SPACE_A)[0] == [DAMAGED]
    assert folder.read(b"\x02" * 16, entries_of([300]), SPACE_A)[0] == [DAMAGED]


@pytest.mark.parametrize("pages", range(1, 10))
def test_what_lies_behind_the_end_of_the_file_is_damaged(folder: Folder, pages: int) -> None:
    entries = entries_of([300, 5000, 4096, 10])
    folder.build(entries)
    os.truncate(folder.path / NAME, pages * PAGE_BYTES)
    ends = entries["page"] + record_pages(entries["payload_bytes"])
    expected = [OK if end <= pages else DAMAGED for end in ends.tolist()]
    assert folder.read(UUID, entries, SPACE_A)[0] == expected


def test_old_bytes_in_a_slot_do_not_make_up_for_a_short_read(folder: Folder) -> None:
    entries = entries_of([5000])
    folder.build(entries)
    _, slots = folder.read(UUID, entries, SPACE_A)
    os.truncate(folder.path / NAME, 2 * PAGE_BYTES)  # the header is there; the payload is in the slot already
    wanted = np.zeros(1, READ)
    for name in ("page", "part", "payload_bytes", "key"):
        wanted[name] = entries[name]
    wanted["address"] = slots.addresses
    status, _ = read_records(folder.files, folder.fd, NAME, UUID, SPACE_A, wanted, direct=False)
    assert status.tolist() == [DAMAGED]


class BadPlace(Files):
    """Reads that touch page 4 fail."""

    def read(self, fd: int, offset: int, buffers: Sequence[Any]) -> int:
        size = sum(memoryview(one).nbytes for one in buffers)
        if offset <= 4 * PAGE_BYTES < offset + size:
            raise OSError(errno.EIO, "planted")
        return super().read(fd, offset, buffers)


def test_a_bad_place_on_the_disk_fails_no_neighbour(folder: Folder) -> None:
    entries = entries_of([300, 300, 300, 300])
    folder.build(entries)
    folder.files = BadPlace()
    assert folder.read(UUID, entries, SPACE_A)[0] == [OK, FAILED, OK, OK]


def test_a_file_that_is_gone_fails_all(folder: Folder) -> None:
    assert folder.read(UUID, entries_of([300, 300]), SPACE_A)[0] == [GONE] * 2


def test_spaces_in_one_segment_do_not_mix(folder: Folder) -> None:
    first = entries_of([300, 300], keyspace=0)
    second = entries_of([300, 300], first_page=5, keyspace=1)
    folder.build(np.concatenate([first, second]), keyspaces=[SPACE_A, SPACE_B])
    assert folder.read(UUID, first, SPACE_A)[0] == [OK, OK]
    assert folder.read(UUID, second, SPACE_B)[0] == [OK, OK]
    assert folder.read(UUID, second, SPACE_A)[0] == [DAMAGED, DAMAGED]
