"""A canonical tensor in a GPU's memory."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kvoffloadd.client.adopt import Extent, rows_extent
from kvoffloadd.client.gpu import gpu_allocation
from kvoffloadd.client.tensor import CanonicalTensor
from kvoffloadd.errors import UsageError


class GpuTensor(CanonicalTensor):
    """Rows of a GPU's memory that another library owns. `owner`: what keeps the memory alive. Made by `adopt`."""

    def __init__(self, extent: Extent, owner: object) -> None:
        """`extent`: addresses of the GPU. Raises as `adopt`."""
        super().__init__(gpu_allocation(extent.address, extent.size_bytes), extent)
        self.owner = owner

    @classmethod
    def adopt(cls, tensor: Any) -> GpuTensor:
        """Share memory that exists: dim 0 is the block, what lies behind one block must be contiguous.

        A torch CUDA tensor of any dtype, or whatever has `__cuda_array_interface__` (CuPy, Numba). Nothing is moved,
        and nothing of the tensor changes. The tensor is held until the registration has ended.

        Raises UsageError for anything else, and for memory that other processes can't map, with what to change;
        DeviceError where there is no usable driver.
        """
        if type(tensor).__module__.partition(".")[0] == "torch":
            return cls(_torch_rows(tensor), tensor)
        described = getattr(tensor, "__cuda_array_interface__", None)
        if described is None:
            raise UsageError(f"can't share a {type(tensor).__name__}: torch CUDA tensors and CUDA arrays only")
        return cls(_described_rows(described), tensor)


def _torch_rows(tensor: Any) -> Extent:
    torch = importlib.import_module("torch")
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda" or tensor.layout != torch.strided:
        raise UsageError("only dense CUDA tensors lie in a GPU's memory (SharedTensor.adopt takes those of the CPU)")
    item_bytes = tensor.element_size()
    strides = tuple(stride * item_bytes for stride in tensor.stride())
    return rows_extent(tensor.data_ptr(), tuple(tensor.shape), strides, item_bytes)


def _described_rows(described: dict[str, Any]) -> Extent:
    item_bytes = np.dtype(described["typestr"]).itemsize
    shape = tuple(described["shape"])
    strides = described.get("strides")
    if strides is None:
        strides = tuple(int(np.prod(shape[at + 1 :], dtype=object)) * item_bytes for at in range(len(shape)))
    address, read_only = described["data"]
    if read_only:
        raise UsageError("a read-only array can't be loaded into")
    return rows_extent(int(address), shape, tuple(strides), item_bytes)
