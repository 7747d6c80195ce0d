"""Checks a registration: a worker's tensors in attached memory, and its part of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvoffloadd.cache.jobs.job import Job
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.composition import Composition
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.device.base import Allocation, Device
from kvoffloadd.device.overlap import Family, find_families
from kvoffloadd.device.plan import GroupPlan, Tensor, Tensors
from kvoffloadd.device.signals import ReadySignal
from kvoffloadd.errors import (
    DuplicateError,
    ExtentError,
    LimitError,
    MemoryKindError,
    SchemaError,
    UnknownNameError,
)
from kvoffloadd.model import GroupKind, GroupSchema, Ref, U16Array
from kvoffloadd.protocol.messages import GroupSpec, ReadySpec, RefSpec, Register, TensorSpec

PLAN_BASE = 32
"""The cost of a registration or a group without descriptors, in descriptors."""
NAMED_COST = 4
"""The cost of an allocation that a registration names, in descriptors."""

GROUPS_PER_NAMESPACE_MAX = 256
GROUP_SPECS = 4
"""The time that a group takes, in tensors or refs."""
LARGE_SPECS, LARGE_DESCRIPTORS = 512, 1 << 15
"""The event loop drafts registrations up to these numbers of tensors and refs, and of descriptors: that takes some
milliseconds at most.
"""
SIGNAL_BYTES = 8


@dataclass(slots=True, eq=False)
class Attachment:
    """An attached allocation, and the uses that keep it mapped."""

    allocation: Allocation
    device: Device
    uses: int = 0  # registrations that name it
    drafts: int = 0  # large registrations that name it and are being checked
    left: bool = False  # detached meanwhile, or the last registration that named it was unregistered


@dataclass(frozen=True, slots=True, eq=False)
class HeldPart:
    """The bytes of this rank's tensors that are a part of a group's keys, and their composition."""

    part: int
    plan: GroupPlan
    composition: Composition


@dataclass(frozen=True, eq=False)
class RegisteredGroup:
    """This rank's view of a group. Derived values are cached, since each job uses them."""

    schema: GroupSchema
    held: tuple[HeldPart, ...]  # ascending by part; empty if the rank has no part of the group

    @cached_property
    def group(self) -> int:
        return self.schema.group

    @cached_property
    def parts(self) -> U16Array:
        """The parts that this rank holds: u16 (held,)."""
        return np.array([held.part for held in self.held], np.uint16)

    @cached_property
    def plans(self) -> tuple[GroupPlan, ...]:
        """The plans of the same parts."""
        return tuple(held.plan for held in self.held)

    @cached_property
    def num_blocks(self) -> int:
        """The number of blocks; block ids at or above it are refused."""
        return min(held.plan.num_blocks for held in self.held)

    @cached_property
    def descriptors(self) -> int:
        """The number of descriptors of each key, in all held parts together."""
        return sum(len(held.plan.size) for held in self.held)

    @cached_property
    def price(self) -> int:
        """The number of keys that one key counts as: its costs arise for each part."""
        return self.schema.price(len(self.held))


@dataclass(slots=True, eq=False)
class Registration:
    """A registration of one session."""

    id: int
    device: Device | None  # of its tensors; None: it has no tensors
    groups: dict[int, RegisteredGroup]
    families: dict[int, Family]  # by group: the groups that may share bytes with it
    allocations: frozenset[int]  # the allocations that it names
    signals: list[Allocation]  # memory in which the worker signals that blocks are ready
    running: set[Job] = field(default_factory=set)  # jobs that use its memory
    descriptors: int = 0  # charged for its plans

    def ready(self, spec: ReadySpec) -> ReadySignal:
        """Returns the place of a job's signal. Raises UnknownNameError, or ExtentError if the place is not an aligned
        u64 within the signal's memory.
        """
        if spec.signal >= len(self.signals):
            raise UnknownNameError(f"registration {self.id} has no signal {spec.signal} (signals: {len(self.signals)})")
        signal = self.signals[spec.signal]
        if spec.offset % SIGNAL_BYTES or spec.offset + SIGNAL_BYTES > signal.size_bytes:
            raise ExtentError(f"signal {spec.signal} has no aligned u64 at byte {spec.offset} of {signal.size_bytes}")
        return ReadySignal(signal.base_address + spec.offset, spec.value)


def plan_descriptors(groups: Sequence[GroupSpec]) -> int:
    """Returns the cost of these groups' plans, in descriptors; even an empty plan costs something."""
    return PLAN_BASE + sum(PLAN_BASE + spec.blocks_per_key * sum(ref.count for ref in spec.refs) for spec in groups)


def cost(message: Register) -> int:
    """Returns a registration's cost, in descriptors: its plans, and the allocations that it continues to name, which
    may be thousands without a group.
    """
    return plan_descriptors(message.groups) + NAMED_COST * (len(message.tensors) + len(message.signals))


def schema_of(spec: GroupSpec) -> GroupSchema:
    """Returns the schema. Raises SchemaError for a window that does not fit the kind, or a part that does not exist."""
    kind = GroupKind(spec.kind)
    if kind in (GroupKind.FULL, GroupKind.MAMBA) and spec.window_keys:
        raise SchemaError(f"group {spec.group}: a {kind} group has no window, not one of {spec.window_keys} keys")
    if kind is GroupKind.CHUNKED and not spec.window_keys:
        raise SchemaError(f"group {spec.group}: a chunked group needs window_keys, the keys of one attention chunk")
    if spec.part >= spec.parts:
        raise SchemaError(f"group {spec.group}: part {spec.part} of {spec.parts}; parts are counted from 0")
    return GroupSchema(spec.group, kind, spec.tokens_per_key, spec.window_keys, spec.blocks_per_key, spec.parts)


def locate(specs: Sequence[TensorSpec], attached: Mapping[int, Attachment]) -> list[Tensor]:
    """Returns the tensors at this process's addresses.

    Raises UnknownNameError for an allocation that this session has not attached, ExtentError for rows that overlap or
    exceed the size that the kernel reports.
    """
    tensors = []
    for number, spec in enumerate(specs):
        entry = attached.get(spec.allocation)
        if entry is None or not entry.allocation.whole:
            lacks = "no" if entry is None else "only some of"
            raise UnknownNameError(f"tensor {number}: this session has {lacks} allocation {spec.allocation}")
        if spec.stride_bytes < spec.page_bytes:
            raise ExtentError(
                f"tensor {number}: stride {spec.stride_bytes} is less than the page of {spec.page_bytes} bytes"
            )
        end = spec.offset + (spec.num_blocks - 1) * spec.stride_bytes + spec.page_bytes
        if end > entry.allocation.size_bytes:
            raise ExtentError(
                f"tensor {number}: {spec.num_blocks} blocks end at byte {end}, but the allocation has "
                f"{entry.allocation.size_bytes} bytes"
            )
        base = entry.allocation.base_address + spec.offset
        tensors.append(Tensor(base, spec.num_blocks, spec.page_bytes, spec.stride_bytes))
    return tensors


def find_signals(numbers: Sequence[int], attached: Mapping[int, Attachment]) -> list[Allocation]:
    """Returns the memory of a registration's signals. Raises UnknownNameError, or MemoryKindError for GPU memory."""
    found = []
    for number in numbers:
        entry = attached.get(number)
        if entry is None:
            raise UnknownNameError(f"signals: this session has no allocation {number}")
        if entry.allocation.kind != "host":
            raise MemoryKindError(f"signals: allocation {number} is not shared memory, which signals need")
        found.append(entry.allocation)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A registration after the checks that need only its message and the place of its memory."""

    groups: list[RegisteredGroup]
    families: dict[int, Family]


def is_large(message: Register) -> bool:
    """Returns whether drafting takes long enough that a thread should do it."""
    specs = len(message.tensors) + sum(GROUP_SPECS + len(spec.refs) for spec in message.groups)
    return specs > LARGE_SPECS or plan_descriptors(message.groups) > LARGE_DESCRIPTORS


def named(message: Register, attached: Mapping[int, Attachment]) -> dict[int, Attachment]:
    """Returns the attached allocations that a registration names."""
    numbers = {spec.allocation for spec in message.tensors} | set(message.signals)
    return {number: attached[number] for number in numbers if number in attached}


def draft(message: Register, attached: Mapping[int, Attachment]) -> Draft:
    """Checks and derives everything that does not depend on other registrations. May run in any thread. `attached`: see
    `named`. Raises PeerErrors.
    """
    located = locate(message.tensors, attached)
    tensors = Tensors.of(located)
    by_group: dict[int, list[GroupSpec]] = {}
    for spec in message.groups:
        by_group.setdefault(spec.group, []).append(spec)
    refs = {number: [[_ref(ref) for ref in spec.refs] for spec in specs] for number, specs in by_group.items()}
    groups = [_group(specs, refs[number], tensors) for number, specs in by_group.items()]
    lies = {
        number: [(located[r.tensor], r) for part_refs in every for r in part_refs] for number, every in refs.items()
    }
    return Draft(groups, find_families(lies))


def check(message: Register, attached: Mapping[int, Attachment], cache: Cache, namespace: Namespace) -> None:
    """Checks against other registrations, as far as possible without a draft. Raises PeerErrors."""
    if len({entry.device for entry in _of_tensors(message, attached)}) > 1:
        raise ExtentError("tensors on several devices: register those of each device separately")
    find_signals(message.signals, attached)
    wanted = {spec.group for spec in message.groups}
    if len(namespace.keyspaces.keys() | wanted) > GROUPS_PER_NAMESPACE_MAX:
        raise LimitError(f"more than {GROUPS_PER_NAMESPACE_MAX} groups in one namespace")
    cache.check_groups(namespace, wanted)


def build(
    number: int,
    message: Register,
    drafted: Draft,
    attached: Mapping[int, Attachment],
    cache: Cache,
    namespace: Namespace,
) -> Registration:
    """Checks everything, then adds the groups to the namespace. Raises PeerErrors and LimitError, and then changes
    nothing.
    """
    check(message, attached, cache, namespace)
    for group in drafted.groups:
        _check_known(group, cache, namespace)
    known = namespace.keyspaces
    new = (
        [held.plan.payload_bytes for held in group.held]
        for group in drafted.groups
        if group.held and (group.schema.group not in known or known[group.schema.group].queue is None)
    )
    cache.eviction.prepare(namespace, new)
    for group in drafted.groups:
        keyspace: Keyspace = cache.declare(namespace, group.schema)
        cache.set_part_bytes(
            keyspace,
            {held.part: held.plan.payload_bytes for held in group.held},
            {held.part: held.composition for held in group.held},
        )
    return Registration(
        number,
        next((entry.device for entry in _of_tensors(message, attached)), None),
        {group.group: group for group in drafted.groups},
        drafted.families,
        frozenset(spec.allocation for spec in message.tensors) | frozenset(message.signals),
        find_signals(message.signals, attached),
    )


def _of_tensors(message: Register, attached: Mapping[int, Attachment]) -> list[Attachment]:
    numbers = {spec.allocation for spec in message.tensors}
    return [attached[number] for number in numbers if number in attached]


def _ref(spec: RefSpec) -> Ref:
    return Ref(spec.tensor, spec.offset, spec.length, spec.count, spec.stride, spec.dtype, spec.layers or b"")


def _group(specs: Sequence[GroupSpec], refs: Sequence[Sequence[Ref]], tensors: Tensors) -> RegisteredGroup:
    """Makes one group from its specs, one for each part that the rank holds, and the refs of each."""
    schema = schema_of(specs[0])
    held: dict[int, HeldPart] = {}
    for spec, part_refs in zip(specs, refs, strict=True):
        if schema_of(spec) != schema:
            raise SchemaError(f"group {spec.group} is registered as {schema} and as {schema_of(spec)} in one request")
        if spec.part in held:
            raise DuplicateError(f"part {spec.part} of group {spec.group} is registered twice in one request")
        plan = GroupPlan.build(tensors, part_refs, spec.blocks_per_key)
        if plan.payload_bytes:
            held[spec.part] = HeldPart(spec.part, plan, Composition.of(part_refs))
    return RegisteredGroup(schema, tuple(held[part] for part in sorted(held)))


def _check_known(group: RegisteredGroup, cache: Cache, namespace: Namespace) -> None:
    """Checks a group against other registrations of it. Raises SchemaError, or ExtentError for payloads that are too
    large.
    """
    namespace.check_schema(group.schema)
    known = namespace.keyspaces.get(group.group)
    for held in group.held:
        if held.plan.payload_bytes > cache.tier.payload_bytes_max:
            raise ExtentError(
                f"group {group.group}: a payload of {held.plan.payload_bytes} bytes does not fit into a slab of "
                f"{cache.tier.payload_bytes_max}; raise memory.slab_bytes or lower blocks_per_key"
            )
        if known is not None:
            known.check_part(held.part, held.plan.payload_bytes, held.composition)
