"""Where a rank's groups lie in its tensors: with random gaps, or as `kvoffloadd.layout` has planned it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvoffloadd.client import Group, Ref
from kvoffloadd.model import U8Array
from scripts.harness.groupshape import GroupShape, RefShape
from scripts.harness.places import Layout, Runs


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of all blocks in a tensor: u8 of this shape, blocks first, strides in bytes, from byte `offset` on."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of one block."""
        return math.prod(self.shape[1:])

    def over(self, rows: U8Array) -> U8Array:
        """A view of these rows, which are all of the tensor."""
        return as_strided(rows.reshape(-1)[self.offset :], self.shape, self.strides)

    def runs(self, rows: U8Array) -> Runs:
        """Returns the same view, and the runs that it consists of."""
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


def scattered(
    shapes: Sequence[GroupShape], num_tensors: int, rank: int, num_blocks: int, gaps: Gaps, *, overlaid: bool
) -> Arrangement:
    """The refs one behind the other, or with `overlaid` each group's from the beginning of its row. Offsets, gaps
    between runs and tails are this rank's own.
    """
    pages = [1] * num_tensors
    refs: dict[int, list[Ref]] = {}
    for shape in shapes:
        if (part := shape.part_of_rank[rank]) is not None:
            refs[shape.number] = _placed(shape.parts[part], [0] * num_tensors if overlaid else list(pages), pages, gaps)
    pages = [page + gaps.draw(0, 0, 16, 123) for page in pages]
    layouts = tuple(Layout(num_blocks, page, page + gaps.draw(0, 0, 64, 33)) for page in pages)
    return Arrangement(
        name=RANDOM,
        num_blocks=num_blocks,
        layouts=layouts,
        order=tuple(range(len(layouts))),
        groups=tuple(group_of(shape, refs.get(shape.number, []), rank) for shape in shapes),
        pieces={number: tuple(_piece(ref, layouts[ref.tensor]) for ref in own) for number, own in refs.items()},
    )


def group_of(shape: GroupShape, refs: list[Ref], rank: int) -> Group:
    """Makes the group as a rank registers it."""
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


def _placed(shapes: Sequence[RefShape], cursors: list[int], pages: list[int], gaps: Gaps) -> list[Ref]:
    """Refs of these shapes, from the `cursors` of their tensors on, which advance. `pages`, the page bytes of each
    tensor, grow to hold them.
    """
    refs = []
    for shape in shapes:
        offset = cursors[shape.tensor] + gaps.draw(0, 0, 64, 5)
        stride = shape.length + gaps.draw(0, 0, 32, 77) if shape.count > 1 else 0
        ref = Ref(shape.tensor, offset, shape.length, shape.count, stride)
        refs.append(ref)
        cursors[ref.tensor] = ref.end
        pages[ref.tensor] = max(pages[ref.tensor], ref.end)
    return refs
