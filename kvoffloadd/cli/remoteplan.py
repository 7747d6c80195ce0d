"""What a store that hosts share means for a model: for people, and for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvoffloadd.cli.plantables import PIPE_COLUMNS, Row, Section, print_section, print_sentences, times_said
from kvoffloadd.cli.report import open_console
from kvoffloadd.planner.planning import CapacityPlan
from kvoffloadd.planner.remote import RemotePlan, config_lines
from kvoffloadd.units import format_bytes, format_seconds


def remote_json(plan: RemotePlan) -> dict[str, Any]:
    """Everything, as maps, lists and numbers. `object_bytes` has an entry for each group."""
    found = dataclasses.asdict(plan)
    terms = found.pop("terms")
    return {**terms, **found, "config": config_lines(plan)}


def print_remote(plan: RemotePlan, of: CapacityPlan) -> None:
    """Tables on standard output, then lines for the config, the warnings, and what all of it rests on."""
    from rich.padding import Padding

    console = open_console(PIPE_COLUMNS)
    print_section(console, *_prompts(plan), left=1)
    print_section(console, *_store(plan, of), left=1)
    console.print("\nconfig", style="bold", highlight=False)
    for line in config_lines(plan):
        console.print(Padding(line, (0, 0, 0, 2)), markup=False, highlight=False)
    print_sentences(console, "warnings of the remote store", plan.warnings)
    print_sentences(console, "assumed of the remote store", plan.assumed)


def _prompts(plan: RemotePlan) -> Section:
    rows: list[Row] = [
        ("keys asked for, fetched", *(f"{one.asked:,}, {one.objects:,}" for one in plan.prompts)),
        ("bytes fetched", *(format_bytes(one.fetch_bytes) for one in plan.prompts)),
        ("fetched in", *(format_seconds(one.fetch_s) for one in plan.prompts)),
        ("computed in", *(format_seconds(one.prefill_s) for one in plan.prompts)),
        ("fetching is as fast at", *(f"{one.break_even_bytes_per_s / 1e9:.2f} GB/s" for one in plan.prompts)),
    ]
    headings = ("", *(f"{one.tokens:,} tokens ({one.name})" for one in plan.prompts))
    return f"a prompt from {plan.terms.engine}, of which this host has nothing", headings, rows


def _store(plan: RemotePlan, of: CapacityPlan) -> Section:
    sizes = sorted(set(plan.object_bytes))
    spread = format_bytes(sizes[0]) if len(sizes) == 1 else f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"
    rows: list[Row] = [
        ("capacity, of all hosts together", format_bytes(plan.store_bytes)),
        ("a key, all parts and a header page", spread),
        ("tokens, all that is stored", f"{plan.tokens:,}"),
    ]
    rows += [
        (f"prompts of {prompt.tokens:,} tokens, all that is stored", times_said(held))
        for prompt, held in zip(of.prompts, plan.held, strict=True)
    ]
    return "what the store holds", ("", ""), rows
