"""The interface's promises, for every policy, against a model that only knows what is held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.cache.policy import DEFAULT_POLICY, POLICIES, create_policy
from kvoffloadd.cache.policy.base import Clock, Policy
from kvoffloadd.config import POLICY_NAMES
from kvoffloadd.errors import ConfigError
from kvoffloadd.model import BoolArray, U32Array, U64Array

ROWS = 40
each_policy = pytest.mark.parametrize("name", POLICIES)


def rows_of(*rows: int) -> U32Array:
    return np.array(rows, np.uint32)


def hashes_of(rows: U32Array, generation: int = 0) -> U64Array:
    return (rows.astype(np.uint64) + np.uint64(1000 * generation + 1)) * np.uint64(0x9E3779B97F4A7C15)


def every(rows: U32Array) -> BoolArray:
    return np.ones(len(rows), np.bool_)


def none(rows: U32Array) -> BoolArray:
    return np.zeros(len(rows), np.bool_)


def filled(name: str, count: int, max_rows: int = ROWS) -> Policy:
    policy = create_policy(name, max_rows, max_rows)
    rows = np.arange(count, dtype=np.uint32)
    policy.insert(rows, hashes_of(rows), rows)
    return policy


@each_policy
def test_victims_are_still_held_until_removed(name: str) -> None:
    policy = filled(name, 10)
    first = policy.victims(4, every)
    assert len(policy) == 10
    policy.remove(first)
    assert len(policy) == 6
    rest = policy.victims(99, every)
    assert sorted([*first.tolist(), *rest.tolist()]) == list(range(10))


@each_policy
def test_nothing_evictable_gives_nothing_and_loses_nothing(name: str) -> None:
    policy = filled(name, 10)
    assert not len(policy.victims(3, none))
    assert (len(policy), policy.num_aside) == (10, 10)
    assert not len(policy.victims(99, every)), "nobody has let go of them"
    policy.readmit(rows_of(*range(10)))
    assert policy.num_aside == 0
    assert sorted(policy.victims(99, every).tolist()) == list(range(10))


@each_policy
def test_what_is_set_aside_comes_back_in_the_order_of_its_prompt(name: str) -> None:
    policy = filled(name, 6)
    policy.victims(6, none)
    policy.readmit(rows_of(1, 2, 3))
    assert (len(policy), policy.num_aside) == (6, 3)
    policy.readmit(rows_of(1))
    assert policy.victims(6, every).tolist() == [3, 2, 1]
    policy.remove(rows_of(0, 1))
    assert (len(policy), policy.num_aside) == (4, 2)
    policy.readmit(rows_of(5, 4))
    assert sorted(policy.victims(6, every).tolist()) == [2, 3, 4, 5]


@each_policy
def test_a_row_number_that_was_set_aside_is_used_again(name: str) -> None:
    policy = filled(name, 4)
    policy.victims(4, none)
    policy.remove(rows_of(2))
    policy.insert(rows_of(2), hashes_of(rows_of(2), 1), rows_of(0))
    assert policy.num_aside == 3
    policy.readmit(rows_of(2))
    assert policy.victims(4, every).tolist() == [2]


@each_policy
def test_evictable_rows_behind_many_in_use_are_found(name: str) -> None:
    policy = filled(name, 10_000, 10_000)
    found = policy.victims(5, lambda rows: (rows == 17) | (rows == 9000))
    assert sorted(found.tolist()) == [17, 9000]


@each_policy
def test_nothing_in_nothing_out(name: str) -> None:
    policy = create_policy(name, 1, ROWS)
    policy.insert(rows_of(), hashes_of(rows_of()), rows_of())
    policy.touch(rows_of(), rows_of())
    policy.remove(rows_of())
    assert len(policy) == 0
    assert not len(policy.victims(1, every))
    assert not len(filled(name, 3).victims(0, every))


@each_policy
def test_a_prompts_tail_goes_before_its_head(name: str) -> None:
    policy = filled(name, 8)
    assert policy.victims(8, every).tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("name", ["lru", "hit-density"])
def test_what_will_not_be_used_again_goes_first_until_it_is_used(name: str) -> None:
    policy = filled(name, 8)
    policy.keep(rows_of(0, 1, 2, 3), soon=False)
    assert policy.victims(4, every).tolist() == [3, 2, 1, 0]
    policy.touch(rows_of(0, 1), rows_of(0, 1))
    assert policy.victims(2, every).tolist() == [3, 2]
    policy.keep(rows_of(6, 7), soon=False)
    policy.keep(rows_of(2, 3), soon=True)
    assert policy.victims(2, every).tolist() == [7, 6]


@each_policy
def test_what_is_lost_goes_before_all_others_until_it_is_used(name: str) -> None:
    policy = filled(name, 8)
    policy.touch(rows_of(*range(8)), rows_of(*range(8)))
    policy.lose(rows_of(2, 3, 4, 5))
    assert policy.victims(3, every).tolist() == [5, 4, 3]
    policy.touch(rows_of(2, 3), rows_of(2, 3))
    assert set(policy.victims(3, every)[:2].tolist()) >= {5, 4}
    assert sorted(policy.victims(99, every).tolist()) == list(range(8))


@each_policy
def test_the_next_victim_is_worth_no_more_than_any_other_key(name: str) -> None:
    """Also than keys of another policy with the same clock that were used later, and those that are lost are worth the
    least.
    """
    clock = Clock()
    policy, other = (create_policy(name, ROWS, ROWS, clock) for _ in range(2))
    for number in range(20):
        row = rows_of(number)
        policy.insert(row, hashes_of(row), rows_of(0))
        if number % 3:
            policy.touch(row, rows_of(0))
    later = rows_of(1, 2, 3)
    other.insert(later, hashes_of(later), rows_of(0, 1, 2))
    first, rest = np.split(policy.victims(20, every), [1])
    assert policy.worth(first)[0] <= policy.worth(rest).min()
    assert policy.worth(first)[0] <= other.worth(later).min()
    other.lose(later)
    assert other.worth(later).max() < policy.worth(first)[0]
    clock.advance(10)
    assert other.worth(later).max() < policy.worth(rest).min(), "however much is used meanwhile"


@each_policy
def test_resize_keeps_what_is_held(name: str) -> None:
    policy = filled(name, 8)
    for capacity in (1, 5, 1000, 100_000):
        policy.resize(capacity)
        policy.touch(rows_of(3, 4), rows_of(3, 4))
    assert sorted(policy.victims(99, every).tolist()) == list(range(8))


def test_unknown_name_says_which_are_known() -> None:
    with pytest.raises(ConfigError, match="'mru' is not one of hit-density, lru, s3-fifo"):
        create_policy("mru", 10, 10)
    assert DEFAULT_POLICY in POLICIES


def test_the_config_knows_all_policies() -> None:
    assert tuple(sorted(POLICIES)) == POLICY_NAMES


some_rows = st.lists(st.integers(0, ROWS - 1), max_size=12, unique=True)


class PolicyMachine(RuleBasedStateMachine):
    """The model: the rows held, and those in use."""

    @initialize(name=st.sampled_from(sorted(POLICIES)), capacity=st.integers(1, 2 * ROWS))
    def begin(self, name: str, capacity: int) -> None:
        self.policy = create_policy(name, capacity, ROWS)
        self.held: set[int] = set()
        self.in_use: set[int] = set()
        self.chosen = rows_of()

    def evictable(self, rows: U32Array) -> BoolArray:
        asked = rows.tolist()
        assert set(asked) <= self.held
        return np.array([row not in self.in_use for row in asked], np.bool_)

    @rule(rows=some_rows, generation=st.integers(0, 3), first=st.integers(0, 9000))
    def insert(self, rows: list[int], generation: int, first: int) -> None:
        new = rows_of(*(row for row in rows if row not in self.held))
        self.policy.insert(new, hashes_of(new, generation), np.arange(first, first + len(new), dtype=np.uint32))
        self.held.update(new.tolist())

    @rule(rows=some_rows, first=st.integers(0, 3))
    def touch(self, rows: list[int], first: int) -> None:
        known = rows_of(*(row for row in rows if row in self.held))
        self.policy.touch(known, np.arange(first, first + len(known), dtype=np.uint32))

    @rule(rows=some_rows, soon=st.booleans())
    def keep(self, rows: list[int], soon: bool) -> None:
        self.policy.keep(rows_of(*(row for row in rows if row in self.held)), soon=soon)

    @rule(rows=some_rows)
    def lose(self, rows: list[int]) -> None:
        self.policy.lose(rows_of(*(row for row in rows if row in self.held)))

    @rule(rows=some_rows)
    def remove(self, rows: list[int]) -> None:
        gone = rows_of(*(row for row in rows if row in self.held))
        self.policy.remove(gone)
        self.held.difference_update(gone.tolist())

    @rule(rows=some_rows)
    def use(self, rows: list[int]) -> None:
        free = rows_of(*(row for row in self.in_use - set(rows) if row in self.held))
        self.in_use = set(rows)
        self.policy.readmit(free)

    @rule(wanted=st.integers(0, ROWS + 5))
    def choose(self, wanted: int) -> None:
        chosen = self.policy.victims(wanted, self.evictable)
        assert chosen.dtype == np.uint32
        found = chosen.tolist()
        assert len(set(found)) == len(found)
        assert set(found) <= self.held - self.in_use
        assert len(found) == min(wanted, len(self.held - self.in_use))
        self.chosen = chosen

    @rule()
    def evict(self) -> None:
        gone = rows_of(*(row for row in self.chosen.tolist() if row in self.held))
        self.policy.remove(gone)
        self.held.difference_update(gone.tolist())
        self.chosen = rows_of()

    @rule(capacity=st.integers(1, 4 * ROWS))
    def resize(self, capacity: int) -> None:
        self.policy.resize(capacity)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.held)
            assert self.policy.num_aside <= len(self.held & self.in_use)
            worth = self.policy.worth(rows_of(*self.held))
            assert worth.dtype == np.float64
            assert (worth >= 0).all()


TestPolicyMachine = pytest.mark.slow(PolicyMachine.TestCase)
TestPolicyMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
