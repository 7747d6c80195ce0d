"""Namespaces (keys that engines may share), their keyspaces (one per group), and the queues that evict keyspaces."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgpack
import numpy as np

from kvoffloadd.cache.memory.composition import UNKNOWN, Composition
from kvoffloadd.cache.memory.doubt import Doubt
from kvoffloadd.cache.memory.quota import Quota
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.cache.progress import Progress
from kvoffloadd.errors import SchemaError
from kvoffloadd.model import PAGE_BYTES, GroupSchema, I64Array, slot_pages

_LABEL_CHARS, _FINGERPRINT_CHARS = 40, 8


@dataclass(slots=True, eq=False)
class Queue:
    """Keeps keys that compete for the same slots, in order of eviction."""

    policy: Policy
    # The number of keyspaces that use slots of each size, in pages; one Counter, which all queues share.
    sizes: Counter[int] = field(default_factory=Counter)
    quotas: tuple[Quota, ...] = ()  # that count its keys
    _keyspaces: dict[int, Counter[int]] = field(default_factory=dict)  # by slot size, then by slots per key
    _widths: Counter[int] = field(default_factory=Counter)  # keyspaces by the parts of their keys

    def most_per_key(self, size: int) -> int:
        """Returns the most slots of this size that one key has; 0: no keyspace uses them."""
        return max(self._keyspaces.get(size, ()), default=0)

    @property
    def num_spaces(self) -> int:
        """Returns the number of keyspaces that have their keys in this queue."""
        return self._widths.total()

    @property
    def widest(self) -> int:
        """Returns the most parts that one key has."""
        return max(self._widths, default=1)

    def join(self, keyspace: Keyspace) -> None:
        """Joins a keyspace to the queue: its keys enter this queue from now on."""
        self._widths[keyspace.schema.parts] += 1

    def add_parts(self, keyspace: Keyspace, known: Iterable[int]) -> None:
        """Counts the slots of parts with payload sizes, `known`, that have become known."""
        for size, more in Counter(map(slot_pages, known)).items():
            before = keyspace.slots.get(size, 0)
            if before:
                self._count(size, before, -1)
            keyspace.slots[size] = before + more
            self._count(size, before + more, 1)

    def leave(self, keyspace: Keyspace) -> None:
        """Removes a keyspace that is gone: it uses no slots any more."""
        self._widths[keyspace.schema.parts] -= 1
        self._widths += Counter()  # drops zeros
        for size, slots in keyspace.slots.items():
            self._count(size, slots, -1)

    def _count(self, size: int, slots: int, number: int) -> None:
        keyspaces = self._keyspaces.setdefault(size, Counter())
        for counts, key in ((keyspaces, slots), (self.sizes, size)):
            counts[key] += number
            if not counts[key]:
                del counts[key]
        if not keyspaces:
            del self._keyspaces[size]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Keyspace:
    """Holds the counts and properties of the keys of one group in one epoch of a namespace."""

    id: int  # in the index; no other keyspace has the same while this object lives, see `Keyspaces`
    namespace: Namespace
    schema: GroupSchema
    part_bytes: list[int]  # payload size of each part; 0 until a rank that has the part registers; see `set_part_bytes`
    part_pages: I64Array = field(init=False)  # the size of its slot, see `model.slot_pages`
    compositions: list[Composition] = field(init=False)  # of each part, as far as it is known
    queue: Queue | None = None  # chosen by the first payload size that becomes known
    retired: bool = False  # it was cleared, or its namespace is forgotten
    drops: int = 0  # grows when a clear begins, or ends, to take its older keys, see `Cache.drop_older`
    slots: dict[int, int] = field(default_factory=dict)  # slots per key, by size in pages, as counted in the queue
    packed: tuple[int, bytes] | None = None  # for `savedstate`: the epoch when it was packed, and the result
    rows: int = 0  # in any state
    keys: int = 0  # complete ones that can hit
    bytes: int = 0  # committed payload
    taken_pages: int = 0  # of slots, reserved or committed; see `take`
    quotas: tuple[Quota, ...] = ()  # that count them

    def __post_init__(self) -> None:
        self.compositions = [UNKNOWN] * self.schema.parts
        self._count_pages()

    def set_part_bytes(self, sizes: Mapping[int, int]) -> None:
        """Sets the payload sizes of these parts, by number."""
        for part, size in sizes.items():
            self.part_bytes[part] = size
        self._count_pages()

    def _count_pages(self) -> None:
        self.part_pages = -(-np.array(self.part_bytes, np.int64) // PAGE_BYTES)

    def take(self, pages: int) -> None:
        """Counts the pages of slots that its keys have taken, or have given back if there are less than none."""
        self.taken_pages += pages
        for quota in self.quotas:
            quota.pages += pages

    def fill_compositions(self, found: Mapping[int, Composition]) -> bool:
        """Adds compositions of these parts, by number, as far as they were unknown. Returns whether any was new."""
        filled = list(self.compositions)
        for part, composition in found.items():
            filled[part] = filled[part].filled(composition)
        changed = filled != self.compositions
        if changed:
            self.compositions, self.packed = filled, None
        return changed

    def check_part(self, part: int, payload_bytes: int, composition: Composition = UNKNOWN) -> None:
        """Raises SchemaError if another rank registered this part with another size or composition."""
        known = self.part_bytes[part]
        if known and known != payload_bytes:
            raise SchemaError(
                f"group {self.schema.group} part {part} has payloads of {known} bytes in this namespace, not "
                f"{payload_bytes}"
            )
        if (conflict := self.compositions[part].conflict(composition)) is not None:
            theirs, ours = conflict
            raise SchemaError(
                f"group {self.schema.group} part {part} has {theirs} in this namespace, not {ours}; engines whose KV "
                "caches differ need different names for model, revision or salt"
            )


@dataclass(slots=True, eq=False)
class Namespace:
    """Groups the keys that engines of the same user, model and layout share. Keys of two namespaces never mix."""

    fingerprint: bytes  # a hash of everything that identifies the namespace
    uid: int
    label: str  # the engine's name of its model
    key_bytes: int
    epoch: int  # see `Epochs`
    doubt: Doubt = Doubt.NONE  # which of its keys do not hit now
    keyspaces: dict[int, Keyspace] = field(default_factory=dict)  # by group
    sessions: int = 0
    listeners: int = 0  # sessions that are subscribed to its events
    tier_listeners: int = 0  # those of them that follow each tier
    jobs: Progress = field(default_factory=Progress)  # stores and loads under way
    name: str = field(init=False)  # short, unique, and of harmless characters: from label and fingerprint

    def __post_init__(self) -> None:
        label = "".join(c if c.isascii() and (c.isalnum() or c in "._/-") else "_" for c in self.label)
        self.name = f"{label[-_LABEL_CHARS:]}#{self.fingerprint.hex()[:_FINGERPRINT_CHARS]}"

    @property
    def keys(self) -> int:
        """Returns the number of complete keys in memory."""
        return sum(keyspace.keys for keyspace in self.keyspaces.values())

    @property
    def bytes(self) -> int:
        """Returns the committed payload bytes in memory."""
        return sum(keyspace.bytes for keyspace in self.keyspaces.values())

    def check_schema(self, schema: GroupSchema) -> None:
        """Raises SchemaError if the group is known with other properties."""
        known = self.keyspaces.get(schema.group)
        if known and known.schema != schema:
            raise SchemaError(
                f"group {schema.group} is registered as {known.schema} in this namespace, not as {schema}"
            )


def shape_of(keyspace: Keyspace) -> bytes:
    """Returns 16 bytes that identify its group's schema, the sizes of all its parts, and the known compositions: in
    another layout a key is another key.
    """
    schema = keyspace.schema
    facts: list[object] = [
        schema.group, schema.kind, schema.tokens_per_key, schema.window_keys, schema.blocks_per_key, schema.parts,
        keyspace.part_bytes,
    ]  # fmt: skip
    if any(composition.known for composition in keyspace.compositions):
        facts.append([(composition.dtypes, composition.layers) for composition in keyspace.compositions])
    return hashlib.blake2b(msgpack.packb(facts), digest_size=16).digest()
