"""Other processes' memory, mapped by the daemon's own code on the software driver."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.memory import SharedMemory
from kvoffloadd.errors import MemoryKindError
from scripts.harness.gpu import Gpu
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


def test_chunks_before_one_that_the_driver_refuses_are_unmapped(
    gpu: Gpu, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.use()
    memory = SharedMemory(driver, 0)
    allocation = memory.reserve(3 * BLOCK_BYTES)
    unmapped = list[tuple[int, list[int]]]()

    def refuse_second(address: int, fd: int, size_bytes: int) -> None:
        if address != allocation.base_address:
            raise CudaError("cuMemMap", "CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(memory, "_map_chunk", refuse_second)
    monkeypatch.setattr(memory, "_unmap_chunks", lambda begin, sizes: unmapped.append((begin, list(sizes))))
    with pytest.raises(MemoryKindError, match="can't map this chunk"):
        memory.add_chunks(allocation, [0, 0, 0], [BLOCK_BYTES] * 3)
    assert unmapped == [(allocation.base_address, [BLOCK_BYTES])]
    assert allocation.size_bytes == 0
    memory.unmap(allocation)
