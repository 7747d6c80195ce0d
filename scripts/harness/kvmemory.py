"""One rank's KV cache, in shared memory or a GPU's, and a private copy of what every byte of it must be.

The copy (`expected`) covers rows whole: what lies between pieces and between rows, and blocks that were not asked for.
So one comparison finds both bytes that are wrong and bytes that should not have been touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvoffloadd.client import KvCache, Ready
from kvoffloadd.model import NO_BLOCK, BoolArray, I64Array, U8Array
from scripts.harness.arrangement import Arrangement, Piece
from scripts.harness.freeblocks import FreeBlocks
from scripts.harness.geometry import Geometry
from scripts.harness.groupshape import GroupShape
from scripts.harness.places import HostPlace, Line, Place, Runs

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
    """A tensor's rows with all their padding: u8 (blocks, stride), real (as last looked at) and expected."""

    real: U8Array
    expected: U8Array

    def same(self, runs: list[tuple[int, int]]) -> bool:
        """Whether these rows (the first, and how many) hold what is expected. As fast as memory is."""
        stride = self.real.shape[1]
        real, expected = self.real.ctypes.data, self.expected.ctypes.data
        return not any(_memcmp(real + at * stride, expected + at * stride, count * stride) for at, count in runs)


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """A piece's bytes: real, and u8 (blocks, ...) expected; `start` and `end` in what a key holds."""

    real: Runs
    expected: U8Array
    start: int
    end: int


class KvMemory:
    """The tensors of one rank, whose blocks are dealt out with `take` and come back with `give`.

    `name`: of shared memory, as a process's mappings show it. `line`: what writes late, and where the memory lies;
    None: nothing does, and in shared memory.

    Raises UsageError, DeviceError or OSError if the memory can't be had.
    """

    def __init__(
        self,
        geometry: Geometry,
        arrangement: Arrangement,
        rng: np.random.Generator,
        name: str,
        *,
        line: Line | None = None,
    ) -> None:
        self.geometry = geometry
        self.layout = arrangement.name
        self.num_blocks = arrangement.num_blocks
        self.line = line
        if line is None:
            self._place: Place = HostPlace(arrangement.layouts, name, together=bool(rng.integers(0, 2)))
        else:
            self._place = line.place(arrangement.layouts, rng, name)
        self._rows = [_noisy(real, rng) for real in self._place.rows]
        self._place.publish()
        shapes = {group.number: group for group in geometry.groups}
        self._runs = {number: self._runs_of(shapes[number], pieces) for number, pieces in arrangement.pieces.items()}
        tensors = [self._place.tensors[at] for at in arrangement.order]
        self.caches = KvCache(tensors, arrangement.groups, [] if line is None else [line.timeline])
        self.free = FreeBlocks(self.num_blocks, rng)
        self._busy = np.zeros(self.num_blocks, bool)

    def _runs_of(self, shape: GroupShape, pieces: Iterable[Piece]) -> list[_Runs]:
        runs, start = [], 0
        for piece in pieces:
            end = start + shape.blocks_per_key * piece.block_bytes
            row = self._rows[piece.tensor]
            runs.append(_Runs(piece.runs(row.real), piece.over(row.expected), start, end))
            start = end
        return runs

    # --- contents ----------------------------------------------------------------------------------

    def fill(self, group: int, blocks: I64Array, contents: U8Array, *, late: bool = False) -> None:
        """Compute, as an engine would: u8 (keys, payload) into blocks (keys, blocks_per_key).

        `late`: behind what the line has to do; a job that needs the blocks waits for `ready`.
        """
        for runs, ids, values in self._pieces(group, blocks, contents):
            self._place.write(runs.real, ids, values, late=late)
            runs.expected[ids] = values

    def spoil(self, group: int, blocks: I64Array, value: int) -> None:
        """Set every byte of these blocks' pieces, late: their earlier user is not done with them yet."""
        ids = blocks[blocks != NO_BLOCK]
        for runs in self._runs[group]:
            self._place.write(runs.real, ids, np.full((len(ids), *runs.expected.shape[1:]), value, np.uint8), late=True)
            runs.expected[ids] = value

    def ready(self) -> Ready | None:
        """Returns when all late writes are done; None: they are."""
        return None if self.line is None else self.line.point()

    def expect(self, group: int, blocks: I64Array, contents: U8Array) -> None:
        """A load has filled these blocks with these payloads. Blocks that are NO_BLOCK were not wanted."""
        for runs, ids, values in self._pieces(group, blocks, contents):
            runs.expected[ids] = values

    def forgive(self, group: int, blocks: I64Array) -> None:
        """A load that ended early may have written anything into these blocks' pieces."""
        ids = blocks[blocks != NO_BLOCK]
        self._place.fetch(_consecutive(np.unique(ids)))
        for runs in self._runs[group]:
            runs.expected[ids] = runs.real.view[ids]

    def _pieces(self, group: int, blocks: I64Array, contents: U8Array) -> list[tuple[_Runs, I64Array, U8Array]]:
        flat = blocks.reshape(-1)
        wanted = flat != NO_BLOCK
        pieces = []
        for runs in self._runs[group]:
            values = contents[:, runs.start : runs.end].reshape(len(flat), *runs.expected.shape[1:])
            pieces.append((runs, flat[wanted], values[wanted]))
        return pieces

    # --- comparing ---------------------------------------------------------------------------------

    def lend(self, blocks: I64Array, lent: bool = True) -> None:
        """A load writes into these blocks until it has ended (`lent` False): they can't be compared meanwhile."""
        self._busy[blocks] = lent

    def compare(self, blocks: I64Array) -> Wrong | None:
        """What is wrong in these blocks and next to them; None: nothing. What was wrong is expected from then on."""
        near = np.unique(np.concatenate([blocks - 1, blocks, blocks + 1]))
        near = near[(near >= 0) & (near < self.num_blocks)]
        return self._compared(near[~self._busy[near]], np.isin(near[~self._busy[near]], blocks))

    def compare_all(self) -> Wrong | None:
        """Compares all blocks that are not lent, as `compare` does; whatever is wrong there is stray."""
        rows = np.flatnonzero(~self._busy)
        return self._compared(rows, np.zeros(len(rows), bool))

    def _compared(self, rows: I64Array, wanted: BoolArray) -> Wrong | None:
        found: Wrong | None = None
        runs = _consecutive(rows)
        self._place.fetch(runs)
        for tensor, row in enumerate(self._rows):
            if row.same(runs):
                continue
            real, expected = row.real[rows], row.expected[rows]
            differs = real != expected
            wrong, stray = int(differs.sum()), int(differs[~wanted].sum())
            at, byte = (int(index[0]) for index in np.nonzero(differs))
            where = (
                f"first tensor {tensor} block {rows[at]} byte {byte} of {row.real.shape[1]}: "
                f"{real[at, byte]:#04x} in place of {expected[at, byte]:#04x}"
            )
            row.expected[rows] = real
            if found is None:
                found = Wrong(where, wrong, stray)
            else:
                found = Wrong(found.where, found.wrong_bytes + wrong, found.stray_bytes + stray)
        return found


def _consecutive(rows: I64Array) -> list[tuple[int, int]]:
    """Ascending rows as runs of neighbours: the first, and how many."""
    breaks = np.flatnonzero(rows[1:] != rows[:-1] + 1) + 1
    return [(int(run[0]), len(run)) for run in np.split(rows, breaks) if len(run)]


def _noisy(real: U8Array, rng: np.random.Generator) -> _Row:
    real[:] = np.frombuffer(rng.bytes(real.size), np.uint8).reshape(real.shape)
    return _Row(real, real.copy())
