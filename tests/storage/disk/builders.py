"""Segments with known contents, for the tests of the disk tier's files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvoffloadd.model import PAGE_BYTES, I64Array, U8Array, U64Array
from kvoffloadd.storage.disk.files import Files, aligned_pages
from kvoffloadd.storage.disk.format import (
    ENTRY,
    KeyspaceId,
    Records,
    SegmentHeader,
    encode_records,
    encode_spaces,
    record_pages,
)
from kvoffloadd.storage.disk.records import READ, read_records, write_records
from kvoffloadd.storage.disk.recovery import Recovered, recover_segment
from kvoffloadd.storage.disk.segment import create_segment, seal_segment
from kvoffloadd.storage.hashing import hash_payloads

NAME = "00000000000000aa"
SEGMENT_BYTES = 64 * PAGE_BYTES
SPACE_A = KeyspaceId(b"A" * 16, b"s" * 16, 1, 0, 2, 16)
SPACE_B = KeyspaceId(b"B" * 16, b"t" * 16, 2, 3, 1, 32)


def header_of(uuid: bytes = b"\x01" * 16, number: int = 1, segment_bytes: int = SEGMENT_BYTES) -> SegmentHeader:
    return SegmentHeader(uuid, number, segment_bytes, 1_700_000_000)


def payload_of(entry: Records, epoch: int) -> bytes:
    """The payload that belongs to a key and part in an epoch: whatever else is read is wrong."""
    seed = [int(entry["key"][0]), int(entry["part"]), epoch]
    return np.random.default_rng(seed).bytes(int(entry["payload_bytes"]))


def entries_of(sizes: list[int], first_page: int = 1, first_key: int = 1, keyspace: int = 0) -> Records:
    """Records of these payload sizes behind one another."""
    entries = np.zeros(len(sizes), ENTRY)
    entries["key"][:, 0] = np.arange(first_key, first_key + len(sizes))
    entries["payload_bytes"] = sizes
    pages = record_pages(entries["payload_bytes"])
    entries["page"] = first_page + np.cumsum(pages) - pages
    entries["sequence"] = np.arange(100 + first_key, 100 + first_key + len(sizes))
    entries["space"] = keyspace
    return entries


@dataclass(slots=True)
class RecordSlots:
    """Page-aligned memory, one slot for each record."""

    entries: Records
    memory: U8Array = field(init=False)
    starts: I64Array = field(init=False)

    def __post_init__(self) -> None:
        pages = record_pages(self.entries["payload_bytes"]) - 1
        self.starts = np.cumsum(pages) - pages
        self.memory = aligned_pages(int(pages.sum()))
        self.memory[:] = 0xEE

    @property
    def addresses(self) -> U64Array:
        return (self.starts * PAGE_BYTES + self.memory.ctypes.data).astype(np.uint64)

    def payload(self, at: int) -> U8Array:
        start = int(self.starts[at]) * PAGE_BYTES
        payload: U8Array = self.memory.reshape(-1)[start : start + int(self.entries["payload_bytes"][at])]
        return payload


class Folder:
    """A directory of segment files. `files` does the system calls."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self.path = path
        self.files = files or Files()
        self.files.make_directory(path)
        self.fd = self.files.open_directory(path)

    def close(self) -> None:
        os.close(self.fd)

    def create(self, header: SegmentHeader, name: str = NAME) -> int:
        return create_segment(self.files, self.fd, name, header, direct=False)

    def write(self, fd: int, header: SegmentHeader, entries: Records, keyspaces: list[KeyspaceId]) -> None:
        """Entries that lie behind one another, with the payloads that `payload_of` makes."""
        slots = RecordSlots(entries)
        for at in range(len(entries)):
            slots.payload(at)[:] = np.frombuffer(
                payload_of(entries[at], keyspaces[int(entries["space"][at])].epoch), np.uint8
            )
        sizes = entries["payload_bytes"].astype(np.int64)
        headers = aligned_pages(len(entries))
        digests = hash_payloads(slots.addresses, sizes)
        encode_records(
            headers, header.uuid, entries, encode_spaces(keyspaces)[entries["space"]], digests, 1_700_000_001
        )
        write_records(self.files, fd, int(entries["page"][0]), headers, slots.addresses, sizes)

    def build(
        self,
        entries: Records,
        *,
        keyspaces: list[KeyspaceId] | None = None,
        header: SegmentHeader | None = None,
        sealed: bool = True,
        name: str = NAME,
    ) -> SegmentHeader:
        """A segment file with these records."""
        keyspaces, header = keyspaces or [SPACE_A], header or header_of()
        fd = self.create(header, name)
        if len(entries):
            self.write(fd, header, entries, keyspaces)
        if sealed:
            seal_segment(self.files, fd, header, entries, keyspaces)
        os.close(fd)
        return header

    def recover(self, name: str = NAME) -> Recovered:
        return recover_segment(self.files, self.fd, name, direct=False)

    def read(
        self, uuid: bytes, entries: Records, keyspace: KeyspaceId, name: str = NAME
    ) -> tuple[list[int], RecordSlots]:
        """Status of each entry, and the slots they were read to. What is OK is compared with what was written."""
        slots = RecordSlots(entries)
        wanted = np.zeros(len(entries), READ)
        for field_name in ("page", "part", "payload_bytes", "key"):
            wanted[field_name] = entries[field_name]
        wanted["address"] = slots.addresses
        status, digests = read_records(self.files, self.fd, name, uuid, keyspace, wanted, direct=False)
        for at, found in enumerate(status.tolist()):
            if found == 0:
                assert slots.payload(at).tobytes() == payload_of(entries[at], keyspace.epoch)
                expected = hash_payloads(
                    slots.addresses[at : at + 1], entries["payload_bytes"][at : at + 1].astype(int)
                )
                assert (digests[at] == expected[0]).all()
        return status.tolist(), slots
