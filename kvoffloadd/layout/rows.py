"""One tensor whose row is one block across all layers: groups overlay it, a whole block is one descriptor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.geometry import View
from kvoffloadd.layout.place import Place, shared_views
from kvoffloadd.layout.plan import Plan, TensorPlan
from kvoffloadd.layout.spec import Attention, LayerGroup, LayerSpec, check_blocks, check_groups, nth_layers


def uniform_type(specs: Mapping[str, LayerSpec]) -> bool:
    """Whether the layers are all attention of one kind and block size, with pages of several sizes."""
    kinds = {(spec.kind, spec.block_size) for spec in specs.values()}
    attention = all(isinstance(spec, Attention) for spec in specs.values())
    return attention and len(kinds) == 1 and len({spec.page_bytes for spec in specs.values()}) > 1


def packs_rows(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], enabled: object = None) -> bool:
    """Whether an engine's layers share rows: its option says so ("true" in any case) and there are several groups, or
    they are of uniform type.
    """
    return uniform_type(specs) or (str(enabled).lower() == "true" and len(groups) > 1)


def packed_rows(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], num_blocks: int) -> Plan:
    """One tensor (num_blocks, row_bytes); slot n holds the n-th layer of every group, and is as long as the longest.

    Raises UsageError for layers that need tensors of their own, and for kernel blocks that differ.
    """
    check_groups(specs, groups)
    check_blocks(num_blocks)
    slots = nth_layers(groups)
    _check_kernel_blocks(specs, slots)
    sizes = [max(specs[layer].page_bytes for layer in slot) for slot in slots]
    row_bytes = sum(sizes)
    views: dict[str, tuple[View, ...]] = {}
    for at, slot in enumerate(slots):
        place = Place(0, row_bytes, base=sum(sizes[:at]))
        views.update({layer: shared_views(layer, specs[layer], num_blocks, place) for layer in slot})
    return Plan(num_blocks, (TensorPlan((num_blocks, row_bytes), slots),), views, dict(specs), tuple(groups))


def _check_kernel_blocks(specs: Mapping[str, LayerSpec], slots: Sequence[Sequence[str]]) -> None:
    layers = [layer for slot in slots for layer in slot]
    for layer in layers if len(slots) > 1 else ():
        if specs[layer].kernel_blocks != specs[layers[0]].kernel_blocks:
            raise UsageError(
                f"layers {layers[0]} and {layer} can't share rows: they have {specs[layers[0]].kernel_blocks} and "
                f"{specs[layer].kernel_blocks} kernel blocks a block, their bytes would overlap"
            )
