"""Order, bounded memory and bounded work of the queues, with tiny chunks, against plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.cache.policy.rowqueue import NOWHERE, RowQueues
from kvoffloadd.model import U32Array

ROWS, QUEUES, CHUNK = 50, 3, 4
some_rows = st.lists(st.integers(0, ROWS - 1), max_size=20, unique=True)
which = st.integers(0, QUEUES - 1)


class QueueMachine(RuleBasedStateMachine):
    """The model: a list per queue; `aside` has the queue of each row that is aside."""

    @initialize()
    def begin(self) -> None:
        self.queues = RowQueues(QUEUES, ROWS, CHUNK)
        self.model: list[list[int]] = [[] for _ in range(QUEUES)]
        self.aside: dict[int, int] = {}

    def known(self, rows: list[int]) -> list[int]:
        return [row for row in rows if row in self.aside or any(row in held for held in self.model)]

    def take_out(self, rows: list[int]) -> None:
        self.aside = {row: queue for row, queue in self.aside.items() if row not in rows}
        self.model = [[row for row in queue if row not in rows] for queue in self.model]

    @rule(queue=which, rows=some_rows)
    def append(self, queue: int, rows: list[int]) -> None:
        new = [row for row in rows if row not in self.known(rows)]
        self.queues.append(queue, np.array(new, np.uint32))
        self.model[queue] += new

    @rule(queue=which, rows=some_rows)
    def move(self, queue: int, rows: list[int]) -> None:
        known = self.known(rows)
        self.queues.move(queue, np.array(known, np.uint32))
        self.take_out(known)
        self.model[queue] += known

    @rule(rows=some_rows)
    def discard(self, rows: list[int]) -> None:
        known = self.known(rows)
        self.queues.discard(np.array(known, np.uint32))
        self.take_out(known)

    @rule(queue=which, rows=some_rows)
    def set_aside(self, queue: int, rows: list[int]) -> None:
        known = self.known(rows)
        self.queues.set_aside(queue, np.array(known, np.uint32))
        self.take_out(known)
        self.aside.update(dict.fromkeys(known, queue))

    @rule(rows=some_rows)
    def readmit(self, rows: list[int]) -> None:
        known = self.known(rows)
        back = [row for row in known if row in self.aside]
        assert self.queues.readmit(np.array(known, np.uint32)).tolist() == back
        for row in back:
            self.model[self.aside.pop(row)].append(row)

    @rule(block=st.integers(1, 9))
    def scan(self, block: int) -> None:
        for queue, expected in enumerate(self.model):
            blocks = [rows.tolist() for rows in self.queues.scan(queue, lambda: block)]
            assert all(0 < len(rows) <= block for rows in blocks)
            assert [row for rows in blocks for row in rows] == expected

    @invariant()
    def heads(self) -> None:
        if hasattr(self, "queues"):
            for queue, expected in enumerate(self.model):
                assert self.queues.size(queue) == len(expected)
                assert self.queues.head(queue) == (expected[0] if expected else NOWHERE)
                assert (self.queues.queues_of(np.array(expected, np.uint32)) == queue).all()
            assert self.queues.num_aside == len(self.aside)
            assert len(self.queues) == sum(map(len, self.model)) + len(self.aside)


TestQueueMachine = pytest.mark.slow(QueueMachine.TestCase)
TestQueueMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


class CountingQueues(RowQueues):
    """Counts the entries written."""

    written = 0

    def _write(self, chunk: int, at: int, rows: U32Array) -> None:
        self.written += len(rows)
        super()._write(chunk, at, rows)


def test_the_pool_stays_small_however_rows_move() -> None:
    rows, chunk = 20_000, 64
    queues = CountingQueues(2, rows, chunk)
    queues.append(0, np.arange(rows, dtype=np.uint32))
    random = np.random.default_rng(0)
    for _ in range(2_000):
        queues.move(int(random.integers(0, 2)), random.choice(rows, 50, replace=False).astype(np.uint32))
        assert queues.chunks_in_use <= 3 * (rows // chunk)
    # Work is bounded by what was asked for, not by what is held.
    moved = 2_000 * 50
    assert queues.written - rows - moved <= 4 * moved


def test_one_row_left_in_each_chunk_costs_no_room() -> None:
    rows, chunk = 4096, 16
    queues = RowQueues(1, rows, chunk)
    every = np.arange(rows, dtype=np.uint32)
    for _ in range(40):
        queues.append(0, every)
        queues.discard(every[every % chunk != 3])
        queues.move(0, every[every % chunk == 3])
        assert queues.chunks_in_use <= 2 * rows // chunk + 4
        queues.discard(every[every % chunk == 3])
        assert len(queues) == 0
