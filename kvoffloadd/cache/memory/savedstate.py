"""Namespaces and epochs as they are saved beside the arena, for a warm restart. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack

from kvoffloadd.cache.memory.epochs import Epochs
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace

_ARRAYS_BYTES = 10
"""Headers of two arrays, at most."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a predecessor noted of namespaces. `keyspaces`: as `pack_state` lists them."""

    base: int
    last: int
    epochs: dict[bytes, int]
    keyspaces: list[list[Any]]


def pack_state(namespaces: Iterable[Namespace], epochs: Epochs, bytes_max: int) -> tuple[bytes, list[int]]:
    """Whose the keys in memory are, for `read_saved_state`; and users of whom nothing is told, since it is too much."""
    by_uid: dict[int, list[bytes]] = {}
    for namespace in namespaces:
        told = by_uid.setdefault(namespace.uid, [])
        told += filter(None, map(_noted, namespace.keyspaces.values()))
    packer = msgpack.Packer()
    head = b"".join(map(packer.pack, (epochs.base, epochs.last, epochs.by_namespace)))
    sizes = {uid: sum(map(len, told)) for uid, told in by_uid.items()}
    left_out = []
    while sizes and len(head) + _ARRAYS_BYTES + sum(sizes.values()) > bytes_max:
        left_out.append(max(sizes, key=sizes.__getitem__))
        del sizes[left_out[-1]]
    keyspaces = [one for uid in sizes for one in by_uid[uid]]
    return b"".join([packer.pack_array_header(4), head, packer.pack_array_header(len(keyspaces)), *keyspaces]), left_out


def _noted(keyspace: Keyspace) -> bytes:
    """One of the keyspaces, packed: once, since there may be tens of thousands that have not changed. Nothing of one
    whose sizes are not all known: no key of it could be taken over.
    """
    namespace, schema = keyspace.namespace, keyspace.schema
    if keyspace.noted is None or keyspace.noted[0] != namespace.epoch:
        if not all(keyspace.part_bytes):
            return b""
        facts = [
            *(keyspace.id, namespace.fingerprint, namespace.uid, namespace.label, namespace.key_bytes, namespace.epoch),
            *(schema.group, str(schema.kind), schema.tokens_per_key, schema.window_keys),
            *(schema.blocks_per_key, schema.parts, keyspace.part_bytes),
        ]
        keyspace.noted = namespace.epoch, msgpack.packb(facts)
    return keyspace.noted[1]


def read_saved_state(names: bytes) -> SavedState | None:
    """What `pack_state` has packed, with its checksum right; None: nothing was."""
    return SavedState(*msgpack.unpackb(names, strict_map_key=False)) if names else None
