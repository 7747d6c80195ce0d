"""Which bytes belong to a block, from strides alone."""

from __future__ import annotations

import pytest

from kvoffloadd.layout.geometry import View, segments


@pytest.mark.parametrize("stride", [0, 1, 4, 1 << 40])
def test_the_stride_of_a_single_block_says_nothing(stride: int) -> None:
    """Libraries may give any stride to a dimension of size 1."""
    (found,) = segments("l", View(0, 0, (1, 2, 4), (stride, 4, 1), "int8"), 0, 1)
    assert found.runs == ((0, 8),)
    assert (found.rows.num_blocks, found.rows.page_bytes) == (1, 8)
