"""Namespaces and epochs as they are saved beside the arena, for a warm restart. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from kvoffloadd.cache.memory.composition import UNKNOWN, Composition
from kvoffloadd.cache.memory.epochs import Epochs
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace

_ARRAYS_BYTES = 10
"""Headers of two arrays, at most."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """Namespaces and epochs as a predecessor saved them. `base`, `last` and `epochs`: see `Epochs`."""

    base: int
    last: int
    epochs: dict[bytes, int]
    keyspaces: list[list[Any]]  # the fields of each, as `_pack_keyspace` lists them


def pack_state(namespaces: Iterable[Namespace], epochs: Epochs, bytes_max: int) -> tuple[bytes, list[int]]:
    """The packed state, for `read_saved_state`, and the uids whose keyspaces are left out, since they need too much."""
    by_uid: dict[int, list[bytes]] = {}
    for namespace in namespaces:
        packed = by_uid.setdefault(namespace.uid, [])
        packed += filter(None, map(_pack_keyspace, namespace.keyspaces.values()))
    packer = msgpack.Packer()
    head = b"".join(map(packer.pack, (epochs.base, epochs.last, epochs.by_namespace)))
    sizes = {uid: sum(map(len, packed)) for uid, packed in by_uid.items()}
    left_out = []
    while sizes and len(head) + _ARRAYS_BYTES + sum(sizes.values()) > bytes_max:
        left_out.append(max(sizes, key=sizes.__getitem__))
        del sizes[left_out[-1]]
    keyspaces = [packed for uid in sizes for packed in by_uid[uid]]
    return b"".join([packer.pack_array_header(4), head, packer.pack_array_header(len(keyspaces)), *keyspaces]), left_out


def _pack_keyspace(keyspace: Keyspace) -> bytes:
    """One keyspace, packed once, since there may be tens of thousands that have not changed. Empty if not all its part
    sizes are known: no key of it could be taken over.
    """
    namespace, schema = keyspace.namespace, keyspace.schema
    if keyspace.packed is None or keyspace.packed[0] != namespace.epoch:
        if not all(keyspace.part_bytes):
            return b""
        facts = [
            *(keyspace.id, namespace.fingerprint, namespace.uid, namespace.label, namespace.key_bytes, namespace.epoch),
            *(schema.group, str(schema.kind), schema.tokens_per_key, schema.window_keys),
            *(schema.blocks_per_key, schema.parts, keyspace.part_bytes, *_pack_compositions(keyspace)),
        ]
        keyspace.packed = namespace.epoch, msgpack.packb(facts)
    return keyspace.packed[1]


def _pack_compositions(keyspace: Keyspace) -> list[list[Any]]:
    """One more field, for `read_compositions`; none if nothing is known. Earlier daemons take the last field for the
    sizes of parts, and leave a keyspace behind in which one is 0: they can't compare compositions.
    """
    if not any(composition.known for composition in keyspace.compositions):
        return []
    found = keyspace.compositions
    kept = found[:1] if len(set(found)) == 1 else found
    return [[0, *((one.dtypes, one.layers) for one in kept)]]


def read_compositions(fields: Sequence[Sequence[Any]], parts: int) -> list[Composition]:
    """Of each part, from what comes behind the sizes of parts."""
    if not fields:
        return [UNKNOWN] * parts
    found = [Composition(*pair) for pair in fields[0][1:]]
    return found * parts if len(found) == 1 else found


def read_saved_state(names: bytes) -> SavedState | None:
    """Unpack what `pack_state` packed, whose checksum the caller has verified. None: nothing was saved."""
    return SavedState(*msgpack.unpackb(names, strict_map_key=False)) if names else None
