"""Tests until when keys are expected of a prompt that another engine has just computed."""

from __future__ import annotations

import math

import pytest

from kvoffloadd.integrations.vllm.expectation import COMPUTED_AT, EXPECTED_S, expected_until

CLOCK_S, NOW_S = 1.7e9, 50.0


def until(value: object) -> float:
    return expected_until({COMPUTED_AT: value}, CLOCK_S, NOW_S)


def test_it_is_the_same_moment_on_both_clocks() -> None:
    assert until(CLOCK_S) == NOW_S + EXPECTED_S
    assert until(CLOCK_S - EXPECTED_S / 4) == NOW_S + EXPECTED_S * 3 / 4
    assert until(int(CLOCK_S)) == NOW_S + EXPECTED_S


def test_what_was_computed_long_ago_is_not_expected() -> None:
    assert until(CLOCK_S - EXPECTED_S) == until(CLOCK_S - 1e6) == until(-1e9) == 0.0


def test_a_clock_that_is_fast_makes_nobody_wait_longer() -> None:
    assert until(CLOCK_S + 1e6) == until(1e11) == NOW_S + EXPECTED_S


@pytest.mark.parametrize(
    "value", [None, True, "now", [CLOCK_S], math.nan, math.inf, -math.inf, 1e300, 10**400, -(10**400)]
)
def test_what_is_no_time_is_ignored(value: object) -> None:
    assert until(value) == 0.0


def test_others_expect_nothing() -> None:
    assert expected_until(None, CLOCK_S, NOW_S) == expected_until({}, CLOCK_S, NOW_S) == 0.0
