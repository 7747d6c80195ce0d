"""What never ends is found out by looks, and a clock that goes on alone is no reason."""

from __future__ import annotations

import pytest

from kvoffloadd.scheduling.stuckdetector import StuckDetector


def test_time_in_which_nothing_ran_is_one_look() -> None:
    """The process was stopped for an hour; then its copy ends."""
    patience = StuckDetector(0.5)
    now = 100.0
    assert not patience.is_over(0.5, now, 3.0)
    assert not patience.is_over(3600.5, now + 3600, 3.0)
    assert not patience.is_over(0.0, now + 3600.5, 3.0)


def test_work_that_never_ends_is_found_out() -> None:
    patience = StuckDetector(0.5)
    found = [patience.is_over(0.4 + 0.5 * look, 100.0 + 0.5 * look, 3.0) for look in range(20)]
    assert found.index(True) == 6
    assert all(found[6:])


def test_work_that_ends_and_is_followed_by_more_is_not_stuck() -> None:
    """Two threads whose pieces overlap and take longer than a look, but never as long as that."""
    patience = StuckDetector(0.5)
    assert not any(patience.is_over(0.5 + look % 5 / 2, 100.0 + 0.5 * look, 3.0) for look in range(100))


def test_little_patience_takes_some_looks_too() -> None:
    patience = StuckDetector(0.5)
    assert [patience.is_over(9.0, 100.0 + 0.5 * look, 0.1) for look in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("every_s", [0.05, 0.5])
def test_how_often_somebody_looks_makes_no_difference(every_s: float) -> None:
    """Looks in between count for what lies between them, and a stop for no more because of them."""
    begun = 100.0
    patience = StuckDetector(0.5)
    now, looks = begun, 0
    while not patience.is_over(now - begun, now, 3.0):
        now, looks = now + every_s, looks + 1
        assert looks < 100
    assert 2.7 <= now - begun <= 3.6
    stopped = StuckDetector(0.5)
    for look in range(int(2 / every_s)):
        assert not stopped.is_over(look * every_s, begun + look * every_s, 3.0)
    assert not stopped.is_over(3600.0, begun + 3600.0, 3.0)


def test_what_was_watched_of_other_work_is_not_inherited() -> None:
    """Pieces overlap and take longer than a look, for hours. Then the process is stopped while one has just begun."""
    patience = StuckDetector(1.25)
    now = 100.0
    for look in range(1000):
        now += 1.25
        assert not patience.is_over(1.5 + 0.3 * (look % 5), now, 10.0)
    assert not patience.is_over(22.0, now + 20.0, 10.0)


@pytest.mark.parametrize("early_s", [0.0, 0.002])
def test_who_is_watched_from_the_beginning_is_found_out_in_time(early_s: float) -> None:
    """It holds although timers are a little early."""
    patience = StuckDetector(0.25, 100.0)
    found = [patience.is_over(at, 100.0 + at, 1.0) for at in (0.25 - early_s, 0.5 - early_s, 0.75, 1.0 - early_s)]
    assert found == [False, False, False, True]
