"""Puts layers of equal pages in one tensor, so that a block's bytes of all of them lie side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.geometry import View
from kvoffloadd.layout.place import Place, Sharing, own_view, shared_views, sharing
from kvoffloadd.layout.plan import Plan, TensorPlan
from kvoffloadd.layout.spec import LayerGroup, LayerSpec, check_blocks, check_groups

Slots = tuple[tuple[str, ...], ...]


def cross_layers(
    specs: Mapping[str, LayerSpec],
    groups: Sequence[LayerGroup],
    num_blocks: int,
    slots: Sequence[Sequence[str]] | None = None,
) -> Plan:
    """Plans one tensor for each page size in use, and one for each layer that can't share.

    Shared tensors are (num_blocks, slots, page_bytes), or (num_blocks * kernel_blocks, ...) of kernel pages if all of
    its groups have that many; where backends want heads first, (num_blocks, heads, slots, per_head_bytes). `slots`:
    which layers share memory, at most one a group; without it, the n-th layers of all groups do, counted by page size.

    Raises UsageError for layers that do not fit on one slot.
    """
    check_groups(specs, groups)
    check_blocks(num_blocks)
    keys = {layer: sharing(layer, spec) for layer, spec in specs.items()}
    named = default_slots(keys, groups) if slots is None else _checked(keys, groups, slots)
    tensors: list[TensorPlan] = []
    views: dict[str, tuple[View, ...]] = {}
    for shared in _shared_tensors(named, keys, specs, groups):
        plan = TensorPlan(_shape(num_blocks, shared))
        for index, slot in enumerate(shared.slots):
            place = Place(len(tensors), plan.bytes // num_blocks, index, len(shared.slots))
            views.update({layer: shared_views(layer, specs[layer], num_blocks, place) for layer in slot})
        tensors.append(plan)
    for layer, key in keys.items():
        if key is None:
            views[layer] = (own_view(layer, specs[layer], num_blocks, len(tensors)),)
            tensors.append(TensorPlan((num_blocks, specs[layer].page_bytes)))
    return Plan(num_blocks, tuple(tensors), views, dict(specs), tuple(groups))


@dataclass(frozen=True, slots=True)
class _SharedTensor:
    """A tensor that layers share. `kernel_blocks`: of each group's layers."""

    key: Sharing
    slots: list[tuple[str, ...]]
    kernel_blocks: dict[int, int]


def _shared_tensors(
    slots: Slots, keys: Mapping[str, Sharing | None], specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]
) -> list[_SharedTensor]:
    """Gathers slots of one page size, as far as the layers of each group have equal kernel blocks: those of one group
    would overlap otherwise, while different groups never use the same block.
    """
    group_of = {layer: group.group for group in groups for layer in group.layers}
    found: list[_SharedTensor] = []
    for slot in slots:
        key = keys[slot[0]]
        if key is None:
            continue
        ratios = {group_of[layer]: specs[layer].kernel_blocks for layer in slot}
        fitting = (
            candidate
            for candidate in found
            if candidate.key == key
            and all(candidate.kernel_blocks.get(group, ratio) == ratio for group, ratio in ratios.items())
        )
        shared = next(fitting, None)
        if shared is None:
            shared = _SharedTensor(key, [], {})
            found.append(shared)
        shared.slots.append(slot)
        shared.kernel_blocks.update(ratios)
    return found


def _shape(num_blocks: int, shared: _SharedTensor) -> tuple[int, ...]:
    ratios = set(shared.kernel_blocks.values())
    ratio = ratios.pop() if len(ratios) == 1 else 1
    outside = (size for _, size in shared.key.outside)
    return (num_blocks * ratio, *outside, len(shared.slots), shared.key.page_bytes // ratio)


def default_slots(keys: Mapping[str, Sharing | None], groups: Sequence[LayerGroup]) -> Slots:
    """Has the n-th layers of all groups share a slot, counted by what they can share a tensor with."""
    slots: dict[tuple[Sharing, int], list[str]] = {}
    for group in groups:
        counts: dict[Sharing, int] = {}
        for layer in group.layers:
            key = keys[layer]
            if key is not None:
                nth = counts[key] = counts.get(key, -1) + 1
                slots.setdefault((key, nth), []).append(layer)
    return tuple(tuple(slot) for slot in slots.values())


def _checked(keys: Mapping[str, Sharing | None], groups: Sequence[LayerGroup], slots: Sequence[Sequence[str]]) -> Slots:
    """Returns an engine's slots. Raises UsageError where layers can't lie on one."""
    group_of = {layer: group.group for group in groups for layer in group.layers}
    named = [layer for slot in slots for layer in slot]
    if sorted(named) != sorted(keys) or not all(slots):
        raise UsageError("slots must name each layer once, and each slot at least one")
    for slot in slots:
        layer_of = dict[int, str]()
        for layer in slot:
            other = layer_of.setdefault(group_of[layer], layer)
            if other != layer:
                raise UsageError(f"layers {other} and {layer} are of one group: they need separate slots")
        first = slot[0]
        for other in slot[1:]:
            one, two = keys[first], keys[other]
            if one is None or two is None:
                raise UsageError(
                    f"layer {first if one is None else other} can't share a slot: it needs a separate tensor"
                )
            if one != two:
                raise UsageError(
                    f"layers {first} and {other} can't share a slot: {_describe(one)} against {_describe(two)}; "
                    "pad the smaller page, or use one order"
                )
    return tuple(tuple(slot) for slot in slots)


def _describe(key: Sharing) -> str:
    outside = " x ".join(f"{size} {axis}s" for axis, size in key.outside)
    return f"{outside + ' first, ' if outside else ''}{key.page_bytes} bytes each"
