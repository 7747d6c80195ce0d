"""Recommends the layout that transfers best, and warns of what will disappoint."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffloadd.layout import LayerKind
from kvoffloadd.model import slot_bytes
from kvoffloadd.planner.capacity import MemorySpace
from kvoffloadd.planner.layouts import CROSS_LAYER, HEADS_FIRST, PAGES, ROWS, Layout
from kvoffloadd.planner.rank import Rank
from kvoffloadd.units import format_bytes

IN_DOUBT = (CROSS_LAYER, HEADS_FIRST, ROWS)
"""The order of preference among layouts with equal numbers of descriptors."""

WASTEFUL = 0.25
"""The share of a slot that padding may take before a warning is given."""


def recommend(layouts: Sequence[Layout], chosen: Layout, prompt_tokens: int, share_tp: bool) -> Layout:
    """Returns the layout with the fewest descriptors for a prompt's store and load.

    `chosen`: only layouts with this pack size count; no released engine packs layers, so only a modified engine has
    any. `share_tp`: ranks of other tensor-parallel sizes read the stored keys; with the heads first, each reads a
    contiguous range.
    """
    fitting = [layout for layout in layouts if layout.pack_size == chosen.pack_size]
    shareable = [layout for layout in fitting if layout.name == HEADS_FIRST] if share_tp else []
    return min(
        shareable or fitting, key=lambda layout: (_moved(layout, prompt_tokens), sum(layout.padding), _doubt(layout))
    )


def _moved(layout: Layout, tokens: int) -> int:
    """Counts the descriptors of a prompt's store and of its load, or those of a block of each group if the prompt has
    no whole block.
    """
    store, load = layout.stored_blocks(tokens), layout.needed_blocks(tokens)
    return layout.descriptors_of(store) + layout.descriptors_of(load) or sum(layout.descriptors)


def _doubt(layout: Layout) -> int:
    return IN_DOUBT.index(layout.name) if layout.name in IN_DOUBT else len(IN_DOUBT)


def warnings(layout: Layout, rank: Rank, memory: MemorySpace, prompt_tokens: int, prompts_held: int) -> list[str]:
    """Returns what will disappoint. `prompts_held`: whole prompts of `prompt_tokens` in the memory tier, all groups
    stored.
    """
    found = []
    block = layout.block_tokens
    if block > prompt_tokens:
        found.append(
            f"a block has {block:,} tokens, a typical prompt {prompt_tokens:,}: such a prompt has no full block, so "
            f"nothing of it is ever stored or found again; {_shorter(layout, rank, prompt_tokens)}"
        )
    largest = max(layout.payloads)
    if largest > memory.payload_bytes_max:
        found.append(
            f"a payload of {format_bytes(largest)} does not fit into a slab of "
            f"{format_bytes(memory.payload_bytes_max)}: the daemon refuses to register it; set memory.slab_bytes to "
            f"{format_bytes(slot_bytes(largest))} or more"
        )
    elif prompts_held < 1 and block <= prompt_tokens:
        found.append(
            f"memory holds less than one prompt of {prompt_tokens:,} tokens: its first blocks are evicted before its "
            "last are stored; raise --memory"
        )
    wasted = [slot_bytes(payload) / payload - 1 for payload in layout.payloads]
    if max(wasted) > WASTEFUL:
        smallest = layout.payloads[wasted.index(max(wasted))]
        found.append(
            f"a payload of {format_bytes(smallest)} takes a slot of {format_bytes(slot_bytes(smallest))}: "
            "larger blocks, or several blocks a key, waste less"
        )
    return found


def _shorter(layout: Layout, rank: Rank, prompt_tokens: int) -> str:
    multiple = rank.model.block_multiple
    if layout.block_tokens == multiple > 1:
        return f"kernels read this model's cache in blocks of {multiple} tokens"
    if rank.block_size >= layout.block_tokens:
        return f"use a --block-size of {prompt_tokens:,} or less"
    pack = layout.pack_size * 2
    while rank.block_tokens(pack) > prompt_tokens and rank.block_tokens(pack) < rank.block_tokens(pack // 2):
        pack *= 2
    most = rank.model.count(LayerKind.FULL)
    if pack > most or rank.block_tokens(pack) > prompt_tokens:
        return "not even several attention layers on a page would make it short enough"
    return f'"{PAGES.format(pack)}" would make it {rank.block_tokens(pack):,}, but no released engine offers it'
