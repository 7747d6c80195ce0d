"""Runs of numbers: none is given out twice, none is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.runs import Runs

steps = st.lists(st.tuples(st.booleans(), st.sampled_from([1, 2, 3, 8]), st.integers(0, 30)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(steps=steps, max_records=st.integers(1, 400))
def test_runs_do_not_overlap_and_room_is_what_it_says(steps: list[tuple[bool, int, int]], max_records: int) -> None:
    runs = Runs(max_records)
    held: list[tuple[int, int]] = []
    for takes, width, count in steps:
        if takes:
            wanted = min(count, runs.room(width))
            first = runs.allocate(width, wanted)
            assert len(first) == wanted
            held += [(width, number) for number in first.tolist()]
        else:
            gone = [run for run in held if run[0] == width][:count]
            held = [run for run in held if run not in gone]
            runs.free(width, np.array([number for _, number in gone], np.uint32))
        taken = [number for width, first in held for number in range(first, first + width)]
        assert len(set(taken)) == len(taken), "a number was given out twice"
        assert max(taken, default=-1) < runs.used <= max_records
    for width in (1, 2, 3, 8):
        runs.allocate(width, runs.room(width))
        assert runs.room(width) == 0
        assert runs.used <= max_records


def test_what_is_given_back_is_used_before_anything_new() -> None:
    runs = Runs(100)
    first = runs.allocate(3, 10)
    runs.free(3, first[2:6])
    assert runs.room(3) == 4 + 70 // 3
    assert runs.memory_bytes() == 16
    assert set(runs.allocate(3, 4).tolist()) == set(first[2:6].tolist())
    assert runs.used == 30
    assert runs.memory_bytes() == 0


def test_a_run_of_one_width_is_never_cut_for_another() -> None:
    runs = Runs(12)
    runs.free(4, runs.allocate(4, 3))
    assert runs.room(2) == 0
    assert runs.room(4) == 3


def test_the_callers_array_may_change_after_a_free() -> None:
    runs = Runs(10)
    first = runs.allocate(1, 4)
    runs.free(1, first)
    first[:] = 9
    assert sorted(runs.allocate(1, 4).tolist()) == [0, 1, 2, 3]


def test_numbers_of_runs() -> None:
    assert Runs.of(np.array([5, 0], np.uint32), 3).tolist() == [[5, 6, 7], [0, 1, 2]]
    assert Runs.of(np.array([0xFFFF_FFFE], np.uint32), 3).tolist() == [[0xFFFF_FFFE, 0xFFFF_FFFF, 1 << 32]]
