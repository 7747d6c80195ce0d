"""Plans one tensor that has one block across all layers in each row: groups overlay it, a block is one descriptor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.geometry import View
from kvoffloadd.layout.place import Place, shared_views
from kvoffloadd.layout.plan import Plan, TensorPlan
from kvoffloadd.layout.spec import (
    Attention,
    LayerGroup,
    LayerSpec,
    Mamba,
    check_blocks,
    check_groups,
    item_bytes,
)


def uniform_type(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> bool:
    """Returns whether the layers of every group are attention of one reach and block size, and pages are of several
    sizes: then engines that pack rows do so by default. Groups may differ from one another in all of that.
    """
    for group in groups:
        layers = [specs[layer] for layer in group.layers]
        if not all(isinstance(spec, Attention) for spec in layers):
            return False
        if len({(spec.group_kind, spec.block_size) for spec in layers}) > 1:
            return False
    return len({spec.page_bytes for spec in specs.values()}) > 1


def packed_rows(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], num_blocks: int) -> Plan:
    """Plans one tensor (num_blocks, row_bytes). Pages of a group lie one behind the other from the row's first byte on,
    in the order of its layers; the row is as long as the longest group, rounded up to a size that its dtypes and kernel
    blocks divide.

    Raises UsageError for layers that need separate tensors, and for kernel blocks that differ in a group.
    """
    check_groups(specs, groups)
    check_blocks(num_blocks)
    for group in groups:
        _check_kernel_blocks(specs, group)
    longest = max(sum(specs[layer].page_bytes for layer in group.layers) for group in groups)
    step = math.lcm(*(_divisor(spec) for spec in specs.values()))
    row_bytes = -(-longest // step) * step
    views: dict[str, tuple[View, ...]] = {}
    for group in groups:
        base = 0
        for layer in group.layers:
            views[layer] = shared_views(layer, specs[layer], num_blocks, Place(0, row_bytes, base=base))
            base += specs[layer].page_bytes
    return Plan(num_blocks, (TensorPlan((num_blocks, row_bytes)),), views, dict(specs), tuple(groups))


def _divisor(spec: LayerSpec) -> int:
    """Returns the divisor that a row must have for the layer to lie in it."""
    if isinstance(spec, Attention):
        return item_bytes(spec.dtype) * spec.kernel_blocks
    return math.lcm(*(item_bytes(state.dtype) for state in spec.states)) if isinstance(spec, Mamba) else 1


def _check_kernel_blocks(specs: Mapping[str, LayerSpec], group: LayerGroup) -> None:
    """Checks the kernel blocks of a group's layers, which interleave: with different ratios they would overlap."""
    first = group.layers[0]
    for layer in group.layers:
        if specs[layer].kernel_blocks != specs[first].kernel_blocks:
            raise UsageError(
                f"layers {first} and {layer} of group {group.group} can't share rows: they have "
                f"{specs[first].kernel_blocks} and {specs[layer].kernel_blocks} kernel blocks a block, their bytes "
                "would overlap"
            )
