"""Waiting for a fact with a deadline, in place of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable


def throughout(fact: Callable[[], object], what: str, seconds: float) -> None:
    """`fact()` is true now and stays so for `seconds`. Raises AssertionError as soon as it is not."""
    end = time.monotonic() + seconds
    while True:
        if not fact():
            raise AssertionError(f"no longer: {what}")
        if time.monotonic() > end:
            return
        time.sleep(0.01)
