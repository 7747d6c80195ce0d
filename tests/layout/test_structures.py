"""Published models, cut down, in every layout that the planner finds for them: restored prompts go on bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.client import Client, NamespaceSpec
from kvoffloadd.layout import (
    LATENT,
    Attention,
    LayerKind,
    LayerSpec,
    Plan,
    cross_layers,
    packed_rows,
    uniform_type,
)
from kvoffloadd.planner import Rank, form_groups, read_model
from kvoffloadd.planner.compressed import SPARSE
from kvoffloadd.planner.layouts import Layout, per_layer, possible_layouts
from scripts.harness.daemon import Daemon
from scripts.harness.layers import allocated
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
    prompt_of,
)
from tests.planner.models import changed

pytestmark = pytest.mark.slow

NUM_BLOCKS = 512
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


def undisturbed(plan: Plan, seed: int) -> Generated:
    """What the model generates without a byte moved."""
    memory = allocated(plan)
    ids = iter(range(1, NUM_BLOCKS))
    sizes = {group.group: memory.specs[group.layers[0]].block_size for group in memory.groups}
    tables = {group: list(itertools.islice(ids, TABLE * BLOCK // size)) for group, size in sizes.items()}
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
    assert {layout.spec(group).block_size for layout in found for group in range(layout.num_groups)} == {BLOCK}
    check_restored(daemon, name, {layout.name: layout.plan for layout in found}, seed)


def compressed(ratio: int, layer: str) -> dict[str, Attention]:
    """A layer of DeepSeek V4 in small: entries of `ratio` tokens, states of the compressor, an index where there are 4
    tokens in an entry, and a window; blocks and pages of several sizes.
    """

    def latents(block: int, size: int, dtype: str, tokens: int = 1, window: int = 0) -> Attention:
        bare = Attention(block, 1, size, dtype, LATENT, LayerKind.MLA, window, tokens_per_entry=tokens)
        return replace(bare, padded_bytes=-(-bare.payload_bytes // 32) * 32)

    found = {f"{layer}.window": latents(4, 32, "bfloat16", window=WINDOW)}
    if ratio:
        overlap = 2 if ratio == SPARSE else 1
        found[layer] = latents(BLOCK, 32, "bfloat16", ratio)
        found[f"{layer}.state"] = latents(ratio // 2, 2 * overlap * 32, "float32", window=overlap * ratio)
    if ratio == SPARSE:
        found[f"{layer}.index"] = latents(BLOCK, 44, "uint8", ratio)
        found[f"{layer}.index_state"] = latents(ratio // 2, 2 * overlap * 20, "float32", window=overlap * ratio)
    return found


def test_compressed_tokens(daemon: Daemon, tmp_path: Path, seed: int) -> None:
    """DeepSeek V4's first layers: in the groups of the published model, several page sizes to a group."""
    published = Rank(read_model(changed(tmp_path, "deepseek-v4-flash", num_hidden_layers=7)), 1, 256)
    ratios = [0, 0, SPARSE, BLOCK, SPARSE, BLOCK, SPARSE]
    specs: dict[str, LayerSpec] = {}
    for at, ratio in enumerate(ratios):
        specs |= compressed(ratio, f"layers.{at}")
    groups = form_groups(specs)
    assert groups == form_groups(published.specs(LATENT))
    assert uniform_type(specs, groups)
    plans = {
        "by-layer": per_layer(specs, groups, NUM_BLOCKS),
        "cross-layer": cross_layers(specs, groups, NUM_BLOCKS),
        "packed-rows": packed_rows(specs, groups, NUM_BLOCKS),
    }
    check_restored(daemon, "deepseek-v4-flash", plans, seed)


def check_restored(daemon: Daemon, model: str, plans: Mapping[str, Plan], seed: int) -> None:
    """Each layout's restored prompt goes on as the first one's that was never moved."""
    reference = undisturbed(next(iter(plans.values())), seed)
    for name, plan in plans.items():
        with Client(daemon.socket, namespace=NamespaceSpec(model=model, layout=name)) as client:
            worker = Worker(client, allocated(plan), seed)
            worker.offload()
            assert worker.restorable() == FULL_BLOCKS
            worker.wipe(NAN)
            worker.load(worker.admit(FULL_BLOCKS))
            check_same(worker.resume(FULL_BLOCKS), reference)
