"""Widths and names of the daemon's keys, and how many of them fit one request."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import lru_cache

from kvoffloadd.client import KvCache
from kvoffloadd.model import KEY_BYTES_MAX, key_price
from kvoffloadd.protocol.messages import Limits

KEY_BYTES = KEY_BYTES_MAX

Piece = dict[int, slice]
"""Group -> the slice of its keys."""

_BLOCK_BYTES = 4
_FRAME_BYTES = 1024
_GROUP_FRAME_BYTES = 64
"""Bytes of a frame in addition to keys and blocks, at most."""


@lru_cache(maxsize=4)
def mask_of(generation: int) -> int:
    """Returns the mask that is XORed with a key's little-endian number, to rename it in each generation (u64).

    32 bytes, 0 for generation 0: names differ as long as no two keys differ by just that.
    """
    return int.from_bytes(key_of_name(generation, b""), "little") if generation else 0


def key_of_name(generation: int, name: bytes) -> bytes:
    """Makes a key from a name of any length, a different one in each generation (u64)."""
    salt = generation.to_bytes(8, "little")
    return hashlib.blake2b(name, digest_size=KEY_BYTES, salt=salt, person=b"kvoffloadd").digest()


def most_keys(limits: Limits | None, caches: KvCache, groups: int, blocks_per_key: int = 0) -> int:
    """Returns how many keys of `caches` fit one request with this number of groups, and of blocks with each key."""
    if limits is None:
        return sys.maxsize
    parts = max((group.parts for group in caches.groups), default=1)
    bytes_per_key = KEY_BYTES + blocks_per_key * _BLOCK_BYTES
    room = limits.frame_bytes - _FRAME_BYTES - groups * _GROUP_FRAME_BYTES
    return max(1, min(limits.keys_per_request // key_price(parts, 1), room // bytes_per_key))


def pieces(counts: Mapping[int, int], most: int) -> list[Piece]:
    """Splits all keys of all groups, in order, into pieces of `most`. `counts`: how many each group has."""
    dealt: list[Piece] = []
    room = 0
    for group, count in counts.items():
        start = 0
        while start < count:
            if not room:
                dealt.append({})
                room = most
            taken = min(room, count - start)
            dealt[-1][group] = slice(start, start + taken)
            start += taken
            room -= taken
    return dealt
