"""Packs and reads what is saved next to the arena for a warm restart: namespaces, epochs, claims, tombstones. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgpack
import msgspec

from kvoffloadd.cache.memory.composition import UNKNOWN, Composition
from kvoffloadd.cache.memory.epochs import Epochs
from kvoffloadd.cache.memory.keyspaces import NUMBERS
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.model import (
    BLOCKS_PER_KEY_MAX,
    EPOCH_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    LAYERS_BYTES,
    PARTS_PER_KEY_MAX,
    TOKENS_PER_KEY_END,
    GroupKind,
    GroupSchema,
)
from kvoffloadd.storage.tombstone import Tombstone

log = logging.getLogger(__name__)

_ARRAYS_BYTES = 15
"""The maximum size of two array headers, and of the header of the claims."""

_Fingerprint = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Epoch = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]
_Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class SavedKeyspace(msgspec.Struct, frozen=True, array_like=True):
    """Describes one keyspace, as `pack_keyspace` lists it. It is within the bounds of a session's groups."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS)]
    fingerprint: _Fingerprint
    uid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    label: str
    key_bytes: Annotated[int, msgspec.Meta(ge=KEY_BYTES_MIN, le=KEY_BYTES_MAX)]
    epoch: _Epoch
    group: _Small
    kind: GroupKind
    tokens_per_key: Annotated[int, msgspec.Meta(ge=1, lt=TOKENS_PER_KEY_END)]
    window_keys: _Small
    blocks_per_key: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_KEY_MAX)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=PARTS_PER_KEY_MAX)]
    part_bytes: list[_Bytes]
    packed_compositions: list[int | tuple[str, bytes]] = []

    @property
    def schema(self) -> GroupSchema:
        """Returns the schema of its group."""
        return GroupSchema(
            self.group, self.kind, self.tokens_per_key, self.window_keys, self.blocks_per_key, self.parts
        )

    @property
    def compositions(self) -> list[Composition]:
        """Returns the composition of each part."""
        found = [Composition(*pair) for pair in self.packed_compositions if isinstance(pair, tuple)]
        return (found or [UNKNOWN]) * self.parts if len(found) < 2 else found

    @property
    def is_sound(self) -> bool:
        """Returns whether its fields are consistent."""
        compositions = self.compositions
        is_chunked = self.kind is GroupKind.CHUNKED
        return (
            len(self.part_bytes) == len(compositions) == self.parts
            and all(len(composition.layers) in (0, LAYERS_BYTES) for composition in compositions)
            and self.packed_compositions[:1] in ([], [0])
            and not any(isinstance(pair, int) for pair in self.packed_compositions[1:])
            and (self.window_keys > 0 or not is_chunked)
        )


class SavedState(msgspec.Struct, frozen=True, array_like=True):
    """Holds namespaces, epochs, claims and tombstones as a predecessor saved them. `base`, `last` and `epochs`: see
    `Epochs`; `claims`: see `savedclaims`.
    """

    base: _Epoch
    last: _Epoch
    epochs: dict[_Fingerprint, _Epoch]
    keyspaces: list[SavedKeyspace]
    claims: bytes = b""
    tombstones: list[Tombstone] = []


def are_consistent(keyspaces: Sequence[SavedKeyspace]) -> bool:
    """Returns whether keyspaces are sound and consistent: each number and each group belongs to one keyspace, and a
    namespace belongs to one user.
    """
    groups = {(keyspace.fingerprint, keyspace.group) for keyspace in keyspaces}
    namespaces = {
        (keyspace.fingerprint, keyspace.uid, keyspace.label, keyspace.key_bytes, keyspace.epoch)
        for keyspace in keyspaces
    }
    return (
        all(keyspace.is_sound for keyspace in keyspaces)
        and len({keyspace.number for keyspace in keyspaces}) == len(groups) == len(keyspaces)
        and len(namespaces) == len({keyspace.fingerprint for keyspace in keyspaces})
    )


def pack_state(
    namespaces: Iterable[Namespace], epochs: Epochs, bytes_max: int, claims: bytes = b"", tombstones: bytes = b""
) -> tuple[bytes, list[int]]:
    """Returns the packed state, for `read_saved_state`, and the users with keyspaces that are left out, since they need
    too much space. The claims are left out before any keyspace. `tombstones`: packed, see `Tombstones`.
    """
    by_uid: dict[int, list[bytes]] = {}
    for namespace in namespaces:
        packed = by_uid.setdefault(namespace.uid, [])
        packed += filter(None, map(pack_keyspace, namespace.keyspaces.values()))
    packer = msgpack.Packer()
    head = b"".join(map(packer.pack, (epochs.base, epochs.last, epochs.by_namespace)))
    sizes = {uid: sum(map(len, packed)) for uid, packed in by_uid.items()}
    left_out = []
    bytes_max -= len(tombstones)
    while sizes and len(head) + _ARRAYS_BYTES + sum(sizes.values()) > bytes_max:
        left_out.append(max(sizes, key=sizes.__getitem__))
        del sizes[left_out[-1]]
    keyspaces = [packed for uid in sizes for packed in by_uid[uid]]
    body = [head, packer.pack_array_header(len(keyspaces)), *keyspaces]
    if len(head) + _ARRAYS_BYTES + sum(sizes.values()) + len(claims) > bytes_max:
        claims = b""
    # Without claims and tombstones it is as earlier daemons write it; they ignore what follows the keyspaces.
    more = [packer.pack(claims)] * bool(claims or tombstones) + [tombstones] * bool(tombstones)
    return b"".join([packer.pack_array_header(4 + len(more)), *body, *more]), left_out


def pack_keyspace(keyspace: Keyspace) -> bytes:
    """Packs one keyspace, once, since there may be tens of thousands that have not changed. The result is empty if not
    all its part sizes are known: none of its keys could be taken over.
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
    """Returns one more field, `packed_compositions`, or none if nothing is known. Earlier daemons take the last field
    for the sizes of parts, and leave a keyspace behind if one of them is 0: they can't compare compositions.
    """
    if not any(composition.known for composition in keyspace.compositions):
        return []
    found = keyspace.compositions
    kept = found[:1] if len(set(found)) == 1 else found
    return [[0, *((composition.dtypes, composition.layers) for composition in kept)]]


def read_saved_state(names: bytes) -> SavedState | None:
    """Unpacks the result of `pack_state`; the caller has verified its checksum. Returns None if nothing was saved, or,
    with a warning, if `pack_state` does not pack such a state: this start is a cold one.
    """
    if not names:
        return None
    try:
        saved = msgspec.msgpack.decode(names, type=SavedState)
        why = "" if are_consistent(saved.keyspaces) else "its groups can't be together"
        if not all(tombstone.is_sound for tombstone in saved.tombstones):
            why = "its deleted keys are not whole"
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = str(error)
    if not why:
        return saved
    log.warning("memory: what the previous run has saved is damaged, and its keys are not taken over: %.200s", why)
    return None
