"""Runs measurements in rounds: each is made once per round, so that other work on the machine slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")

Show = Callable[[float, str], None]
"""Takes the share of the rounds that have ended, and the name of the next measurement."""
Samples = dict[str, list[T]]
"""Maps each measurement to the values of its rounds."""


def in_rounds(
    rounds: int, measure: Callable[[], Mapping[str, T]], show: Show = lambda _done, _text: None, *, warm_up: int = 1
) -> Samples[T]:
    """Calls `measure` once for each round. The first `warm_up` calls come before the rounds and are not counted."""
    samples: Samples[T] = {}
    for number in range(-warm_up, rounds):
        show((number + warm_up) / (rounds + warm_up), f"round {number + 1} of {rounds}")
        found = measure()
        for name, value in found.items() if number >= 0 else ():
            samples.setdefault(name, []).append(value)
    return samples
