"""A call is too long only if it is long each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.calls import TRIES, Calls, assert_short


def trials(*seconds: Sequence[float]) -> Callable[[], Calls]:
    """One after the other."""
    left = iter(seconds)

    def trial() -> Calls:
        calls = Calls()
        calls.seconds = list(next(left))
        calls.names = ["insert"] * len(calls.seconds)
        return calls

    return trial


def test_one_trial_is_enough_where_all_calls_are_short() -> None:
    assert_short(trials([0.1, 0.2]), 0.5)


def test_a_call_may_be_long_now_and_then() -> None:
    assert_short(trials([0.1, 9.0], [9.0, 0.2]), 0.5)


def test_a_call_that_is_long_each_time_is_told() -> None:
    with pytest.raises(AssertionError, match=r"call 1, insert, took 0.600 s each time"):
        assert_short(trials(*[[0.1, 0.6]] * TRIES), 0.5)


def test_trials_make_the_same_calls() -> None:
    with pytest.raises(AssertionError):
        assert_short(trials([9.0], [0.1, 0.1]), 0.5)


def test_what_is_timed_has_its_name() -> None:
    calls = Calls()
    with calls.timed("insert"):
        pass
    assert calls.names == ["insert"]
    assert 0 <= calls.seconds[0] < 60
