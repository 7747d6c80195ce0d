"""Which CPUs a GPU's threads run on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from kvoffloadd.config import CudaConfig
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda import device as device_module
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.gpus import CudaGpus
from kvoffloadd.device.cuda.pinning import Arena
from kvoffloadd.sharedmem import Mapping, create_memfd

MIB = 1 << 20
MINE = frozenset(os.sched_getaffinity(0))
ONE = frozenset({max(MINE)})


@pytest.fixture
def arena() -> Arena:
    """It stays mapped: it is pinned to the end of this process, as a daemon's is."""
    fd = create_memfd("kvo-test", MIB)
    mapping = Mapping.map_fd(fd, MIB)
    os.close(fd)
    return Arena(mapping.address, MIB, MIB)


async def cpus_of_copies(driver: Driver, arena: Arena, near: Callable[[str], frozenset[int]]) -> list[set[int]]:
    """Where the threads run that submit the first GPU's copies, each way."""
    ends = list[str]()
    gpus = CudaGpus(asyncio.get_running_loop(), arena, MIB, CudaConfig(), ends.append, near)
    device = await gpus.device(driver.uuid(0))
    found = [await lane.perform(lambda: os.sched_getaffinity(0)) for lane in device.lanes()]
    assert await device.close(10.0)
    assert await gpus.close(10.0)
    assert ends == []
    return found


@pytest.mark.parametrize(("near", "expected"), [(ONE, ONE), (frozenset(), MINE)])
async def test_copies_are_submitted_near_their_gpu(
    driver: Driver, arena: Arena, near: frozenset[int], expected: frozenset[int]
) -> None:
    asked = list[str]()

    def find(address: str) -> frozenset[int]:
        asked.append(address)
        return near

    assert await cpus_of_copies(driver, arena, find) == [expected, expected]
    assert asked[0] == driver.pci_address(0) == "0000:01:00.0"


async def test_a_gpu_that_does_not_say_where_it_is(
    driver: Driver, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_driver: Driver, _ordinal: int) -> str:
        raise CudaError("cuDeviceGetAttribute", "CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(Driver, "pci_address", refuse)
    assert await cpus_of_copies(driver, arena, lambda _: ONE) == [MINE, MINE]


async def test_what_keeps_one_gpu_waiting_does_not_keep_each_of_them_waiting(
    driver: Driver, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks register together, and their GPUs are opened one after the other: each within its client's deadline."""
    go_on = threading.Event()

    def load(_driver: Driver, _ordinal: int) -> object:
        assert go_on.wait(60)
        return object()

    monkeypatch.setattr(device_module, "RowKernel", load)
    monkeypatch.setattr(device_module, "PREPARE_S", 0.05)
    gpus = CudaGpus(asyncio.get_running_loop(), arena, MIB, CudaConfig(kernel_row_bytes=7), print)
    first = await gpus.device(driver.uuid(0))
    assert first.is_late
    monkeypatch.setattr(device_module, "PREPARE_S", 3600.0)
    async with asyncio.timeout(30):
        second = await gpus.device(driver.uuid(1))
    go_on.set()
    for device in (first, second):
        assert await device.close(10.0)
        assert not device.is_late
        assert device.gauges()["load_kernel_row_bytes"] == 7, "as soon as it is there"
    assert await gpus.close(10.0)
