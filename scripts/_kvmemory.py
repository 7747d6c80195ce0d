"""One rank's KV cache in shared memory, and a private copy of what every byte of it must be.

The copy (`expected`) covers rows whole: what lies between refs and between rows, and blocks that nobody asked for. So
one comparison finds both bytes that are wrong and bytes that should not have been touched.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvoffloadd.client import Group, KvCache, Ref, SharedTensor
from kvoffloadd.model import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _geometry import Geometry, GroupShape

    from kvoffloadd.model import I64Array, U8Array


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Wrong:
    """Bytes that are not what they must be; `stray_bytes` of them lie in blocks that nothing was asked to write."""

    where: str
    wrong_bytes: int
    stray_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A tensor's rows with all their padding: u8 (blocks, stride), real and expected."""

    real: U8Array
    expected: U8Array

    def same(self, runs: list[tuple[int, int]]) -> bool:
        """Whether these rows (the first, and how many) hold what is expected. As fast as memory is."""
        stride = self.real.shape[1]
        real, expected = self.real.ctypes.data, self.expected.ctypes.data
        return not any(_memcmp(real + at * stride, expected + at * stride, count * stride) for at, count in runs)


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """A ref's bytes: u8 (blocks, count, length), real and expected; `start` and `end` in the payload."""

    real: U8Array
    expected: U8Array
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Bytes to leave between things: one of some sizes, or always none."""

    rng: np.random.Generator
    padded: bool

    def draw(self, *sizes: int) -> int:
        """One of them."""
        return sizes[int(self.rng.integers(0, len(sizes)))] if self.padded else 0


class KvMemory:
    """The tensors of one rank, whose `num_blocks` blocks are dealt out with `take` and come back with `give`.

    `padded`: refs, runs and rows lie apart by random gaps. `name`: of the memory, as a process's mappings show it.

    Raises UsageError or OSError if the memory can't be had.
    """

    def __init__(
        self,
        geometry: Geometry,
        rank: int,
        num_blocks: int,
        rng: np.random.Generator,
        name: str,
        *,
        padded: bool = True,
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._shapes = {group.number: group for group in geometry.groups if group.part_of_rank[rank] is not None}
        gaps = Gaps(rng, padded)
        refs, pages = _placed(geometry, self._shapes.values(), rank, gaps)
        self._rows, tensors = _allocated(pages, num_blocks, rng, gaps, name)
        self._runs = {number: self._runs_of(shape, refs[number]) for number, shape in self._shapes.items()}
        self.caches = KvCache(tensors, [_group(shape, refs.get(shape.number, []), rank) for shape in geometry.groups])
        self._free = rng.permutation(num_blocks)
        self._num_free = num_blocks
        self._busy = np.zeros(num_blocks, bool)

    def _runs_of(self, shape: GroupShape, refs: list[Ref]) -> list[_Runs]:
        runs, start = [], 0
        for ref in refs:
            end = start + shape.blocks_per_key * ref.payload_bytes
            row = self._rows[ref.tensor]
            runs.append(_Runs(_view(row.real, ref), _view(row.expected, ref), start, end))
            start = end
        return runs

    # --- blocks ------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return self._num_free

    def take(self, count: int) -> I64Array:
        """Blocks that nobody uses; the caller has made sure of `num_free`."""
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give(self, blocks: I64Array) -> None:
        """They are free again; what they hold stays, and is still compared."""
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)

    # --- contents ----------------------------------------------------------------------------------

    def fill(self, group: int, blocks: I64Array, contents: U8Array) -> None:
        """Compute, as an engine would: u8 (keys, payload) into blocks (keys, blocks_per_key)."""
        for runs, ids, values in self._pieces(group, blocks, contents):
            runs.real[ids] = values
            runs.expected[ids] = values

    def expect(self, group: int, blocks: I64Array, contents: U8Array) -> None:
        """A load has filled these blocks with these payloads. Blocks that are NO_BLOCK were not wanted."""
        for runs, ids, values in self._pieces(group, blocks, contents):
            runs.expected[ids] = values

    def forgive(self, group: int, blocks: I64Array) -> None:
        """A load that ended early may have written anything into these blocks' refs."""
        ids = blocks[blocks != NO_BLOCK]
        for runs in self._runs[group]:
            runs.expected[ids] = runs.real[ids]

    def _pieces(self, group: int, blocks: I64Array, contents: U8Array) -> list[tuple[_Runs, I64Array, U8Array]]:
        flat = blocks.reshape(-1)
        wanted = flat != NO_BLOCK
        pieces = []
        for runs in self._runs[group]:
            values = contents[:, runs.start : runs.end].reshape(len(flat), *runs.real.shape[1:])
            pieces.append((runs, flat[wanted], values[wanted]))
        return pieces

    # --- comparing ---------------------------------------------------------------------------------

    def lend(self, blocks: I64Array, lent: bool = True) -> None:
        """A load writes into these blocks until it has ended (`lent` False): they can't be compared meanwhile."""
        self._busy[blocks] = lent

    def compare(self, blocks: I64Array) -> Wrong | None:
        """What is wrong in these blocks and beside them; None: nothing. What was wrong is expected from then on."""
        near = np.unique(np.concatenate([blocks - 1, blocks, blocks + 1]))
        near = near[(near >= 0) & (near < self.num_blocks)]
        return self._compared(near[~self._busy[near]], np.isin(near[~self._busy[near]], blocks))

    def compare_all(self) -> Wrong | None:
        """As `compare`, all blocks that are not lent; whatever is wrong there is stray."""
        rows = np.flatnonzero(~self._busy)
        return self._compared(rows, np.zeros(len(rows), bool))

    def _compared(self, rows: I64Array, asked: np.ndarray) -> Wrong | None:
        found: Wrong | None = None
        breaks = np.flatnonzero(rows[1:] != rows[:-1] + 1) + 1
        runs = [(int(some[0]), len(some)) for some in np.split(rows, breaks) if len(some)]
        for tensor, row in enumerate(self._rows):
            if row.same(runs):
                continue
            real, expected = row.real[rows], row.expected[rows]
            differs = real != expected
            wrong, stray = int(differs.sum()), int(differs[~asked].sum())
            at, byte = (int(index[0]) for index in np.nonzero(differs))
            where = (
                f"tensor {tensor} block {rows[at]} byte {byte} of {row.real.shape[1]}: "
                f"{real[at, byte]:#04x} in place of {expected[at, byte]:#04x}"
            )
            row.expected[rows] = real
            if found is None:
                found = Wrong(where, wrong, stray)
            else:
                found = Wrong(found.where, found.wrong_bytes + wrong, found.stray_bytes + stray)
        return found


def _group(shape: GroupShape, refs: list[Ref], rank: int) -> Group:
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


def _placed(
    geometry: Geometry, shapes: Iterable[GroupShape], rank: int, gaps: Gaps
) -> tuple[dict[int, list[Ref]], list[int]]:
    """Refs by group, and the page bytes of each tensor. Offsets, gaps between runs and tails are this rank's own."""
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


def _allocated(
    pages: list[int], num_blocks: int, rng: np.random.Generator, gaps: Gaps, name: str
) -> tuple[list[_Row], list[SharedTensor]]:
    """Tensors in one memfd or each in its own, rows further apart than they are long; filled with noise."""
    strides = [page + gaps.draw(0, 0, 64, 33) for page in pages]
    sizes = [stride * num_blocks for stride in strides]
    together = bool(rng.integers(0, 2))
    pools = [sum(sizes)] if together else sizes
    memory = [SharedTensor.allocate(1, size, name=name) for size in pools]
    flats = [tensor.array.reshape(-1) for tensor in memory]
    rows, tensors, offset = [], [], 0
    for at, (page, stride, size) in enumerate(zip(pages, strides, sizes, strict=True)):
        flat = flats[0][offset : offset + size] if together else flats[at]
        flat[:] = np.frombuffer(rng.bytes(size), np.uint8)
        real = flat.reshape(num_blocks, stride)
        rows.append(_Row(real, real.copy()))
        tensors.append(SharedTensor.adopt(real[:, :page]))
        offset += size
    return rows, tensors


def _view(rows: U8Array, ref: Ref) -> U8Array:
    """u8 (blocks, count, length) over the same memory."""
    begin = rows[:, ref.offset :]
    shape = (rows.shape[0], ref.count, ref.length)
    return as_strided(begin, shape, (rows.strides[0], ref.stride or ref.length, 1))
