"""Maps workers' GPU memory: cudaMalloc'ed memory by IPC handle, virtual memory in chunks by descriptor.

Ownership: the thread of the GPU's memory lane alone, except for the allocations' sizes and addresses, which the event
loop reads when the call that changed them has returned.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvoffloadd.cudadriver import CudaError, PointerAttribute
from kvoffloadd.device.base import Allocation
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.errors import LimitError, MemoryKindError
from kvoffloadd.units import format_bytes

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


@dataclass(slots=True, eq=False)
class IpcAllocation(Allocation):
    """The whole of another process's cudaMalloc'ed allocation."""

    handle: bytes


@dataclass(slots=True, eq=False)
class VmmAllocation(Allocation):
    """Adjacent chunks in reserved addresses; `size_bytes` grows to `total_bytes` as they are mapped."""

    total_bytes: int
    chunks: list[int] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """See `Allocation.whole`."""
        return self.size_bytes == self.total_bytes

    @property
    def charged_bytes(self) -> int:
        """See `Allocation.charged_bytes`."""
        return self.total_bytes


@dataclass(slots=True)
class _Opened:
    """An open IPC handle: its address, and the number of times it was opened."""

    address: int
    size_bytes: int
    uses: int = 1


class SharedMemory:
    """The mappings of one GPU. Every method blocks, and needs the GPU's context current."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        self._opened: dict[bytes, _Opened] = {}
        self._location, self._access = self._access_to(ordinal)
        self._granularity = self._granularity_of(ordinal)

    # --- IPC handles ---

    def open_handle(self, handle: bytes) -> IpcAllocation:
        """See `GpuMemory.open_handle`. A handle is opened once, and counted, since the driver opens it only once per
        process.
        """
        known = self._opened.get(handle)
        if known is None:
            known = self._opened[handle] = self._open(handle)
        else:
            known.uses += 1
        return IpcAllocation("cuda_ipc", known.size_bytes, known.address, handle)

    def _open(self, handle: bytes) -> _Opened:
        packed = self._driver.api.CUipcMemHandle()
        ctypes.memmove(int(packed.getPtr()), handle, len(handle))
        try:
            address = int(self._driver.call("cuIpcOpenMemHandle", packed, _LAZY_PEER_ACCESS))
        except CudaError as error:
            if self._lasts(error):
                raise
            raise MemoryKindError(
                f"the driver can't open this IPC handle ({error}): its memory may be freed, its process may have "
                "ended, or run as another user or in another container than the daemon (run both as one user, in a "
                "common PID namespace)"
            ) from error
        try:
            return _Opened(address, self._bytes_from(address))
        except (CudaError, MemoryKindError):
            self._driver.call("cuIpcCloseMemHandle", address)
            raise

    def _bytes_from(self, address: int) -> int:
        """Returns how many of an opened allocation's bytes lie at the address and after it."""
        ordinal = self._driver.attribute(PointerAttribute.DEVICE_ORDINAL, address)
        if ordinal != self._ordinal:  # it would open all the same, and every copy would pass through two GPUs
            raise MemoryKindError(f"memory of GPU {ordinal}, announced as GPU {self._ordinal}'s")
        base, size_bytes = map(int, self._driver.call("cuMemGetAddressRange", address))
        # Small allocations share a block with others, which the driver maps whole: only the part from the address on is
        # named.
        return base + size_bytes - address

    def _close(self, allocation: IpcAllocation) -> None:
        known = self._opened[allocation.handle]
        known.uses -= 1
        if known.uses == 0:
            del self._opened[allocation.handle]
            self._driver.call("cuIpcCloseMemHandle", known.address)

    # --- chunks of virtual memory ---

    def reserve(self, total_bytes: int) -> VmmAllocation:
        """See `GpuMemory.reserve_chunks`."""
        if total_bytes < 1 or total_bytes % self._granularity:
            raise MemoryKindError(f"{total_bytes} bytes: chunks are multiples of {format_bytes(self._granularity)}")
        try:
            address = int(self._driver.call("cuMemAddressReserve", total_bytes, 0, 0, 0))
        except CudaError as error:
            if self._lasts(error):
                raise
            raise LimitError(f"no address space for {format_bytes(total_bytes)} of GPU memory: {error}") from error
        return VmmAllocation("cuda_vmm", 0, address, total_bytes)

    def add_chunks(self, allocation: VmmAllocation, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """See `GpuMemory.add_chunks`."""
        if allocation.size_bytes + sum(sizes) > allocation.total_bytes:
            raise MemoryKindError(f"chunks for more than the {allocation.total_bytes} bytes that were announced")
        if any(size < 1 or size % self._granularity for size in sizes):
            raise MemoryKindError(f"chunks are multiples of {self._granularity} bytes")
        begin = allocation.base_address + allocation.size_bytes
        mapped: list[int] = []
        try:
            for fd, size in zip(fds, sizes, strict=True):
                self._map_chunk(begin + sum(mapped), fd, size)
                mapped.append(size)
            self._driver.call("cuMemSetAccess", begin, sum(mapped), [self._access], 1)
        except CudaError as error:
            if self._lasts(error):
                raise
            self._unmap_chunks(begin, mapped)
            raise MemoryKindError(
                f"the driver can't map this chunk ({error}): send the descriptors that "
                "cuMemExportToShareableHandle gave, with the sizes they were made with"
            ) from error
        except MemoryKindError:
            self._unmap_chunks(begin, mapped)
            raise
        allocation.chunks += sizes
        allocation.size_bytes += sum(sizes)

    def _map_chunk(self, address: int, fd: int, size_bytes: int) -> None:
        api = self._driver.api
        kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._driver.call("cuMemImportFromShareableHandle", fd, kind)
        try:
            properties = self._driver.call("cuMemGetAllocationPropertiesFromHandle", handle)
            if int(properties.location.id) != self._ordinal:
                raise MemoryKindError("a chunk of another GPU's memory")
            self._driver.call("cuMemMap", address, size_bytes, 0, handle, 0)
        finally:
            self._driver.call("cuMemRelease", handle)  # a mapping keeps the memory by itself

    def _unmap_chunks(self, begin: int, sizes: Sequence[int]) -> None:
        address = begin
        for size in sizes:
            self._driver.call("cuMemUnmap", address, size)
            address += size

    # --- both ---

    def _lasts(self, error: CudaError) -> bool:
        """Returns whether the GPU can't be used any more. Memory from a peer can fail for reasons of the peer, and
        drivers have no separate error codes for some of these.
        """
        return error.sticky and not self._driver.context_works()

    def unmap(self, allocation: Allocation) -> None:
        """Ends a mapping. The caller guarantees that no copy uses it. Blocks until the driver returns."""
        if isinstance(allocation, IpcAllocation):
            self._close(allocation)
        elif isinstance(allocation, VmmAllocation):
            self._unmap_chunks(allocation.base_address, allocation.chunks)
            self._driver.call("cuMemAddressFree", allocation.base_address, allocation.total_bytes)

    def close(self) -> None:
        """Closes what is still open at the end of the process, and ignores the driver's errors."""
        for known in self._opened.values():
            with contextlib.suppress(CudaError):
                self._driver.call("cuIpcCloseMemHandle", known.address)
        self._opened.clear()

    def _access_to(self, ordinal: int) -> tuple[object, object]:
        api = self._driver.api
        location = api.CUmemLocation()
        location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
        access = api.CUmemAccessDesc()
        access.location = location
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return location, access

    def _granularity_of(self, ordinal: int) -> int:
        api = self._driver.api
        wanted = api.CUmemAllocationProp()
        wanted.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = self._location
        kind = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._driver.call("cuMemGetAllocationGranularity", wanted, kind))
