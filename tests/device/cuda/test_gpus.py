"""Which CPUs a GPU's threads run on."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvoffloadd.config import CudaConfig
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.gpus import CudaGpus
from kvoffloadd.device.cuda.pinning import Arena
from kvoffloadd.sharedmem import Mapping, create_memfd

MIB = 1 << 20
MINE = frozenset(os.sched_getaffinity(0))
ONE = frozenset({max(MINE)})


@pytest.mark.parametrize(("near", "expected"), [(ONE, ONE), (frozenset(), MINE)])
async def test_copies_are_submitted_near_their_gpu(
    driver: Driver, near: frozenset[int], expected: frozenset[int]
) -> None:
    asked, ends = list[str](), list[str]()
    fd = create_memfd("kvo-test", MIB)
    mapping = Mapping.map_fd(fd, MIB)

    def find(address: str) -> frozenset[int]:
        asked.append(address)
        return near

    arena = Arena(mapping.address, MIB, MIB)
    gpus = CudaGpus(asyncio.get_running_loop(), arena, MIB, CudaConfig(), ends.append, find)
    device = await gpus.device(driver.uuid(0))
    for lane in device.lanes():
        assert await lane.perform(lambda: os.sched_getaffinity(0)) == expected
    assert asked == [driver.pci_address(0)] == ["0000:01:00.0"]
    assert await device.close(10.0)
    assert await gpus.close(10.0)
    assert ends == []
    mapping.close()
    os.close(fd)
