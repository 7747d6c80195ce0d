"""Rules of the driver that no document settles: each is tried, and the driver's answer is reported by name.

Copies from and to memory that is not registered, or in part; signals on the NULL stream; chunks of virtual memory as
engines' sleep mode allocates them; what may be called while another thread captures a graph.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.client.memory.gpu import driver, gpu_allocation
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.memory import SharedMemory
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd, populate
from kvoffloadd.model import Direction
from kvoffloadd.testing.wait import until
from kvoffloadd.units import format_bytes
from scripts.gpu.bench import GIB, KIB, MIB
from scripts.harness.gpu import POSIX_FD, Gpu, GpuBuffer, one_copy, software_driver

UNREGISTERED_BYTES, QUICK_UNREGISTERED_BYTES = 256 * MIB, 4 * MIB
BATCH = 1024
ROUNDS = 3
LARGE_CHUNK_BYTES, QUICK_CHUNK_BYTES = 8 * GIB, 4 * MIB
FABRIC = 8  # CU_MEM_HANDLE_TYPE_FABRIC
STREAMS = {"NULL": 0, "legacy": 1, "per thread": 2}
SOFT = {"skipped": "the software driver has none of it"}
CAPTURE_MODES = {"global": 0, "thread local": 1, "relaxed": 2}
SEEN_S = 5.0


def answer_of(work: Callable[[], Any]) -> str:
    """Returns what a call answers: the driver's name for its failure, or success and the value."""
    try:
        value = work()
    except KvOffloadError as error:
        cause = error if hasattr(error, "name") else error.__cause__
        return str(getattr(cause, "name", error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of bindings that do not know it
        return f"{type(error).__name__}: {error}"
    return "CUDA_SUCCESS" + ("" if value is None else f", {value}")


class _Host:
    """Shared memory that is there. The driver knows the first `registered_bytes` of it."""

    def __init__(self, size_bytes: int, registered_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        self._fd = create_memfd("gpu-check", size_bytes)
        self._mapping = Mapping.map_fd(self._fd, size_bytes)
        self.address, self.array = self._mapping.address, self._mapping.array()
        populate(self.address, size_bytes, 8, nice=0)
        self._registered = bool(registered_bytes)
        if registered_bytes:
            driver().call("cuMemHostRegister", self.address, registered_bytes, 3)

    def close(self) -> None:
        if self._registered:
            driver().call("cuMemHostUnregister", self.address)
        self._mapping.close()
        os.close(self._fd)


class _Copies:
    """Copies between a GPU's memory and the host's, whole or in rows, timed and compared."""

    def __init__(self, gpu: Gpu, host: _Host) -> None:
        self._gpu, self._host = gpu, host
        self._device = GpuBuffer(gpu, host.size_bytes)
        self._noise = np.random.default_rng(7).integers(0, 256, host.size_bytes, np.uint8)
        self._driver = Driver()

    def by(self, direction: Direction, row_bytes: int) -> str:
        """GB/s and how much of the time is within the calls, and wrong bytes. `row_bytes` 0: one copy of all."""
        store = direction is Direction.STORE
        self._reset(store)
        total, calls = [], []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            status = self._submit(store, row_bytes)
            called = time.perf_counter() - begun
            driver().check("a copy", status)
            self._gpu.synchronize()
            total.append(time.perf_counter() - begun)
            calls.append(called)
        wrong = self._wrong_bytes(store)
        speed = self._host.size_bytes / min(total) / 1e9
        return f"{speed:.2f} GB/s, {min(calls) / min(total):.0%} of it within the calls, {wrong} wrong bytes"

    def _submit(self, store: bool, row_bytes: int) -> int:
        ends = (self._device.address, self._host.address) if store else (self._host.address, self._device.address)
        if not row_bytes:
            return self._driver.copy_each(*one_copy(*ends, self._host.size_bytes), self._gpu.stream)
        at = np.arange(0, self._host.size_bytes, row_bytes, dtype=np.uint64)
        src, dst = at + np.uint64(ends[0]), at + np.uint64(ends[1])
        sizes = np.full(len(at), row_bytes, np.uint64)
        for begin in range(0, len(at), BATCH):
            batch = slice(begin, begin + BATCH)
            status = self._driver.copy_batch(
                src[batch], dst[batch], sizes[batch], self._gpu.stream, sources_final=not store
            )
            if status:
                return status
        return 0

    def _reset(self, store: bool) -> None:
        if store:
            self._device.upload(0, self._noise)
            self._host.array[:] = 0
        else:
            self._host.array[:] = self._noise
            self._device.set_later(0, self._host.size_bytes, 0)
            self._gpu.synchronize()

    def _wrong_bytes(self, store: bool) -> int:
        found = self._host.array if store else self._device.download(0, self._host.size_bytes)
        return int((found != self._noise).sum())


def unregistered(quick: bool) -> dict[str, Any]:
    """Copies from and to shared memory that the driver does not know, or knows in part. A copy over both comes last:
    it may end the context.
    """
    if software_driver() is not None:
        return SOFT
    gpu = Gpu()
    size = QUICK_UNREGISTERED_BYTES if quick else UNREGISTERED_BYTES
    found: dict[str, Any] = {}
    for name, registered_bytes in (("not registered", 0), ("half of it registered", size // 2)):
        host = _Host(size, registered_bytes)
        copies = _Copies(gpu, host)
        for direction in Direction:
            for rows, row_bytes in (("64 KiB rows in batches", 64 * KIB), ("4 KiB rows in batches", 4 * KIB)):
                found[f"{name}, {direction.value}, {rows}"] = _answer_of_copy(copies, direction, row_bytes)
        for direction in Direction:
            found[f"{name}, {direction.value}, one copy"] = _answer_of_copy(copies, direction, 0)
        found[f"{name}: context works after all"] = driver().context_works()
        if not registered_bytes:
            host.close()
    return found


def _answer_of_copy(copies: _Copies, direction: Direction, row_bytes: int) -> str:
    return answer_of(lambda: copies.by(direction, row_bytes))


def null_streams(_quick: bool) -> dict[str, Any]:
    """Signals on the streams that have only fixed handles, as an engine's current stream may be one."""
    if software_driver() is not None:
        return SOFT
    Gpu()
    page = Pinned(4096)
    words = page.array.view(np.uint64)
    found = {}
    for number, (name, stream) in enumerate(STREAMS.items()):
        found[f"cuStreamWriteValue64, stream {name}"] = answer_of(partial(_signal, page, words, number, stream))
    return found


def _signal(page: Pinned, words: Any, number: int, stream: int) -> str:
    at = page.device_address + 8 * number
    driver().call("cuStreamWriteValue64", stream, at, number + 1, 0)
    until(lambda: int(words[number]) == number + 1, "the value is seen", SEEN_S, every_s=0)
    return "seen"


def large_chunks(quick: bool) -> dict[str, Any]:
    """One chunk of virtual memory for a whole tensor, with the flag and the handle types that engines ask for."""
    gpu = Gpu()
    size = QUICK_CHUNK_BYTES if quick else LARGE_CHUNK_BYTES
    found = {}
    for name, kinds, rdma in (
        ("descriptors", POSIX_FD, False),
        ("descriptors, for GPUDirect RDMA", POSIX_FD, True),
        ("fabric, for GPUDirect RDMA", FABRIC, True),
        ("none", 0, False),
    ):
        name_of_case = f"{format_bytes(size)}, handles: {name}"
        found[name_of_case] = answer_of(partial(_chunk, gpu, size, kinds, rdma))
    return found


def _chunk(gpu: Gpu, size_bytes: int, handle_types: int, rdma: bool) -> str:
    """Make one, export it as the client library does, map it once more, and compare a byte."""
    api = driver().api
    wanted = api.CUmemAllocationProp()
    wanted.type = api.CUmemAllocationType(1)
    wanted.location.type = api.CUmemLocationType(1)
    wanted.location.id = gpu.ordinal
    wanted.requestedHandleTypes = api.CUmemAllocationHandleType(handle_types)
    wanted.allocFlags.gpuDirectRDMACapable = int(rdma)
    access = api.CUmemAccessDesc()
    access.location, access.flags = wanted.location, api.CUmemAccess_flags(3)
    at = int(driver().call("cuMemAddressReserve", size_bytes, 0, 0, 0))
    try:
        handle = driver().call("cuMemCreate", size_bytes, wanted, 0)
        driver().call("cuMemMap", at, size_bytes, 0, handle, 0)
        driver().call("cuMemRelease", handle)
        try:
            driver().call("cuMemSetAccess", at, size_bytes, [access], 1)
            driver().call("cuMemsetD8", at, 0x5A, size_bytes)
            driver().call("cuCtxSynchronize")  # unmapping does not wait for it
            return _exported(gpu, at, size_bytes)
        finally:
            driver().call("cuMemUnmap", at, size_bytes)
    finally:
        driver().call("cuMemAddressFree", at, size_bytes)


def _exported(gpu: Gpu, address: int, size_bytes: int) -> str:
    memory: Any = gpu_allocation(address, size_bytes)
    descriptors = memory.export(0, len(memory.chunks))
    shared = SharedMemory(Driver(), gpu.ordinal)
    allocation = shared.reserve(size_bytes)
    shared.add_chunks(allocation, descriptors.fds, list(memory.chunks))
    byte = (ctypes.c_uint8 * 1)()
    driver().call("cuMemcpyDtoH", ctypes.addressof(byte), allocation.base_address + size_bytes - 1, 1)
    shared.unmap(allocation)
    chunks = f"{len(memory.chunks)} chunk" + ("" if len(memory.chunks) == 1 else "s")
    return f"{chunks} exported and mapped again, byte {'right' if byte[0] == 0x5A else 'wrong'}"


def during_capture(_quick: bool) -> dict[str, Any]:
    """What the client library calls while another thread captures a graph, as engines do when they start."""
    if software_driver() is not None:
        return SOFT
    gpu = Gpu()
    memory = GpuBuffer(gpu, 2 * MIB)
    chunks = GpuBuffer(gpu, 4 * MIB, chunk_bytes=2 * MIB)
    page, later = Pinned(4096), _Host(4096)
    mode_type, event = driver().api.CUstreamCaptureMode, _recorded(gpu)
    calls: dict[str, Callable[[], Any]] = {
        "address, export of an IPC handle": lambda: _silent(gpu_allocation(memory.address, memory.size_bytes)),
        "address, export of chunks": lambda: _silent(gpu_allocation(chunks.address, chunks.size_bytes)),
        "cuMemHostRegister": lambda: driver().call("cuMemHostRegister", later.address, 4096, 3),
        "cuMemHostUnregister": lambda: driver().call("cuMemHostUnregister", later.address),
        "cuStreamWriteValue64 on a stream of its own": lambda: driver().call(
            "cuStreamWriteValue64", gpu.stream, page.device_address, 1, 0
        ),
        "an event made and recorded on a stream of its own": lambda: _silent(_recorded(gpu)),
        "an event waited for": lambda: driver().call("cuEventSynchronize", event),
        "an event waited for by a relaxed thread": lambda: _relaxed_wait(event),
    }
    found: dict[str, Any] = {}
    for name, mode in CAPTURE_MODES.items():
        captured = int(driver().call("cuStreamCreate", 1))
        for call, work in calls.items():
            driver().call("cuStreamBeginCapture", captured, mode_type(mode))
            driver().call("cuMemsetD8Async", memory.address, 1, 64, captured)
            answers: list[str] = []
            thread = threading.Thread(target=_in_thread, args=(gpu, work, answers), daemon=True)
            thread.start()
            thread.join(SEEN_S)
            ended = answer_of(partial(_end_capture, captured))
            capture = "goes on" if ended == "CUDA_SUCCESS" else f"ends with {ended}"
            found[f"capture {name}: {call}"] = f"{answers[0] if answers else 'hangs'}; the capture {capture}"
    return found


def _recorded(gpu: Gpu) -> Any:
    event = driver().call("cuEventCreate", 3)
    driver().call("cuEventRecord", event, gpu.stream)
    return event


def _relaxed_wait(event: Any) -> None:
    relaxed = driver().api.CUstreamCaptureMode(CAPTURE_MODES["relaxed"])
    driver().call("cuThreadExchangeStreamCaptureMode", relaxed)
    driver().call("cuEventSynchronize", event)


def _end_capture(stream: int) -> None:
    driver().call("cuStreamEndCapture", stream)


def _silent(_value: object) -> None:
    """Reports only that it worked."""


def _in_thread(gpu: Gpu, work: Callable[[], Any], answers: list[str]) -> None:
    gpu.use()
    answers.append(answer_of(work))
