"""Namespaces (keys that engines may share), their keyspaces (one per group), and the queues that evict keyspaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.cache.progress import Progress
from kvoffloadd.errors import SchemaError
from kvoffloadd.model import GroupSchema, slot_pages

_LABEL_CHARS, _FINGERPRINT_CHARS = 40, 8


@dataclass(slots=True, eq=False)
class Queue:
    """Keys that compete for the same slots, in order of eviction. `sizes`: keyspaces by the size in pages of slots that
    they use, of all queues together.
    """

    policy: Policy
    sizes: Counter[int] = field(default_factory=Counter)
    _keyspaces: dict[int, Counter[int]] = field(default_factory=dict)  # by slot size, then by slots per key
    _widths: Counter[int] = field(default_factory=Counter)  # keyspaces by the parts of their keys

    def most_per_key(self, size: int) -> int:
        """Slots of this size of one key, at most; 0: no space has any."""
        return max(self._keyspaces.get(size, ()), default=0)

    @property
    def num_spaces(self) -> int:
        """Keyspaces whose keys are here."""
        return self._widths.total()

    @property
    def widest(self) -> int:
        """Parts of one key, at most."""
        return max(self._widths, default=1)

    def join(self, keyspace: Keyspace) -> None:
        """Keys of this keyspace come here from now on."""
        self._widths[keyspace.schema.parts] += 1

    def add_parts(self, keyspace: Keyspace, known: Iterable[int]) -> None:
        """The payload sizes of these parts of a keyspace are known now, too."""
        for size, more in Counter(map(slot_pages, known)).items():
            before = keyspace.slots.get(size, 0)
            if before:
                self._count(size, before, -1)
            keyspace.slots[size] = before + more
            self._count(size, before + more, 1)

    def leave(self, keyspace: Keyspace) -> None:
        """A keyspace is no more: what it uses is not to be expected from now on."""
        self._widths[keyspace.schema.parts] -= 1
        self._widths += Counter()  # without those that there are none of
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
    """The keys of one group in one epoch of a namespace. `id` is what the index knows: no other keyspace has the same
    while this object lives, see `Keyspaces`. One that is `retired` was cleared, or its namespace is forgotten.

    `part_bytes[p]` is the payload size of part p, 0 until a rank that has the part registers; `queue` is chosen by the
    first size that is told; `slots`: slots per key, by size in pages, of the parts that the queue knows. `packed`: what
    a pool is told of it, and in which epoch. `rows` counts rows in any state, `keys` complete ones that can hit,
    `bytes` committed payload.
    """

    id: int
    namespace: Namespace
    schema: GroupSchema
    part_bytes: list[int]
    queue: Queue | None = None
    retired: bool = False
    slots: dict[int, int] = field(default_factory=dict)
    packed: tuple[int, bytes] | None = None
    rows: int = 0
    keys: int = 0
    bytes: int = 0

    def check_part(self, part: int, payload_bytes: int) -> None:
        """Raises SchemaError if another rank registered this part with another size."""
        known = self.part_bytes[part]
        if known and known != payload_bytes:
            raise SchemaError(
                f"group {self.schema.group} part {part} has payloads of {known} bytes in this namespace, not "
                f"{payload_bytes}"
            )


@dataclass(slots=True, eq=False)
class Namespace:
    """Keys of two namespaces never meet. `epoch`: see `Epochs`; `listeners` counts subscribed sessions; `jobs`: stores
    and loads under way. `name`: a short one, safe anywhere: what the engine calls its model, and what tells it from
    others of that name.
    """

    fingerprint: bytes
    uid: int
    label: str
    key_bytes: int
    epoch: int
    keyspaces: dict[int, Keyspace] = field(default_factory=dict)
    sessions: int = 0
    listeners: int = 0
    jobs: Progress = field(default_factory=Progress)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        label = "".join(c if c.isascii() and (c.isalnum() or c in "._/-") else "_" for c in self.label)
        self.name = f"{label[-_LABEL_CHARS:]}#{self.fingerprint.hex()[:_FINGERPRINT_CHARS]}"

    @property
    def keys(self) -> int:
        """Complete keys held."""
        return sum(keyspace.keys for keyspace in self.keyspaces.values())

    @property
    def bytes(self) -> int:
        """Committed payload bytes held."""
        return sum(keyspace.bytes for keyspace in self.keyspaces.values())

    def check_schema(self, schema: GroupSchema) -> None:
        """Raises SchemaError if the group is known with other properties."""
        known = self.keyspaces.get(schema.group)
        if known and known.schema != schema:
            raise SchemaError(f"group {schema.group} is {known.schema} in this namespace, not {schema}")
