"""The output of `kvoffloadd advise`: what more or less memory or disk would give."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from kvoffloadd.cache.policy import DEFAULT_POLICY
from kvoffloadd.cli.plantables import PIPE_COLUMNS, print_section, print_sentences
from kvoffloadd.cli.report import ProgressLine, open_console
from kvoffloadd.planner import PlanInputs, make_plan, read_model
from kvoffloadd.planner.sizing import HEADINGS, Sizing, sizing_rows, sizing_sentences
from kvoffloadd.planner.trace import read_requests
from kvoffloadd.planner.tracesizing import size_for
from kvoffloadd.units import parse_bytes


def size_trace(arguments: argparse.Namespace) -> Sizing:
    """Simulates the trace that the arguments name. Raises ConfigError."""
    trace = read_requests(arguments.trace, arguments.trace_block_tokens)
    with ProgressLine(f"{arguments.trace}", lambda count: f"{count:,} blocks") as line:
        return size_for(
            trace,
            _token_bytes(arguments),
            parse_bytes(arguments.memory),
            parse_bytes(arguments.disk) if arguments.disk else 0,
            arguments.policy or DEFAULT_POLICY,
            samples=arguments.samples,
            progress=line.update,
        )


def _token_bytes(arguments: argparse.Namespace) -> float:
    if arguments.token_bytes:
        return float(arguments.token_bytes)
    model = read_model(arguments.model_config)
    return make_plan(model, PlanInputs(tp=arguments.tp, kv_dtype=arguments.kv_dtype)).token_bytes


def sizing_json(sizing: Sizing) -> dict[str, Any]:
    """Returns all figures and sentences, for programs."""
    return dataclasses.asdict(sizing) | {"sentences": sizing_sentences(sizing)}


def print_sizing(sizing: Sizing) -> None:
    """Prints a table and sentences, for people."""
    console = open_console(PIPE_COLUMNS)
    title = f"what each size would have hit, with the policy {sizing.policy}"
    print_section(console, title, HEADINGS, sizing_rows(sizing))
    print_sentences(console, "so", sizing_sentences(sizing))
