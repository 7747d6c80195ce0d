"""Other processes' memory, mapped by the daemon's own code on the software driver."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from tests.device.cuda import blocks
from tests.softcuda.running import result

BLOCK_BYTES = 2 << 20


def test_small_allocations_that_share_a_block() -> None:
    """Each is named to the block's end, and stays while others of the block are closed."""
    begins = (0, 1024, 4096)  # multiples of 512
    sizes = [[BLOCK_BYTES - begin, value] for begin, value in zip(begins, (1, 2, 3), strict=True)]
    assert result(blocks.opened_and_closed, "small_block") == str([*sizes, [2], [3], [3]])


def test_allocations_that_share_nothing() -> None:
    sizes = [[size_bytes, value] for size_bytes, value in zip(blocks.SIZES, (1, 2, 3), strict=True)]
    assert result(blocks.opened_and_closed) == str([*sizes, [2], [3], [3]])
