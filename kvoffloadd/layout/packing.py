"""Puts several attention layers on one page: where a Mamba state sets the page, blocks need not grow to fill it."""

from __future__ import annotations

from collections.abc import Mapping

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.geometry import View
from kvoffloadd.layout.place import Place, shared_views
from kvoffloadd.layout.plan import Plan, TensorPlan
from kvoffloadd.layout.spec import LayerGroup, LayerSpec, Mamba, attention, check_blocks, check_groups

KERNEL_TOKENS = 16
"""Attention kernels require blocks that are a multiple of this."""


def packed_block_size(mamba_page_bytes: int, token_bytes: int, pack_size: int, step_tokens: int = KERNEL_TOKENS) -> int:
    """Returns the smallest block, in tokens, for which `pack_size` attention layers fill at least the Mamba state's
    page.

    `token_bytes`: of one token in one attention layer. `step_tokens`: blocks are a multiple of it, rounded up to the
    multiple that kernels require. Raises UsageError for sizes below 1.
    """
    if min(mamba_page_bytes, token_bytes, pack_size, step_tokens) < 1:
        raise UsageError(f"sizes must be positive: {mamba_page_bytes}, {token_bytes}, {pack_size}, {step_tokens}")
    steps = -(-mamba_page_bytes // (step_tokens * pack_size * token_bytes))
    return -(-steps * step_tokens // KERNEL_TOKENS) * KERNEL_TOKENS


def packed_pages(specs: Mapping[str, LayerSpec], pack_size: int, num_blocks: int) -> Plan:
    """Plans one tensor (num_blocks, page) for each pack of `pack_size` attention layers, in the order of `specs`.

    Attention layers are group 0. Mamba layers overlay the tensors, one a group and tensor, dealt out to as many groups
    as necessary. The last pack may have fewer layers: their slots stay unused.

    Raises UsageError unless attention layers are of one page size, and pages fit.
    """
    check_blocks(num_blocks)
    packed = [layer for layer, spec in specs.items() if not isinstance(spec, Mamba)]
    states = [layer for layer, spec in specs.items() if isinstance(spec, Mamba)]
    if pack_size < 1 or not packed:
        raise UsageError(f"{len(packed)} attention layers can't be packed by {pack_size}")
    pages = {layer: attention(layer, specs[layer]).page_bytes for layer in packed}
    page = pages[packed[0]] * pack_size
    for layer in packed:
        if pages[layer] != pages[packed[0]]:
            raise UsageError(
                f"layers {packed[0]} and {layer} can't be packed: pages of {pages[packed[0]]} and {pages[layer]} bytes"
            )
    for layer in states:
        if specs[layer].page_bytes > page:
            raise UsageError(
                f"layer {layer}: a state of {specs[layer].page_bytes} bytes does not fit a page of {page}: "
                f"{pack_size} attention layers of {pages[packed[0]]}; use larger blocks or packs"
            )
    packs = [packed[start : start + pack_size] for start in range(0, len(packed), pack_size)]
    count = -(-len(states) // len(packs))
    dealt = [tuple(states[index::count]) for index in range(count)]
    groups = (LayerGroup(0, tuple(packed)), *(LayerGroup(1 + index, layers) for index, layers in enumerate(dealt)))
    check_groups(specs, groups)
    views: dict[str, tuple[View, ...]] = {}
    tensors = []
    for index, pack in enumerate(packs):
        for slot, layer in enumerate(pack):
            views[layer] = shared_views(layer, specs[layer], num_blocks, Place(index, page, slot, pack_size))
        over = [layers[index] for layers in dealt if index < len(layers)]
        views.update({layer: shared_views(layer, specs[layer], num_blocks, Place(index, page)) for layer in over})
        tensors.append(TensorPlan((num_blocks, page)))
    return Plan(num_blocks, tuple(tensors), views, dict(specs), groups)
