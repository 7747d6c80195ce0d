"""Where a rank's groups lie in its tensors: with random gaps, or as `kvoffloadd.layout` has planned it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvoffloadd.client import Group, Ref
from scripts.harness.places import Layout, Runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvoffloadd.model import U8Array
    from scripts.harness.geometry import Geometry, GroupShape


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of all blocks in a tensor: u8 of this shape, blocks first, strides in bytes, from byte `offset` on."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return math.prod(self.shape[1:])

    def over(self, rows: U8Array) -> U8Array:
        """A view of these rows, which are all of the tensor."""
        return as_strided(rows.reshape(-1)[self.offset :], self.shape, self.strides)

    def runs(self, rows: U8Array) -> Runs:
        """The same, and of which runs it is."""
        dims = [dim for dim in zip(self.shape[1:], self.strides[1:], strict=True) if dim[0] > 1]
        length = 1
        while dims and dims[-1][1] == length:
            length *= dims.pop()[0]
        within = np.full(1, self.offset)
        for size, stride in dims:
            within = (within[:, None] + stride * np.arange(size)).reshape(-1)
        return Runs(self.tensor, self.over(rows), within, length)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`layouts`: the tensors. `order`: those that are registered; the refs of `groups` count by it. `pieces`: of each
    group that the rank has a part of. What a key holds is its groups' pieces, one after the other, whatever the refs.
    """

    name: str
    num_blocks: int
    layouts: tuple[Layout, ...]
    order: tuple[int, ...]
    groups: tuple[Group, ...]
    pieces: Mapping[int, tuple[Piece, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Bytes to leave between things: one of some sizes, or always none."""

    rng: np.random.Generator
    padded: bool

    def draw(self, *sizes: int) -> int:
        """One of them."""
        return sizes[int(self.rng.integers(0, len(sizes)))] if self.padded else 0


RANDOM = "random"
"""The name of arrangements that no layout has."""


def scattered(geometry: Geometry, rank: int, num_blocks: int, gaps: Gaps) -> Arrangement:
    """The geometry's refs one behind the other; offsets, gaps between runs and tails are this rank's own."""
    held = [shape for shape in geometry.groups if shape.part_of_rank[rank] is not None]
    refs, pages = _placed(geometry, held, rank, gaps)
    layouts = tuple(Layout(num_blocks, page, page + gaps.draw(0, 0, 64, 33)) for page in pages)
    return Arrangement(
        name=RANDOM,
        num_blocks=num_blocks,
        layouts=layouts,
        order=tuple(range(len(layouts))),
        groups=tuple(group_of(shape, refs.get(shape.number, []), rank) for shape in geometry.groups),
        pieces={number: tuple(_piece(ref, layouts[ref.tensor]) for ref in mine) for number, mine in refs.items()},
    )


def group_of(shape: GroupShape, refs: list[Ref], rank: int) -> Group:
    """As a rank registers it."""
    part = shape.part_of_rank[rank]
    return Group(
        group=shape.number,
        kind=shape.kind,
        tokens_per_key=shape.tokens_per_key,
        refs=refs,
        window_keys=shape.window_keys,
        blocks_per_key=shape.blocks_per_key,
        parts=len(shape.parts),
        part=0 if part is None else part,
    )


def _piece(ref: Ref, layout: Layout) -> Piece:
    shape = (layout.num_blocks, ref.count, ref.length)
    return Piece(ref.tensor, ref.offset, shape, (layout.stride_bytes, ref.stride or ref.length, 1))


def _placed(
    geometry: Geometry, shapes: Iterable[GroupShape], rank: int, gaps: Gaps
) -> tuple[dict[int, list[Ref]], list[int]]:
    """Refs by group, and the page bytes of each tensor."""
    pages = [1] * geometry.tensors
    refs: dict[int, list[Ref]] = {}
    for shape in shapes:
        part = shape.part_of_rank[rank]
        cursors = [0] * geometry.tensors if geometry.overlaid else list(pages)
        refs[shape.number] = []
        for ref in shape.parts[0 if part is None else part]:
            offset = cursors[ref.tensor] + gaps.draw(0, 0, 64, 5)
            stride = ref.length + gaps.draw(0, 0, 32, 77) if ref.count > 1 else 0
            placed = Ref(ref.tensor, offset, ref.length, ref.count, stride)
            refs[shape.number].append(placed)
            cursors[ref.tensor] = placed.end
            pages[ref.tensor] = max(pages[ref.tensor], placed.end)
    return refs, [page + gaps.draw(0, 0, 16, 123) for page in pages]
