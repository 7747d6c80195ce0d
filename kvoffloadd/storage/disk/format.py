"""Converts between bytes on disk and arrays: segment headers, records' headers, footers. Pure; see docs/DISK_FORMAT.md.

All values are little-endian, in pages of 4 KiB. Each header and trailer page ends in the xxh3_128 of the bytes before
it, and a trailer has the digest of its footer, so that no torn or flipped page passes for a whole one. Records and
footers name the uuid of their segment: leftovers of an earlier use of the file are invalid.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffloadd.model import PAGE_BYTES, PARTS_PER_KEY_MAX, BoolArray, I64Array, U8Array, U64Array
from kvoffloadd.storage.signedpages import CHECKSUM_OFFSET, digest_of, is_signed, sign_page

Records = npt.NDArray[Any]
"""A structured array: of ENTRY, RECORD or SPACE."""

FORMAT_VERSION = 1
HEADER_PAGES = 1
"""The pages before the first record of a segment."""
RECORD_HEADER_PAGES = 1
"""The pages before the payload of a record."""
TRAILER_PAGES = 1
"""The pages at the end of a footer."""

Count = TypeVar("Count", int, I64Array)

SEGMENT_MAGIC = int.from_bytes(b"KVOSEGM\n", "little")
RECORD_MAGIC = int.from_bytes(b"KVORECD\n", "little")
TRAILER_MAGIC = int.from_bytes(b"KVOTRLR\n", "little")

ENTRY = np.dtype(
    {
        "names": ["key", "sequence", "payload_bytes", "page", "space", "part"],
        "formats": [("<u8", (4,)), "<u8", "<u8", "<u4", "<u4", "<u4"],
        "offsets": [0, 32, 40, 48, 52, 56],
        "itemsize": 64,
    }
)
"""A record in a footer. `page`: of its header, in the file. `keyspace`: index into the footer's keyspaces."""

SPACE_FIELDS = ("fingerprint", "shape", "epoch", "group", "parts", "key_bytes")
SPACE = np.dtype(
    [
        ("fingerprint", "u1", (16,)),
        ("shape", "u1", (16,)),
        ("epoch", "<u8"),
        ("group", "<u4"),
        ("parts", "<u4"),
        ("key_bytes", "<u4"),
        ("zeros", "u1", (12,)),
    ]
)

RECORD = np.dtype(
    {
        "names": [
            "magic", "version", "part", "uuid", "sequence", "payload_bytes", "key", "fingerprint", "shape", "epoch",
            "group", "parts", "key_bytes", "digest", "written_s", "checksum",
        ],
        "formats": [
            "<u8", "<u4", "<u4", ("u1", (16,)), "<u8", "<u8", ("<u8", (4,)), ("u1", (16,)), ("u1", (16,)), "<u8",
            "<u4", "<u4", "<u4", ("<u8", (2,)), "<u8", ("<u8", (2,)),
        ],
        "offsets": [0, 8, 12, 16, 32, 40, 48, 80, 96, 112, 120, 124, 128, 136, 152, CHECKSUM_OFFSET],
        "itemsize": PAGE_BYTES,
    }
)  # fmt: skip
"""The page before a payload. `digest`: the payload's xxh3_128, high half first, as `hash_payloads` returns it."""

SEGMENT = np.dtype(
    {
        "names": ["magic", "version", "uuid", "number", "segment_bytes", "created_s", "checksum"],
        "formats": ["<u8", "<u4", ("u1", (16,)), "<u8", "<u8", "<u8", ("<u8", (2,))],
        "offsets": [0, 8, 16, 32, 40, 48, CHECKSUM_OFFSET],
        "itemsize": PAGE_BYTES,
    }
)
"""Page 0 of a segment file."""

TRAILER = np.dtype(
    {
        "names": [
            "magic", "version", "num_spaces", "uuid", "number", "segment_bytes", "footer_page", "num_entries",
            "footer_digest", "checksum",
        ],
        "formats": ["<u8", "<u4", "<u4", ("u1", (16,)), "<u8", "<u8", "<u8", "<u8", ("<u8", (2,)), ("<u8", (2,))],
        "offsets": [0, 8, 12, 16, 32, 40, 48, 56, 64, CHECKSUM_OFFSET],
        "itemsize": PAGE_BYTES,
    }
)  # fmt: skip
"""The last page of a sealed segment."""


class Problem(enum.Enum):
    """Why a page is no segment header. FOREIGN: another program's; VERSION: of another format version; DAMAGED: a
    damaged header; UNWRITTEN: space was allocated for a header, and nothing of it was written, or only its end.
    """

    FOREIGN = "foreign"
    VERSION = "version"
    DAMAGED = "damaged"
    UNWRITTEN = "unwritten"


@dataclass(frozen=True, slots=True)
class KeyspaceId:
    """Identifies keys that can be compared. `fingerprint`: of the namespace; `shape`: of the group's schema and the
    sizes of its parts; both 16 bytes. `key_bytes`: the significant bytes of a key's 32; the rest is zeros.
    """

    fingerprint: bytes
    shape: bytes
    epoch: int
    group: int
    parts: int
    key_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A use of a segment file. `uuid`: 16 random bytes of this use. `number`: rises with each use of any file, so that
    the oldest is known. `created_s`: unix time, 0 if unknown.
    """

    uuid: bytes
    number: int
    segment_bytes: int
    created_s: int


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last page of a sealed segment: the footer begins at `footer_page` and has these sizes."""

    uuid: bytes
    number: int
    segment_bytes: int
    footer_page: int
    num_entries: int
    num_spaces: int
    footer_digest: tuple[int, int]


def record_pages(payload_bytes: npt.NDArray[Any]) -> I64Array:
    """Returns the pages of each record: its header and its payload."""
    pages: I64Array = -(-payload_bytes.astype(np.int64) // PAGE_BYTES) + RECORD_HEADER_PAGES
    return pages


def footer_pages(num_entries: Count, num_spaces: int) -> Count:
    """Returns the pages at the end of a sealed segment, including the trailer: for one number of entries, or each."""
    return -(-(num_entries * ENTRY.itemsize + num_spaces * SPACE.itemsize) // PAGE_BYTES) + TRAILER_PAGES


# --- segment headers ---


def encode_segment_header(header: SegmentHeader) -> U8Array:
    """Returns page 0, (4096,)."""
    page = np.zeros(PAGE_BYTES, np.uint8)
    fields = page.view(SEGMENT)[0]
    fields["magic"], fields["version"] = SEGMENT_MAGIC, FORMAT_VERSION
    fields["uuid"] = _bytes(header.uuid)
    fields["number"], fields["segment_bytes"] = header.number, header.segment_bytes
    fields["created_s"] = header.created_s
    sign_page(page)
    return page


def decode_segment_header(page: U8Array) -> SegmentHeader | Problem:
    """Decodes page 0, (4096,)."""
    fields = page.view(SEGMENT)[0]
    if fields["magic"] == SEGMENT_MAGIC and fields["version"] == FORMAT_VERSION and is_signed(page):
        return SegmentHeader(
            fields["uuid"].tobytes(), int(fields["number"]), int(fields["segment_bytes"]), int(fields["created_s"])
        )
    return _problem(page)


def _problem(page: U8Array) -> Problem:
    fields = page.view(SEGMENT)[0]
    if fields["magic"] == SEGMENT_MAGIC and fields["version"] == FORMAT_VERSION:
        return Problem.DAMAGED
    # With its first words corrected, a valid header that is damaged only there is whole again.
    mended = page.copy()
    fields_of_mended = mended.view(SEGMENT)[0]
    fields_of_mended["magic"], fields_of_mended["version"] = SEGMENT_MAGIC, FORMAT_VERSION
    if is_signed(mended):
        return Problem.DAMAGED
    if fields["magic"] == SEGMENT_MAGIC:
        return Problem.VERSION
    # The middle is zeros if nothing of the header was written, or only its end.
    fields_end = SEGMENT.fields["created_s"][1] + 8 if SEGMENT.fields else 0
    if fields["magic"] == 0 and not page[fields_end:CHECKSUM_OFFSET].any():
        return Problem.UNWRITTEN
    return Problem.FOREIGN


# --- records ---


def encode_records(
    out: U8Array, uuid: bytes, entries: Records, keyspaces: Records, digests: U64Array, now_s: int
) -> None:
    """Writes the header page of each entry to `out`, (n, 4096), whatever it holds. `keyspaces`: of SPACE, one for all
    entries or one for each. `now_s`: unix time.
    """
    out[:] = 0
    fields = out.view(RECORD)[:, 0]
    fields["magic"], fields["version"] = RECORD_MAGIC, FORMAT_VERSION
    fields["uuid"] = _bytes(uuid)
    for name in ("part", "sequence", "payload_bytes", "key"):
        fields[name] = entries[name]
    for name in SPACE_FIELDS:
        fields[name] = keyspaces[name]
    fields["digest"] = digests
    fields["written_s"] = now_s
    for page in out:
        sign_page(page)


def decode_records(pages: U8Array, uuid: bytes) -> tuple[Records, BoolArray]:
    """Returns each page, (n, 4096), as a RECORD, and whether it is whole and belongs to this use of the segment.
    Invalid records have arbitrary contents.
    """
    records = pages.view(RECORD)[:, 0]
    valid: BoolArray = records["magic"] == RECORD_MAGIC
    found = np.flatnonzero(valid)
    if len(found):
        sizes = records["payload_bytes"][found]
        good = (records["version"][found] == FORMAT_VERSION) & (records["uuid"][found] == _bytes(uuid)).all(axis=1)
        good &= (sizes > 0) & (sizes < 1 << 62)
        good &= _have_parts(records["part"][found], records["parts"][found])
        valid[found] = good
        for index in found[good].tolist():
            valid[index] = is_signed(pages[index])
    return records, valid


# --- footers ---


def encode_spaces(keyspaces: Sequence[KeyspaceId]) -> Records:
    """Returns the keyspaces as an array of SPACE."""
    table = np.zeros(len(keyspaces), SPACE)
    for row, keyspace in zip(table, keyspaces, strict=True):
        row["fingerprint"], row["shape"] = _bytes(keyspace.fingerprint), _bytes(keyspace.shape)
        row["epoch"], row["group"] = keyspace.epoch, keyspace.group
        row["parts"], row["key_bytes"] = keyspace.parts, keyspace.key_bytes
    return table


def decode_spaces(table: Records) -> list[KeyspaceId]:
    """Returns the keyspaces of an array with the fields of SPACE."""
    return [
        KeyspaceId(
            row["fingerprint"].tobytes(), row["shape"].tobytes(), int(row["epoch"]), int(row["group"]),
            int(row["parts"]), int(row["key_bytes"]),
        )
        for row in table
    ]  # fmt: skip


def encode_footer(
    uuid: bytes, number: int, entries: Records, keyspaces: Sequence[KeyspaceId], segment_bytes: int
) -> U8Array:
    """Returns the last `footer_pages` pages of a sealed segment, as flat bytes. Entries are sorted by page."""
    pages = footer_pages(len(entries), len(keyspaces))
    out = np.zeros(pages * PAGE_BYTES, np.uint8)
    body, last = out[:-PAGE_BYTES], out[-PAGE_BYTES:]
    end = len(entries) * ENTRY.itemsize
    body[:end].view(ENTRY)[:] = entries[np.argsort(entries["page"], kind="stable")]
    body[end : end + len(keyspaces) * SPACE.itemsize].view(SPACE)[:] = encode_spaces(keyspaces)
    trailer = last.view(TRAILER)[0]
    trailer["magic"], trailer["version"] = TRAILER_MAGIC, FORMAT_VERSION
    trailer["uuid"] = _bytes(uuid)
    trailer["number"], trailer["segment_bytes"] = number, segment_bytes
    trailer["footer_page"] = segment_bytes // PAGE_BYTES - pages
    trailer["num_entries"], trailer["num_spaces"] = len(entries), len(keyspaces)
    trailer["footer_digest"] = digest_of(body)
    sign_page(last)
    return out


def decode_trailer(page: U8Array) -> Trailer | None:
    """Decodes the last page, (4096,), of a sealed segment; None if it is no whole trailer."""
    fields = page.view(TRAILER)[0]
    if fields["magic"] != TRAILER_MAGIC or fields["version"] != FORMAT_VERSION or not is_signed(page):
        return None
    high, low = fields["footer_digest"].tolist()
    trailer = Trailer(
        uuid=fields["uuid"].tobytes(),
        number=int(fields["number"]),
        segment_bytes=int(fields["segment_bytes"]),
        footer_page=int(fields["footer_page"]),
        num_entries=int(fields["num_entries"]),
        num_spaces=int(fields["num_spaces"]),
        footer_digest=(high, low),
    )
    pages = footer_pages(trailer.num_entries, trailer.num_spaces)
    return trailer if trailer.footer_page == trailer.segment_bytes // PAGE_BYTES - pages else None


def decode_footer(pages: U8Array, uuid: bytes) -> tuple[Records, list[KeyspaceId]] | None:
    """Returns the entries and keyspaces of a footer, given as the flat bytes of all its pages; None if it is not whole,
    or belongs to another use of the segment.
    """
    trailer = decode_trailer(pages[-PAGE_BYTES:])
    if trailer is None or trailer.uuid != uuid:
        return None
    body = pages[:-PAGE_BYTES]
    whole = len(pages) == footer_pages(trailer.num_entries, trailer.num_spaces) * PAGE_BYTES
    if not whole or digest_of(body) != trailer.footer_digest:
        return None
    end = trailer.num_entries * ENTRY.itemsize
    entries = body[:end].view(ENTRY)
    table = body[end : end + trailer.num_spaces * SPACE.itemsize].view(SPACE)
    return (entries, decode_spaces(table)) if _is_sound(entries, table, trailer.footer_page) else None


def _is_sound(entries: Records, table: Records, footer_page: int) -> bool:
    """Returns whether the entries are plausible: they lie in sequence before the footer, and their keyspaces exist."""
    if not len(entries):
        return True
    if entries["payload_bytes"].max() > footer_page * PAGE_BYTES or (entries["payload_bytes"] == 0).any():
        return False
    first = entries["page"].astype(np.int64)
    behind = np.append(first[1:], footer_page)
    in_place = first[0] >= HEADER_PAGES and bool((first + record_pages(entries["payload_bytes"]) <= behind).all())
    if not in_place or int(entries["space"].max()) >= len(table):
        return False
    return bool(_have_parts(entries["part"], table["parts"][entries["space"]]).all())


def _have_parts(part: Records, parts: Records) -> BoolArray:
    """Returns whether a key may have this number of parts, and has this one."""
    has: BoolArray = (part < parts) & (parts <= PARTS_PER_KEY_MAX)
    return has


# --- bytes ---


def _bytes(raw: bytes) -> U8Array:
    return np.frombuffer(raw, np.uint8)
