"""Measures the CPU time of calls that must be short. The time that a busy machine keeps them waiting does not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

TRIES = 5
"""A call that walks all rows does so each time; one that the machine has kept waiting was kept once."""


class Calls:
    """CPU seconds of this thread in each call, in their order."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.names: list[str] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """What is called within."""
        before = time.thread_time()
        yield
        self.seconds.append(time.thread_time() - before)
        self.names.append(name)


def assert_short(trial: Callable[[], Calls], limit_s: float) -> None:
    """No call takes `limit_s` each time. A trial makes the same calls whenever it is run."""
    calls = trial()
    least = np.array(calls.seconds)
    for _ in range(TRIES - 1):
        if least.max() < limit_s:
            return
        again = trial()
        assert again.names == calls.names
        least = np.minimum(least, again.seconds)
    longest = int(least.argmax())
    assert least[longest] < limit_s, f"call {longest}, {calls.names[longest]}, took {least[longest]:.3f} s each time"
