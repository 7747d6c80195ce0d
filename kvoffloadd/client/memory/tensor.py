"""A canonical tensor: `num_blocks` rows of `page_bytes`, `stride_bytes` apart, in shared memory or on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.client.memory.adopt import Extent, gpu_extent, numpy_extent, rows_extent, torch_extent
from kvoffloadd.client.memory.allocation import Allocation
from kvoffloadd.client.memory.gpu import GpuAllocation, gpu_allocation
from kvoffloadd.errors import UsageError
from kvoffloadd.model import U8Array
from kvoffloadd.protocol.messages import TensorSpec


class CanonicalTensor:
    """Rows in memory that the daemon can map. `offset`: byte of the allocation where block 0 begins."""

    def __init__(self, allocation: Allocation | GpuAllocation, extent: Extent) -> None:
        self.allocation: Allocation | GpuAllocation = allocation
        self.offset = extent.address - allocation.address
        self.num_blocks = extent.num_blocks
        self.page_bytes = extent.page_bytes
        self.stride_bytes = extent.stride_bytes

    def spec(self, allocation: int) -> TensorSpec:
        """Converts the tensor for the wire; `allocation` is the daemon's number for the memory."""
        return TensorSpec(
            allocation=allocation,
            offset=self.offset,
            num_blocks=self.num_blocks,
            page_bytes=self.page_bytes,
            stride_bytes=self.stride_bytes,
        )

    def __repr__(self) -> str:
        rows = f"{self.num_blocks} blocks of {self.page_bytes} bytes, {self.stride_bytes} apart"
        return f"<{type(self).__name__} {rows}>"


class SharedTensor(CanonicalTensor):
    """A canonical tensor in shared memory.

    `array`: u8 (num_blocks, page_bytes), a view with row stride `stride_bytes`; it keeps the memory alive. Made by
    `allocate`, `adopt` or `of_fd`.
    """

    allocation: Allocation

    def __init__(self, allocation: Allocation, extent: Extent, array: U8Array) -> None:
        super().__init__(allocation, extent)
        self.array = array

    @classmethod
    def allocate(
        cls, num_blocks: int, page_bytes: int, stride_bytes: int | None = None, *, name: str = "kv_cache"
    ) -> SharedTensor:
        """Allocates zeros in a separate memfd, sealed against resizing, so that a daemon of any uid may map it.

        All of its pages are there when it returns, which takes about a second per GiB and thread, up to four of them.
        Raises UsageError for sizes that make no tensor, OSError or ResourceError where the kernel has no memory for it.
        """
        stride_bytes = page_bytes if stride_bytes is None else stride_bytes
        if num_blocks < 1 or page_bytes < 1 or stride_bytes < page_bytes:
            raise UsageError(f"not a valid tensor: {num_blocks} blocks of {page_bytes} bytes, {stride_bytes} apart")
        allocation, memory = Allocation.create(name, num_blocks * stride_bytes)
        rows = memory.reshape(num_blocks, stride_bytes)[:, :page_bytes]
        return cls(allocation, Extent(allocation.address, num_blocks, page_bytes, stride_bytes), rows)

    @classmethod
    def adopt(cls, tensor: Any) -> SharedTensor:
        """Shares memory that exists: dim 0 is the block, the bytes of one block must be contiguous.

        A torch CPU tensor of any dtype: its storage is moved to shared memory in place, once for all tensors over it;
        torch views stay valid, numpy views taken before do not. That memory is unsealed: only a daemon of the same uid
        takes it (prefer `allocate(...).torch()`). A numpy array: over a SharedTensor or a writable `np.memmap` (on a
        tmpfs, or it is not memory).

        All of its pages are there when it returns. Raises UsageError for anything else, ResourceError where the kernel
        has no memory for it.
        """
        if isinstance(tensor, np.ndarray):
            extent, allocation = numpy_extent(tensor)
            return cls(allocation, extent, _rows_of(tensor, extent))
        if type(tensor).__module__.partition(".")[0] != "torch":
            raise UsageError(
                f"can't share a {type(tensor).__name__}: numpy arrays and torch CPU tensors only "
                "(GpuTensor.adopt takes those of a GPU)"
            )
        extent, allocation, rows = torch_extent(tensor)
        return cls(allocation, extent, rows)

    @classmethod
    def of_fd(cls, fd: int, memory: U8Array, rows: U8Array) -> SharedTensor:
        """Shares memory that another library has mapped. `memory`: u8 (bytes,), all that `fd` names, from its first
        byte on; `rows`: u8 (num_blocks, page_bytes), a view of it. The descriptor is duplicated.

        Unless it is a memfd with seals only a daemon of the same uid takes it. Raises UsageError for rows that lie
        elsewhere, or are none.
        """
        extent = rows_extent(rows.ctypes.data, rows.shape, rows.strides, rows.itemsize)
        address = memory.ctypes.data
        if extent.address < address or extent.address + extent.size_bytes > address + memory.size:
            raise UsageError(f"{extent.size_bytes} bytes at {extent.address:#x} are outside the given memory")
        return cls(Allocation.of_fd(fd, memory), extent, rows)

    def torch(self) -> Any:
        """Returns the same memory as a torch.int8 tensor (num_blocks, page_bytes). Imports torch; copies nothing."""
        return importlib.import_module("torch").from_numpy(self.array.view(np.int8))


class GpuTensor(CanonicalTensor):
    """Rows of a GPU's memory that another library owns. `owner`: keeps the memory alive. Made by `adopt`."""

    def __init__(self, extent: Extent, owner: object) -> None:
        """Takes an `extent` with addresses of the GPU. Raises as `adopt`."""
        super().__init__(gpu_allocation(extent.address, extent.size_bytes), extent)
        self.owner = owner

    @classmethod
    def adopt(cls, tensor: Any) -> GpuTensor:
        """Shares memory that exists: dim 0 is the block, the bytes of one block must be contiguous.

        Accepts a torch CUDA tensor of any dtype, or any object with `__cuda_array_interface__` (CuPy, Numba). Nothing
        is moved, and nothing of the tensor changes. The tensor is held until the registration has ended.

        Raises UsageError for anything else, and for memory that other processes can't map, with the remedy; DeviceError
        where there is no usable driver.
        """
        return cls(gpu_extent(tensor), tensor)


def _rows_of(array: npt.NDArray[Any], extent: Extent) -> U8Array:
    """Returns the array's memory as u8 rows, which keep the array alive."""
    flat = array.reshape(extent.num_blocks, -1)  # a view: the dimensions after dim 0 are contiguous
    return flat.view(np.uint8)
