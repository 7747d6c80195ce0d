"""The exact order, against an OrderedDict."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from kvoffloadd.cache.policy.lru import Lru
from kvoffloadd.model import BoolArray, U32Array


@pytest.mark.parametrize("number", range(5))
def test_order_is_least_recently_used_tails_first(number: int) -> None:
    random = np.random.default_rng(number)
    rows = 3000
    policy = Lru(rows, rows)
    order: OrderedDict[int, None] = OrderedDict()
    for _ in range(400):
        asked = random.choice(rows, int(random.integers(1, 60)), replace=False).astype(np.uint32)
        held = np.array([row in order for row in asked.tolist()])
        positions = np.arange(len(asked), dtype=np.uint32)
        policy.touch(asked[held], positions[held])
        policy.insert(asked[~held], asked[~held].astype(np.uint64), positions[~held])
        for part in (asked[held], asked[~held]):
            for row in reversed(part.tolist()):
                order[row] = None
                order.move_to_end(row)
        wanted = int(random.integers(0, 30))
        expected = list(order)[:wanted]
        victims = policy.victims(wanted, lambda rows: np.ones(len(rows), np.bool_))
        assert victims.tolist() == expected
        policy.remove(victims)
        for row in expected:
            del order[row]


def test_rows_in_use_are_passed_over_and_come_back_at_the_young_end() -> None:
    policy = Lru(10, 10)
    rows = np.arange(6, dtype=np.uint32)
    policy.insert(rows[::-1], rows.astype(np.uint64), rows)
    in_use = {0, 2}

    def evictable(asked: U32Array) -> BoolArray:
        return np.array([row not in in_use for row in asked.tolist()], np.bool_)

    assert policy.victims(2, evictable).tolist() == [1, 3]
    in_use.clear()
    assert policy.victims(6, evictable).tolist() == [1, 3, 4, 5]
    policy.readmit(np.array([2, 0], np.uint32))
    assert policy.victims(6, evictable).tolist() == [1, 3, 4, 5, 0, 2]
