"""Converts torch's tensors to geometry, and back. Imports torch when called, never before."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.geometry import Rows, View
from kvoffloadd.layout.spec import item_bytes


class Storages:
    """Keeps the memory under tensors alive and numbers it. Tensors over one storage share a number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._tensors: list[Any] = []
        self.sizes: dict[int, int] = {}

    def view(self, layer: str, tensor: Any) -> View:
        """Returns the tensor as geometry. Raises UsageError unless it is dense, with a dtype that is known."""
        torch = importlib.import_module("torch")
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise UsageError(f"layer {layer}: a {type(tensor).__name__} is not a dense torch tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        item_bytes(dtype)
        if self._tensors and tensor.device != self._tensors[0].device:
            raise UsageError(
                f"layer {layer}: it is on {tensor.device}, others are on {self._tensors[0].device}; "
                "register one cache for each device"
            )
        storage = tensor.untyped_storage()
        # Storages of the meta device have no address.
        name = ("address", storage.data_ptr()) if storage.data_ptr() else ("object", storage._cdata)
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self._tensors):
            self._tensors.append(tensor)
            self.sizes[number] = storage.nbytes()
        elif storage.nbytes() > self.sizes[number]:
            self._tensors[number], self.sizes[number] = tensor, storage.nbytes()
        offset = tensor.storage_offset() * tensor.element_size()
        return View(number, offset, tuple(tensor.shape), tuple(tensor.stride()), dtype)

    def rows(self, rows: Rows) -> Any:
        """Returns torch.int8 (num_blocks, page_bytes) over the memory that these rows name."""
        return rows_over(self._tensors[rows.memory], rows)


def rows_over(tensor: Any, rows: Rows) -> Any:
    """Returns torch.int8 (num_blocks, page_bytes) with strides (stride_bytes, 1), over the tensor's storage."""
    torch = importlib.import_module("torch")
    raw = torch.empty(0, dtype=torch.int8, device=tensor.device)
    size, stride = (rows.num_blocks, rows.page_bytes), (rows.stride_bytes, 1)
    return raw.set_(tensor.untyped_storage(), rows.offset, size, stride)


def view_over(flat: Any, view: View) -> Any:
    """Returns a tensor of the view's dtype over `flat`: torch.int8 (bytes,), from byte 0 of its memory."""
    torch = importlib.import_module("torch")
    typed = flat.view(getattr(torch, view.dtype))
    return typed.as_strided(view.shape, view.strides, view.offset // item_bytes(view.dtype))


def device_type(tensors: Sequence[Any]) -> str:
    """Returns the type of the device that the tensors are on: "cpu", "cuda", "meta"."""
    return str(tensors[0].device.type) if tensors else "cpu"
