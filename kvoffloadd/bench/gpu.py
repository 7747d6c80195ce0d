"""Benchmarks stores and loads between a GPU's memory and the memory tier against one large copy of the driver's each
way.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from kvoffloadd.bench.figure import Figure
from kvoffloadd.bench.memory import CopyCase, copy_worker, jobs_beside
from kvoffloadd.bench.rounds import Show
from kvoffloadd.client import GpuTensor
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.linux.sharedmem import Mapping, create_memfd, populate

ROW_BYTES = 1 << 20
_PORTABLE_AND_MAPPED, _DEFAULT_STREAM = 3, 0


class DeviceMemory:
    """Rows in memory of the current GPU, as `GpuTensor.adopt` takes them. Its owner calls `close`."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.address = int(driver().call("cuMemAlloc", rows * row_bytes))
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (rows, row_bytes), "typestr": "|u1", "data": (self.address, False), "version": 3,
        }  # fmt: skip

    def close(self) -> None:
        """Frees the memory, which must not be in use any more."""
        driver().call("cuMemFree", self.address)


class Pinned:
    """Shared memory that is registered with the driver, as the daemon's memory tier is: a new memfd, or `fd`, which
    stays the caller's.
    """

    def __init__(self, size_bytes: int, fd: int | None = None, threads: int = 4) -> None:
        self.size_bytes = size_bytes
        used = create_memfd("kvoffloadd-bench", size_bytes) if fd is None else fd
        try:
            self._mapping = Mapping.map_fd(used, size_bytes)
        finally:
            if fd is None:
                os.close(used)  # the mapping keeps the memory
        self.address = self._mapping.address
        self.array = self._mapping.array()
        populate(self.address, size_bytes, threads)
        driver().call("cuMemHostRegister", self.address, size_bytes, _PORTABLE_AND_MAPPED)

    @property
    def device_address(self) -> int:
        """Returns the address of byte 0 in kernels."""
        return int(driver().call("cuMemHostGetDevicePointer", self.address, 0))

    def close(self) -> None:
        """Frees the memory, which must not be in use any more."""
        driver().call("cuMemHostUnregister", self.address)
        self._mapping.close()


def measure_gpu(folder: Path, job_bytes: int, rounds: int, show: Show) -> list[Figure]:
    """Measures the first GPU. Raises DeviceError if there is none; DaemonError, KvOffloadError or OSError."""
    driver().call("cuCtxSetCurrent", driver().call("cuDevicePrimaryCtxRetain", driver().call("cuDeviceGet", 0)))
    rows = max(1, job_bytes // ROW_BYTES)
    moved = rows * ROW_BYTES
    with closing(DeviceMemory(rows, ROW_BYTES)) as memory, closing(Pinned(moved)) as host:
        case = CopyCase("", lambda _: ([GpuTensor.adopt(memory)], ()), ROW_BYTES, ROW_BYTES, 1)
        down = partial(_timed, "cuMemcpyDtoHAsync", host.address, memory.address, moved)
        up = partial(_timed, "cuMemcpyHtoDAsync", memory.address, host.address, moved)
        with copy_worker(folder, case, job_bytes, {"log.level": "warning"}) as (_, work):
            return jobs_beside("gpu", case, work, (("cuMemcpyDtoH", down), ("cuMemcpyHtoD", up)), rounds, show)


def _timed(copy: str, to: int, source: int, size_bytes: int) -> float:
    begun = time.perf_counter()
    driver().call(copy, to, source, size_bytes, _DEFAULT_STREAM)
    driver().call("cuStreamSynchronize", _DEFAULT_STREAM)
    return time.perf_counter() - begun
