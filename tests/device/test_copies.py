"""Coalescing, splitting and checking of copies: the same bytes, always."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.device.plan import Copies, coalesce, concatenate, make_copies, overlap, split
from kvoffloadd.errors import UsageError
from kvoffloadd.model import Direction
from tests.device.memory import same_array, u64

Run = tuple[int, int, int]
"""Source, destination, size."""


def bytes_of(copies: Copies) -> list[tuple[int, int]]:
    """(source, destination) of each byte, sorted."""
    runs = zip(copies.src.tolist(), copies.dst.tolist(), copies.size.tolist(), strict=True)
    return sorted((s + byte, d + byte) for s, d, n in runs for byte in range(n))


def made_of(runs: list[Run]) -> Copies:
    columns = list(zip(*runs, strict=True)) or [(), (), ()]
    return Copies(u64(columns[0]), u64(columns[1]), u64(columns[2]), len(runs))


@st.composite
def walks(draw: st.DrawFn) -> list[Run]:
    """Runs that often continue the one before, upwards or downwards, on one side or on both. They may overlap."""
    src, dst, size = 5000, 90_000, draw(st.integers(1, 5))
    runs = [(src, dst, size)]
    for _ in range(draw(st.integers(0, 12))):
        step, length = draw(st.integers(0, 5)), draw(st.integers(1, 5))
        gap_src, gap_dst = draw(st.sampled_from([(0, 0), (0, 0), (0, 3), (3, 0), (50, 50)]))
        if step < 3:
            src, dst = src + size + gap_src, dst + size + gap_dst
        else:
            src, dst = src - length - gap_src, dst - length - gap_dst
        size = length
        runs.append((src, dst, size))
    return runs


@pytest.mark.slow
@given(walks())
@settings(max_examples=300, deadline=None)
def test_coalesce_keeps_every_byte(runs: list[Run]) -> None:
    before = made_of(runs)
    after = Copies(*coalesce(before.src, before.dst, before.size), len(runs))
    assert bytes_of(after) == bytes_of(before)
    assert len(after) <= len(before)
    assert after.size.dtype == after.src.dtype == after.dst.dtype == np.uint64
    again = coalesce(after.src, after.dst, after.size)
    joined = [(s, d, n) for s, d, n in zip(*(a.tolist() for a in (after.src, after.dst, after.size)), strict=True)]
    for (s, d, _), (t, e, m) in itertools.pairwise(joined):
        assert not (t + m == s and e + m == d), "descending neighbours are left"
    assert len(again[0]) <= len(after)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], []),
        ([(10, 100, 5)], [(10, 100, 5)]),
        ([(10, 100, 5), (15, 105, 7)], [(10, 100, 12)]),
        ([(15, 105, 7), (10, 100, 5)], [(10, 100, 12)]),
        ([(10, 100, 5), (15, 106, 7)], [(10, 100, 5), (15, 106, 7)]),
        ([(10, 100, 5), (16, 105, 7)], [(10, 100, 5), (16, 105, 7)]),
        ([(30, 230, 10), (20, 220, 10), (10, 210, 10), (99, 0, 1)], [(10, 210, 30), (99, 0, 1)]),
        # pairs that ascend, in an order that descends: keys of two blocks, handed out from the end
        ([(60, 160, 10), (70, 170, 10), (40, 140, 10), (50, 150, 10)], [(40, 140, 40)]),
        # one side ascends, the other descends
        ([(10, 110, 10), (20, 100, 10)], [(10, 110, 10), (20, 100, 10)]),
    ],
)
def test_coalesce_by_example(runs: list[Run], expected: list[Run]) -> None:
    before = made_of(runs)
    src, dst, size = coalesce(before.src, before.dst, before.size)
    assert list(zip(src.tolist(), dst.tolist(), size.tolist(), strict=True)) == expected


def test_direction_says_which_side_is_written() -> None:
    memory, payload, size = u64([10, 20]), u64([100, 110]), u64([10, 10])
    store = make_copies(Direction.STORE, memory, payload, size, 2)
    load = make_copies(Direction.LOAD, memory, payload, size, 2)
    assert (store.src.tolist(), store.dst.tolist()) == ([10], [100])
    assert (load.src.tolist(), load.dst.tolist()) == ([100], [10])
    assert (len(load), load.total_bytes, load.descriptors) == (1, 20, 2)


def test_concatenate() -> None:
    one, other = made_of([(1, 2, 3)]), made_of([(4, 5, 6), (7, 8, 9)])
    both = concatenate([one, other])
    assert same_array(both.src, [1, 4, 7])
    assert same_array(both.dst, [2, 5, 8])
    assert same_array(both.size, [3, 6, 9])
    assert both.descriptors == 3
    nothing = concatenate([])
    assert (len(nothing), nothing.total_bytes, nothing.descriptors) == (0, 0, 0)
    assert nothing.size.dtype == np.uint64


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=10))
@settings(max_examples=500, deadline=None)
def test_overlap_finds_common_bytes(ranges: list[tuple[int, int]]) -> None:
    written = [at + byte for at, size in ranges for byte in range(size)]
    arguments = u64([at for at, _ in ranges]), u64([size for _, size in ranges])
    assert overlap(*arguments) == (len(set(written)) < len(written))


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 5) | st.integers(0, 200_000), max_size=12),
    st.integers(1, 5),
    st.sampled_from([1, 4096, 50_000]),
    st.sampled_from([30_000, 100_000, 1 << 30]),
    st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_split_keeps_every_byte_within_its_bounds(
    sizes: list[int], pieces: int, min_piece_bytes: int, chunk_bytes: int, chunk_descriptors: int
) -> None:
    src = np.cumsum([7, *(size + 3 for size in sizes)])[:-1].tolist()
    dst = [10_000_000 - 2 * at for at in src]
    copies = made_of(list(zip(src, dst, sizes, strict=True)))
    total = sum(sizes)
    chunks = split(copies, pieces, min_piece_bytes, chunk_bytes=chunk_bytes, chunk_descriptors=chunk_descriptors)
    # Each piece lies in one copy, at the same distance from the start on both sides, and all together fill the copies.
    runs = [
        run for chunk in chunks for run in zip(chunk.src.tolist(), chunk.dst.tolist(), chunk.size.tolist(), strict=True)
    ]
    filled: dict[int, list[tuple[int, int]]] = {}
    for s, d, n in runs:
        whole = int(np.searchsorted(src, s, side="right")) - 1
        assert s - src[whole] == d - dst[whole]
        filled.setdefault(whole, []).append((s - src[whole], n))
    for whole, size in enumerate(sizes):
        at = 0
        for begin, n in sorted(filled.get(whole, [])):
            assert begin == at
            assert begin % 16384 == 0, "cuts keep the alignment"
            at += n
        assert at == size
    even = -(-total // max(min(pieces, total // min_piece_bytes), -(-total // chunk_bytes), 1))
    assert all(0 < chunk.total_bytes <= even + 16384 for chunk in chunks)
    assert all(len(chunk) <= chunk_descriptors for chunk in chunks)
    assert sum(chunk.descriptors for chunk in chunks) == (copies.descriptors if total else 0)
    assert all(chunk.src.dtype == chunk.dst.dtype == chunk.size.dtype == np.uint64 for chunk in chunks)


def test_a_small_copy_stays_whole() -> None:
    copies = made_of([(0, 1 << 30, 1 << 20)])
    assert split(copies, 4, 1 << 20) == [copies]
    assert split(made_of([]), 4, 1) == []
    assert split(made_of([(1, 2, 0)]), 4, 1) == []


def test_a_giant_is_cut_for_its_followers_sake() -> None:
    chunks = split(made_of([(0, 1 << 40, 1 << 30)]), 2, 1 << 20)
    assert [chunk.total_bytes for chunk in chunks] == [64 << 20] * 16
    many = split(made_of([(at * 100, (1 << 40) + at * 100, 10) for at in range(5000)]), 1, 1 << 20)
    assert [len(chunk) for chunk in many] == [1024] * 4 + [904]


def test_pieces_are_about_equal() -> None:
    copies = made_of([(at << 20, (1 << 40) + (at << 20), 300_000) for at in range(10)])
    assert [round(chunk.total_bytes, -5) for chunk in split(copies, 3, 1)] == [1_000_000] * 3


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0), (-1, 1)])
def test_bounds_below_one_are_misuse(bounds: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        split(made_of([(0, 10, 5)]), *bounds)
