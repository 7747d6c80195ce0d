"""Copies rows that lie evenly apart on both sides; each run of them becomes one pitched copy. Pure, like `plan`.

A payload has a block's layers side by side, and an engine's layers in one allocation are evenly apart: a block of 64
layers becomes one pitched copy of 64 rows instead of 64 copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffloadd.device.plan import Copies
from kvoffloadd.model import BoolArray, I64Array, U64Array

ROWS_MIN = 8
"""A pitched copy takes the driver as long as several single copies."""

LAGS = 16
"""The most rows of a key in one layer: its blocks, if none are adjacent."""


@dataclass(frozen=True, slots=True, eq=False)
class Pitched:
    """Runs of rows, each one pitched copy: u64 arrays `(runs,)`. Row i of a run lies at `src + i * src_pitch`, goes to
    `dst + i * dst_pitch`, and has `width` bytes. `rest`: the copies in no run.
    """

    src: U64Array
    dst: U64Array
    width: U64Array
    height: U64Array
    src_pitch: U64Array
    dst_pitch: U64Array
    rest: Copies

    def __len__(self) -> int:
        return len(self.width)


def pitch(
    copies: Copies,
    src_ends: U64Array,
    dst_ends: U64Array,
    *,
    rows_min: int = ROWS_MIN,
    pitch_max_bytes: int,
) -> Pitched:
    """Returns the same bytes, with rows that lie evenly apart combined. Rows of a run are neighbours in the arrays, or
    every 2nd, up to every `LAGS`th: the blocks of a key come layer by layer.

    `src_ends`, `dst_ends`: u64, ascending: the ends of memories, which a pitched copy may not cross. `rows_min`: at
    least 2; shorter runs stay single copies. `pitch_max_bytes`: the largest distance that the driver accepts.
    """
    runs, rest = [], copies
    for lag in range(1, LAGS + 1):
        if lag > 1 and not _repeats(rest, lag):
            continue
        order = np.concatenate([np.arange(first, len(rest), lag) for first in range(lag)])
        found, single = _neighbours(_only(rest, order), src_ends, dst_ends, rows_min, pitch_max_bytes)
        runs.append(found)
        rest = _only(rest, np.sort(order[single]))
    src, dst, width, height, src_pitch, dst_pitch = (np.concatenate(column) for column in zip(*runs, strict=True))
    return Pitched(src, dst, width, height, src_pitch, dst_pitch, rest)


def _only(copies: Copies, rows: I64Array) -> Copies:
    descriptors = copies.descriptors * len(rows) // max(len(copies), 1)
    return Copies(copies.src[rows], copies.dst[rows], copies.size[rows], descriptors)


def _repeats(rows: Copies, lag: int) -> bool:
    """Returns whether many rows (a 32nd) are as far from the row `lag` before as from the row `lag` after, on both
    sides.
    """
    if len(rows) <= 2 * lag:
        return False
    even = np.ones(len(rows) - 2 * lag, bool)
    for side in (rows.src, rows.dst):
        step = side[lag:] - side[:-lag]
        even &= step[lag:] == step[:-lag]
    return 32 * int(np.count_nonzero(even)) >= len(rows)


def _neighbours(
    copies: Copies, src_ends: U64Array, dst_ends: U64Array, rows_min: int, pitch_max_bytes: int
) -> tuple[tuple[U64Array, ...], I64Array]:
    """Returns the runs of neighbours in the arrays, with the fields of `Pitched`, and the indices of the rows
    in none.
    """
    src, dst, size = copies.src, copies.dst, copies.size
    src_step, dst_step = src[1:] - src[:-1], dst[1:] - dst[:-1]  # modulo 2^64: steps back are larger than any pitch
    most = np.uint64(pitch_max_bytes)
    even = (size[1:] == size[:-1]) & (src_step >= size[1:]) & (dst_step >= size[1:])
    even &= (src_step <= most) & (dst_step <= most) & _within(src, src_ends) & _within(dst, dst_ends)
    begins = np.ones(len(even), bool)
    begins[1:] = ~(even[1:] & even[:-1] & (src_step[1:] == src_step[:-1]) & (dst_step[1:] == dst_step[:-1]))
    first, rows = _runs(np.flatnonzero(begins), even, rows_min)
    single = np.ones(len(size), bool)
    single[_each(first, rows)] = False
    found = src[first], dst[first], size[first], rows.astype(np.uint64), src_step[first], dst_step[first]
    return found, np.flatnonzero(single)


def _within(addresses: U64Array, ends: U64Array) -> BoolArray:
    """Returns, as bool (addresses - 1,), whether each address and the next lie in the same memory."""
    memory = np.searchsorted(ends, addresses, side="right")
    same: BoolArray = memory[1:] == memory[:-1]
    return same


def _runs(begins: I64Array, even: BoolArray, rows_min: int) -> tuple[I64Array, I64Array]:
    """Returns where runs begin, and their rows. `begins`: where equal steps begin, including the steps that are part of
    no run. No row is in two runs: where one ends with the row that the next begins with, the first has it.
    """
    steps = np.diff(begins, append=len(even))
    long = even[begins] & (steps + 1 >= rows_min)
    first, rows = begins[long], steps[long] + 1
    shared = np.zeros(len(first), bool)
    shared[1:] = first[1:] == first[:-1] + rows[:-1] - 1
    first, rows = first + shared, rows - shared
    enough = rows >= rows_min
    return first[enough], rows[enough]


def _each(first: I64Array, rows: I64Array) -> I64Array:
    """Returns the indices of all rows of all runs."""
    ends = np.cumsum(rows)
    return np.repeat(first - (ends - rows), rows) + np.arange(int(rows.sum()))
