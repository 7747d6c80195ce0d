"""Finds the memory under arrays that other libraries made, and moves it to shared memory where it is not yet."""

from __future__ import annotations

import importlib
import math
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.client.memory.allocation import Allocation
from kvoffloadd.errors import UsageError
from kvoffloadd.model import U8Array


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows in this process's memory."""

    address: int
    num_blocks: int
    page_bytes: int
    stride_bytes: int

    @property
    def size_bytes(self) -> int:
        """Returns the bytes from the first byte of the first row to the last byte of the last row."""
        return (self.num_blocks - 1) * self.stride_bytes + self.page_bytes


def rows_extent(address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Extent:
    """Returns the extent of rows along dim 0. `strides` in bytes. Raises UsageError if they are no rows."""
    if len(shape) < 2 or math.prod(shape) == 0:
        raise UsageError(f"shape {shape} has no blocks along dim 0 with bytes behind them")
    page_bytes = item_bytes
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size > 1 and stride != page_bytes:
            raise UsageError(f"the bytes of one block are not contiguous: shape {shape}, strides {strides} bytes")
        page_bytes *= size
    stride_bytes = strides[0] if shape[0] > 1 else page_bytes
    if stride_bytes < page_bytes:
        raise UsageError(f"blocks overlap: {page_bytes} bytes each, {stride_bytes} apart")
    return Extent(address, shape[0], page_bytes, stride_bytes)


def numpy_extent(array: npt.NDArray[Any]) -> tuple[Extent, Allocation]:
    """Returns where a numpy array's rows lie, and the shared memory that holds them. Raises UsageError if none does."""
    extent = rows_extent(array.ctypes.data, array.shape, array.strides, array.itemsize)
    known = Allocation.around(extent.address, extent.size_bytes)
    return extent, known if known is not None else _of_memmap(array)


def _of_memmap(array: npt.NDArray[Any]) -> Allocation:
    root: Any = array
    while isinstance(root, np.ndarray) and not (isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap)):
        root = root.base
    if root is None or not isinstance(root, np.memmap) or root.filename is None:
        raise UsageError("the array is in private memory: allocate it with SharedTensor.allocate, or map a file")
    if root.mode not in ("r+", "w+"):
        raise UsageError(f"a memmap of mode {root.mode!r} can't be shared for writing: open it with 'r+'")
    mapped = np.frombuffer(root._mmap, np.uint8)  # type: ignore[attr-defined]  # numpy names the mmap nowhere else
    file_offset = root.offset - root.offset % mmap.ALLOCATIONGRANULARITY  # where numpy begins to map
    fd = os.open(root.filename, os.O_RDWR | os.O_CLOEXEC)
    allocation = Allocation(fd, mapped.ctypes.data - file_offset, file_offset + mapped.size, root)
    allocation.populate(mapped.ctypes.data, mapped.size)
    return allocation


def torch_extent(tensor: Any) -> tuple[Extent, Allocation, U8Array]:
    """Moves a torch CPU tensor's storage to shared memory, if it is not there; returns its rows as u8. Raises
    UsageError.
    """
    refusal = "only dense CPU tensors can be moved to shared memory"
    _torch_rows(tensor, "cpu", refusal)  # before anything is moved
    storage = tensor.untyped_storage()
    allocation = Allocation.around(storage.data_ptr(), storage.nbytes())
    if allocation is None:
        allocation = _move(storage)
    extent = _torch_rows(tensor, "cpu", refusal)
    start = extent.address - storage.data_ptr()
    torch = importlib.import_module("torch")
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(storage, start, (extent.num_blocks, extent.page_bytes), (extent.stride_bytes, 1))
    return extent, allocation, raw.numpy()


def gpu_extent(tensor: Any) -> Extent:
    """Returns where the rows of a torch CUDA tensor lie, or of a CUDA array. Raises UsageError."""
    if type(tensor).__module__.partition(".")[0] == "torch":
        refusal = "only dense CUDA tensors lie in a GPU's memory (SharedTensor.adopt takes those of the CPU)"
        return _torch_rows(tensor, "cuda", refusal)
    described = getattr(tensor, "__cuda_array_interface__", None)
    if described is None:
        raise UsageError(f"can't share a {type(tensor).__name__}: torch CUDA tensors and CUDA arrays only")
    item_bytes = np.dtype(described["typestr"]).itemsize
    shape = tuple(described["shape"])
    strides = described.get("strides")
    if strides is None:
        strides = tuple(int(np.prod(shape[axis + 1 :], dtype=object)) * item_bytes for axis in range(len(shape)))
    address, read_only = described["data"]
    if read_only:
        raise UsageError("a read-only array can't be loaded into")
    return rows_extent(int(address), shape, tuple(strides), item_bytes)


def _torch_rows(tensor: Any, device: str, refusal: str) -> Extent:
    """Returns where the rows lie now. Raises UsageError with `refusal` unless it is a dense tensor on such a device."""
    torch = importlib.import_module("torch")
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != device or tensor.layout != torch.strided:
        raise UsageError(refusal)
    item_bytes = tensor.element_size()
    strides = tuple(stride * item_bytes for stride in tensor.stride())
    return rows_extent(tensor.data_ptr(), tuple(tensor.shape), strides, item_bytes)


def _move(storage: Any) -> Allocation:
    try:
        fd, size_bytes = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise UsageError(f"torch can't move this storage to shared memory: {error}") from error
    # torch keeps its own descriptor, and closes it with the storage.
    allocation = Allocation(os.dup(fd), storage.data_ptr(), size_bytes, storage)
    allocation.populate(allocation.address, size_bytes)
    return allocation
