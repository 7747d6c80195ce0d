"""Which layout transfers best and why, and what will disappoint: sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffloadd.layout import LayerKind
from kvoffloadd.model import slot_bytes
from kvoffloadd.planner.capacity import MemorySpace
from kvoffloadd.planner.layouts import CROSS_LAYER, HEADS_FIRST, PAGES, ROWS, Layout
from kvoffloadd.planner.rank import Rank
from kvoffloadd.units import format_bytes

SHORT_ENOUGH = 4
"""A block should be at most this part of a prompt: what lies behind the last whole block is computed again."""

IN_DOUBT = (CROSS_LAYER, HEADS_FIRST, ROWS)
"""Which goes first where descriptors are equal."""

LOAD_TIMES = {"in shared memory": 0.9, "with a software driver that takes 2 us to submit a copy": 0.67}
"""What bench_layouts measured of gpt-oss-20b: cross-layer, where a tensor a layer takes 1. docs/benchmarks has all."""

WASTEFUL = 0.25
"""Of a slot, the part that padding may take before it is worth a word."""


def recommend(layouts: Sequence[Layout], chosen: Layout, prompt_tokens: int, share_tp: bool) -> tuple[Layout, str]:
    """The layout with the fewest descriptors for a prompt's store and load; and why, in a sentence.

    `chosen`: only layouts with its pack size, since no released engine packs layers, unless somebody's own does.
    `share_tp`: ranks of other tensor-parallel sizes are to read what is stored.
    """
    fitting = [one for one in layouts if one.pack_size == chosen.pack_size]
    shareable = [one for one in fitting if one.name == HEADS_FIRST] if share_tp else []
    best = min(shareable or fitting, key=lambda one: (_moved(one, prompt_tokens), sum(one.padding), _doubt(one)))
    said, measured = f'"{best.name}": {_cost(best)}', ""
    worst = max(fitting, key=lambda one: sum(one.descriptors))
    if sum(worst.descriptors) > sum(best.descriptors):
        said += f', where "{worst.name}" takes {_cost(worst)}'
        measured = f". {_measured()}"
    if best.block_tokens * SHORT_ENOUGH > prompt_tokens:
        said += _gain(layouts, best, prompt_tokens)
    if shareable:
        said += "; a range of heads is contiguous, so that ranks of other tensor-parallel sizes can read it"
    return best, f"{said}{measured}."


def _measured() -> str:
    """What fewer descriptors are worth in time."""
    times = ", ".join(f"{time:.2f} of the time {where}" for where, time in LOAD_TIMES.items())
    return (
        f"With 1 descriptor in place of 12, loads of gpt-oss-20b took {times} (docs/benchmarks/bench_layouts.json); "
        "on a GPU it has not been measured"
    )


def _gain(layouts: Sequence[Layout], best: Layout, prompt_tokens: int) -> str:
    """What packing would gain where blocks are long for a prompt; "" where it would gain nothing."""
    shorter = sorted((one for one in layouts if one.block_tokens < best.block_tokens), key=lambda one: one.block_tokens)
    if not shorter:
        return ""
    fitting = [one for one in shorter if one.block_tokens * SHORT_ENOUGH <= prompt_tokens]
    packed = fitting[-1] if fitting else shorter[0]
    return (
        f'; its blocks of {best.block_tokens:,} tokens are long for a prompt of {prompt_tokens:,}: "{packed.name}" '
        f"would have blocks of {packed.block_tokens:,}, but no released engine offers it"
    )


def _moved(layout: Layout, tokens: int) -> int:
    """Descriptors of a prompt's store and of its load; of a block of each group where it has no whole block."""
    store, load = layout.stored_blocks(tokens), layout.needed_blocks(tokens)
    return layout.descriptors_of(store) + layout.descriptors_of(load) or sum(layout.descriptors)


def _doubt(layout: Layout) -> int:
    return IN_DOUBT.index(layout.name) if layout.name in IN_DOUBT else len(IN_DOUBT)


def _cost(layout: Layout) -> str:
    number = sum(layout.descriptors)
    each = format_bytes(sum(layout.payloads) // number)
    groups = f"a block of each of the {layout.num_groups} groups" if layout.num_groups > 1 else "a block"
    return f"{number} descriptor{'s' * (number > 1)} of {each} for {groups}"


def warnings(layout: Layout, rank: Rank, memory: MemorySpace, prompt_tokens: int, prompts_held: int) -> list[str]:
    """What will disappoint. `prompts_held`: whole prompts of `prompt_tokens` in the memory tier, all groups stored."""
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
