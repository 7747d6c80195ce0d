"""Determines where a layer's tensors lie in rows that it shares with others, or alone: geometry of one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.backend import BLOCK, LAYER, Backend
from kvoffloadd.layout.geometry import View
from kvoffloadd.layout.spec import Attention, LayerSpec, Mamba, Opaque, attention, item_bytes


@dataclass(frozen=True, slots=True)
class Sharing:
    """What layers must have in common to share a tensor; in one group, they need equal kernel blocks too.

    `outside`: sizes of the dimensions between block and layer, () or (("head", heads),). `page_bytes`: bytes of one
    block of one layer behind each of their combinations, with padding.
    """

    outside: tuple[tuple[str, int], ...]
    page_bytes: int


def sharing(layer: str, spec: LayerSpec) -> Sharing | None:
    """Returns what the layer can share a tensor with; None: it is isolated. Raises UsageError where padding does not
    divide.
    """
    if isinstance(spec, Mamba):
        return Sharing((), spec.page_bytes)
    backend = spec.backend if isinstance(spec, Attention) else None
    if not isinstance(spec, Attention) or not isinstance(backend, Backend) or not backend.shares:
        return None
    axes = spec.axes(1)
    outside = tuple((axis, axes[axis]) for axis in backend.outside_layers)
    pieces = spec.kernel_blocks * math.prod(size for _, size in outside)
    page = spec.page_bytes
    if page % (pieces * item_bytes(spec.dtype)):
        raise UsageError(f"layer {layer}: a page of {page} bytes is not {pieces} equal pieces of {spec.dtype}")
    return Sharing(outside, page // math.prod(size for _, size in outside))


@dataclass(frozen=True, slots=True)
class Place:
    """Slot `slot` of `slots` equal ones from byte `base` of rows of `row_bytes`, in memory `memory`."""

    memory: int
    row_bytes: int
    slot: int = 0
    slots: int = 1
    base: int = 0


def shared_views(layer: str, spec: LayerSpec, num_blocks: int, place: Place) -> tuple[View, ...]:
    """Returns the layer's tensor, or those of its states, in rows that several layers share.

    Raises UsageError for a layer that can't share rows, and for places that do not fit its dtype.
    """
    if isinstance(spec, Mamba):
        return _states(layer, spec, num_blocks, place)
    share = sharing(layer, spec)
    if isinstance(spec, Opaque):
        raise UsageError(f"layer {layer}: it is opaque, and needs a separate tensor")
    if share is None or not isinstance(spec.backend, Backend):
        raise UsageError(f"layer {layer}: its backend has no order with blocks first and layers behind them")
    page = share.page_bytes // spec.kernel_blocks
    item, axes = item_bytes(spec.dtype), spec.axes(num_blocks)
    pitch = _exact(layer, place.row_bytes, spec.kernel_blocks, "the row")
    base = _exact(layer, place.base, spec.kernel_blocks, "the place in the row")
    strides = {BLOCK: pitch}
    inner = item
    for axis in reversed(spec.backend.with_layers[1:]):
        if axis == LAYER:
            inner = page * place.slots
        else:
            strides[axis] = inner
            inner *= axes[axis]
    order = spec.backend.shape
    offset = base + place.slot * page
    return (_view(layer, place.memory, offset, [(axes[axis], strides[axis]) for axis in order], spec.dtype),)


def _states(layer: str, spec: Mamba, num_blocks: int, place: Place) -> tuple[View, ...]:
    """Returns one view for each state, one behind the other in the layer's page."""
    offset = place.base + place.slot * spec.page_bytes
    views = []
    for state in spec.states:
        inner = item_bytes(state.dtype)
        dims: list[tuple[int, int]] = []
        for size in reversed(state.shape):
            dims.insert(0, (size, inner))
            inner *= size
        views.append(_view(layer, place.memory, offset, [(num_blocks, place.row_bytes), *dims], state.dtype))
        offset += state.bytes
    return tuple(views)


def own_view(layer: str, spec: LayerSpec, num_blocks: int, memory: int) -> View:
    """Returns the layer's tensor in separate memory, in its backend's order; blocks need not come first. For an opaque
    layer: int8 (kernel blocks, bytes of one).

    Raises UsageError for Mamba, for a backend that is not known, and for padding where blocks do not come first.
    """
    if isinstance(spec, Opaque):
        page = spec.page_bytes // spec.kernel_blocks
        return View(memory, 0, (num_blocks * spec.kernel_blocks, page), (page, 1), "int8")
    spec = attention(layer, spec)
    backend = spec.backend
    if not isinstance(backend, Backend):
        raise UsageError(f"layer {layer}: to allocate its tensor, its backend's order must be known")
    axes, strides, inner = spec.axes(num_blocks), {}, item_bytes(spec.dtype)
    for axis in reversed(backend.memory):
        if axis == BLOCK and backend.memory[0] == BLOCK:
            inner = spec.page_bytes // spec.kernel_blocks
        strides[axis] = inner
        inner *= axes[axis]
    if backend.memory[0] != BLOCK and spec.page_bytes != spec.payload_bytes:
        raise UsageError(f"layer {layer}: pages can't be padded where {backend.memory[0]} lies outside of blocks")
    return _view(layer, memory, 0, [(axes[axis], strides[axis]) for axis in backend.shape], spec.dtype)


def _view(layer: str, memory: int, offset: int, dims: list[tuple[int, int]], dtype: str) -> View:
    """Makes a view of `dims`: (size, stride in bytes)."""
    item = item_bytes(dtype)
    shape = tuple(size for size, _ in dims)
    if offset % item or any(stride % item for _, stride in dims):
        bytes_apart = tuple(stride for _, stride in dims)
        raise UsageError(
            f"layer {layer}: {dtype} {shape} at byte {offset}, strides {bytes_apart} bytes, is misaligned: all must be "
            f"multiples of {item}; put states with larger elements first, or pad the page"
        )
    return View(memory, offset, shape, tuple(stride // item for _, stride in dims), dtype)


def _exact(layer: str, size: int, pieces: int, what: str) -> int:
    if size % pieces:
        raise UsageError(f"layer {layer}: {what} of {size} bytes is not {pieces} equal kernel pages")
    return size // pieces
