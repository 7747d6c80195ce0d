"""A GPU's context that takes long: how long is waited for it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvoffloadd.config import CudaConfig
from kvoffloadd.device.base import CopyRequest, CopyResult
from kvoffloadd.device.cuda import rows as rows_module
from kvoffloadd.device.cuda.device import CudaDevice
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies, GroupPlan, Tensor
from kvoffloadd.device.work import BlockList, BlockWork
from kvoffloadd.errors import DeviceError
from kvoffloadd.model import Direction, Outcome, Ref
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.gpu import Gpu
from tests.device.cuda.test_stream import SIZE, Memory

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
        self.pinned_bytes = 0
        self.failure = ""

    def start(self, context: int) -> None:
        self.started = True

    def covers(self, copies: Copies, direction: Direction) -> bool:
        return True


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
    with pytest.raises(DeviceError, match="was not created within"):
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
    async with asyncio.timeout(HANG_S):
        assert "a copy has not ended" in await ended
    await device.close(10.0)


@pytest.mark.parametrize(("rows", "chunk_rows"), [(8, 8 * 16), (64, 64 * 16), (7, 16)])
async def test_a_chunk_has_as_many_runs_as_a_batch_has_copies(gpu: Gpu, rows: int, chunk_rows: int) -> None:
    """Each is a separate call, and what is urgent waits for the chunks before it. Shorter runs are no runs."""
    loop, config = asyncio.get_running_loop(), CudaConfig(batch_descriptors=16, pitched_row_bytes=1024)
    device = CudaDevice(loop, Driver(), bytes(16), 0, 1 << 30, config, print)
    await device.open(Pinned(20.0))  # type: ignore[arg-type]  # a fake
    number = np.arange(100 * rows, dtype=np.uint64)
    block = np.random.default_rng(1).permutation(100).astype(np.uint64)[number // np.uint64(rows)]
    address = number * np.uint64(4096) + block * np.uint64(1 << 30)
    copies = Copies(address, address + np.uint64(1 << 50), np.full(len(number), 512, np.uint64), len(number))
    chunks = device._copiers[Direction.LOAD].cut(copies)
    assert [len(chunk) for chunk in chunks[:-1]] == [chunk_rows] * (len(number) // chunk_rows)
    nothing = np.zeros(0, np.uint64)
    assert device._copiers[Direction.LOAD].cut(Copies(nothing, nothing, nothing, 0)) == []
    await device.close(10.0)


@pytest.mark.parametrize("row_bytes", [512, 4096])
async def test_the_event_loop_looks_for_no_runs(
    gpu: Gpu, driver: Driver, monkeypatch: pytest.MonkeyPatch, row_bytes: int
) -> None:
    """That takes milliseconds where rows are many. The loop cuts what has none, since its rows are large."""
    threads: list[str] = []

    def recorded(copies: Copies, *ends: Any, pitch_max_bytes: int) -> Pitched:
        threads.append(threading.current_thread().name)
        return pitch(copies, *ends, pitch_max_bytes=pitch_max_bytes)

    monkeypatch.setattr(rows_module, "pitch", recorded)
    memory, layers, keys = Memory(gpu, driver), 16, 20
    memory.host[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    layer_bytes = SIZE // layers
    tensors = [Tensor(memory.buffer.address + at * layer_bytes, keys, row_bytes, row_bytes) for at in range(layers)]
    plan = GroupPlan.build(tensors, [Ref(layer, 0, row_bytes) for layer in range(layers)], 1)
    numbers = np.arange(keys)
    slots = np.uint64(memory.mapping.address) + numbers.astype(np.uint64) * np.uint64(plan.payload_bytes)
    blocks = np.random.default_rng(2).permutation(keys).astype(np.uint32)
    work = BlockWork([BlockList((plan,), blocks.reshape(-1, 1), numbers, np.zeros(keys, np.int64), slots)])
    loop, config = asyncio.get_running_loop(), CudaConfig(pitched_row_bytes=512)
    device = CudaDevice(loop, Driver(), bytes(16), 0, 1 << 20, config, print)
    await device.open(Pinned(20.0))  # type: ignore[arg-type]  # a fake
    ended: asyncio.Future[CopyResult] = loop.create_future()
    device.submit(CopyRequest(Direction.LOAD, work, loop.time() + 60, urgent=True), ended.set_result)
    assert (await ended).outcome is Outcome.DONE
    rows = memory.host[: keys * plan.payload_bytes].reshape(keys, layers, row_bytes)
    on_gpu = memory.buffer.download(0, SIZE).reshape(layers, -1)[:, : keys * row_bytes].reshape(layers, keys, row_bytes)
    assert (on_gpu[:, blocks] == rows.transpose(1, 0, 2)).all()
    assert {name.rpartition("-")[0] for name in threads} == ({"kvo-gpu-load"} if row_bytes == 512 else set())
    assert device.gauges()["pitched_copies"] == (keys if row_bytes == 512 else 0)
    await device.close(10.0)
    memory.close()
