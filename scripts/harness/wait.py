"""Waiting for a fact with a deadline, in place of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_S = 60.0
"""Longer than anything that goes on takes, on the busiest machine: what takes longer hangs."""


def until(fact: Callable[[], T], what: str, deadline_s: float = HANG_S) -> T:
    """The first true value of `fact()`. Raises AssertionError at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}; the last answer was {value!r}")
        time.sleep(0.002)


def throughout(fact: Callable[[], object], what: str, seconds: float) -> None:
    """`fact()` is true now and stays so for `seconds`. Raises AssertionError as soon as it is not."""
    end = time.monotonic() + seconds
    while True:
        assert fact(), f"no longer: {what}"
        if time.monotonic() > end:
            return
        time.sleep(0.01)
