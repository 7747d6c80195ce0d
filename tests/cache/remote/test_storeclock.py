"""The clock that stands still while the store does not answer."""

from __future__ import annotations

from kvoffloadd.cache.remote.storeclock import StoreClock


def test_only_time_between_answers_counts() -> None:
    clock = StoreClock(gap_max_s=5.0)
    clock.answered(100.0)
    assert clock.now_s == 0.0
    clock.answered(101.0)
    clock.answered(103.0)
    assert clock.now_s == 3.0
    clock.silent()
    clock.answered(200.0)
    assert clock.now_s == 3.0, "it was away"
    clock.answered(300.0)
    assert clock.now_s == 8.0, "nothing was asked for most of that time"
    clock.answered(299.0)
    assert clock.now_s == 8.0
