"""Layers of equal pages in one tensor, so that a block's bytes of all of them lie side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.geometry import View
from kvoffloadd.layout.place import Place, Sharing, own_view, shared_views, sharing
from kvoffloadd.layout.plan import Plan, TensorPlan
from kvoffloadd.layout.spec import LayerGroup, LayerSpec, attention, check_blocks, check_groups

Slots = tuple[tuple[str, ...], ...]


def cross_layers(
    specs: Mapping[str, LayerSpec],
    groups: Sequence[LayerGroup],
    num_blocks: int,
    slots: Sequence[Sequence[str]] | None = None,
) -> Plan:
    """One tensor for each page size in use, and one for each layer that can't share.

    Shared tensors are (num_blocks, slots, page_bytes), or (num_blocks * kernel_blocks, ...) of kernel pages; where
    backends want heads first, (num_blocks, heads, slots, per_head_bytes). `slots`: which layers share memory, at most
    one a group; without it, the n-th layers of all groups do, counted by page size.

    Raises UsageError for layers that do not fit on one slot.
    """
    check_groups(specs, groups)
    check_blocks(num_blocks)
    keys = {layer: sharing(layer, spec) for layer, spec in specs.items()}
    by_key: dict[Sharing, list[tuple[str, ...]]] = {}
    for slot in default_slots(keys, groups) if slots is None else _checked(keys, groups, slots):
        key = keys[slot[0]]
        if key is not None:
            by_key.setdefault(key, []).append(slot)
    tensors: list[TensorPlan] = []
    views: dict[str, tuple[View, ...]] = {}
    for key, members in by_key.items():
        plan = TensorPlan(_shape(num_blocks, len(members), key), tuple(members))
        for at, slot in enumerate(members):
            place = Place(len(tensors), plan.bytes // num_blocks, at, len(members))
            views.update({layer: shared_views(layer, specs[layer], num_blocks, place) for layer in slot})
        tensors.append(plan)
    for layer, key in keys.items():
        if key is None:
            spec = attention(layer, specs[layer])
            views[layer] = (own_view(layer, spec, num_blocks, len(tensors)),)
            tensors.append(TensorPlan((num_blocks, spec.page_bytes), ((layer,),)))
    return Plan(num_blocks, tuple(tensors), views, dict(specs), tuple(groups))


def _shape(num_blocks: int, slots: int, key: Sharing) -> tuple[int, ...]:
    outside = tuple(size for _, size in key.outside)
    return (num_blocks * key.kernel_blocks, *outside, slots, key.page_bytes)


def default_slots(keys: Mapping[str, Sharing | None], groups: Sequence[LayerGroup]) -> Slots:
    """The n-th layers of all groups share a slot, counted by what they can share a tensor with."""
    slots: dict[tuple[Sharing, int], list[str]] = {}
    for group in groups:
        counts: dict[Sharing, int] = {}
        for layer in group.layers:
            key = keys[layer]
            if key is not None:
                at = counts[key] = counts.get(key, -1) + 1
                slots.setdefault((key, at), []).append(layer)
    return tuple(tuple(slot) for slot in slots.values())


def _checked(keys: Mapping[str, Sharing | None], groups: Sequence[LayerGroup], slots: Sequence[Sequence[str]]) -> Slots:
    """An engine's slots. Raises UsageError where layers can't lie on one."""
    group_of = {layer: group.group for group in groups for layer in group.layers}
    named = [layer for slot in slots for layer in slot]
    if sorted(named) != sorted(keys) or not all(slots):
        raise UsageError("slots must name each layer once, and each slot at least one")
    for slot in slots:
        first = slot[0]
        for other in slot[1:]:
            one, two = keys[first], keys[other]
            if group_of[first] == group_of[other]:
                raise UsageError(f"layers {first} and {other} are of one group: they need slots of their own")
            if one is None or two is None:
                raise UsageError(f"layer {first if one is None else other} can't share a slot: its backend isolates it")
            if one.kernel_blocks != two.kernel_blocks:
                raise UsageError(
                    f"layers {first} and {other} can't share a slot: they have {one.kernel_blocks} and "
                    f"{two.kernel_blocks} kernel blocks a block, their bytes would overlap"
                )
            if one != two:
                raise UsageError(
                    f"layers {first} and {other} can't share a slot: {_said(one)} against {_said(two)}; "
                    "pad the smaller page, or use one order"
                )
    return tuple(tuple(slot) for slot in slots)


def _said(key: Sharing) -> str:
    outside = " x ".join(f"{size} {axis}s" for axis, size in key.outside)
    return f"{outside + ' first, ' if outside else ''}{key.page_bytes} bytes each"
