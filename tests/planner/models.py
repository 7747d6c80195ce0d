"""Configs of real models, numbers only, and plans made of them."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

from kvoffloadd.planner import CapacityPlan, Layout, ModelConfig, PlanInputs, Rank, Trace, make_plan, read_model
from scripts.harness.published import CONFIGS

DATA = Path(__file__).parent / "data"
GPT_OSS, GEMMA_2, GEMMA_3 = "gpt-oss-20b", "gemma-2-2b", "gemma-3-4b"
LLAMA, LLAMA_4, QWEN, DEEPSEEK = "llama-3.1-8b", "llama-4-scout", "qwen3.5-397b-a17b", "deepseek-v2-lite"
DEEPSEEK_32, GEMMA_3N, FALCON_H1 = "deepseek-v3.2", "gemma-3n-e4b", "falcon-h1-7b"
DEEPSEEK_32, GEMMA_3N, FALCON_H1 = "deepseek-v3.2", "gemma-3n-e4b", "falcon-h1-7b"
TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "conversation_trace.jsonl"
GIB = 1 << 30


def path_of(name: str) -> Path:
    return DATA / f"{name}.json"


def model(name: str) -> ModelConfig:
    return read_model(path_of(name))


def rank(name: str, tp: int = 1, block_size: int = 16, **more: Any) -> Rank:
    return Rank(model(name), tp, block_size, **more)


def plan(name: str, trace: Trace | None = None, **terms: Any) -> CapacityPlan:
    return make_plan(model(name), PlanInputs(**terms), trace)


def layout(made: CapacityPlan, name: str) -> Layout:
    return next(one for one in made.layouts if one.name == name)


def changed(folder: Path, name: str, **keys: object) -> Path:
    """The model's config with these keys of its text layers changed; `...` takes one away."""
    values: Any = copy.deepcopy(CONFIGS[name]) if name in CONFIGS else json.loads(path_of(name).read_text("utf-8"))
    inner = values.get("text_config", values)
    for key, value in keys.items():
        if value is ...:
            inner.pop(key, None)
            values.pop(key, None)
        else:
            inner[key] = value
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def example_of(section: str) -> tuple[list[str], list[str]]:
    """The arguments of the command that a document's section shows, and the lines of its output."""
    shown = [line.removeprefix("    ").rstrip() for line in section.splitlines() if not line[:4].strip()]
    command, *output = "\n".join(shown).strip().splitlines()
    while command.endswith("\\"):
        command = command[:-1] + output.pop(0)
    return shlex.split(command)[1:], "\n".join(output).strip().splitlines()
