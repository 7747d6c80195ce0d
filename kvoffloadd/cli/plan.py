"""Prints a plan for people, as tables that fit 100 columns, and for programs, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvoffloadd.cli.plantables import (
    PIPE_COLUMNS,
    Row,
    Section,
    held_section,
    print_indented,
    print_section,
    print_sentences,
    prompt_row,
)
from kvoffloadd.cli.report import open_console
from kvoffloadd.layout import Attention
from kvoffloadd.model import PAGE_BYTES, GroupKind, slot_bytes
from kvoffloadd.planner.layouts import ROWS, Layout
from kvoffloadd.planner.planning import CapacityPlan
from kvoffloadd.planner.rank import Rank
from kvoffloadd.storage.disk.format import RECORD_HEADER_PAGES
from kvoffloadd.units import format_bytes

# --- for programs ---------------------------------------------------------------------------------------


def plan_json(plan: CapacityPlan) -> dict[str, Any]:
    """Returns everything, as maps, lists and numbers. Lists inside a layout have an entry for each of its groups."""
    rank, layout = plan.rank, plan.layout
    model = dataclasses.asdict(rank.model)
    heads = rank.heads(rank.model.attention_kinds[0])
    model["kinds"] = {str(kind): rank.model.count(kind) for kind in dict.fromkeys(rank.model.kinds)}
    return {
        "model": model,
        "rank": {
            "tp": rank.tp, "kv_heads": heads.count, "head_size": heads.size, "kv_dtype": rank.kept_dtype,
            "heads": {str(kind): dataclasses.asdict(rank.heads(kind)) for kind in rank.model.attention_kinds},
            "token_bytes": rank.token_bytes, "state_bytes": rank.state_bytes,
        },
        "block_tokens": layout.block_tokens,
        "block_tokens_asked": rank.block_size,
        "pack_size": layout.pack_size,
        "page_bytes": _page_bytes(plan),
        "row_bytes": layout.plan.block_bytes,
        "groups": [_group(plan, group) for group in range(layout.num_groups)],
        "layouts": [_layout(plan, candidate) for candidate in plan.layouts],
        "impossible": plan.refused,
        "rows_by_default": plan.rows_by_default,
        "recommended": {"layout": plan.recommended.name},
        "prompts": [dataclasses.asdict(prompt) for prompt in plan.prompts],
        "held": [dataclasses.asdict(held) for held in plan.held],
        "trace": dataclasses.asdict(plan.trace) | {"unique_tokens": plan.trace.unique_tokens} if plan.trace else None,
        "warnings": list(plan.warnings),
        "assumed": list(plan.assumed),
    }  # fmt: skip


def _page_bytes(plan: CapacityPlan) -> int:
    """Returns the bytes of one block in one slot of the engine's memory."""
    specs = plan.layout.plan.specs.values()
    return max(spec.page_bytes for spec in specs if isinstance(spec, Attention)) * plan.layout.pack_size


def _group(plan: CapacityPlan, group: int) -> dict[str, Any]:
    layout, spec = plan.layout, plan.layout.spec(group)
    payload = layout.payloads[group]
    return {
        "group": group,
        "kind": str(spec.kind),
        "layers": list(layout.plan.groups[group].layers),
        "window_tokens": spec.window if isinstance(spec, Attention) else 0,
        "window_keys": spec.window_keys(layout.block_tokens),
        "layer_bytes": spec.payload_bytes,
        "payload_bytes": payload,
        "parts": plan.parts[group],
        "slot_bytes": slot_bytes(payload),
        "record_bytes": slot_bytes(payload) + RECORD_HEADER_PAGES * PAGE_BYTES,
    }


def _layout(plan: CapacityPlan, layout: Layout) -> dict[str, Any]:
    tokens = plan.prompts[0].tokens
    return {
        "name": layout.name,
        "pack_size": layout.pack_size,
        "block_tokens": layout.block_tokens,
        "tensors": len(layout.plan.canonical.rows),
        "row_bytes": layout.plan.block_bytes,
        "descriptors": list(layout.descriptors),
        "payload_bytes": list(layout.payloads),
        "padding_bytes": list(layout.padding),
        "descriptor_bytes": sum(layout.payloads) // sum(layout.descriptors),
        "stored_bytes_per_token": layout.token_bytes,
        "prompt_store_descriptors": layout.descriptors_of(layout.stored_blocks(tokens)),
        "prompt_load_descriptors": layout.descriptors_of(layout.needed_blocks(tokens)),
        "prompt_load_descriptors_clipped": layout.descriptors_of(layout.clipped_blocks(tokens)),
    }


# --- for people -----------------------------------------------------------------------------------------


def print_plan(plan: CapacityPlan) -> None:
    """Prints tables on standard output, then the warnings and the assumptions."""
    console = open_console(PIPE_COLUMNS)
    print_section(console, *_summary(plan), left=2)
    print_section(console, *_groups(plan), left=2)
    print_section(console, *_layouts(plan))
    notes = ["store, load: descriptors of the prompt, on each rank; unused: of the engine's memory, never stored"]
    notes.append(f'"{ROWS}": engines that have it use it {"by default" if plan.rows_by_default else "on request"}')
    for reason in dict.fromkeys(plan.refused.values()):
        names = " and ".join(f'"{name}"' for name, why in plan.refused.items() if why == reason)
        notes.append(f"not possible: {names}: {reason}")
    print_indented(console, notes)
    if plan.rank.model.is_hybrid:
        print_section(console, *_packs(plan))
    print_section(
        console, *held_section(plan.held, plan.prompts, plan.trace, needs_less=plan.layout.needs_less), left=2
    )
    print_sentences(console, "warnings", plan.warnings)
    print_sentences(console, "assumed", plan.assumed)


def _summary(plan: CapacityPlan) -> Section:
    rank, layout = plan.rank, plan.layout
    model = rank.model
    kinds = ", ".join(f"{model.count(kind)} {kind}" for kind in dict.fromkeys(model.kinds))
    held = f"one latent of {model.head_size}" if model.is_mla else _heads(rank)
    dtype = "fp8 with scales" if rank.is_packed else rank.dtype
    block = f"{layout.block_tokens:,} tokens"
    if layout.block_tokens != rank.block_size:
        why = "a page must hold a layer's state" if model.is_hybrid else "kernels read this model's cache so"
        if model.full_heads is not None:
            why = "of layers with smaller heads, to make pages equal"
        block += f" ({rank.block_size} asked for: {why})"
    rows: list[Row] = [
        ("layers", f"{len(model.kinds)}: {kinds}"),
        ("each rank", f"1 of {rank.tp}: {held}, {dtype}, {format_bytes(rank.token_bytes)} a token and layer"),
        ("block", block),
        ("page", f"{format_bytes(_page_bytes(plan))} of a slot, {format_bytes(layout.plan.block_bytes)} of all slots"),
    ]
    if model.linear is not None:
        rows.insert(2, ("state", f"{rank.state_bytes:,} bytes a layer, {_states(rank)}"))
    rows += [prompt_row(prompt, plan.trace, "block", needs_less=plan.layout.needs_less) for prompt in plan.prompts]
    return f"{model.model_type}, {rank.tp} rank{'s' * (rank.tp > 1)}", ("", ""), rows


def _heads(rank: Rank) -> str:
    alike: dict[str, list[str]] = {}
    for kind in rank.model.attention_kinds:
        heads = rank.heads(kind)
        alike.setdefault(f"{heads.count} KV head{'s' * (heads.count > 1)} of {heads.size}", []).append(str(kind))
    if len(alike) == 1:
        return next(iter(alike))
    return " and ".join(f"{heads} ({', '.join(kinds)})" for heads, kinds in alike.items())


def _states(rank: Rank) -> str:
    return "convolution and recurrent state" if len(rank.states) > 1 else "convolution"


def _groups(plan: CapacityPlan) -> Section:
    """Combines equal groups in one line."""
    alike: dict[Row, list[int]] = {}
    for group in range(plan.layout.num_groups):
        found = _group(plan, group)
        window = f"{found['window_tokens']:,} tokens" if found["window_tokens"] else "-"
        row = (
            found["kind"], window, str(len(found["layers"])), format_bytes(found["payload_bytes"]),
            str(found["parts"]), format_bytes(found["slot_bytes"]), format_bytes(found["record_bytes"]),
        )  # fmt: skip
        alike.setdefault(row, []).append(group)
    headings = ("group", "kind", "window", "layers", "payload", "parts", "slot in memory", "record on disk")
    title = "groups (a key is one block of one group; a payload is one rank's part of it)"
    return title, headings, [(_ranges(groups), *row) for row, groups in alike.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """Formats 0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _layouts(plan: CapacityPlan) -> Section:
    rows: list[Row] = []
    for layout in plan.layouts:
        found = _layout(plan, layout)
        unused = sum(layout.padding) / (layout.plan.block_bytes * layout.num_groups)
        rows.append((
            ("* " if layout is plan.recommended else "  ") + layout.name,
            f"{layout.block_tokens:,}",
            f"{found['tensors']:,}",
            _spread(layout.descriptors),
            format_bytes(found["descriptor_bytes"]),
            f"{found['prompt_store_descriptors']:,}",
            f"{found['prompt_load_descriptors']:,}",
            f"{100 * unused:.1f} %",
        ))  # fmt: skip
    title = f"layouts (* the best), for a prompt of {plan.prompts[0].tokens:,} tokens"
    return title, ("layout", "block", "tensors", "descriptors", "each", "store", "load", "unused"), rows


def _spread(numbers: Sequence[int]) -> str:
    """Formats the numbers of all groups: one number, or a range from the least to the most."""
    least, most = min(numbers), max(numbers)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _packs(plan: CapacityPlan) -> Section:
    rows: list[Row] = []
    for size in sorted({layout.pack_size for layout in plan.layouts}):
        layout = next(candidate for candidate in plan.layouts if candidate.pack_size == size)
        states = sum(layout.reach(group).kind is GroupKind.MAMBA for group in range(layout.num_groups))
        prompt = plan.prompts[0].tokens
        rows.append((
            str(size), f"{layout.block_tokens:,}", format_bytes(layout.block_tokens * plan.rank.token_bytes * size),
            f"{layout.num_groups - states} + {states}", format_bytes(sum(layout.payloads) // layout.block_tokens),
            f"{prompt // layout.block_tokens:,}",
        ))  # fmt: skip
    title = "attention layers on a page, if an engine packed them: shorter blocks, but a state for each"
    return title, ("pack", "block", "page", "groups", "stored a token", "blocks of a prompt"), rows
