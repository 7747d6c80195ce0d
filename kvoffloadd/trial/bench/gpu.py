"""Stores and loads between a GPU's memory and the memory tier, beside one large copy of the driver's each way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvoffloadd.client import GpuTensor
from kvoffloadd.cudadriver import CudaDriver
from kvoffloadd.sharedmem import Mapping, create_memfd, populate
from kvoffloadd.trial.bench.figure import Figure
from kvoffloadd.trial.bench.memory import CopyCase, copy_worker, jobs_beside
from kvoffloadd.trial.bench.rounds import Show

ROW_BYTES = 1 << 20
_PORTABLE, _DEFAULT_STREAM = 1, 0


class DeviceMemory:
    """Rows in memory of the current GPU, as `GpuTensor.adopt` takes them. Its owner calls `close`."""

    def __init__(self, driver: CudaDriver, rows: int, row_bytes: int) -> None:
        self._driver = driver
        self.address = int(driver.call("cuMemAlloc", rows * row_bytes))
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (rows, row_bytes), "typestr": "|u1", "data": (self.address, False), "version": 3,
        }  # fmt: skip

    def close(self) -> None:
        """Nothing may use it any more."""
        self._driver.call("cuMemFree", self.address)


def measure_gpu(folder: Path, job_bytes: int, rounds: int, show: Show) -> list[Figure]:
    """The first GPU. Raises DeviceError if there is none; DaemonError, KvOffloadError or OSError."""
    driver = CudaDriver()
    driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
    rows = max(1, job_bytes // ROW_BYTES)
    moved = rows * ROW_BYTES
    with closing(DeviceMemory(driver, rows, ROW_BYTES)) as memory, _pinned(driver, moved) as host:
        case = CopyCase("", lambda _: ([GpuTensor.adopt(memory)], ()), ROW_BYTES, ROW_BYTES, 1)
        down = partial(_timed, driver, "cuMemcpyDtoHAsync", host, memory.address, moved)
        up = partial(_timed, driver, "cuMemcpyHtoDAsync", memory.address, host, moved)
        with copy_worker(folder, case, job_bytes, {"log.level": "warning"}) as (_, work):
            return jobs_beside("gpu", case, work, (("cuMemcpyDtoH", down), ("cuMemcpyHtoD", up)), rounds, show)


@contextmanager
def _pinned(driver: CudaDriver, size_bytes: int) -> Iterator[int]:
    """The address of host memory that the driver knows, as the daemon's memory tier is."""
    fd = create_memfd("kvoffloadd-bench", size_bytes)
    try:
        memory = Mapping.map_fd(fd, size_bytes)
        populate(memory.address, size_bytes, 4, fd=fd)
        driver.call("cuMemHostRegister", memory.address, size_bytes, _PORTABLE)
        try:
            yield memory.address
        finally:
            driver.call("cuMemHostUnregister", memory.address)
            memory.close()
    finally:
        os.close(fd)


def _timed(driver: CudaDriver, copy: str, to: int, source: int, size_bytes: int) -> float:
    begun = time.perf_counter()
    driver.call(copy, to, source, size_bytes, _DEFAULT_STREAM)
    driver.call("cuStreamSynchronize", _DEFAULT_STREAM)
    return time.perf_counter() - begun
