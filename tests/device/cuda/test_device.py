"""A GPU's context that takes long: how long is waited for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from kvoffloadd.config import CudaConfig
from kvoffloadd.device.cuda.device import CudaDevice
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import DeviceError
from kvoffloadd.model import Direction
from scripts.harness.gpu import Gpu

STUCK_S, CONTEXT_S = 0.1, 0.4


class Slow(Driver):
    """Contexts take their time."""

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuDevicePrimaryCtxRetain":
            time.sleep(CONTEXT_S)
        return super().call(name, *arguments)


class Pinned:
    """An arena that is pinned already. `mapping_s`: how much longer a context may take for it."""

    def __init__(self, mapping_s: float) -> None:
        self.mapping_s = mapping_s
        self.ends = np.array([1 << 62], np.uint64)
        self.started = False

    def start(self, context: int) -> None:
        self.started = True


async def open_with(mapping_s: float) -> bool:
    """Whether pinning goes on. Raises DeviceError."""
    loop, pinned = asyncio.get_running_loop(), Pinned(mapping_s)
    ends: list[str] = []
    device = CudaDevice(loop, Slow(), bytes(16), 0, 1 << 20, CudaConfig(stuck_s=STUCK_S), ends.append)
    try:
        await device.open(pinned)  # type: ignore[arg-type]  # a fake
    finally:
        await device.close(10.0)
    assert ends == []
    return pinned.started


async def test_what_is_pinned_gives_a_context_more_time(gpu: Gpu) -> None:
    assert await open_with(mapping_s=20.0)


async def test_a_context_that_does_not_come_is_not_waited_for(gpu: Gpu) -> None:
    with pytest.raises(DeviceError, match="not there after"):
        await open_with(mapping_s=0.0)


async def test_a_copy_that_was_begun_long_ago_is_looked_at_more_than_once(gpu: Gpu) -> None:
    """The process may have been stopped meanwhile."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def end(reason: str) -> None:
        if not ended.done():
            ended.set_result(reason)

    loop, config = asyncio.get_running_loop(), CudaConfig(stuck_s=STUCK_S)
    device = CudaDevice(loop, Slow(), bytes(16), 0, 1 << 20, config, end)
    await device.open(Pinned(20.0))  # type: ignore[arg-type]  # a fake
    device.busy_s = lambda now: 3600.0  # type: ignore[method-assign]
    device._check_stuck()
    assert not ended.done()
    async with asyncio.timeout(20):
        assert "a copy has not ended" in await ended
    await device.close(10.0)


@pytest.mark.parametrize(("rows", "chunk_rows"), [(8, 8 * 16), (64, 64 * 16), (7, 16)])
async def test_a_chunk_has_as_many_runs_as_a_batch_has_copies(gpu: Gpu, rows: int, chunk_rows: int) -> None:
    """Each is a call of its own, and what is urgent waits for the chunks before it. Shorter runs are no runs."""
    loop, config = asyncio.get_running_loop(), CudaConfig(batch_descriptors=16, pitched_row_bytes=1024)
    device = CudaDevice(loop, Driver(), bytes(16), 0, 1 << 30, config, print)
    await device.open(Pinned(20.0))  # type: ignore[arg-type]  # a fake
    number = np.arange(100 * rows, dtype=np.uint64)
    block = np.random.default_rng(1).permutation(100).astype(np.uint64)[number // np.uint64(rows)]
    address = number * np.uint64(4096) + block * np.uint64(1 << 30)
    copies = Copies(address, address + np.uint64(1 << 50), np.full(len(number), 512, np.uint64), len(number))
    chunks = device._copiers[Direction.LOAD].cut(copies)
    assert [len(chunk) for chunk in chunks[:-1]] == [chunk_rows] * (len(number) // chunk_rows)
    await device.close(10.0)
