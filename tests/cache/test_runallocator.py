"""Runs of numbers: none is given out twice, none is lost, and what one width has left serves the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.cache.memory import runallocator as runs_module
from kvoffloadd.cache.memory.runallocator import BLOCK, RunAllocator, pieces, stretches
from kvoffloadd.model import U32Array

WIDTHS = (1, 2, 3, 8, 100, 1024)
widths = st.sampled_from(WIDTHS)


def take(runs: RunAllocator, width: int, count: int) -> U32Array:
    """Takes as many as there are."""
    return runs.allocate(width, runs.ready(width, count))


class RunsMachine(RuleBasedStateMachine):
    """The model: a set of the numbers that are given out. What is between them, block by block, can be had."""

    @initialize(blocks=st.integers(1, 4), short=st.integers(0, BLOCK - 1), listed=st.sampled_from([0, 64, 5000, 9**9]))
    def begin(self, blocks: int, short: int, listed: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(runs_module, "LISTED_MAX", listed)
        self.patch.setattr(runs_module, "BLOCKS_AT_ONCE", 2)
        self.runs = RunAllocator(blocks * BLOCK - short)
        self.held: list[tuple[int, int]] = []
        self.taken = np.zeros(self.runs.max_records, bool)

    def could_be(self, width: int) -> int:
        free = np.zeros(-(-len(self.taken) // BLOCK) * BLOCK, bool)
        free[: len(self.taken)] = ~self.taken
        count, length = 0, 0
        for at, one in enumerate(free.tolist()):
            length = length + 1 if one and at % BLOCK else int(one)
            if length == width:
                count, length = count + 1, 0
        return count

    @rule(width=widths, count=st.sampled_from([1, 3, 40, 5000]), back=st.sampled_from([0, 0, 2]))
    def allocate(self, width: int, count: int, back: int) -> None:
        """What is ready stays so, whatever is given back before it is taken."""
        possible = self.could_be(width)
        ready = self.runs.ready(width, count)
        assert ready == min(count, possible), "all that is free can be had, in whichever widths it came back"
        if back:
            self.free(WIDTHS[count % len(WIDTHS)], back, seed=count)
        first = self.runs.allocate(width, ready)
        numbers = RunAllocator.of(first, width)
        assert len(first) == ready
        assert (numbers[:, 0] // BLOCK == numbers[:, -1] // BLOCK).all()
        assert not self.taken[numbers].any(), "a number is given out that is another's"
        self.taken[numbers] = True
        assert self.taken.sum() == self.runs.taken, "a number is given out twice"
        self.held += [(width, number) for number in first.tolist()]

    @rule(width=widths, count=st.sampled_from([1, 5, 3000]), seed=st.integers(0, 1 << 16))
    def free(self, width: int, count: int, seed: int) -> None:
        of_width = [at for at, run in enumerate(self.held) if run[0] == width]
        gone = np.random.default_rng(seed).permutation(of_width)[:count].astype(int).tolist()
        first = np.array([self.held[at][1] for at in gone], np.uint32)
        out = set(gone)
        self.held = [run for at, run in enumerate(self.held) if at not in out]
        self.runs.free(width, first)
        self.taken[RunAllocator.of(first, width)] = False
        first[:] = 0  # the caller's array may change

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "runs"):
            return
        runs = self.runs
        assert runs.check() == []
        assert runs.check_blocks(0, runs.used) == []
        assert runs.taken == np.count_nonzero(self.taken)
        free = runs.in_map(0, runs.used)
        free[runs.listed()] = True
        assert (free == ~self.taken[: runs.used]).all()
        assert not self.taken[runs.used :].any()

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()


TestRuns = pytest.mark.slow(RunsMachine.TestCase)
TestRuns.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_what_is_given_back_is_used_before_anything_new() -> None:
    runs = RunAllocator(100 * BLOCK)
    first = take(runs, 3, 10)
    assert runs.used == BLOCK
    runs.free(3, first[2:6])
    assert set(take(runs, 3, 4).tolist()) == set(first[2:6].tolist())
    assert take(runs, 3, BLOCK // 3 - 10).max() < BLOCK == runs.used
    assert runs.memory_bytes() < 3 * BLOCK


def test_what_one_width_left_serves_any_other() -> None:
    runs = RunAllocator(2 * BLOCK)
    for width in (1, 1024, 7, 1000, 4096, 2, 1):
        first = take(runs, width, 1 << 20)
        assert len(first) == 2 * (BLOCK // width)
        runs.free(width, first)
    assert (runs.taken, runs.check()) == (0, [])


def test_neighbours_are_merged_and_what_lies_between_is_kept() -> None:
    runs = RunAllocator(BLOCK)
    singles = take(runs, 1, BLOCK)
    runs.free(1, np.delete(singles, 2000))
    assert runs.ready(1024, 9) == 3
    assert runs.ready(2000, 9) == 2
    assert runs.ready(2001, 9) == 1
    assert runs.ready(2096, 9) == 0
    runs.free(1, singles[2000:2001])
    assert runs.ready(4096, 9) == 1
    assert runs.ready(4097, 9) == 0


def test_what_is_looked_at_in_vain_is_bounded_and_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "BLOCKS_AT_ONCE", 1)
    monkeypatch.setattr(runs_module, "VAIN_MAX", 3)
    runs = RunAllocator(8 * BLOCK)
    pairs = take(runs, 1, 8 * BLOCK)
    runs.free(1, pairs[pairs % 2 == 0])
    last = pairs[pairs >= 7 * BLOCK]
    runs.free(1, last[last % 2 == 1])
    assert [runs.ready(2, 1) for _ in range(3)] == [0, 1, 1], "the next one goes on where the first gave up"
    assert runs.check_blocks(0, 8 * BLOCK) == []


def test_numbers_of_runs() -> None:
    assert RunAllocator.of(np.array([5, 0], np.uint32), 3).tolist() == [[5, 6, 7], [0, 1, 2]]
    assert RunAllocator.of(np.array([0xFFFF_FFFE], np.uint32), 3).tolist() == [[0xFFFF_FFFE, 0xFFFF_FFFF, 1 << 32]]


def test_stretches_and_the_pieces_in_them() -> None:
    free = np.array([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 1]], bool)
    begins, lengths, rows = stretches(free)
    assert (begins.tolist(), lengths.tolist(), rows.tolist()) == ([0, 3, 0, 5], [2, 3, 4, 1], [0, 0, 1, 1])
    first, counts = pieces(rows * 6 + begins, lengths, 2, 3)
    assert (first.tolist(), counts.tolist()) == ([0, 3, 6], [1, 1, 1, 0])
