"""The fair queue: whatever is queued, each flow gets its share, and nothing waits for ever."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.scheduling.fairqueue import NEWCOMERS_SHARE, FairQueue

MIB = 1 << 20
TURN, LEAST = 8 * MIB, 64 << 10

Item = tuple[int, int]
"""Of a flow, and which of its items."""


def take_all(queue: FairQueue[Item]) -> list[Item]:
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item)
    return taken


def flows_of(taken: list[Item]) -> list[int]:
    return [flow for flow, _ in taken]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(LEAST, TURN)), max_size=60), st.randoms())
def test_each_item_comes_once_in_order_of_its_flow(pushed: list[tuple[int, int]], chance: object) -> None:
    queue: FairQueue[Item] = FairQueue(TURN)
    items = [(flow, number) for number, (flow, _) in enumerate(pushed)]
    for item, (flow, cost) in zip(items, pushed, strict=True):
        queue.push([(flow, 1)], item, cost)
    gone = {item for item in items if chance.random() < 0.2}  # type: ignore[attr-defined]
    assert all(queue.remove(item) for item in gone)
    assert not any(queue.remove(item) for item in gone)
    left = [item for item in items if item not in gone]
    assert list(queue) == left
    assert len(queue) == len(left)
    taken = take_all(queue)
    assert sorted(taken) == sorted(left)
    for flow in range(6):
        assert [item for item in taken if item[0] == flow] == [item for item in left if item[0] == flow]
    assert len(queue) == 0


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 8]), min_size=2, max_size=6),
    st.lists(st.lists(st.integers(LEAST, TURN), min_size=1, max_size=8), min_size=6, max_size=6),
)
def test_flows_that_wait_all_the_time_share_as_they_should(divisors: list[int], costs: list[list[int]]) -> None:
    """The theorem of start-time fair queueing: two flows never differ by more than a turn of each."""
    queue: FairQueue[Item] = FairQueue(TURN)
    turns = 200
    for flow, divisor in enumerate(divisors):
        for number in range(turns):
            queue.push([(flow, divisor)], (flow, number), costs[flow][number % len(costs[flow])])
    served: Counter[int] = Counter()
    for _ in range(turns):
        item = queue.take()
        assert item is not None
        flow, number = item
        served[flow] += costs[flow][number % len(costs[flow])] * divisors[flow]
        for one, other in combinations(range(len(divisors)), 2):
            late = TURN * (divisors[one] + divisors[other])  # a less urgent flow begins later by this
            most = late + max(costs[one]) * divisors[one] + max(costs[other]) * divisors[other]
            assert abs(served[one] - served[other]) <= most


@settings(deadline=None)
@given(
    st.lists(st.integers(LEAST, TURN), min_size=1, max_size=20),
    st.integers(1, 8),
    st.integers(0, 20),
    st.integers(LEAST, TURN),
)
def test_newcomers_without_end_keep_nobody_from_its_turn(costs: list[int], others: int, had: int, own: int) -> None:
    """A flow that waits has its turn before all the others together have had a bounded number of bytes."""
    queue: FairQueue[Item] = FairQueue(TURN)
    waiting, number = (-1, -1), others
    for turn in range(had):  # it may have been served, and owe for it
        queue.push([(-1, 1)], (-1, turn), own)
    for flow in range(others):
        queue.push([(flow, 1)], (flow, 0), costs[flow % len(costs)])
    for _ in range(had):
        queue.take()
    for turn in range(had):
        queue.remove((-1, turn))
    queue.push([(-1, 1)], waiting, own)
    passed = 0
    while (item := queue.take()) != waiting:
        assert item is not None
        cost = costs[item[0] % len(costs)]
        passed += cost
        assert passed <= 2 * (NEWCOMERS_SHARE + 1) * (others + 2) * (TURN + max(costs)), "it waits for ever"
        number += 1
        queue.push([(number, 1)], (number, 0), costs[number % len(costs)])


def test_who_comes_late_is_next() -> None:
    queue: FairQueue[Item] = FairQueue(TURN)
    for number in range(512):
        queue.push([(1, 1)], (1, number), TURN)
    for _ in range(100):
        queue.take()
    for number in range(4):
        queue.push([(2, 1)], (2, number), MIB)
    assert flows_of(take_all(queue))[:8].count(2) == 4


def test_who_comes_back_has_not_forgotten_what_it_had() -> None:
    """One that queues its next item only when the last one was taken gets its share, and no more."""
    queue: FairQueue[Item] = FairQueue(TURN)
    for number in range(100):
        queue.push([(1, 1)], (1, number), MIB)
    queue.push([(2, 1)], (2, 0), 8 * MIB)
    taken = []
    for number in range(1, 60):
        item = queue.take()
        assert item is not None
        taken.append(item)
        if item[0] == 2:
            queue.push([(2, 1)], (2, number), 8 * MIB)
    assert flows_of(taken[:54]).count(2) == 6, "an eighth of the items, of eight times the bytes"


def test_one_level_after_the_other() -> None:
    """A user with 256 engines has as much as one with a single engine."""
    queue: FairQueue[Item] = FairQueue(TURN)
    for engine in range(256):
        for number in range(4):
            queue.push([(1001, 1), (engine, 1)], (engine, number), MIB)
    for number in range(100):
        queue.push([(1002, 1), (256, 1)], (256, number), MIB)
    first = flows_of([item for item in (queue.take() for _ in range(200)) if item])
    assert first.count(256) == 100
    assert len(set(first)) == 101, "and each of the engines has a turn before one has two"


def test_the_less_urgent_has_a_share_and_does_not_begin() -> None:
    queue: FairQueue[Item] = FairQueue(TURN)
    for flow, divisor in ((1, 8), (2, 64), (0, 1)):
        for number in range(100):
            queue.push([(flow, divisor)], (flow, number), TURN)
    order = flows_of(take_all(queue))
    assert order[:7] == [0] * 7
    assert Counter(order[:73])[0] in (63, 64, 65)
    assert Counter(order[:73])[1] in (7, 8, 9)
    assert 2 in order[:80]


def test_what_waits_in_two_flows_goes_with_the_first() -> None:
    queue: FairQueue[Item] = FairQueue(TURN)
    for number in range(10):
        queue.push([(1, 1)], (1, number), TURN)
    queue.push([(2, 1)], (1, 9), TURN)
    queue.push([(2, 1)], (1, 9), TURN)  # nothing new
    assert len(queue) == 10
    taken = take_all(queue)
    assert sorted(taken) == [(1, number) for number in range(10)]
    assert taken.index((1, 9)) < 2
    queue.push([(1, 1)], (1, 0), TURN)
    queue.push([(2, 1)], (1, 0), TURN)
    assert queue.remove((1, 0))
    assert queue.take() is None


def test_flows_that_ended_leave_nothing_behind() -> None:
    queue: FairQueue[Item] = FairQueue(TURN)
    for number in range(10):
        queue.push([(0, 1)], (0, number), TURN)
    for flow in range(1, 10_000):
        queue.push([(flow, 1)], (flow, 0), MIB)
        if flow % 2:
            assert queue.remove((flow, 0))
            queue.push([(flow, 1)], (flow, 0), MIB)
        item = queue.take()
        if item is not None and item[0] == 0:
            queue.push([(0, 1)], item, TURN)
    root = queue._root  # what it keeps can't be seen in any other way
    assert len(root.flows) < 300
    assert len(root.heap) < 600
