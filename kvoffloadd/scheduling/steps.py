"""Work in steps: one form for all work that may take longer than a turn of the event loop.

A yield is an opportunity for the loop to turn, not a request: the code that drives the steps goes by the clock. Small
work thus ends in the turn in which it began, and no caller has to distinguish large from small.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

TURN_S = 0.0005
"""The length of one turn: no step and no request begins later than this. A step takes some milliseconds at most."""

Steps = Generator[None, None, T]
"""A generator that yields between its steps, and returns its result. `close` ends it early: the generator then undoes
its effects.
"""


def take_turn(steps: Steps[T], turn_ends: float) -> T | None:
    """Takes at least one step, and none that begins after `turn_ends`, in `time.monotonic()`. Returns the result, which
    is not None; None: the steps have not ended, and need another turn.
    """
    try:
        _turn(steps, turn_ends)
    except StopIteration as end:
        result: T = end.value
        return result
    return None


async def in_turns(steps: Steps[T]) -> T:
    """Returns the result, after the necessary number of turns of the loop, the present one first. Closes the steps if
    it is cancelled, but not if it never begins.
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
