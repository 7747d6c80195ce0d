"""Predicted descriptors against those that a real daemon counts, for every layout of small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, NamespaceSpec, Outcome
from kvoffloadd.planner import Rank, read_model
from kvoffloadd.planner.layouts import Layout, possible_layouts
from scripts.harness.daemon import Daemon
from tests.planner.models import DEEPSEEK, DEEPSEEK_32, FALCON_H1, GEMMA_3, GEMMA_3N, GPT_OSS, LLAMA_4, QWEN, changed

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

BLOCKS, KEYS = 200, 12
SMALL: dict[str, dict[str, object]] = {
    GEMMA_3: {"num_hidden_layers": 17, "head_dim": 16, "sliding_window": 40},
    GPT_OSS: {"num_hidden_layers": 6, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
    LLAMA_4: {"num_hidden_layers": 8, "head_dim": 16, "attention_chunk_size": 32},
    DEEPSEEK: {"num_hidden_layers": 5, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
    DEEPSEEK_32: {"num_hidden_layers": 5, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
    GEMMA_3N: {
        "num_hidden_layers": 15, "num_kv_shared_layers": 5, "head_dim": 16, "sliding_window": 40,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 3,
    },
    FALCON_H1: {
        "num_hidden_layers": 4, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    QWEN: {
        "num_hidden_layers": 20, "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
"""The models with fewer layers and smaller heads: their groups are as uneven as ever."""

PAIRS = [(name, at) for name, layouts in ((GEMMA_3, 5), (GPT_OSS, 5), (LLAMA_4, 5), (DEEPSEEK, 3),
                                             (DEEPSEEK_32, 3), (GEMMA_3N, 5), (FALCON_H1, 6), (QWEN, 6))
         for at in range(layouts)]  # fmt: skip


def small(folder: Path, name: str) -> list[Layout]:
    found, _ = possible_layouts(Rank(read_model(changed(folder, name, **SMALL[name])), 1, 16), num_blocks=BLOCKS)
    return found


def test_every_layout_is_tried(tmp_path: Path) -> None:
    assert [(name, at) for name in SMALL for at in range(len(small(tmp_path, name)))] == PAIRS


@pytest.mark.parametrize(("name", "at"), PAIRS)
def test_a_daemon_counts_what_was_predicted(daemon: Daemon, tmp_path: Path, name: str, at: int, seed: int) -> None:
    layout = small(tmp_path, name)[at]
    rng = np.random.default_rng(seed)
    groups = [group.group for group in layout.plan.groups]
    # A block is of one group at a time.
    ids = rng.permutation(BLOCKS).astype(np.uint32)[: KEYS * len(groups)].reshape(-1, KEYS)
    keys = rng.integers(0, 256, (len(groups), KEYS, 32), dtype=np.uint8)
    cache = layout.plan.allocate("host").cache.kv_cache()
    with Client(daemon.socket, namespace=NamespaceSpec(model=f"planned-{name}", layout=layout.name)) as client:
        client.connect()
        registration = client.register(cache)
        tokens = KEYS * layout.block_tokens
        stored, needed = layout.stored_blocks(tokens), layout.needed_blocks(tokens)
        assert set(stored) == {KEYS}
        for direction, blocks in (("store", stored), ("load", needed)):
            before = daemon.status()["transfers"][direction]
            # The last of each: what a restore needs is at the end.
            wanted = {
                group: (keys[group][KEYS - count :], ids[group][KEYS - count :])
                for group, count in zip(groups, blocks, strict=True)
            }
            job = client.store(registration, wanted) if direction == "store" else client.load(registration, wanted)
            assert client.wait(job, 15).outcome == Outcome.DONE
            after = daemon.status()["transfers"][direction]
            moved = {
                counter: after[counter] - before[counter] for counter in ("descriptors", "copies", "bytes", "keys")
            }
            assert moved["descriptors"] == layout.descriptors_of(blocks)
            assert 0 < moved["copies"] <= moved["descriptors"]
            payload_bytes = sum(count * each for count, each in zip(blocks, layout.payloads, strict=True))
            assert (moved["bytes"], moved["keys"]) == (payload_bytes, sum(blocks))
