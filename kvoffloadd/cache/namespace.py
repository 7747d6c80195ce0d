"""Who may share: namespaces, and the spaces that their groups' keys live in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffloadd.cache.progress import Progress
from kvoffloadd.errors import SchemaError
from kvoffloadd.model import GroupSchema, slot_pages

if TYPE_CHECKING:
    from kvoffloadd.cache.catalog import Shelf
    from kvoffloadd.cache.policy.base import Policy


_LABEL_CHARS, _FINGERPRINT_CHARS = 40, 8


@dataclass(slots=True, eq=False)
class Queue:
    """Keys that compete for the same slots, in order of eviction. `slots_per_key` by slot size in pages: the most
    of any space.
    """

    policy: Policy
    slots_per_key: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Space:
    """The keys of one group in one epoch of a namespace. `id` is what the index knows: no other space has the same
    while this object lives, see `Spaces`. One that is `retired` was cleared, or its namespace is forgotten.

    `part_bytes[p]` is the payload size of part p, 0 until a rank that has the part registers; `queue` is chosen by the
    first size that is told, `shelf` (its place on disk, if there is a disk) once all are. `noted`: what a pool is told
    of it, and in which epoch. `rows` counts rows in any state, `keys` complete ones that can hit, `bytes` committed
    payload.
    """

    id: int
    namespace: Namespace
    schema: GroupSchema
    part_bytes: list[int]
    queue: Queue | None = None
    shelf: Shelf | None = None
    retired: bool = False
    noted: tuple[int, bytes] | None = None
    rows: int = 0
    keys: int = 0
    bytes: int = 0

    def sizes(self) -> dict[int, int]:
        """Slots per key by slot size in pages, of the parts that are known."""
        counts: dict[int, int] = {}
        for size in map(slot_pages, filter(None, self.part_bytes)):
            counts[size] = counts.get(size, 0) + 1
        return counts

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
    spaces: dict[int, Space] = field(default_factory=dict)
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
        return sum(space.keys for space in self.spaces.values())

    @property
    def bytes(self) -> int:
        """Committed payload bytes held."""
        return sum(space.bytes for space in self.spaces.values())

    def check_schema(self, schema: GroupSchema) -> None:
        """Raises SchemaError if the group is known with other properties."""
        known = self.spaces.get(schema.group)
        if known and known.schema != schema:
            raise SchemaError(f"group {schema.group} is {known.schema} in this namespace, not {schema}")
