"""Converts between header pages and arrays: the page before an object's payloads in the remote store. Pure.

    offset  bytes   field
         0      8   "KVORMTE\\n"
         8      4   version
        12      4   parts, at most 123
        16     16   fingerprint of the namespace
        32     16   shape
        48      8   generation
        56      8   era
        64      8   zeros
        72      4   group
        76      4   key_bytes
        80     32   key
       112      8   payload bytes of all parts
       120     16   boot_id of the daemon that wrote it
       136      8   unix time at which it was written
       144   32 p   of each part: payload bytes (8), zeros (8), its xxh3_128, high half first (16)
      4080     16   xxh3_128 of all before, high half first

Little-endian; unnamed bytes are zeros. It contains everything that a reader asks for, so that an object of another name
never passes for the wanted one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.agentwire.frames import HEADER_BYTES, PARTS_MAX
from kvoffloadd.agentwire.names import Space
from kvoffloadd.model import BoolArray, U8Array, U64Array
from kvoffloadd.storage.signedpages import CHECKSUM_OFFSET, is_signed, sign_page

HEADER_VERSION = 1
HEADER_MAGIC = int.from_bytes(b"KVORMTE\n", "little")

_WRITER = slice(120, 144)
"""The writer and its time, which readers ignore."""
_PARTS_AT = 144

PART = np.dtype([("payload_bytes", "<u8"), ("zeros", "<u8"), ("digest", "<u8", (2,))])
HEADER = np.dtype(
    {
        "names": [
            "magic", "version", "parts", "fingerprint", "shape", "generation", "era", "group", "key_bytes", "key",
            "payload_bytes", "boot_id", "written_s", "part", "checksum",
        ],
        "formats": [
            "<u8", "<u4", "<u4", ("u1", (16,)), ("u1", (16,)), "<u8", ("u1", (8,)), "<u4", "<u4", ("<u8", (4,)),
            "<u8", ("u1", (16,)), "<u8", (PART, (PARTS_MAX,)), ("<u8", (2,)),
        ],
        "offsets": [0, 8, 12, 16, 32, 48, 56, 72, 76, 80, 112, 120, 136, _PARTS_AT, CHECKSUM_OFFSET],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip


def encode_headers(
    space: Space, keys: U64Array, part_bytes: U64Array, digests: U64Array, boot_id: bytes, now_s: int
) -> U8Array:
    """Returns header pages, (n, 4096), of keys (n, 4) with parts of `part_bytes` (p,) and `digests` (n, p, 2)."""
    pages = _unsigned(space, keys, part_bytes)
    fields = pages.view(HEADER)[:, 0]
    fields["boot_id"] = np.frombuffer(boot_id, np.uint8)
    fields["written_s"] = now_s
    fields["part"]["digest"][:, : len(part_bytes)] = digests
    for page in pages:
        sign_page(page)
    return pages


def match_headers(pages: U8Array, space: Space, keys: U64Array, part_bytes: U64Array) -> tuple[BoolArray, U64Array]:
    """Returns which pages, (n, 4096), are whole and match the request; and the digests (n, p, 2) of payloads in each,
    which are meaningless for the others.
    """
    digests: U64Array = pages.view(HEADER)[:, 0]["part"]["digest"][:, : len(part_bytes)].astype(np.uint64)
    # All but writer, digests and checksum must be as this version writes it.
    found = pages[:, :CHECKSUM_OFFSET].copy()
    found[:, _WRITER] = 0
    named = found[:, _PARTS_AT : _PARTS_AT + len(part_bytes) * PART.itemsize]
    named.reshape(len(pages), len(part_bytes), PART.itemsize)[:, :, 16:] = 0  # a view: only the last axis is split
    valid: BoolArray = (found == _unsigned(space, keys, part_bytes)[:, :CHECKSUM_OFFSET]).all(axis=1)
    for index in np.flatnonzero(valid).tolist():
        valid[index] = is_signed(pages[index])
    return valid, digests


def _unsigned(space: Space, keys: U64Array, part_bytes: U64Array) -> U8Array:
    """Returns the pages as far as the names and sizes determine them."""
    pages = np.zeros((len(keys), HEADER_BYTES), np.uint8)
    fields: npt.NDArray[Any] = pages.view(HEADER)[:, 0]
    fields["magic"], fields["version"], fields["parts"] = HEADER_MAGIC, HEADER_VERSION, len(part_bytes)
    fields["fingerprint"] = np.frombuffer(space.fingerprint, np.uint8)
    fields["shape"] = np.frombuffer(space.shape, np.uint8)
    fields["generation"], fields["era"] = space.generation, np.frombuffer(space.era, np.uint8)
    fields["group"], fields["key_bytes"], fields["key"] = space.group, space.key_bytes, keys
    fields["payload_bytes"] = int(part_bytes.sum())
    fields["part"]["payload_bytes"][:, : len(part_bytes)] = part_bytes
    return pages
