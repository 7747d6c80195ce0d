"""Published models, cut down, in every layout that the planner finds for them: restored prompts go on bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.client import Client, NamespaceSpec
from kvoffloadd.planner import Rank, read_model
from kvoffloadd.planner.layouts import Layout, possible_layouts
from scripts.harness.daemon import Daemon
from tests.layout.decoder import Decoder
from tests.layout.oracle import torch
from tests.layout.worker import (
    BLOCK,
    FULL_BLOCKS,
    NAN,
    NEW,
    TABLE,
    WINDOW,
    Generated,
    Worker,
    check_same,
    planned,
    prompt_of,
)
from tests.planner.models import changed

NUM_BLOCKS = 256
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": {
        **HEADS,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": WINDOW,
    },
    # 13 windows and 2 full layers: eight groups, and a slot that the last window leaves unused.
    "gemma-3-27b": {**HEADS, "num_hidden_layers": 15, "sliding_window": WINDOW},
    "qwen3-next-80b-a3b": {
        **HEADS,
        "num_hidden_layers": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "deepseek-r1": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
    },
}
"""Keys of the published configs that are made smaller; kinds of layers and their ratios stay."""

LAYOUTS = {"gpt-oss-120b": 5, "gemma-3-27b": 5, "qwen3-next-80b-a3b": 6, "deepseek-r1": 3}


def layouts(folder: Path, name: str) -> list[Layout]:
    return possible_layouts(Rank(read_model(changed(folder, name, **MODELS[name])), 1, BLOCK), 0, NUM_BLOCKS)[0]


def undisturbed(layout: Layout, seed: int) -> Generated:
    """What the model says, not a byte of it moved."""
    memory = planned(layout.plan)
    tables = {group.group: range(1 + at * TABLE, 1 + (at + 1) * TABLE) for at, group in enumerate(memory.groups)}
    return Decoder(memory.specs, memory.groups, memory.layers, seed).generate(prompt_of(seed), tables, NEW)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The same order of additions every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_a_restored_prompt_goes_on_as_if_it_had_been_computed(
    daemon: Daemon, tmp_path: Path, name: str, seed: int
) -> None:
    """Blocks that are not loaded are not a number."""
    found = layouts(tmp_path, name)
    assert len(found) == LAYOUTS[name]
    reference = undisturbed(found[0], seed)
    for layout in found:
        assert {layout.spec(group).block_size for group in range(layout.num_groups)} == {BLOCK}
        with Client(daemon.socket, namespace=NamespaceSpec(model=name, layout=layout.name)) as client:
            worker = Worker(client, planned(layout.plan), seed)
            worker.offload()
            assert worker.restorable() == FULL_BLOCKS
            worker.wipe(NAN)
            worker.load(worker.admit(FULL_BLOCKS))
            check_same(worker.resume(FULL_BLOCKS), reference)
