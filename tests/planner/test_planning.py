"""Whole plans: what tiers hold, what is recommended, and what is warned of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.config import Config
from kvoffloadd.errors import ConfigError
from kvoffloadd.planner import PlanInputs, Trace, make_plan, read_model
from kvoffloadd.planner.layouts import CROSS_LAYER, HEADS_FIRST, PAGES
from tests.planner.models import DEEPSEEK, GEMMA_2, GEMMA_3, GIB, GPT_OSS, LLAMA, QWEN, changed, layout, plan

TIB = 1 << 40
ROOT = Path(__file__).parents[2]


def test_terms_default_to_the_daemons() -> None:
    assert PlanInputs().slab_bytes == 0, "as the daemon's own default, which follows from the capacity"
    assert PlanInputs().memory_bytes == Config().memory.capacity_bytes
    assert PlanInputs().segment_bytes == Config().disk.segment_bytes


def test_what_gpt_oss_takes() -> None:
    """64 GiB are 1,024 slabs of 170 slots of 384 KiB; a block is a key of each group."""
    found = plan(GPT_OSS, memory_bytes=64 * GIB, disk_bytes=2 * TIB)
    memory, disk = found.held
    assert found.layout.payloads == (393_216, 393_216)
    assert (memory.keys, memory.blocks, memory.tokens) == (1024 * 170, 512 * 170, 512 * 170 * 16)
    assert memory.index_bytes == 92 * memory.keys
    assert memory.prompts == (1024 * 170 // 1000,)
    assert memory.needed == (1024 * 170 // 508,)  # 500 full blocks, 8 of the window
    each = (65_536 - 1 - 12) // 97  # of a segment, its header and footer
    assert disk.keys == (8192 - 1) * each // 2 * 2
    (prompt,) = found.prompts
    assert (prompt.tokens, prompt.blocks) == (8000, 500)
    assert (prompt.stored_bytes, prompt.needed_bytes) == (1000 * 393_216, 508 * 393_216)


def test_ranks_share_a_daemon() -> None:
    """Twice the parts of half the size: the same bytes, and the same prompts."""
    one, two = plan(GPT_OSS, memory_bytes=64 * GIB), plan(GPT_OSS, tp=2, memory_bytes=64 * GIB)
    assert (two.parts, two.layout.payloads) == ((2, 2), (196_608, 196_608))
    assert two.prompts[0].stored_bytes == one.prompts[0].stored_bytes
    assert two.held[0].keys >= one.held[0].keys
    assert "all 2 ranks are on this host" in " ".join(two.assumed)


def test_latents_are_stored_once() -> None:
    one, eight = plan(DEEPSEEK), plan(DEEPSEEK, tp=8)
    assert eight.parts == (1,)
    assert eight.held == one.held
    assert "one of them stores them" in " ".join(eight.assumed)


def test_more_ranks_than_heads() -> None:
    found = plan(GPT_OSS, tp=16)
    assert found.parts == (8, 8)
    assert "2 ranks have the same KV head: one of them stores it" in found.assumed


def test_both_figures_where_they_differ() -> None:
    assert plan(LLAMA).held[0].prompts == plan(LLAMA).held[0].needed
    found = plan(GEMMA_3, block_size=64, prompt_tokens=4032, memory_bytes=64 * GIB)
    stored, needed = found.held[0].prompts[0], found.held[0].needed[0]
    assert stored is not None
    assert needed is not None
    assert needed > 2 * stored


def test_a_trace_says_what_prompts_are() -> None:
    trace = Trace(requests=10, median_tokens=1000, p90_tokens=4000, block_tokens=512, unique_blocks=50, references=70)
    found = plan(LLAMA, trace, prompt_tokens=5, memory_bytes=64 * GIB)
    assert [(prompt.name, prompt.tokens) for prompt in found.prompts] == [("median", 1000), ("p90", 4000)]
    assert found.held[0].prompts == (64 * GIB // (2 << 20) // 62, 64 * GIB // (2 << 20) // 250)


# --- advice ---


@pytest.mark.parametrize("name", [GPT_OSS, GEMMA_2, GEMMA_3, LLAMA, DEEPSEEK])
def test_fewest_and_largest_descriptors(name: str) -> None:
    found = plan(name)
    assert found.recommended.name == CROSS_LAYER
    assert found.recommended.descriptors == (1,) * found.layout.num_groups
    assert min(sum(one.descriptors) for one in found.layouts) == sum(found.recommended.descriptors)


def test_heads_first_to_be_shared() -> None:
    found = plan(GEMMA_3, tp=2, share_tp=True)
    assert found.recommended.name == HEADS_FIRST
    assert plan(DEEPSEEK, tp=2, share_tp=True).recommended.name == CROSS_LAYER
    assert "states are no heads" in " ".join(plan(QWEN, tp=2, share_tp=True).warnings)


def test_no_advice_names_an_option_that_engines_lack() -> None:
    for prompt in (100, 300, 2000, 8000):
        found = plan(QWEN, tp=2, prompt_tokens=prompt)
        assert "--attn-pack-size" not in " ".join((*found.warnings, *found.assumed))


def test_packs_as_asked_for() -> None:
    found = plan(QWEN, tp=2, pack_size=4)
    assert (found.layout.name, found.layout.block_tokens, found.layout.num_groups) == (PAGES.format(4), 528, 13)
    assert found.parts == (2,) * 13
    assert layout(found, PAGES.format(4)) is found.layout


@pytest.mark.parametrize(
    ("name", "pack", "complaint"),
    [
        (LLAMA, 2, "--attn-pack-size is only for models with states"),
        (QWEN, 16, "--attn-pack-size 16: there are 15 attention layers"),
    ],
)
def test_packs_that_can_not_be(name: str, pack: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        plan(name, tp=2, pack_size=pack)


@pytest.mark.parametrize(
    ("name", "terms", "warning"),
    [
        (
            QWEN,
            {"tp": 2, "prompt_tokens": 2000},
            'no full block, .*; "packed pages, 2 layers" would make it 1,056, but no released engine offers it',
        ),
        (QWEN, {"tp": 2, "prompt_tokens": 300}, '"packed pages, 8 layers" would make it 272, but no released engine'),
        (QWEN, {"tp": 2, "prompt_tokens": 100}, "not even several attention layers on a page would make it short eno"),
        (LLAMA, {"block_size": 512, "prompt_tokens": 300}, "a block has 512 tokens.*use a --block-size of 300 or less"),
        (
            LLAMA,
            {"block_size": 1024},
            r"a payload of 128 MiB does not fit into a slab.*memory.slab_bytes to 128 MiB or",
        ),
        (LLAMA, {"memory_bytes": GIB // 2}, "memory holds less than one prompt of 8,000 tokens"),
    ],
)
def test_warnings(name: str, terms: dict[str, Any], warning: str) -> None:
    (found,) = plan(name, **{"memory_bytes": 64 * GIB, **terms}).warnings
    assert re.search(warning, found)


def test_padding_that_is_worth_a_word(tmp_path: Path) -> None:
    small = read_model(changed(tmp_path, LLAMA, num_hidden_layers=3, head_dim=8))
    (found,) = make_plan(small, PlanInputs(block_size=2)).warnings
    assert "a payload of 1.50 KiB takes a slot of 4 KiB" in found


def test_nothing_to_warn_of() -> None:
    for name in (GPT_OSS, GEMMA_2, GEMMA_3, LLAMA, DEEPSEEK):
        assert plan(name, memory_bytes=64 * GIB).warnings == ()
