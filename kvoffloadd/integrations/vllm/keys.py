"""Keys: from vLLM's to the daemon's, one packed list for each group.

An offload key is a block hash and the index of a KV cache group, big-endian in its last four bytes. The protocol has
groups of its own, so the index goes; what is left gets the namespace's width.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvoffloadd.integrations.common.keys import KEY_BYTES, key_of_name, mask_of

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
    if len(name) > KEY_BYTES:
        return key_of_name(generation, name)
    padded = name.ljust(KEY_BYTES, b"\0")
    return _masked(padded, mask_of(generation)) if generation else padded


def offload_key_of(key: bytes, group: int, generation: int, hash_bytes: int) -> bytes | None:
    """The offload key that `key_of` made this of, `hash_bytes`: how long the engine's block hashes are.

    None where it is none of this generation, which a padding tells: hashes as long as keys have none, so that another
    generation's become hashes of nothing. None for longer hashes, too: their names can't be turned back.
    """
    if hash_bytes > KEY_BYTES:
        return None
    padded = _masked(key, mask_of(generation)) if generation else key
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
