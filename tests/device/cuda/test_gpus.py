"""GPUs as they are opened: side by side, and with threads near them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvoffloadd.config import CudaConfig
from kvoffloadd.cudadriver import CudaDriver, CudaError
from kvoffloadd.device.cuda.device import CudaDevice
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.gpus import CudaGpus
from kvoffloadd.device.cuda.pinning import Arena
from kvoffloadd.errors import MemoryKindError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd
from kvoffloadd.startup import EXECUTOR_THREADS, make_executor
from kvoffloadd.testing.wait import HANG_S

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


async def test_gpus_are_opened_side_by_side(driver: Driver, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of an engine register together. Contexts take their time, and none of them is made twice."""
    together, call, made = threading.Barrier(2), CudaDriver.call, list[object]()

    def meet(self: Driver, name: str, *arguments: Any) -> Any:
        if name == "cuDevicePrimaryCtxRetain":
            together.wait(HANG_S)
            made.append(arguments)
        return call(self, name, *arguments)

    monkeypatch.setattr(Driver, "call", meet)
    gpus = CudaGpus(asyncio.get_running_loop(), arena, MIB, CudaConfig(), print)
    uuids = [driver.uuid(0), driver.uuid(1)]
    first, second, again, once_more = await asyncio.gather(*(gpus.device(uuid) for uuid in (*uuids, *uuids)))
    assert (again, once_more) == (first, second)
    assert len(made) == 2
    assert gpus.devices() == [first, second] or gpus.devices() == [second, first]
    for device in (first, second):
        assert await device.close(10.0)
    assert await gpus.close(10.0)


async def test_a_gpu_that_can_not_be_opened_keeps_no_other_from_it(
    driver: Driver, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again when it is named again."""
    call, refused = CudaDriver.call, [True]

    def refuse(self: Driver, name: str, *arguments: Any) -> Any:
        if name == "cuDevicePrimaryCtxRetain" and int(arguments[0]) == 0 and refused[0]:
            raise CudaError(name, "CUDA_ERROR_DEVICE_UNAVAILABLE")
        return call(self, name, *arguments)

    monkeypatch.setattr(Driver, "call", refuse)
    gpus = CudaGpus(asyncio.get_running_loop(), arena, MIB, CudaConfig(), print)
    failed, second = await asyncio.gather(
        gpus.device(driver.uuid(0)), gpus.device(driver.uuid(1)), return_exceptions=True
    )
    assert isinstance(failed, MemoryKindError)
    assert "EXCLUSIVE_PROCESS" in str(failed)
    refused[0] = False
    first = await gpus.device(driver.uuid(0))
    assert isinstance(second, CudaDevice)
    for device in (first, second):
        assert await device.close(10.0)
    assert await gpus.close(10.0)


async def test_a_driver_that_hangs_keeps_one_thread_of_its_own(
    driver: Driver, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a GPU is named, none of the threads that others use is taken. What it answers in the end counts."""
    call, answers, hung = CudaDriver.call, threading.Event(), list[str]()

    def hang(self: Driver, name: str, *arguments: Any) -> Any:
        if name == "cuDeviceGetCount":
            hung.append(name)
            answers.wait(HANG_S)
        return call(self, name, *arguments)

    monkeypatch.setattr(Driver, "call", hang)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(make_executor())
    gpus = CudaGpus(loop, arena, MIB, CudaConfig(stuck_s=0.02), print)
    try:
        for _ in range(EXECUTOR_THREADS + 1):
            with pytest.raises(MemoryKindError, match="did not answer"):
                await gpus.device(driver.uuid(0))
        async with asyncio.timeout(HANG_S / 2):
            await loop.run_in_executor(None, print)
    finally:
        answers.set()
    assert gpus._loading is not None
    await asyncio.wait([gpus._loading], timeout=HANG_S)  # no call waits for it any more
    device = await until_it_is_there(gpus, driver.uuid(0))
    assert len(hung) == 1
    assert await device.close(10.0)
    assert await gpus.close(10.0)


async def test_a_context_that_does_not_come_keeps_one_thread(
    driver: Driver, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked for again before the driver has returned."""
    call, answers, hung = CudaDriver.call, threading.Event(), list[str]()

    def hang(self: Driver, name: str, *arguments: Any) -> Any:
        if name == "cuDevicePrimaryCtxRetain":
            hung.append(name)
            answers.wait(HANG_S)
        return call(self, name, *arguments)

    uuid = driver.uuid(0)
    gpus = CudaGpus(asyncio.get_running_loop(), arena, MIB, CudaConfig(stuck_s=0.5), print)
    await gpus.device(driver.uuid(1))  # the driver is loaded
    monkeypatch.setattr(Driver, "call", hang)
    try:
        for reason in ("was not created within", "has not been created yet", "has not been created yet"):
            with pytest.raises(MemoryKindError, match=reason):
                await gpus.device(uuid)
    finally:
        answers.set()
    assert len(hung) == 1
    device = await until_it_is_there(gpus, uuid)
    for opened in (device, await gpus.device(driver.uuid(1))):
        assert await opened.close(10.0)
    assert await gpus.close(10.0)


async def until_it_is_there(gpus: CudaGpus, uuid: bytes) -> CudaDevice:
    """Names it until the driver answers in time."""
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(MemoryKindError):
                return await gpus.device(uuid)
