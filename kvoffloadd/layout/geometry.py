"""Derives from strides which bytes of memory belong to a block. Pure integers, no tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.spec import item_bytes
from kvoffloadd.model import Ref

Run = tuple[int, int]
"""(offset, length) in bytes."""

Level = tuple[int, int]
"""(stride in bytes, size) of a dimension."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor over memory: `memory` names it, `offset` is in bytes, `strides` in elements of `dtype`."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def narrow(self, dim: int, start: int, size: int) -> View:
        """Restricts one dimension to these indices, as torch's `narrow`."""
        offset = self.offset + start * self.strides[dim] * item_bytes(self.dtype)
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return View(self.memory, offset, shape, self.strides, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} with strides {self.strides}"


@dataclass(frozen=True, slots=True)
class Rows:
    """A canonical tensor: `num_blocks` rows of `page_bytes`, `stride_bytes` apart, from byte `offset` of `memory`."""

    memory: int
    offset: int
    num_blocks: int
    page_bytes: int
    stride_bytes: int

    @property
    def end(self) -> int:
        """First byte of the memory behind the last row."""
        return self.offset + (self.num_blocks - 1) * self.stride_bytes + self.page_bytes


@dataclass(frozen=True, slots=True)
class RowSegment:
    """The bytes of a layer's tensor in one row of memory: `runs`, in ascending order, from the row's `rows.offset` on.

    `rows.page_bytes` reaches from the first run to the end of the last.
    """

    layer: str
    kernel_blocks: int
    rows: Rows
    runs: tuple[Run, ...]


def segments(layer: str, view: View, block_dim: int, kernel_blocks: int) -> list[RowSegment]:
    """Returns the rows of a layer's tensor: one list entry for each combination of the dimensions that lie outside the
    blocks.

    Only strides show which do: K and V are apart if their stride exceeds the blocks', whatever the shape. Raises
    UsageError where blocks overlap or are no whole number of kernel blocks.
    """
    item = item_bytes(view.dtype)
    levels = [(stride * item, size) for size, stride in zip(view.shape, view.strides, strict=True)]
    pitch, count = levels.pop(block_dim)
    if count % kernel_blocks or not count:
        raise UsageError(f"layer {layer}: {view}: {count} kernel blocks are not a multiple of {kernel_blocks}")
    if min((size for _, size in levels), default=1) < 1:
        raise UsageError(f"layer {layer}: {view} has no bytes")
    levels = sorted(level for level in levels if level[1] > 1)
    outer = [level for level in levels if count > 1 and level[0] > pitch]
    inner = [level for level in levels if level not in outer]
    blocks = [(pitch, count)] if count > 1 else []
    extent = _extent(item, inner)
    if extent < 0 or _extent(item, [*inner, *blocks, *outer]) < 0:
        raise UsageError(
            f"layer {layer}: {view}: its blocks (dimension {block_dim}) overlap; each must have bytes of its own, "
            "so the strides of dimensions must nest"
        )
    stride = kernel_blocks * max(pitch, extent) if count == 1 else kernel_blocks * pitch
    runs = tuple(_runs(item, [*inner, (pitch, kernel_blocks)] if kernel_blocks > 1 else inner))
    page = runs[-1][0] + runs[-1][1]
    return [
        RowSegment(
            layer, kernel_blocks, Rows(view.memory, view.offset + offset, count // kernel_blocks, page, stride), runs
        )
        for offset in _offsets(outer)
    ]


def _extent(item: int, ascending: Sequence[Level]) -> int:
    """Returns the bytes from the first to the end of the last element; -1 if elements might overlap."""
    extent = item
    for stride, size in ascending:
        if stride < extent:
            return -1
        extent += (size - 1) * stride
    return extent


def _runs(item: int, ascending: Sequence[Level]) -> Iterator[Run]:
    length, merged_dims = item, 0
    while merged_dims < len(ascending) and ascending[merged_dims][0] == length:
        length *= ascending[merged_dims][1]
        merged_dims += 1
    for offset in _offsets(ascending[merged_dims:]):
        yield offset, length


def _offsets(ascending: Sequence[Level]) -> list[int]:
    """Returns where each combination of these dimensions begins, ascending."""
    steps = [range(0, size * stride, stride) for stride, size in reversed(ascending)]
    return [sum(combination) for combination in itertools.product(*steps)]


def merged(runs: Sequence[Run]) -> list[Run]:
    """Merges neighbours among runs that do not overlap and are in order."""
    joined: list[Run] = []
    for offset, length in sorted(runs):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return joined


def refs_of(tensor: int, runs: Sequence[Run]) -> list[Ref]:
    """Converts ascending runs to refs: runs of equal length and distance form one. The order of bytes is that of the
    row.
    """
    refs: list[Ref] = []
    index = 0
    while index < len(runs):
        offset, length = runs[index]
        stride = runs[index + 1][0] - offset if index + 1 < len(runs) else 0
        count = 1
        while index + count < len(runs) and runs[index + count] == (offset + count * stride, length):
            count += 1
        refs.append(Ref(tensor, offset, length, count, stride if count > 1 else 0))
        index += count
    return refs
