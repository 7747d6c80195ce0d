"""Conditions that a call can wait for, and the one effect that both clients' I/O shells carry out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")


class Waitable:
    """A condition that occurs once: `done` turns True and stays so."""

    __slots__ = ("_wakers", "done")

    def __init__(self) -> None:
        self.done = False
        self._wakers: list[Callable[[], None]] = []

    def settle(self) -> None:
        """Marks the condition as having occurred, and calls every waker, once."""
        self.done = True
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Registers `wake`, which is called when the condition occurs. It must not raise."""
        self._wakers.append(wake)

    def discard_waker(self, wake: Callable[[], None]) -> None:
        """Removes `wake`, if it was not called yet."""
        if wake in self._wakers:
            self._wakers.remove(wake)


@dataclass(slots=True)
class Wait:
    """Requests I/O until one of `targets` is done or `until` (time.monotonic seconds) has passed, and no less."""

    targets: tuple[Waitable, ...]
    until: float


Gen = Generator[Wait, None, R]
"""A call, written once for both clients: it yields what it waits for and returns the call's value."""
