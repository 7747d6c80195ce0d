"""vLLM's block lists become block ids per key; whatever is not a whole chunk is never stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvoffloadd.integrations.vllm.blocks import Chunks, load_chunks, store_chunks, warn_of_states
from kvoffloadd.model import NO_BLOCK

A, B, C = (name.encode() * 32 for name in "abc")


def ids(chunks: Chunks, group: int) -> list[list[int]]:
    found: list[list[int]] = chunks[group][1].tolist()
    return found


@dataclass
class Blocks:
    """Stands in for vLLM's GPULoadStoreSpec."""

    group_sizes: Sequence[int]
    block_indices: Sequence[int]
    block_ids: npt.NDArray[Any]


def blocks(group_sizes: list[int], block_indices: list[int], *numbers: int) -> Blocks:
    return Blocks(group_sizes, block_indices, np.array(numbers, np.int32))


def test_a_load_that_begins_and_ends_inside_chunks() -> None:
    chunks = load_chunks([(0, [A, B])], blocks([4], [5], 7, 8, 9, 10), 4)
    assert (chunks[0].keys, chunks[0].first) == (A + B, 1)
    assert ids(chunks, 0) == [[NO_BLOCK, 7, 8, 9], [10, NO_BLOCK, NO_BLOCK, NO_BLOCK]]


def test_a_load_into_the_null_block_is_not_wanted() -> None:
    assert ids(load_chunks([(0, [A])], blocks([2], [2], 0, 9), 2), 0) == [[NO_BLOCK, 9]]


def test_groups_are_told_apart_by_their_sizes() -> None:
    chunks = load_chunks([(0, [A]), (2, []), (5, [B, C])], blocks([2, 0, 3], [0, 0, 1], 1, 2, 3, 4, 5), 2)
    assert ids(chunks, 0) == [[1, 2]]
    assert ids(chunks, 5) == [[NO_BLOCK, 3], [4, 5]]
    assert 2 not in chunks


def test_positions_are_those_in_the_prompt() -> None:
    """Whatever of it is stored now: what a step has computed, or the end of it that a window needs."""
    for first, begin in ((0, 0), (6, 3), (7, 4)):
        size = 4 - first % 2
        chunks = store_chunks([(0, [A, B])], blocks([size], [first], *range(1, size + 1)), 2)
        assert (chunks[0].first, len(chunks[0].blocks)) == (begin, 2 - first % 2)


def test_keys_and_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not 2 chunks"):
        load_chunks([(0, [A, B])], blocks([2], [0], 1, 2), 2)


def test_a_store_drops_an_incomplete_first_chunk() -> None:
    chunks = store_chunks([(0, [A, B])], blocks([3], [1], 6, 7, 8), 2)
    assert (chunks[0].keys, chunks[0].first) == (B, 1)
    assert ids(chunks, 0) == [[7, 8]]
    assert store_chunks([(0, [A])], blocks([1], [3], 6), 2) == {}


@pytest.mark.parametrize(("mode", "blocks", "warned"), [("align", 2, 1), ("align", 1, 0), ("none", 2, 0)])
def test_long_chunks_of_states_by_vllms_own_connector(
    mode: str, blocks: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_states(mode, blocks)
    assert len(caplog.messages) == warned
    assert all("Leave blocks_per_chunk at 1 (it is 2)" in message for message in caplog.messages)


def test_a_store_with_a_hole_elsewhere_is_dropped_as_a_whole() -> None:
    chunks = store_chunks([(0, [A, B]), (1, [C])], blocks([3, 2], [0, 0], 6, 7, 8, 1, 2), 2)
    assert list(chunks) == [1]
