"""Work in steps: one shape for whatever may take longer than a turn of the event loop.

A yield is an opportunity for the loop to turn, not a request: the code that drives the steps goes by the clock. Small
work thus ends in the turn in which it began, and no caller has to tell large from small.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

TURN_S = 0.0005
"""What one turn may take: no step and no request begins later than this. A step takes some milliseconds at most."""

Steps = Generator[None, None, T]
"""A generator that yields between its steps, and returns its result. `close` ends it early: it undoes what it did."""


def take_turn(steps: Steps[T], turn_ends: float) -> T | None:
    """Take one step at least, and none that begins after `turn_ends`, in `time.monotonic()`. Returns the result, which
    is not None; None: they have not ended, and want another turn.
    """
    try:
        _turn(steps, turn_ends)
    except StopIteration as end:
        result: T = end.value
        return result
    return None


async def in_turns(steps: Steps[T]) -> T:
    """The result, after as many turns of the loop as it takes, this one first. Closes them if it is cancelled, but not
    if it never begins.
    """
    with contextlib.closing(steps):
        try:
            while True:
                _turn(steps, time.monotonic() + TURN_S)
                await asyncio.sleep(0)
        except StopIteration as end:
            result: T = end.value
            return result


def _turn(steps: Steps[Any], turn_ends: float) -> None:
    """Raises StopIteration, with the result, when they end."""
    next(steps)
    while time.monotonic() < turn_ends:
        next(steps)
