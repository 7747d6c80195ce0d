"""A worker's KV cache as the daemon sees it: canonical tensors, groups that name bytes in their rows, and their
registration, which is repeated after a reconnect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from kvoffloadd.client.arguments import check_message, instance_of
from kvoffloadd.client.memory.allocation import Allocation
from kvoffloadd.client.memory.gpu import GpuAllocation
from kvoffloadd.client.memory.tensor import CanonicalTensor
from kvoffloadd.client.memory.timeline import Ready, Timeline
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import UsageError
from kvoffloadd.model import LAYERS_BYTES, Dtype, GroupKind, GroupSchema, Ref, dtype_named
from kvoffloadd.protocol.messages import GroupSpec, ReadySpec, RefSpec


@dataclass(frozen=True, slots=True)
class Group:
    """A group as this rank registers it: the schema that the namespace shares, and this rank's part.

    `refs`: where a block's bytes lie in the tensors' rows; none: this rank has no part of the group (a scheduler, or a
    pipeline rank without its layers). `parts` and `part`: this rank holds slice `part` of `parts` of each key's bytes;
    one that holds several registers the group as often, each time with the refs of that part.
    """

    group: int
    kind: GroupKind
    tokens_per_key: int
    refs: Sequence[Ref] = ()
    window_keys: int = 0
    blocks_per_key: int = 1
    parts: int = 1
    part: int = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block in this rank's refs."""
        return sum(ref.payload_bytes for ref in self.refs)

    @property
    def schema(self) -> GroupSchema:
        """The part of the group that the namespace shares."""
        return GroupSchema(
            self.group, self.kind, self.tokens_per_key, self.window_keys, self.blocks_per_key, self.parts
        )

    def check_refs(self, pages: Sequence[int]) -> None:
        """Checks that the refs lie within `pages`, the bytes of a row of each tensor. Raises UsageError."""
        for ref in self.refs:
            if not 0 <= ref.tensor < len(pages):
                raise UsageError(
                    f"group {self.group}: {ref} names tensor {ref.tensor}, which does not exist (tensors: {len(pages)})"
                )
            page = pages[ref.tensor]
            if dtype_named(ref.dtype) != ref.dtype or len(ref.layers) not in (0, LAYERS_BYTES):
                raise UsageError(
                    f"group {self.group}: {ref}: `dtype` must be one of {', '.join(get_args(Dtype)[1:])}, and `layers` "
                    "what `digest_layers` returns; both may be empty"
                )
            if min(ref.offset, ref.stride) < 0 or min(ref.length, ref.count) < 1 or ref.end > page:
                raise UsageError(f"group {self.group}: {ref} extends beyond its page of {page} bytes")

    def spec(self, *, composition: bool) -> GroupSpec:
        """Converts the group for the wire. `composition`: the daemon also accepts a description of the refs' bytes."""
        refs = [
            RefSpec(
                tensor=ref.tensor,
                offset=ref.offset,
                length=ref.length,
                count=ref.count,
                stride=ref.stride,
                dtype=ref.dtype if composition else "",
                layers=(ref.layers or None) if composition else None,
            )
            for ref in self.refs
        ]
        return GroupSpec(
            group=self.group,
            kind=GroupKind(self.kind).value,
            tokens_per_key=self.tokens_per_key,
            window_keys=self.window_keys,
            blocks_per_key=self.blocks_per_key,
            parts=self.parts,
            part=self.part,
            refs=refs,
        )


class KvCache:
    """Tensors and groups of one worker, all tensors on one device. Raises UsageError where they do not fit each other.

    Tensors that lie in the same memory are attached once. `timelines`: those that jobs' `ready` may belong to.
    """

    def __init__(
        self, tensors: Sequence[CanonicalTensor], groups: Sequence[Group], timelines: Sequence[Timeline] = ()
    ) -> None:
        self.tensors = tuple(tensors)
        self.groups = tuple(groups)
        self.timelines = tuple(timelines)
        for group in self.groups:
            self._check_fields(group)
        self._by_number = {group.group: group for group in self.groups}
        if len({(group.group, group.part) for group in self.groups}) != len(self.groups):
            raise UsageError("a part of a group is named twice")
        for group in self.groups:
            self._check(group)

    @staticmethod
    def _check_fields(group: Group) -> None:
        instance_of(Group, group, "a group")
        try:
            check_message(group.spec(composition=False), f"group {group.group!r:.80}")
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"group {group.group!r:.80}: {error}") from None

    def _check(self, group: Group) -> None:
        if group.schema != self._by_number[group.group].schema:
            raise UsageError(f"the parts of group {group.group} differ in more than their refs")
        if not 0 <= group.part < group.parts:
            raise UsageError(f"group {group.group}: part {group.part} of {group.parts}")
        group.check_refs([tensor.page_bytes for tensor in self.tensors])

    def group(self, number: int) -> Group:
        """Returns the group of that number; if several parts of it are held, any of them. Raises UsageError."""
        found = self._by_number.get(number)
        if found is None:
            raise UsageError(f"group {number} is not registered; these are: {sorted(self._by_number)}")
        return found

    def ready_spec(self, ready: Ready) -> ReadySpec:
        """Converts `ready` for the wire. Raises UsageError for a timeline that is not named here."""
        if instance_of(Ready, ready, "ready").timeline not in self.timelines:
            raise UsageError("`ready` belongs to a timeline that was not registered with the KV cache")
        return ReadySpec(signal=self.timelines.index(ready.timeline), offset=0, value=ready.value)

    @property
    def is_on_gpu(self) -> bool:
        """Returns whether the tensors are in memory of a GPU."""
        return any(not isinstance(tensor.allocation, Allocation) for tensor in self.tensors)

    def allocations(self) -> list[Allocation | GpuAllocation]:
        """Returns the memory behind the tensors and the timelines, each piece once."""
        every: list[Allocation | GpuAllocation] = [tensor.allocation for tensor in self.tensors]
        every += [timeline.allocation for timeline in self.timelines]
        return list({allocation.identity: allocation for allocation in every}.values())


class Registration:
    """A registered KV cache. The object stays the same over reconnects; its number does not.

    It holds the tensors, and with them their descriptors and memory, as long as it lives.
    """

    __slots__ = ("_connection_ended", "_number", "caches", "closed")

    def __init__(self, caches: KvCache) -> None:
        self.caches = caches
        self.closed = False
        self._number = 0
        self._connection_ended: Waitable | None = None

    def __repr__(self) -> str:
        state = "unregistered" if self.closed else f"id {self.id}"
        return f"<Registration {state}, {len(self.caches.tensors)} tensors, {len(self.caches.groups)} groups>"

    def bind(self, number: int, connection_ended: Waitable) -> None:
        """Records the daemon's `number` for it, which is valid until its connection has ended."""
        self._number, self._connection_ended = number, connection_ended

    @property
    def id(self) -> int | None:
        """The daemon's number for it on the present connection; None if there is none."""
        if self.closed or self._connection_ended is None or self._connection_ended.done:
            return None
        return self._number

    def named_id(self) -> int:
        """Returns `id`. Raises UsageError if there is none."""
        number = self.id
        if number is None:
            raise UsageError("this registration was ended by `unregister`" if self.closed else "not registered here")
        return number
