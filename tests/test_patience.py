"""What never ends is found out by looks, and a clock that goes on alone is no reason."""

from __future__ import annotations

import pytest

from kvoffloadd.patience import Patience


def test_time_in_which_nothing_ran_is_one_look() -> None:
    """The process was stopped for an hour; then its copy ends."""
    patience = Patience(0.5)
    now = 100.0
    assert not patience.is_over(0.5, now, 3.0)
    assert not patience.is_over(3600.5, now + 3600, 3.0)
    assert not patience.is_over(0.0, now + 3600.5, 3.0)


def test_work_that_never_ends_is_found_out() -> None:
    patience = Patience(0.5)
    found = [patience.is_over(0.4 + 0.5 * look, 100.0 + 0.5 * look, 3.0) for look in range(20)]
    assert found.index(True) == 6
    assert all(found[6:])


def test_work_that_ends_and_is_followed_by_more_is_not_stuck() -> None:
    """Two threads whose pieces overlap and take longer than a look, but never as long as that."""
    patience = Patience(0.5)
    assert not any(patience.is_over(0.5 + look % 5 / 2, 100.0 + 0.5 * look, 3.0) for look in range(100))


def test_little_patience_takes_some_looks_too() -> None:
    patience = Patience(0.5)
    assert [patience.is_over(9.0, 100.0 + 0.5 * look, 0.1) for look in range(3)] == [False, False, True]


@pytest.mark.parametrize("every_s", [0.05, 0.5])
def test_how_often_somebody_looks_makes_no_difference(every_s: float) -> None:
    """Looks in between count for what lies between them, and a stop for no more because of them."""
    begun = 100.0
    patience = Patience(0.5)
    now, looks = begun, 0
    while not patience.is_over(now - begun, now, 3.0):
        now, looks = now + every_s, looks + 1
        assert looks < 100
    assert 2.7 <= now - begun <= 3.6
    stopped = Patience(0.5)
    for look in range(int(2 / every_s)):
        assert not stopped.is_over(look * every_s, begun + look * every_s, 3.0)
    assert not stopped.is_over(3600.0, begun + 3600.0, 3.0)
