"""Transfers that know groups: windows and partial hits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.client import GroupKind, Ref
from kvoffloadd.errors import UsageError
from kvoffloadd.layout import Reach, clip, descriptors

SLIDING = Reach(GroupKind.SLIDING, 64, 1024)
QUICK = settings(max_examples=200, deadline=None)


@pytest.mark.parametrize(
    ("window", "size", "boundary", "transfer"),
    [(24, 16, 2, 3), (17, 16, 1, 2), (1024, 64, 16, 17), (1025, 64, 16, 17), (1, 16, 0, 0), (2, 16, 1, 1)],
)
def test_blocks_of_a_window(window: int, size: int, boundary: int, transfer: int) -> None:
    reach = Reach(GroupKind.SLIDING, size, window)
    lengths = range(4 * window + 4 * size)
    assert max(len(reach.blocks(length)) for length in lengths) == transfer
    assert max(len(reach.blocks(length * size)) for length in range(4 * window // size + 4)) == boundary


@QUICK
@given(st.sampled_from(GroupKind), st.integers(1, 9), st.integers(1, 30), st.integers(0, 99))
def test_blocks_are_those_of_the_tokens_looked_at(kind: GroupKind, size: int, window: int, tokens: int) -> None:
    windowed = kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
    reach = Reach(kind, size, window if windowed else 0)
    seen = {
        GroupKind.FULL: range(tokens),
        GroupKind.SLIDING: [token for token in range(tokens) if tokens - token < window],
        GroupKind.CHUNKED: [token for token in range(tokens) if token // window == tokens // window],
        GroupKind.MAMBA: range(max(0, tokens - 1), tokens),
    }[kind]
    assert set(reach.blocks(tokens)) == {token // size for token in seen}


def test_blocks_that_are_there_already() -> None:
    """A window of 1,024 tokens behind 63 blocks of 64 needs the last 16 of them."""
    assert SLIDING.blocks(63 * 64, 0) == SLIDING.blocks(63 * 64, 47) == range(47, 63)
    assert SLIDING.blocks(63 * 64, 50) == range(50, 63)
    assert len(SLIDING.blocks(63 * 64, 63)) == len(SLIDING.blocks(0, 0)) == 0
    assert Reach(GroupKind.FULL, 16).blocks(49, 3) == range(3, 4)


@pytest.mark.parametrize(("kind", "window"), [(GroupKind.FULL, 0), (GroupKind.SLIDING, 24), (GroupKind.MAMBA, 0)])
@pytest.mark.parametrize("local", [5, -1])
def test_more_local_blocks_than_the_prefix_has(kind: GroupKind, window: int, local: int) -> None:
    with pytest.raises(UsageError, match=f"{local} local blocks, but the prefix of 49 tokens has 4 blocks of 16"):
        Reach(kind, 16, window).blocks(49, local)


def test_the_clip_of_engines() -> None:
    assert clip(range(63), 1024, 64) == range(46, 63)
    assert clip(range(63), 24, 16) == range(60, 63)
    assert clip(range(2), 1024, 64) == range(2)
    assert clip(range(0), 1024, 64) == range(0)


def test_descriptors_of_gemma_3_4b() -> None:
    """34 layers: 5 full and 29 sliding, groups of 5 slots, the last of 4 layers; K and V apart."""
    full, last = [Ref(at, 0, 8) for at in range(10)], [Ref(at, 0, 8) for at in range(8)]
    every = [full + full + full + full + full + full + last]
    assert descriptors(every, [63]) == 63 * 34 * 2 == 4284
    groups, padded = [full] * 6 + [last], [full] * 7
    for window_blocks, documented, un_padded in ((17, 1650, 1616), (16, 1590, 1558)):
        counts = [63, *([window_blocks] * 6)]
        assert (descriptors(padded, counts), descriptors(groups, counts)) == (documented, un_padded)
    assert len(SLIDING.blocks(63 * 64)) == 16


def test_what_is_no_reach() -> None:
    for wrong in ((GroupKind.FULL, 64, 5), (GroupKind.SLIDING, 64, 0), (GroupKind.MAMBA, 0, 0)):
        with pytest.raises(UsageError, match="a group of kind"):
            Reach(*wrong)
