"""Pages of 4 KiB that end in the xxh3_128 of the bytes before it, high half first: no torn or flipped page passes for a
whole one. Pure.
"""

from __future__ import annotations

import xxhash

from kvoffloadd.model import PAGE_BYTES, U8Array

CHECKSUM_OFFSET = PAGE_BYTES - 16


def digest_of(raw: U8Array) -> tuple[int, int]:
    """Returns the xxh3_128 of flat bytes, high half first."""
    value = xxhash.xxh3_128_intdigest(raw.data)
    return value >> 64, value & 0xFFFF_FFFF_FFFF_FFFF


def sign_page(page: U8Array) -> None:
    """Writes the checksum of a page, (4096,), to its end."""
    page[CHECKSUM_OFFSET:].view("<u8")[:] = digest_of(page[:CHECKSUM_OFFSET])


def is_signed(page: U8Array) -> bool:
    """Returns whether a page, (4096,), ends in the checksum of the rest."""
    high, low = page[CHECKSUM_OFFSET:].view("<u8").tolist()
    return digest_of(page[:CHECKSUM_OFFSET]) == (high, low)
