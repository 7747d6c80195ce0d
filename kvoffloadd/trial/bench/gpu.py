"""Stores and loads between a GPU's memory and the memory tier, beside one large copy of the driver's each way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvoffloadd.client import Client, GpuTensor, NamespaceSpec
from kvoffloadd.cudadriver import CudaDriver
from kvoffloadd.sharedmem import Mapping, create_memfd, populate
from kvoffloadd.trial.bench.figure import Figure, bandwidth
from kvoffloadd.trial.daemon import OwnDaemon
from kvoffloadd.trial.figures import KEY_BYTES
from kvoffloadd.trial.workload import WAIT_S, Workload

ROW_BYTES = 1 << 20
SETS = 3
_PORTABLE, _DEFAULT_STREAM = 1, 0

Show = Callable[[str], None]


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
    """Of the first GPU. Raises DeviceError if there is none; DaemonError, KvOffloadError or OSError."""
    driver = CudaDriver()
    driver.call("cuCtxSetCurrent", driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0)))
    keys = max(1, job_bytes // ROW_BYTES)
    moved = keys * ROW_BYTES
    memory = DeviceMemory(driver, keys, ROW_BYTES)
    stores, loads, downs, ups = [], [], [], []
    space = NamespaceSpec(model="bench", key_bytes=KEY_BYTES)
    try:
        with (
            _pinned(driver, moved) as host,
            OwnDaemon(folder, SETS * moved, {"log.level": "warning", "memory.slab_bytes": str(moved)}) as daemon,
            Client(daemon.socket, namespace=space, deadline_s=WAIT_S) as client,
        ):
            work = Workload(client, [GpuTensor.adopt(memory)], keys, scattered=True)
            for _ in range(SETS + 1):
                work.store()
            for number in range(rounds):
                show(f"gpu, round {number + 1} of {rounds}")
                work.drain()
                downs.append(_timed(driver, "cuMemcpyDtoHAsync", host, memory.address, moved))
                stores.append(work.store()[0])
                work.drain()
                ups.append(_timed(driver, "cuMemcpyHtoDAsync", memory.address, host, moved))
                loads.append(work.load()[0])
    finally:
        memory.close()
    return [
        bandwidth("gpu", f"store, {ROW_BYTES >> 20} MiB rows", stores, "cuMemcpyDtoH", downs, moved),
        bandwidth("gpu", f"load, {ROW_BYTES >> 20} MiB rows", loads, "cuMemcpyHtoD", ups, moved),
    ]


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
