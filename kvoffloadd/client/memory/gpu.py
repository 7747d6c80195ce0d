"""One piece of a GPU's memory in a form that the daemon can map: `attach_ipc` and `attach_vmm` announce it.

It is found from an address alone, through the driver: that needs no help of the library that made the memory, and
changes nothing about it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from kvoffloadd.cudadriver import CudaDriver, CudaError, PointerAttribute
from kvoffloadd.errors import UsageError
from kvoffloadd.linux.sockets import close_fds
from kvoffloadd.protocol.messages import IPC_HANDLE_BYTES

_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_HANDLE_TYPES = {_POSIX_FD: "POSIX_FILE_DESCRIPTOR", 2: "WIN32", 4: "WIN32_KMT", 8: "FABRIC"}
_MEMORY_TYPE_DEVICE = 2  # CU_MEMORYTYPE_DEVICE

_POOLED = (
    "it comes from a stream-ordered pool (cudaMallocAsync), which other processes can't map: use PyTorch's own "
    "allocator (PYTORCH_CUDA_ALLOC_CONF without backend:cudaMallocAsync)"
)
_NOT_EXPORTABLE = (
    "it is virtual memory without file descriptors (its handle types: {types}), as sleep-mode allocators make it "
    "(none), or PyTorch where it prefers fabric handles (FABRIC), so other processes can't map it: allocate the KV "
    "cache with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False and without the engine's sleep mode"
)


@functools.cache
def driver() -> CudaDriver:
    """Returns the driver, loaded once. Raises DeviceError."""
    return CudaDriver()


@dataclass(frozen=True, slots=True)
class IpcMemory:
    """An allocation of cudaMalloc: its IPC handle of 64 bytes."""

    uuid: bytes
    address: int
    size_bytes: int
    handle: bytes

    @property
    def identity(self) -> tuple[bytes, bytes]:
        """Names the memory: two with the same identity are attached once."""
        return self.uuid, self.handle


@dataclass(frozen=True, slots=True)
class VmmMemory:
    """Chunks of virtual memory, contiguous from `address` on: their sizes in bytes."""

    uuid: bytes
    address: int
    chunks: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all chunks."""
        return sum(self.chunks)

    @property
    def identity(self) -> tuple[bytes, int, int]:
        """See `IpcMemory.identity`."""
        return self.uuid, self.address, self.size_bytes

    def export(self, first: int, count: int) -> Descriptors:
        """Returns descriptors of some chunks. Raises UsageError where the driver gives none."""
        address = self.address + sum(self.chunks[:first])
        found = Descriptors()
        for size in self.chunks[first : first + count]:
            found.add(_exported(address))
            address += size
        return found


GpuAllocation = IpcMemory | VmmMemory


class Descriptors:
    """Holds open descriptors, which are closed with the object."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        weakref.finalize(self, close_fds, self.fds)

    def add(self, fd: int) -> None:
        """Takes over `fd`."""
        self.fds.append(fd)


def gpu_allocation(address: int, size_bytes: int) -> GpuAllocation:
    """Returns the memory that holds these bytes of a GPU.

    Raises:
        UsageError: it is no memory of a GPU, or other processes can't map it; the text names the remedy.
        DeviceError: there is no usable driver.
    """
    try:
        if driver().attribute(PointerAttribute.MEMORY_TYPE, address) != _MEMORY_TYPE_DEVICE:
            raise UsageError(f"address {address:#x} is not memory of a GPU")
        ordinal = driver().attribute(PointerAttribute.DEVICE_ORDINAL, address)
    except CudaError as error:
        raise UsageError(f"address {address:#x} is not memory of a GPU: {error}") from error
    with _context_of(ordinal):
        uuid = driver().uuid(ordinal)
        if driver().attribute(PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE, address):
            return _ipc_memory(uuid, address, size_bytes)
        return _vmm_memory(uuid, address, size_bytes)


def _ipc_memory(uuid: bytes, address: int, size_bytes: int) -> IpcMemory:
    base, whole_bytes = map(int, driver().call("cuMemGetAddressRange", address))
    if address + size_bytes > base + whole_bytes:
        raise UsageError(f"{size_bytes} bytes at {address:#x} extend beyond their allocation")
    handle = driver().call("cuIpcGetMemHandle", base)
    return IpcMemory(uuid, base, whole_bytes, ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES))


def _vmm_memory(uuid: bytes, address: int, size_bytes: int) -> VmmMemory:
    begin = position = _mapping(address)[0]
    chunks = []
    while position < address + size_bytes:
        start, chunk_bytes = _mapping(position)
        if start != position or chunk_bytes < 1:  # a size of 0 would make this loop endless
            raise UsageError(f"{size_bytes} bytes at {address:#x} are not mapped in whole chunks")
        chunks.append(chunk_bytes)
        position += chunk_bytes
    os.close(_exported(begin))  # fails early if it can't be exported
    return VmmMemory(uuid, begin, tuple(chunks))


def _mapping(address: int) -> tuple[int, int]:
    """Returns where the chunk that is mapped there begins, and its bytes."""
    try:
        begin = driver().attribute(PointerAttribute.MAPPING_BASE_ADDR, address)
        return begin, driver().attribute(PointerAttribute.MAPPING_SIZE, address)
    except CudaError as error:
        raise UsageError(f"the memory at {address:#x} can't be shared: {_POOLED} ({error})") from error


def _exported(address: int) -> int:
    """Returns a descriptor of the chunk that is mapped there; the caller owns it."""
    cuda = driver()
    try:
        handle = cuda.call("cuMemRetainAllocationHandle", address)
    except CudaError as error:
        raise UsageError(f"the memory at {address:#x} can't be shared: {_POOLED} ({error})") from error
    try:
        kind = cuda.api.CUmemAllocationHandleType(_POSIX_FD)
        return int(cuda.call("cuMemExportToShareableHandle", handle, kind, 0))
    except CudaError as error:
        reason = _NOT_EXPORTABLE.format(types=_handle_types(address))
        raise UsageError(f"the memory at {address:#x} can't be shared: {reason} ({error})") from error
    finally:
        cuda.call("cuMemRelease", handle)


def _handle_types(address: int) -> str:
    """Names the kinds of handles that the memory there was made for."""
    try:
        allowed = driver().attribute(PointerAttribute.ALLOWED_HANDLE_TYPES, address)
    except CudaError:
        return "unknown"
    return ", ".join(name for bit, name in _HANDLE_TYPES.items() if allowed & bit) or "none"


@contextlib.contextmanager
def _context_of(ordinal: int) -> Iterator[None]:
    """Makes a GPU's primary context, which the memory's library uses, too, current in this thread meanwhile."""
    cuda = driver()
    device = cuda.call("cuDeviceGet", ordinal)
    cuda.call("cuCtxPushCurrent", cuda.call("cuDevicePrimaryCtxRetain", device))
    try:
        yield
    finally:
        cuda.call("cuCtxPopCurrent")
        cuda.call("cuDevicePrimaryCtxRelease", device)
