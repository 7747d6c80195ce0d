"""Layouts compared: the figures that are known of real models, from their configs."""

from __future__ import annotations

import pytest

from kvoffloadd.planner.layouts import (
    BLOCKS,
    CROSS_LAYER,
    HEADS_FIRST,
    KV_APART,
    PAGES,
    PER_LAYER,
    ROWS,
    Layout,
    possible_layouts,
)
from tests.planner.models import DEEPSEEK, GEMMA_2, GEMMA_3, GPT_OSS, LLAMA, QWEN, rank


def layouts(name: str, tp: int = 1, block_size: int = 16, pack_size: int = 0, **more: bool) -> dict[str, Layout]:
    found, _ = possible_layouts(rank(name, tp, block_size, **more), pack_size)
    return {one.name: one for one in found}


def test_gpt_oss() -> None:
    """12 sliding and 12 full layers on 12 slots of 32,768 bytes."""
    found = layouts(GPT_OSS)
    assert list(found) == [KV_APART, PER_LAYER, CROSS_LAYER, HEADS_FIRST, ROWS]
    assert [found[name].descriptors for name in found] == [(24, 24), (12, 12), (1, 1), (1, 1), (1, 1)]
    assert [len(found[name].plan.canonical.rows) for name in found] == [24, 12, 1, 1, 1]
    for one in found.values():
        assert (one.plan.block_bytes, one.payloads, one.padding) == (393_216, (393_216, 393_216), (0, 0))
    assert found[CROSS_LAYER].plan.tensors[0].shape == (BLOCKS, 12, 32_768)
    assert found[PER_LAYER].plan.tensors[0].bytes == BLOCKS * 32_768


def test_gpt_oss_heads_first_on_two_ranks() -> None:
    """4 heads, per-head page 4,096, page 16,384."""
    found = layouts(GPT_OSS, 2)[HEADS_FIRST]
    assert found.plan.tensors[0].shape == (BLOCKS, 4, 12, 4096)
    assert (found.plan.block_bytes, found.descriptors) == (196_608, (1, 1))


def test_gpt_oss_packed_rows() -> None:
    """279 blocks of 64 tokens: 279 descriptors, where tensors of each layer need 3,348, or 6,696 with K and V apart."""
    found = layouts(GPT_OSS, block_size=64)
    assert found[ROWS].plan.block_bytes == 12 * 131_072 == 1_572_864
    blocks = (0, 279)
    counts = {name: one.descriptors_of(blocks) for name, one in found.items()}
    assert (counts[ROWS], counts[PER_LAYER], counts[KV_APART]) == (279, 3348, 6696)
    assert 279 * found[ROWS].payloads[1] == 438_829_056


@pytest.mark.parametrize(("hybrid", "shapes"), [(False, (BLOCKS, 26, 65_536)), (True, (BLOCKS, 13, 65_536))])
def test_gemma_2(hybrid: bool, shapes: tuple[int, ...]) -> None:
    """One group of 26, or two of 13; pages of 65,536 bytes."""
    found = layouts(GEMMA_2, hybrid=hybrid)[CROSS_LAYER]
    assert found.plan.tensors[0].shape == shapes
    assert found.plan.block_bytes == shapes[1] * 65_536
    assert found.num_groups == 1 + hybrid
    # The documented numbers of blocks hold for one budget.
    assert 13_363_118_080 // found.plan.block_bytes == (15_685 if hybrid else 7842)


def test_gemma_3_groups() -> None:
    found = layouts(GEMMA_3, block_size=64)
    assert found[KV_APART].descriptors == (10, 10, 10, 10, 10, 8, 10)
    assert found[CROSS_LAYER].descriptors == (1,) * 7
    # The last sliding group leaves a slot unused: heads first, that cuts its block into a run for each of 4 heads.
    assert found[HEADS_FIRST].descriptors == (1, 1, 1, 1, 1, 4, 1)
    page = 64 * 4096
    assert found[CROSS_LAYER].payloads == (5 * page,) * 5 + (4 * page, 5 * page)
    assert found[CROSS_LAYER].padding == (0, 0, 0, 0, 0, page, 0)


def test_gemma_3_descriptors() -> None:
    """63 blocks of 64 tokens: 4,284 if all are moved; with windows 1,616, or 1,650 if the unused slot were, too."""
    tokens = 63 * 64
    apart = layouts(GEMMA_3, block_size=64)[KV_APART]
    assert apart.descriptors_of(apart.stored_blocks(tokens)) == 4284
    one_group = layouts(GEMMA_3, block_size=64, hybrid=False)[KV_APART]
    assert one_group.descriptors_of((63,)) == 4284
    clipped = apart.clipped_blocks(tokens)
    assert clipped == (17, 17, 17, 17, 17, 17, 63)
    assert apart.descriptors_of(clipped) == 1616
    padded = max(apart.descriptors)
    assert sum(count * padded for count in clipped) == 1650
    needed = apart.needed_blocks(tokens)
    assert needed == (16, 16, 16, 16, 16, 16, 63)
    assert apart.descriptors_of(needed) == 1558
    assert sum(count * padded for count in needed) == 1590


def test_llama() -> None:
    """A block is 32 KiB of each of 32 layers in two tensors, or 2 MiB in one."""
    found = layouts(LLAMA)
    assert found[KV_APART].descriptors == (64,)
    assert (found[CROSS_LAYER].descriptors, found[CROSS_LAYER].payloads) == ((1,), (2 << 20,))


def test_mla() -> None:
    found, refused = possible_layouts(rank(DEEPSEEK, 4))
    assert [one.name for one in found] == [PER_LAYER, CROSS_LAYER, ROWS]
    assert [one.descriptors for one in found] == [(27,), (1,), (1,)]
    assert all(one.payloads == (27 * 16 * 576 * 2,) for one in found)
    assert set(refused) == {KV_APART, HEADS_FIRST, "packed pages"}


def test_packs() -> None:
    """15 attention and 45 Mamba layers: 1 + 3 groups of 15, or packs of 4 and 12 groups of Mamba."""
    found = layouts(QWEN, 2)
    assert list(found) == [PER_LAYER, CROSS_LAYER, ROWS, *map(PAGES.format, (2, 4, 8))]
    assert [found[name].block_tokens for name in found] == [2096, 2096, 2096, 1056, 528, 272]
    alone = found[PER_LAYER]
    assert (alone.num_groups, alone.descriptors, alone.plan.block_bytes) == (4, (15,) * 4, 15 * 2096 * 1024)
    four = found[PAGES.format(4)]
    assert (len(four.plan.tensors), four.num_groups) == (4, 1 + 12)
    assert sorted(len(group.layers) for group in four.plan.groups[1:]) == [3] * 3 + [4] * 9
    assert four.payloads[0] == 15 * 528 * 1024
    assert four.padding[0] == 528 * 1024  # one layer's space
    assert four.payloads[1:] == tuple(len(group.layers) * 2_134_016 for group in four.plan.groups[1:])
    assert four.descriptors == (4, *(len(group.layers) for group in four.plan.groups[1:]))


def test_a_pack_of_any_size() -> None:
    found = layouts(QWEN, 2, pack_size=3)
    assert [one.pack_size for one in found.values()] == [1, 1, 1, 2, 3, 4, 8]
    assert layouts(QWEN, 2, pack_size=1).keys() == layouts(QWEN, 2).keys()


def test_what_a_restore_needs() -> None:
    """It needs Mamba's state at the end, everything of attention, and nothing of a prompt without a whole block."""
    found = layouts(QWEN, 2)[CROSS_LAYER]
    assert found.stored_blocks(8000) == (3, 3, 3, 3)
    assert found.needed_blocks(8000) == found.clipped_blocks(8000) == (1, 1, 1, 3)
    assert found.needed_blocks(2095) == found.stored_blocks(2095) == (0, 0, 0, 0)
