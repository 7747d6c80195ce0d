"""Weights that change: nothing is found from the first sign on, and other names are taken once SGLang has forgotten."""

from __future__ import annotations

from functools import partial

import pytest

from kvoffloadd.integrations.sglang.weights import WeightChanges


class Follower:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.generation = 0

    def suspend(self) -> None:
        self.told.append("suspend")

    def renew(self, generation: int) -> None:
        self.told.append("renew")
        self.generation = generation

    def clear(self) -> None:
        self.told.append("clear")


@pytest.fixture
def follower() -> Follower:
    return Follower()


@pytest.fixture
def weights(follower: Follower) -> WeightChanges:
    weights = WeightChanges()
    weights.number_engine(lambda: 7)
    weights.follow(follower)
    return weights


def test_a_flush_by_itself_changes_nothing(weights: WeightChanges, follower: Follower) -> None:
    weights.flush()
    assert follower.told == []


def test_a_change_and_a_flush(weights: WeightChanges, follower: Follower) -> None:
    weights.flush()
    weights.change()
    assert follower.told == ["suspend"]
    weights.flush()
    weights.flush()
    assert follower.told == ["suspend", "renew", "clear"]
    first = follower.generation
    weights.change()
    weights.flush()
    assert follower.generation not in (0, first)


def test_a_session_ends_before_names_are_new(weights: WeightChanges, follower: Follower) -> None:
    weights.session_begins()
    weights.change()
    weights.flush()
    assert "renew" not in follower.told
    weights.session_ends()
    assert follower.told[-2:] == ["renew", "clear"]
    weights.session_ends()
    assert follower.told.count("renew") == 1


def test_a_session_without_a_flush_needs_one(weights: WeightChanges, follower: Follower) -> None:
    weights.session_begins()
    weights.flush()
    weights.change()  # what was computed after that flush is not of these weights
    weights.session_ends()
    assert "renew" not in follower.told
    weights.flush()
    assert follower.told[-1] == "clear"


def test_ranks_have_one_name_and_engines_others(follower: Follower) -> None:
    names = []
    for engine in (7, 7, 8):
        weights, one = WeightChanges(), Follower()
        weights.number_engine(partial(int, engine))
        weights.follow(one)
        weights.change()
        weights.flush()
        names.append(one.generation)
    assert names[0] == names[1] != names[2]


def test_the_number_of_the_engine_is_found_once(weights: WeightChanges) -> None:
    def another() -> int:
        raise AssertionError("the other ranks do not come here again")

    assert weights.number_engine(another) == 7


def test_who_comes_later_takes_the_names_of_now(weights: WeightChanges, follower: Follower) -> None:
    weights.change()
    weights.flush()
    late = Follower()
    weights.follow(late)
    assert late.generation == follower.generation
    assert late.told == ["renew"], "it clears nothing"
    weights.change()
    later = Follower()
    weights.follow(later)
    assert later.told == ["renew", "suspend"]
