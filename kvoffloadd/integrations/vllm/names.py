"""From vLLM's offload keys to the daemon's: one list of packed keys for each group.

An offload key is a block hash and the index of a KV cache group, big-endian in its last four bytes. The protocol has
groups of its own, so the index goes; what is left gets the namespace's width.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvoffloadd.model import KEY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY_BYTES = KEY_BYTES_MAX
_GROUP_BYTES = 4


def group_of(offload_key: bytes) -> int:
    """Index of the KV cache group that an offload key names."""
    return int.from_bytes(offload_key[-_GROUP_BYTES:], "big")


def key_of(offload_key: bytes, generation: int = 0) -> bytes:
    """The daemon's key, `KEY_BYTES` wide.

    `generation`: another (u64) after each reset of the engine's cache, and 0 before. Stores of an earlier one may still
    be under way then, even unsent; under names of their own they can't be taken for what the new weights compute.
    """
    name = offload_key[:-_GROUP_BYTES]
    if generation or len(name) > KEY_BYTES:
        salt = generation.to_bytes(8, "little")
        return hashlib.blake2b(name, digest_size=KEY_BYTES, salt=salt, person=b"kvoffloadd").digest()
    return name.ljust(KEY_BYTES, b"\0")


def by_group(offload_keys: Iterable[bytes], generation: int = 0) -> dict[int, list[bytes]]:
    """Group -> the daemon's keys, each once, in the order of the offload keys."""
    groups: dict[int, dict[bytes, None]] = {}
    for offload_key in offload_keys:
        groups.setdefault(group_of(offload_key), {})[key_of(offload_key, generation)] = None
    return {group: list(keys) for group, keys in groups.items()}
