"""What is encoded is decoded; what was not encoded by us, or is not whole, is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.model import PAGE_BYTES, PARTS_PER_KEY_MAX
from kvoffloadd.storage.disk import format as disk_format
from kvoffloadd.storage.disk.files import aligned_pages
from kvoffloadd.storage.disk.format import (
    ENTRY,
    KeyspaceId,
    Problem,
    SegmentHeader,
    decode_footer,
    decode_records,
    decode_segment_header,
    decode_trailer,
    encode_footer,
    encode_records,
    encode_segment_header,
    encode_spaces,
    footer_pages,
    record_pages,
)
from kvoffloadd.storage.signedpages import sign_page
from tests.storage.disk.builders import SEGMENT_BYTES, SPACE_A, SPACE_B, entries_of, header_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "DISK_FORMAT.md"

u64 = st.integers(0, (1 << 64) - 1)
u32 = st.integers(0, (1 << 32) - 1)
uuids = st.binary(min_size=16, max_size=16)
keyspaces = st.builds(
    KeyspaceId,
    fingerprint=uuids,
    shape=uuids,
    epoch=u64,
    group=u32,
    parts=st.integers(1, PARTS_PER_KEY_MAX),
    key_bytes=st.integers(8, 32),
)


@given(uuid=uuids, number=u64, segment_bytes=u64, created=u64)
def test_segment_headers_come_back(uuid: bytes, number: int, segment_bytes: int, created: int) -> None:
    header = SegmentHeader(uuid, number, segment_bytes, created)
    assert decode_segment_header(encode_segment_header(header)) == header


def test_every_flipped_byte_of_a_segment_header_is_noticed() -> None:
    page = encode_segment_header(header_of())
    for at in range(PAGE_BYTES):
        page[at] ^= 0xFF
        assert decode_segment_header(page) is Problem.DAMAGED, at
        page[at] ^= 0xFF


def test_records_of_keys_with_more_parts_than_there_are_are_none() -> None:
    """This holds in their headers, and in footers."""
    for parts, is_ours in ((PARTS_PER_KEY_MAX, True), (PARTS_PER_KEY_MAX + 1, False), ((1 << 32) - 1, False)):
        keyspace, entries = replace(SPACE_A, parts=parts), entries_of([1])
        pages = aligned_pages(1)
        encode_records(pages, b"u" * 16, entries, encode_spaces([keyspace]), np.zeros((1, 2), np.uint64), 0)
        assert decode_records(pages, b"u" * 16)[1].tolist() == [is_ours]
        footer = encode_footer(b"u" * 16, 1, entries, [keyspace], SEGMENT_BYTES)
        assert (decode_footer(footer, b"u" * 16) is not None) == is_ours


def test_headers_that_are_not_ours() -> None:
    assert decode_segment_header(np.full(PAGE_BYTES, 0x41, np.uint8)) is Problem.FOREIGN
    newer = encode_segment_header(header_of())
    newer[8] = 2
    sign_page(newer)
    assert decode_segment_header(newer) is Problem.VERSION


def test_a_header_that_was_never_or_half_written_is_ours() -> None:
    page = encode_segment_header(header_of())
    assert decode_segment_header(np.zeros(PAGE_BYTES, np.uint8)) is Problem.UNWRITTEN
    torn = page.copy()
    torn[:512] = 0
    assert decode_segment_header(torn) is Problem.UNWRITTEN


MAGICS = (0, disk_format.SEGMENT_MAGIC, disk_format.RECORD_MAGIC, disk_format.TRAILER_MAGIC)


@given(number=u32, magic=st.sampled_from(MAGICS), version=st.integers(0, 2), signed=st.booleans())
def test_no_page_makes_a_decoder_fail(number: int, magic: int, version: int, signed: bool) -> None:
    page = np.random.default_rng(number).integers(0, 256, PAGE_BYTES, np.uint8)
    page[:8].view("<u8")[:] = magic
    page[8:12].view("<u4")[:] = version
    if signed:
        sign_page(page)
    decode_segment_header(page)
    assert decode_trailer(page) is None
    assert decode_footer(page, b"\0" * 16) is None
    assert not decode_records(page.reshape(1, PAGE_BYTES), b"\0" * 16)[1][0]


@given(data=st.data(), uuid=uuids, table=st.lists(keyspaces, min_size=1, max_size=3), now=u64)
@settings(max_examples=40, deadline=None)
def test_records_come_back(data: st.DataObject, uuid: bytes, table: list[KeyspaceId], now: int) -> None:
    count = data.draw(st.integers(1, 5))
    entries = np.zeros(count, ENTRY)
    for at in range(count):
        entries["key"][at] = data.draw(st.lists(u64, min_size=4, max_size=4))
        entries["sequence"][at] = data.draw(u64)
        entries["payload_bytes"][at] = data.draw(st.integers(1, 1 << 40))
        entries["space"][at] = data.draw(st.integers(0, len(table) - 1))
        entries["part"][at] = data.draw(st.integers(0, table[int(entries["space"][at])].parts - 1))
    digests = np.array(data.draw(st.lists(u64, min_size=2 * count, max_size=2 * count)), np.uint64).reshape(-1, 2)
    out = aligned_pages(count)
    out[:] = 0xAB
    encode_records(out, uuid, entries, encode_spaces(table)[entries["space"]], digests, now)
    records, valid = decode_records(out, uuid)
    assert valid.all()
    for name in ("key", "sequence", "payload_bytes", "part"):
        assert (records[name] == entries[name]).all()
    assert (records["digest"] == digests).all()
    assert (records["written_s"] == now).all()
    named = [table[number] for number in entries["space"].tolist()]
    assert disk_format.decode_spaces(records) == named
    other = bytes([uuid[0] ^ 1]) + uuid[1:]
    assert not decode_records(out, other)[1].any()


def test_every_flipped_byte_of_a_record_header_is_noticed() -> None:
    out = aligned_pages(3)
    entries = entries_of([10, 5000, 4096])
    encode_records(out, b"u" * 16, entries, encode_spaces([SPACE_A]), np.ones((3, 2), np.uint64), 5)
    for at in range(PAGE_BYTES):
        out[1, at] ^= 0x10
        assert decode_records(out, b"u" * 16)[1].tolist() == [True, False, True]
        out[1, at] ^= 0x10


def test_records_of_impossible_size_or_part_are_not_valid() -> None:
    out = aligned_pages(4)
    entries = entries_of([0, 5, 5, 5])
    entries["part"] = 0, 2, 1, 1
    entries["payload_bytes"][3] = 1 << 63
    encode_records(out, b"u" * 16, entries, encode_spaces([SPACE_A]), np.ones((4, 2), np.uint64), 5)
    assert decode_records(out, b"u" * 16)[1].tolist() == [False, False, True, False]


@given(sizes=st.lists(st.integers(1, 3 * PAGE_BYTES), max_size=80), table=st.lists(keyspaces, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_footers_come_back(sizes: list[int], table: list[KeyspaceId]) -> None:
    entries = entries_of(sizes)
    pages = footer_pages(len(entries), len(table))
    segment_bytes = (int(record_pages(entries["payload_bytes"]).sum()) + 1 + pages) * PAGE_BYTES
    raw = encode_footer(b"u" * 16, 9, entries[::-1], table, segment_bytes)
    assert len(raw) == pages * PAGE_BYTES
    trailer = decode_trailer(raw[-PAGE_BYTES:])
    assert trailer is not None
    assert (trailer.uuid, trailer.number, trailer.segment_bytes) == (b"u" * 16, 9, segment_bytes)
    assert trailer.footer_page == segment_bytes // PAGE_BYTES - pages
    found = decode_footer(raw, b"u" * 16)
    assert found is not None
    assert (found[0] == entries).all()
    assert found[1] == table
    assert decode_footer(raw, b"v" * 16) is None


def test_every_flipped_byte_of_a_footer_is_noticed() -> None:
    raw = encode_footer(b"u" * 16, 9, entries_of([1, 2, 3]), [SPACE_A, SPACE_B], SEGMENT_BYTES)
    for at in range(len(raw)):
        raw[at] ^= 1
        assert decode_footer(raw, b"u" * 16) is None
        raw[at] ^= 1
    assert decode_footer(raw, b"u" * 16) is not None


@pytest.mark.parametrize(
    ("name", "value"), [("page", 0), ("page", 2), ("page", 61), ("space", 1), ("part", 2), ("payload_bytes", 0)]
)
def test_a_footer_that_can_not_be_true_is_none(name: str, value: int) -> None:
    entries = entries_of([5000, 1])
    entries[name][1] = value
    assert decode_footer(encode_footer(b"u" * 16, 9, entries, [SPACE_A], SEGMENT_BYTES), b"u" * 16) is None


def tables() -> dict[str, dict[str, tuple[int, int]]]:
    """Reads the tables of the document: structure -> field -> (offset, bytes)."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    name = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        heading = re.match(r"### .*\(`([A-Z]+)`", line)
        name = heading[1] if heading else name
        row = re.match(r"\| (\d+) \| (\d+) \| `(\w+)` \|", line)
        if row:
            found.setdefault(name, {})[row[3]] = (int(row[1]), int(row[2]))
    return found


def test_the_document_has_the_offsets_of_the_code() -> None:
    documented = tables()
    assert set(documented) == {"SEGMENT", "RECORD", "ENTRY", "SPACE", "TRAILER"}
    for name, rows in documented.items():
        dtype = getattr(disk_format, name)
        assert {field: at for field, at in rows.items() if field != "zeros"} == {
            field: (offset, kind.itemsize) for field, (kind, offset) in dtype.fields.items() if field != "zeros"
        }, name


def test_the_document_has_the_magics_and_sizes_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for magic in (disk_format.SEGMENT_MAGIC, disk_format.RECORD_MAGIC, disk_format.TRAILER_MAGIC):
        assert " ".join(f"{byte:02x}" for byte in magic.to_bytes(8, "little")) in text
    for name in ("SEGMENT", "RECORD", "ENTRY", "SPACE", "TRAILER"):
        assert f"(`{name}`, {getattr(disk_format, name).itemsize} bytes)" in text
    assert f"version {disk_format.FORMAT_VERSION}" in text
