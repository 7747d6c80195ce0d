"""Waits for a fact with a deadline, instead of sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SLOWNESS_MAX = 10.0


def slowness() -> float:
    """Returns how many times longer work takes on this machine than on an idle one, estimated from the kernel's load
    average of the last minute: the processes that are ready to run for each CPU. From 1 to `SLOWNESS_MAX`.
    """
    wanting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(max(wanting, 1.0), SLOWNESS_MAX)


HANG_S = 60.0 * slowness()
"""Longer than any operation that makes progress, even on a machine this busy: an operation that takes longer hangs."""


def until(fact: Callable[[], T], what: str, deadline_s: float = HANG_S, *, every_s: float = 0.002) -> T:
    """Returns the first true value of `fact()`. Raises TimeoutError at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:g} s: {what}; the last answer was {value!r}")
        time.sleep(every_s)


def within(fact: Callable[[], object], limit_s: float, *, every_s: float = 0.001) -> float | None:
    """Returns the seconds from now until `fact()` is true; None: it was not at the limit."""
    began = time.monotonic()
    try:
        until(fact, "", limit_s, every_s=every_s)
    except TimeoutError:
        return None
    return time.monotonic() - began
