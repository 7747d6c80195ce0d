"""What the programs under test share: each runs in a separate process, on softcuda, through NVIDIA's own bindings."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from tests import softcuda

U8Array = npt.NDArray[np.uint8]

GRANULE = 2 << 20
NON_BLOCKING = 1
LAZY_PEER_ACCESS = 1
POSIX_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ANY_ORDER = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
STREAM_ORDER = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


def code(result: tuple[Any, ...]) -> int:
    """The error code that a call has returned."""
    return int(result[0])


def ok(result: tuple[Any, ...]) -> Any:
    """The value that a call has returned, which must have succeeded."""
    assert code(result) == 0, result
    return result[1] if len(result) == 2 else result[1:]


def start(ordinal: int = 0) -> Any:
    """The context of a device, current in this thread."""
    ok(driver.cuInit(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(ordinal))
    ok(driver.cuCtxSetCurrent(context))
    return context


def extras() -> softcuda.SoftCuda:
    """Softcuda's own functions, of the driver that this process uses."""
    return softcuda.load()


def allocate(size_bytes: int) -> int:
    """Device memory."""
    return int(ok(driver.cuMemAlloc(size_bytes)))


def new_stream() -> int:
    """A stream that waits for no other."""
    return int(ok(driver.cuStreamCreate(NON_BLOCKING)))


def address(memory: npt.NDArray[Any]) -> int:
    """Where an array's first byte is."""
    return int(memory.ctypes.data)


def noise(size_bytes: int, seed: int = 0) -> U8Array:
    """Bytes in which no two places look alike."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def registered(size_bytes: int) -> U8Array:
    """Host memory that may be copied to and from."""
    memory = np.zeros(size_bytes, np.uint8)
    ok(driver.cuMemHostRegister(address(memory), size_bytes, 0))
    return memory


def bytes_at(device: int, size_bytes: int) -> U8Array:
    """What the device's memory holds."""
    memory = np.empty(size_bytes, np.uint8)
    ok(driver.cuMemcpyDtoH(address(memory), device, size_bytes))
    return memory


def attribute(name: str, device: int) -> Any:
    """What the driver knows of an address."""
    which = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    return ok(driver.cuPointerGetAttribute(which, device))


def put(device: int, memory: U8Array) -> None:
    """Fills the device's memory."""
    ok(driver.cuMemcpyHtoD(device, address(memory), memory.nbytes))


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Waits for something that must come."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def raw_handle(device: int) -> bytes:
    """The IPC handle of device memory, as it goes to another process."""
    handle = ok(driver.cuIpcGetMemHandle(device))
    return ctypes.string_at(handle.getPtr(), 64)  # while the object lives: the address is its own


def open_raw(raw: bytes, flags: int = LAZY_PEER_ACCESS) -> tuple[Any, ...]:
    """Opens another process's handle."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), raw, 64)
    result: tuple[Any, ...] = driver.cuIpcOpenMemHandle(handle, flags)
    return result


@contextlib.contextmanager
def peer(program: Callable[[int, int], None]) -> Iterator[tuple[int, int, int]]:
    """Another process, forked before this one uses the driver: its id, and the ends of pipes from and to it."""
    from_peer, peer_out = os.pipe()
    peer_in, to_peer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(from_peer)
        os.close(to_peer)
        status = 1
        try:
            program(peer_in, peer_out)
            status = 0
        finally:
            os._exit(status)
    os.close(peer_in)
    os.close(peer_out)
    yield pid, from_peer, to_peer
    os.close(to_peer)
    os.waitpid(pid, 0)


def export_noise(peer_in: int, peer_out: int) -> None:
    """A peer: exports memory that holds noise, and frees it on a message, or when the other end is closed."""
    start()
    memory = allocate(GRANULE // 2)
    put(memory, noise(GRANULE // 2))
    os.write(peer_out, raw_handle(memory + 4096))
    if os.read(peer_in, 1):
        ok(driver.cuMemFree(memory))
        os.write(peer_out, b"freed")
        os.read(peer_in, 1)


def property_of(ordinal: int = 0, handle_type: Any = POSIX_FD) -> Any:
    """What chunks should be like."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.requestedHandleTypes = handle_type
    return wanted


def access_of(ordinal: int = 0) -> Any:
    """Who may use a mapping."""
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def reserve(count: int) -> int:
    """Addresses for `count` chunks."""
    return int(ok(driver.cuMemAddressReserve(count * GRANULE, 0, 0, 0)))


def map_chunks(count: int) -> tuple[int, list[int]]:
    """Chunks side by side, ready for use: their address and their handles."""
    base = reserve(count)
    handles = [int(ok(driver.cuMemCreate(GRANULE, property_of(), 0))) for _ in range(count)]
    for index, handle in enumerate(handles):
        ok(driver.cuMemMap(base + index * GRANULE, GRANULE, 0, handle, 0))
    ok(driver.cuMemSetAccess(base, count * GRANULE, [access_of()], 1))
    return base, handles


def pitched(to: tuple[int, int], from_: tuple[int, int], width: int, height: int, stream: int) -> tuple[Any, ...]:
    """One pitched copy. `to`, `from_`: an address, and the distance of rows."""
    asked = driver.CUDA_MEMCPY2D()
    asked.srcMemoryType = asked.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    asked.dstDevice, asked.dstPitch = to
    asked.srcDevice, asked.srcPitch = from_
    asked.WidthInBytes, asked.Height = width, height
    result: tuple[Any, ...] = driver.cuMemcpy2DAsync(asked, stream)
    return result


def pitched_batch(
    runs: list[tuple[tuple[int, int], tuple[int, int], int, int]], stream: int, order: Any = STREAM_ORDER
) -> tuple[Any, ...]:
    """Pitched copies as one call: of each where it goes and whence it comes (as `pitched`), its width and height."""
    asked = [driver.CUDA_MEMCPY3D_BATCH_OP() for _ in runs]
    for one, (to, from_, width, height) in zip(asked, runs, strict=True):
        for operand, side in ((one.dst, to), (one.src, from_)):
            operand.type = driver.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
            operand.op.ptr.ptr, operand.op.ptr.rowLength = side
        one.extent.width, one.extent.height, one.extent.depth = width, height, 1
        one.srcAccessOrder = order
    result: tuple[Any, ...] = driver.cuMemcpy3DBatchAsync(len(asked), asked, 0, stream)
    return result


def batch(
    destinations: list[int], sources: list[int], sizes: list[int], stream: int, order: Any = ANY_ORDER
) -> tuple[Any, ...]:
    """Copies as one call."""
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = order
    to = [driver.CUdeviceptr(destination) for destination in destinations]
    from_ = [driver.CUdeviceptr(source) for source in sources]
    result: tuple[Any, ...] = driver.cuMemcpyBatchAsync(to, from_, sizes, len(sizes), [attributes], [0], 1, stream)
    return result
