"""Waiting for a fact with a deadline, in place of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(fact: Callable[[], T], what: str, deadline_s: float = 10.0) -> T:
    """The first true value of `fact()`. Raises AssertionError at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s} s: {what}; the last answer was {value!r}")
        time.sleep(0.002)
