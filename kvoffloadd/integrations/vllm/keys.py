"""Keys: from vLLM's to the daemon's, one packed list for each group, and how many of them fit one request.

An offload key is a block hash and the index of a KV cache group, big-endian in its last four bytes. The protocol has
groups of its own, so the index goes; what is left gets the namespace's width.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache

from kvoffloadd.client import KvCache
from kvoffloadd.model import KEY_BYTES_MAX, key_price
from kvoffloadd.protocol.messages import Limits

KEY_BYTES = KEY_BYTES_MAX
_GROUP_BYTES = 4

Piece = dict[int, slice]
"""Group -> which of its keys."""

_BLOCK_BYTES = 4
_FRAME_BYTES = 1024
_GROUP_FRAME_BYTES = 64
"""What a frame has beside keys and blocks, at most."""


def group_of(offload_key: bytes) -> int:
    """Index of the KV cache group that an offload key names."""
    return int.from_bytes(offload_key[-_GROUP_BYTES:], "big")


def key_of(offload_key: bytes, generation: int = 0) -> bytes:
    """The daemon's key, `KEY_BYTES` wide.

    `generation`: another (u64) after each reset of the engine's cache, and 0 before. Stores of an earlier one may still
    be under way then, even unsent; under names of their own they can't be taken for what the new weights compute.
    """
    name = offload_key[:-_GROUP_BYTES]
    if len(name) > KEY_BYTES:
        return _digest(generation, name)
    padded = name.ljust(KEY_BYTES, b"\0")
    return _masked(padded, _mask(generation)) if generation else padded


def offload_key_of(key: bytes, group: int, generation: int, hash_bytes: int) -> bytes | None:
    """The offload key that `key_of` made this of, `hash_bytes`: how long the engine's block hashes are.

    None where it is none of this generation, which a padding tells: hashes as long as keys have none, so that another
    generation's become hashes of nothing. None for longer hashes, too: their names can't be turned back.
    """
    if hash_bytes > KEY_BYTES:
        return None
    padded = _masked(key, _mask(generation)) if generation else key
    if padded.count(0, hash_bytes) != KEY_BYTES - hash_bytes:
        return None
    return padded[:hash_bytes] + group.to_bytes(_GROUP_BYTES, "big")


def hash_bytes_of(offload_key: bytes) -> int:
    """How long the block hash in it is."""
    return len(offload_key) - _GROUP_BYTES


def by_group(offload_keys: Iterable[bytes], generation: int = 0) -> dict[int, list[bytes]]:
    """Group -> the daemon's keys, each once, in the order of the offload keys."""
    groups: dict[int, dict[bytes, None]] = {}
    for offload_key in offload_keys:
        groups.setdefault(group_of(offload_key), {})[key_of(offload_key, generation)] = None
    return {group: list(keys) for group, keys in groups.items()}


def _masked(padded: bytes, mask: int) -> bytes:
    return (int.from_bytes(padded, "little") ^ mask).to_bytes(KEY_BYTES, "little")


@lru_cache(maxsize=4)
def _mask(generation: int) -> int:
    """32 bytes for each generation, none for 0: names differ as long as no two hashes differ by just that."""
    return int.from_bytes(_digest(generation, b""), "little") if generation else 0


def _digest(generation: int, name: bytes) -> bytes:
    salt = generation.to_bytes(8, "little")
    return hashlib.blake2b(name, digest_size=KEY_BYTES, salt=salt, person=b"kvoffloadd").digest()


def most_keys(limits: Limits | None, caches: KvCache, groups: int, blocks_per_key: int = 0) -> int:
    """How many keys of `caches` fit one request that names so many groups, and so many blocks with each key."""
    if limits is None:
        return sys.maxsize
    parts = max((group.parts for group in caches.groups), default=1)
    bytes_per_key = KEY_BYTES + blocks_per_key * _BLOCK_BYTES
    room = limits.frame_bytes - _FRAME_BYTES - groups * _GROUP_FRAME_BYTES
    return max(1, min(limits.keys_per_request // key_price(parts, 1), room // bytes_per_key))


def pieces(counts: Mapping[int, int], most: int) -> list[Piece]:
    """All keys of all groups, in order, `most` at once. `counts`: how many each group has."""
    dealt: list[Piece] = []
    room = 0
    for group, count in counts.items():
        at = 0
        while at < count:
            if not room:
                dealt.append({})
                room = most
            taken = min(room, count - at)
            dealt[-1][group] = slice(at, at + taken)
            at += taken
            room -= taken
    return dealt
