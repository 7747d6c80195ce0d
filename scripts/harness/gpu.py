"""A worker's GPU memory without an engine: allocated, filled and read through the driver API alone."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.model import U8Array, U64Array

CHUNK_BYTES = 2 << 20
_BUSY_BYTES, _BUSY_SAMPLE, _BUSY_SAMPLES = 64 << 20, 64, 3
_NON_BLOCKING = 1
_DEVICE, _READ_WRITE, _PINNED = 1, 3, 1
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Gpu:
    """A GPU's primary context, current in this thread, and one stream. For scripts and tests: raises DeviceError."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._device = driver().call("cuDeviceGet", ordinal)
        self._context = driver().call("cuDevicePrimaryCtxRetain", self._device)
        self.use()
        self.stream = int(driver().call("cuStreamCreate", _NON_BLOCKING))
        self._busy_work = 0
        self._busy_bytes_per_s = 0.0

    def use(self) -> None:
        """Make the context current in this thread."""
        driver().call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        driver().call("cuStreamSynchronize", self.stream)

    def delay(self, seconds: float) -> None:
        """Keep the stream busy for about this time: with a software driver's delay, on a GPU with work of no use."""
        self.use()
        software = software_driver()
        if software is not None:
            driver().check("softcuda_delay", software.softcuda_delay(self.stream, round(seconds * 1e9)))
            return
        if not self._busy_work:
            self._busy_work = int(driver().call("cuMemAlloc", _BUSY_BYTES))
            self._busy_bytes_per_s = self._measure_busy_work()
        self._be_busy(round(seconds * self._busy_bytes_per_s / _BUSY_BYTES), self.stream)

    def _be_busy(self, times: int, stream: int) -> None:
        for _ in range(times):
            driver().call("cuMemsetD8Async", self._busy_work, 0, _BUSY_BYTES, stream)

    def _measure_busy_work(self) -> float:
        """How fast this GPU does it: in a separate stream, since the other one may be waiting for something."""
        stream = int(driver().call("cuStreamCreate", _NON_BLOCKING))
        fastest_s = float("inf")
        for _ in range(1 + _BUSY_SAMPLES):  # the first wakes it up
            begun_s = time.perf_counter()
            self._be_busy(_BUSY_SAMPLE, stream)
            driver().call("cuStreamSynchronize", stream)
            fastest_s = min(fastest_s, time.perf_counter() - begun_s)
        driver().call("cuStreamDestroy", stream)
        return _BUSY_SAMPLE * _BUSY_BYTES / fastest_s

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """The context, current in this thread meanwhile, when all that is queued has been done."""
        driver().call("cuCtxPushCurrent", self._context)
        try:
            self.synchronize()
            yield
        finally:
            driver().call("cuCtxPopCurrent")

    def unregister(self, address: int) -> None:
        """End the registration of host memory."""
        with self.idle():
            driver().call("cuMemHostUnregister", address)

    def free_bytes(self) -> int:
        free, _ = driver().call("cuMemGetInfo")
        return int(free)


class GpuBuffer:
    """`size_bytes` of a GPU's memory, not cleared. `chunk_bytes` 0: by cuMemAlloc, else virtual memory in such chunks.

    `handle_type`: of the chunks, a CUmemAllocationHandleType; 0: no other process can map them. Has
    `__cuda_array_interface__`. Given back by `free`, or with the object.
    """

    def __init__(self, gpu: Gpu, size_bytes: int, *, chunk_bytes: int = 0, handle_type: int = POSIX_FD) -> None:
        self.gpu = gpu
        self.size_bytes = size_bytes
        self._chunks: list[int] = []
        if chunk_bytes:
            self.address = self._map(size_bytes, chunk_bytes, handle_type)
        else:
            gpu.use()
            self.address = int(driver().call("cuMemAlloc", size_bytes))
        self._end = weakref.finalize(self, _give_back, gpu, self.address, self._chunks)
        self._end.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (1, self.size_bytes), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def rows(self, offset: int, num_blocks: int, page_bytes: int, stride_bytes: int) -> GpuRows:
        """A canonical tensor in it, for `GpuTensor.adopt`."""
        return GpuRows(self, offset, num_blocks, page_bytes, stride_bytes)

    def upload(self, offset: int, data: U8Array) -> None:
        """Copy in; done when it returns."""
        self.gpu.use()
        flat = np.ascontiguousarray(data).reshape(-1)
        driver().call("cuMemcpyHtoD", self.address + offset, flat.ctypes.data, flat.nbytes)
        driver().call("cuCtxSynchronize")  # of pageable memory the last part may still be on its way

    def upload_later(self, offset: int, data: U8Array) -> None:
        """Copy in, in the stream's order; `data` must be registered, and stay as it is meanwhile."""
        self.gpu.use()
        driver().call("cuMemcpyHtoDAsync", self.address + offset, data.ctypes.data, data.nbytes, self.gpu.stream)

    def set_later(self, offset: int, size_bytes: int, value: int) -> None:
        """Set bytes, in the stream's order."""
        self.gpu.use()
        driver().call("cuMemsetD8Async", self.address + offset, value, size_bytes, self.gpu.stream)

    def download(self, offset: int, size_bytes: int) -> U8Array:
        """Copy out; done when it returns."""
        self.gpu.use()
        data = np.empty(size_bytes, np.uint8)
        driver().call("cuMemcpyDtoH", data.ctypes.data, self.address + offset, size_bytes)
        return data

    def free(self) -> None:
        """Give it back, when the stream's work is done. Nothing else may use it any more."""
        self._end()

    def _map(self, size_bytes: int, chunk_bytes: int, handle_type: int) -> int:
        api = driver().api
        self.gpu.use()
        count = -(-size_bytes // chunk_bytes)
        address = int(driver().call("cuMemAddressReserve", count * chunk_bytes, 0, 0, 0))
        wanted = api.CUmemAllocationProp()
        wanted.type = api.CUmemAllocationType(_PINNED)
        wanted.location.type = api.CUmemLocationType(_DEVICE)
        wanted.location.id = self.gpu.ordinal
        wanted.requestedHandleTypes = api.CUmemAllocationHandleType(handle_type)
        access = api.CUmemAccessDesc()
        access.location = wanted.location
        access.flags = api.CUmemAccess_flags(_READ_WRITE)
        for at in range(address, address + count * chunk_bytes, chunk_bytes):
            handle = driver().call("cuMemCreate", chunk_bytes, wanted, 0)
            driver().call("cuMemMap", at, chunk_bytes, 0, handle, 0)
            driver().call("cuMemRelease", handle)
            self._chunks.append(chunk_bytes)
        driver().call("cuMemSetAccess", address, count * chunk_bytes, [access], 1)
        return address


def _give_back(gpu: Gpu, address: int, chunks: list[int]) -> None:
    with gpu.idle():
        if not chunks:
            driver().call("cuMemFree", address)
            return
        at = address
        for size in chunks:
            driver().call("cuMemUnmap", at, size)
            at += size
        driver().call("cuMemAddressFree", address, at - address)


class GpuRows:
    """u8 (num_blocks, page_bytes) with row stride `stride_bytes` in a buffer, which it keeps alive."""

    def __init__(self, buffer: GpuBuffer, offset: int, num_blocks: int, page_bytes: int, stride_bytes: int) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (num_blocks, page_bytes),
            "typestr": "|u1",
            "data": (buffer.address + offset, False),
            "strides": (stride_bytes, 1),
            "version": 3,
        }


def one_copy(src: int, dst: int, size_bytes: int) -> tuple[U64Array, U64Array, U64Array]:
    """What `Driver.copy_each` is given for a single copy."""
    return np.array([src], np.uint64), np.array([dst], np.uint64), np.array([size_bytes], np.uint64)


def count_gpus() -> int:
    """Those that this process sees; 0 also where there is no driver."""
    with contextlib.suppress(Exception):  # whatever is missing
        return int(driver().call("cuDeviceGetCount"))
    return 0


def gpu_is_usable() -> bool:
    """Whether there is a driver and at least one GPU."""
    return count_gpus() > 0


@functools.cache
def software_driver() -> ctypes.CDLL | None:
    """The libcuda of this process, if it is the one that tests are run on (tests/softcuda)."""
    library = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "softcuda_delay"):
        return None
    library.softcuda_delay.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return library
