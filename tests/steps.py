"""Steps that are taken without a loop."""

from __future__ import annotations

from typing import TypeVar

from kvoffloadd.scheduling.steps import Steps

T = TypeVar("T")


def finish(steps: Steps[T]) -> T:
    """Take all of them, one after the other. Returns the result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
