"""Runs of rows: the same bytes as the copies they are made of, none beyond the end of a memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies, GroupPlan, Tensor, make_copies
from kvoffloadd.model import Direction, Ref, U64Array

NOWHERE = np.zeros(0, np.uint64)
PITCH_MAX = 1 << 20
Row = tuple[int, int, int]


def copies_of(rows: list[Row]) -> Copies:
    src, dst, size = np.array(rows, np.uint64).reshape(-1, 3).T
    return Copies(src, dst, size, len(rows))


def rows_of(runs: Pitched) -> list[Row]:
    """What the driver would copy."""
    found = list(zip(runs.rest.src.tolist(), runs.rest.dst.tolist(), runs.rest.size.tolist(), strict=True))
    columns = (runs.src, runs.dst, runs.width, runs.height, runs.src_pitch, runs.dst_pitch)
    for src, dst, width, height, src_pitch, dst_pitch in zip(*(one.tolist() for one in columns), strict=True):
        found += [(src + at * src_pitch, dst + at * dst_pitch, width) for at in range(height)]
    return sorted(found)


def run(src: int, dst: int, width: int, height: int, src_pitch: int, dst_pitch: int) -> list[Row]:
    return [(src + at * src_pitch, dst + at * dst_pitch, width) for at in range(height)]


@st.composite
def many_rows(draw: st.DrawFn) -> list[Row]:
    """Runs and single rows one after the other; some go on where the last one ends, or go back."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(0, 6))):
        src, dst = (draw(st.integers(0, 1 << 16)) for _ in range(2))
        goes_on = draw(st.booleans())
        if rows and goes_on:
            src, dst = rows[-1][:2]
            rows.pop()  # its last row is the first of the next run
        pitches = [draw(st.integers(-300, 3000)) for _ in range(2)]
        rows += run(
            src + (1 << 20), dst + (1 << 20), draw(st.sampled_from([64, 200])), draw(st.integers(1, 9)), *pitches
        )
    return rows


@given(many_rows(), st.lists(st.integers(1 << 20, 1 << 21), max_size=4), st.integers(2, 5))
def test_the_same_rows_in_runs_that_a_driver_takes(rows: list[Row], ends: list[int], rows_min: int) -> None:
    sorted_ends = np.array(sorted(ends), np.uint64)
    runs = pitch(copies_of(rows), sorted_ends, NOWHERE, rows_min=rows_min, pitch_max_bytes=2000)
    assert rows_of(runs) == sorted(rows)
    assert (runs.height >= rows_min).all()
    for pitches in (runs.src_pitch, runs.dst_pitch):
        assert ((pitches >= runs.width) & (pitches <= 2000)).all()
    last = runs.src + (runs.height - np.uint64(1)) * runs.src_pitch
    for end in ends:
        assert not ((runs.src < end) & (last >= end)).any(), "a run reaches over the end of a memory"


PITCHES = st.sampled_from([0, 63, 64, 65, 5000, (1 << 31) - 1, 1 << 31, 1 << 33, -64, -5000])


@st.composite
def interleaved_rows(draw: st.DrawFn) -> list[Row]:
    """Runs row by row, one after the other in turn, as the blocks of a key come; some lack rows, some come twice."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 3))):
        width, height = draw(st.sampled_from([1, 64])), draw(st.integers(8, 24))
        bases = [
            [draw(st.integers(0, 1 << 40)) for _ in range(2)] for _ in range(draw(st.sampled_from([1, 2, 5, 16, 17])))
        ]
        pitches = [draw(PITCHES) for _ in range(2)]
        shift = draw(st.sampled_from([0, 1 << 56]))  # no memory lies where addresses begin anew
        missing = draw(st.sets(st.integers(0, len(bases) * height - 1), max_size=3))
        found = [
            ((src + shift + at * pitches[0]) % (1 << 64), (dst + shift + at * pitches[1]) % (1 << 64), width)
            for at in range(height)
            for src, dst in bases
        ]
        rows += [row for number, row in enumerate(found) if number not in missing]
        rows += rows[: draw(st.integers(0, 2)) * len(bases)]
    return rows


@given(interleaved_rows(), st.lists(st.integers(0, 1 << 12), max_size=3))
def test_the_same_rows_where_runs_lie_among_each_other(rows: list[Row], at: list[int]) -> None:
    ends = [sorted({min(rows[number % len(rows)][side] + 64, (1 << 64) - 1) for number in at}) for side in (0, 1)]
    most = (1 << 31) - 1
    found = pitch(copies_of(rows), *(np.array(sorted_ends, np.uint64) for sorted_ends in ends), pitch_max_bytes=most)
    assert rows_of(found) == sorted(rows)
    for start, pitches, sorted_ends in zip(
        (found.src, found.dst), (found.src_pitch, found.dst_pitch), ends, strict=True
    ):
        assert ((pitches >= found.width) & (pitches <= most)).all()
        for first, apart, height in zip(start.tolist(), pitches.tolist(), found.height.tolist(), strict=True):
            last = first + (height - 1) * apart
            assert last < 1 << 64, "a run goes on where addresses begin"
            assert not any(first < end <= last for end in sorted_ends), "a run reaches over the end of a memory"


def test_a_run_ends_with_a_memory_on_either_side() -> None:
    rows = copies_of(run(1000, 50_000, 64, 32, 100, 64))
    ends = np.array([1000 + 100 * 12], np.uint64)
    halves = pitch(rows, ends, NOWHERE, pitch_max_bytes=PITCH_MAX)
    assert (halves.height.tolist(), len(halves.rest)) == ([12, 20], 0)
    behind = pitch(rows, NOWHERE, np.array([50_000 + 64 * 30], np.uint64), pitch_max_bytes=PITCH_MAX)
    assert (behind.height.tolist(), len(behind.rest)) == ([30], 2)  # two rows are no run


def test_a_row_between_two_runs_is_in_one_of_them() -> None:
    first = run(0, 0, 10, 9, 20, 10)
    second = run(*first[-1][:2], 10, 12, 50, 10)[1:]
    runs = pitch(copies_of(first + second), NOWHERE, NOWHERE, pitch_max_bytes=PITCH_MAX)
    assert (runs.height.tolist(), len(runs.rest)) == ([9, 11], 0)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_rows_stay_as_they_are(count: int) -> None:
    rows = run(0, 0, 10, count, 20, 10)
    runs = pitch(copies_of(rows), NOWHERE, NOWHERE, pitch_max_bytes=PITCH_MAX)
    assert (len(runs), rows_of(runs), runs.rest.descriptors) == (0, rows, count)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_block_of_many_layers_is_one_run(direction: Direction) -> None:
    """80 layers in one allocation, 8 KiB of each a block: one pitched copy a block instead of 80."""
    layers, row, blocks = 80, 8192, 1000
    tensors = [Tensor((1 << 40) + layer * blocks * row, blocks, row, row) for layer in range(layers)]
    plan = GroupPlan.build(tensors, [Ref(layer, 0, row) for layer in range(layers)], 1)
    ids = np.random.default_rng(1).permutation(blocks)[:50].astype(np.uint32)
    slots: U64Array = np.arange(50, dtype=np.uint64) * np.uint64(plan.payload_bytes) + np.uint64(1 << 44)
    copies = make_copies(direction, *plan.expand(ids.reshape(-1, 1), slots), layers * 50)
    runs = pitch(copies, NOWHERE, NOWHERE, pitch_max_bytes=1 << 31)
    assert (runs.height.tolist(), len(runs.rest)) == ([layers] * 50, 0)
    apart = {"memory": blocks * row, "payload": row}
    src, dst = ("memory", "payload") if direction is Direction.STORE else ("payload", "memory")
    assert set(runs.src_pitch.tolist()) == {apart[src]}
    assert set(runs.dst_pitch.tolist()) == {apart[dst]}


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("blocks_per_key", [2, 5, 16])
def test_the_blocks_of_a_key_are_runs_each(direction: Direction, blocks_per_key: int) -> None:
    """A payload has all blocks of a layer, and then those of the next one. Blocks side by side are one row."""
    layers, row, blocks, keys = 40, 4096, 4000, 12
    tensors = [Tensor((1 << 40) + layer * blocks * row, blocks, row, row) for layer in range(layers)]
    plan = GroupPlan.build(tensors, [Ref(layer, 0, row) for layer in range(layers)], blocks_per_key)
    ids = (2 * np.random.default_rng(1).permutation(blocks // 2)[: keys * blocks_per_key]).astype(np.uint32)
    ids = ids.reshape(keys, blocks_per_key)
    ids[0] = 1 + 2 * np.arange(blocks_per_key)  # apart, as all, but evenly
    ids[1] = 1001 + np.arange(blocks_per_key)  # side by side: one row a layer
    ids[2, :2] = 3001, 3002
    slots: U64Array = np.arange(keys, dtype=np.uint64) * np.uint64(plan.payload_bytes) + np.uint64(1 << 44)
    copies = make_copies(direction, *plan.expand(ids, slots), layers * keys * blocks_per_key)
    runs = pitch(copies, NOWHERE, NOWHERE, pitch_max_bytes=1 << 31)
    assert rows_of(runs) == rows_of(pitch(copies, NOWHERE, NOWHERE, pitch_max_bytes=0))
    rows = runs.height.sum() + len(runs.rest)
    assert (rows, len(runs.rest)) == (len(copies), 0)
    assert len(runs) <= keys * blocks_per_key + layers, "far fewer than rows"


def test_rows_without_a_pattern_stay_as_they_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    src, dst = (rng.permutation(5000).astype(np.uint64) * np.uint64(100) for _ in range(2))
    runs = pitch(Copies(src, dst, np.full(5000, 90, np.uint64), 5000), NOWHERE, NOWHERE, pitch_max_bytes=1 << 31)
    assert (len(runs), runs.rest.src.tolist(), runs.rest.dst.tolist()) == (0, src.tolist(), dst.tolist())
    assert runs.rest.descriptors == 5000
