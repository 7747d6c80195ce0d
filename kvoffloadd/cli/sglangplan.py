"""Prints a plan for SGLang, for people and for programs: the commands to start, its host pools, what the daemon
holds.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import TYPE_CHECKING, Any

from kvoffloadd.cli.plantables import (
    PIPE_COLUMNS,
    Row,
    Section,
    held_section,
    print_section,
    print_sentences,
    prompt_row,
)
from kvoffloadd.cli.report import open_console
from kvoffloadd.model import slot_bytes
from kvoffloadd.planner.hostpools import HostPool
from kvoffloadd.planner.sglang import BUFFER_PROMPTS, HOST_RATIO, SglangPlan
from kvoffloadd.sglangnames import STORAGE
from kvoffloadd.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

INDENT = "  "


# --- for programs ---------------------------------------------------------------------------------------


def sglang_plan_json(plan: SglangPlan) -> dict[str, Any]:
    """Returns everything, as maps, lists and numbers. `flags`: words of SGLang's command line, in addition to the
    model's path.
    """
    page = plan.page_tokens
    return {
        "engine": "sglang",
        "model_type": plan.rank.model.model_type,
        "tp": plan.rank.tp,
        "kv_dtype": plan.rank.kept_dtype,
        "page_tokens": page,
        "pools": [_pool(pool, page) for pool in plan.pools],
        "flags": list(plan.flags),
        "daemon_settings": plan.settings,
        "host_pools": dataclasses.asdict(plan.host),
        "prompts": [dataclasses.asdict(prompt) for prompt in plan.prompts],
        "held": [dataclasses.asdict(held) for held in plan.held],
        "trace": dataclasses.asdict(plan.trace) | {"unique_tokens": plan.trace.unique_tokens} if plan.trace else None,
        "warnings": list(plan.warnings),
        "assumed": list(plan.assumed),
    }


def _pool(pool: HostPool, page_tokens: int) -> dict[str, Any]:
    return {
        "name": pool.name,
        "kind": pool.kind,
        "layers": pool.layers,
        "payload_bytes": pool.payload_bytes,
        "parts": pool.parts,
        "slot_bytes": slot_bytes(pool.payload_bytes),
        "needed_pages": -(-pool.needed_tokens // page_tokens) if pool.needed_tokens else None,
        "is_state": pool.is_state,
    }


# --- for people -----------------------------------------------------------------------------------------


def print_sglang_plan(plan: SglangPlan) -> None:
    """Prints commands and tables on standard output, then the warnings and the assumptions."""
    console = open_console(PIPE_COLUMNS)
    print_section(console, *_summary(plan), left=2)
    print_section(console, *_pools(plan), left=3)
    print_section(console, *_host(plan), left=2)
    print_section(console, *held_section(plan.held, plan.prompts, plan.trace, needs_less=plan.needs_less), left=2)
    _commands(console, plan)
    print_sentences(console, "warnings", plan.warnings)
    print_sentences(console, "assumed", plan.assumed)


def _summary(plan: SglangPlan) -> Section:
    rank = plan.rank
    stored = sum(pool.payload_bytes for pool in plan.pools if not pool.is_state)
    rows: list[Row] = [
        ("page", f"{plan.page_tokens} tokens, {format_bytes(stored)} on each rank: a key in each pool"),
        ("KV cache", "fp8 with scales" if rank.is_packed else rank.dtype),
        *(prompt_row(prompt, plan.trace, "page", needs_less=plan.needs_less) for prompt in plan.prompts),
    ]
    return f"{rank.model.model_type} with SGLang, {rank.tp} rank{'s' * (rank.tp > 1)}", ("", ""), rows


def _pools(plan: SglangPlan) -> Section:
    rows: list[Row] = []
    for pool in plan.pools:
        needed = "one state" if pool.is_state else "all pages"
        if pool.needed_tokens:
            needed = f"the last {-(-pool.needed_tokens // plan.page_tokens):,} pages"
        rows.append((
            pool.name, pool.kind, needed, str(pool.layers), format_bytes(pool.payload_bytes), str(pool.parts),
            format_bytes(slot_bytes(pool.payload_bytes)),
        ))  # fmt: skip
    headings = ("pool", "SGLang's class", "a restore needs", "layers", "payload", "parts", "slot in memory")
    return "host pools (a key is a page, or a state; a payload is one rank's part of it)", headings, rows


def _host(plan: SglangPlan) -> Section:
    host = plan.host
    takes, registered = f"{HOST_RATIO} x the KV cache on its GPU", "twice that, of all ranks"
    if host.default_bytes:
        takes, registered = format_bytes(host.default_bytes), format_bytes(host.mapped_bytes)
    prompt = plan.prompts[0].tokens
    rows: list[Row] = [
        ("SGLang's default (--hicache-ratio)", takes),
        (f"{BUFFER_PROMPTS} prompts of {prompt:,} tokens on their way", f"--hicache-size {host.least_gb} (GB)"),
        ("of the daemon's limits.mapped_bytes", registered),
    ]
    return "memory of SGLang's own, on each rank", ("", ""), rows


def _commands(console: Console, plan: SglangPlan) -> None:
    """Prints commands to copy: a line is broken only where a shell accepts it."""
    from rich.text import Text

    console.print(Text("\nto start", "bold"))
    daemon = ["kvoffloadd serve", "--memory", _size(plan.terms.memory_bytes)]
    if plan.terms.disk_bytes:
        daemon += ["--disk", f"/nvme0/kvoffloadd={_size(plan.terms.disk_bytes)}"]
    daemon += [word for name, value in plan.settings.items() for word in ("--set", f"{name}={value}")]
    lines = [" ".join(daemon), "", "python -m sglang.launch_server --model-path MODEL --enable-cache-report \\"]
    *plain, _ = plan.flags
    line = INDENT
    for words in _options(plain):
        if len(line) + len(words) > PIPE_COLUMNS - len(INDENT) - 3:
            lines.append(f"{line}\\")
            line = INDENT
        line += f"{words} "
    items = list(STORAGE.items())
    lines.append(f"{line}'{{{_inside(items[:1])},")
    lines.append(f"{INDENT * 2}{_inside(items[1:3])},")
    lines.append(f"{INDENT * 2}{_inside(items[3:])}}}'")
    for text in lines:
        console.print(Text(f"{INDENT}{text}" if text else ""), soft_wrap=True)


def _options(words: list[str]) -> list[str]:
    """Returns each option with its value."""
    found: list[str] = []
    for word in words:
        if word.startswith("--"):
            found.append(word)
        else:
            found[-1] += f" {shlex.quote(word)}"
    return found


def _inside(items: list[tuple[str, object]]) -> str:
    return ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in items)


def _size(size: int) -> str:
    """Formats a size as the command line takes it, to the byte."""
    text = format_bytes(size).replace(" ", "").replace(",", "")
    return text if "." not in text else str(size)
