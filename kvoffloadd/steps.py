"""Work in steps: one shape for whatever may take longer than a turn of the event loop.

A yield is an opportunity for the loop to turn, not a request: whoever runs the steps goes by the clock. Small work is
thus done in the turn in which it began, and nobody has to tell large from small.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

TURN_S = 0.0005
"""What one turn may take: no step begins later than this. A step takes some milliseconds at most."""

Steps = Generator[None, None, T]
"""A generator that yields between its steps, and returns its result. `close` ends it early: it undoes what it did."""


def take_turn(steps: Steps[T]) -> T | None:
    """Take one turn. Returns the result, which is something; None: they have not ended, and want another turn."""
    try:
        _turn(steps)
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
                _turn(steps)
                await asyncio.sleep(0)
        except StopIteration as end:
            result: T = end.value
            return result


def _turn(steps: Steps[Any]) -> None:
    """Raises StopIteration, with the result, when they end."""
    turn_ends = time.monotonic() + TURN_S
    next(steps)
    while time.monotonic() < turn_ends:
        next(steps)
