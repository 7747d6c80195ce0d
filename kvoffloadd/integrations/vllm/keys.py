"""Converts vLLM's keys to the daemon's, one packed list for each group.

An offload key is a block hash and the index of a KV cache group, big-endian in its last four bytes. The protocol has
separate groups, so the index goes; the rest gets the namespace's width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffloadd.integrations.common.keys import KEY_BYTES, key_of_name, mask_of
from kvoffloadd.model import I64Array, U8Array

_GROUP_BYTES = 4


@dataclass(frozen=True, slots=True)
class KeyNames:
    """An engine's present naming of keys.

    `generation`: another (u64) after each reset of the engine's cache, and 0 before. Stores of an earlier one may still
    be under way then, even unsent; under separate names they can't be taken for what the new weights compute. `salts`:
    group -> u64, for groups with contents that depend on more than the namespace.
    """

    generation: int = 0
    salts: Mapping[int, int] = field(default_factory=dict)

    def number(self, group: int) -> int:
        """Returns the number that distinguishes this group's names from others of the same hashes; 0: hashes are the
        names.
        """
        return self.generation ^ self.salts.get(group, 0)


PLAIN = KeyNames()


def salts_of(drafts: str, groups: Iterable[int]) -> dict[int, int]:
    """Returns salts for groups with layers of a draft model, which `drafts` names: engines that have another one find
    nothing there.
    """
    salt = hashlib.blake2b(drafts.encode(), digest_size=8, person=b"kvoffloadd draft").digest()
    return dict.fromkeys(groups, int.from_bytes(salt, "little") | 1)


def drafting_groups(layers: Mapping[int, Sequence[str]], target_layers: int) -> list[int]:
    """Returns the groups, by index, that are not the target model's alone. `layers`: the names of each group's layers.

    vLLM names layers by their place in the model. The target's are those with a number below `target_layers` and
    nothing about drafts before it; all others count as the draft's.
    """
    return [group for group, names in layers.items() if not all(_is_targets(name, target_layers) for name in names)]


def _is_targets(name: str, target_layers: int) -> bool:
    place, found, rest = name.partition("layers.")
    number = rest.partition(".")[0]
    return bool(found) and place in _TARGET_PLACES and number.isdecimal() and int(number) < target_layers


_TARGET_PLACES = frozenset(("", "model.", "language_model.", "language_model.model.", "model.language_model."))


def group_of(offload_key: bytes) -> int:
    """Returns the index of the KV cache group that an offload key names."""
    return int.from_bytes(offload_key[-_GROUP_BYTES:], "big")


def groups_of(offload_keys: Sequence[bytes]) -> I64Array:
    """Returns `group_of` each, all at once. Their hashes have one length, as all of an engine's have."""
    ends = np.ascontiguousarray(_joined(offload_keys)[:, -_GROUP_BYTES:])
    return ends.view(">u4").ravel().astype(np.int64)


def key_of(offload_key: bytes, names: KeyNames = PLAIN) -> bytes:
    """Returns the daemon's key, `KEY_BYTES` wide."""
    name, number = offload_key[:-_GROUP_BYTES], names.number(group_of(offload_key))
    if len(name) > KEY_BYTES:
        return key_of_name(number, name)
    padded = name.ljust(KEY_BYTES, b"\0")
    return _masked(padded, mask_of(number)) if number else padded


def offload_key_of(key: bytes, group: int, names: KeyNames, hash_bytes: int) -> bytes | None:
    """Returns the offload key that `key_of` converted to this; `hash_bytes`: length of the engine's block hashes.

    None where it has none of these names, which a padding shows: hashes as long as keys have none, so that keys of
    another generation become hashes that do not exist. None for longer hashes, too: their names can't be turned back.
    """
    if hash_bytes > KEY_BYTES:
        return None
    number = names.number(group)
    padded = _masked(key, mask_of(number)) if number else key
    if padded.count(0, hash_bytes) != KEY_BYTES - hash_bytes:
        return None
    return padded[:hash_bytes] + group.to_bytes(_GROUP_BYTES, "big")


def hash_bytes_of(offload_key: bytes) -> int:
    """Returns the length of the block hash in it."""
    return len(offload_key) - _GROUP_BYTES


def by_group(offload_keys: Iterable[bytes], names: KeyNames = PLAIN) -> dict[int, list[bytes]]:
    """Returns group -> the daemon's keys, each once, in the order of the offload keys."""
    groups: dict[int, dict[bytes, None]] = {}
    for offload_key in offload_keys:
        groups.setdefault(group_of(offload_key), {})[key_of(offload_key, names)] = None
    return {group: list(keys) for group, keys in groups.items()}


def pack_by_group(offload_keys: Sequence[bytes], names: KeyNames = PLAIN) -> dict[int, tuple[int, U8Array]]:
    """Returns group -> the index of its first key, and u8 (keys, KEY_BYTES): `key_of` of each, all at once. Their
    hashes have one length.
    """
    if not offload_keys:
        return {}
    hashes = _joined(offload_keys)[:, :-_GROUP_BYTES]
    if hashes.shape[1] > KEY_BYTES:
        digests = b"".join(key_of(key, names) for key in offload_keys)
        named, masked = np.frombuffer(digests, np.uint8).reshape(-1, KEY_BYTES), True
    else:
        named, masked = np.zeros((len(hashes), KEY_BYTES), np.uint8), False
        named[:, : hashes.shape[1]] = hashes
    groups = groups_of(offload_keys)
    found = {}
    for group, first in zip(*(array.tolist() for array in np.unique(groups, return_index=True)), strict=True):
        mask = 0 if masked else mask_of(names.number(group))
        found[group] = first, named[groups == group] ^ np.frombuffer(mask.to_bytes(KEY_BYTES, "little"), np.uint8)
    return found


def _joined(offload_keys: Sequence[bytes]) -> U8Array:
    width = len(offload_keys[0]) if offload_keys else _GROUP_BYTES
    return np.frombuffer(b"".join(offload_keys), np.uint8).reshape(-1, width)


def _masked(padded: bytes, mask: int) -> bytes:
    return (int.from_bytes(padded, "little") ^ mask).to_bytes(KEY_BYTES, "little")
