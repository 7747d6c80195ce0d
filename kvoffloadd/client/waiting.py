"""Things that a call can wait for, and the one effect that both clients' I/O shells carry out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

R = TypeVar("R")


class Waitable:
    """Happens once: `done` turns True and stays so."""

    __slots__ = ("_wakers", "done")

    def __init__(self) -> None:
        self.done = False
        self._wakers: list[Callable[[], None]] = []

    def settle(self) -> None:
        """It has happened: call every waker, once."""
        self.done = True
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when it happens. It must not raise."""
        self._wakers.append(wake)

    def discard_waker(self, wake: Callable[[], None]) -> None:
        """Forget `wake`, if it was not called yet."""
        if wake in self._wakers:
            self._wakers.remove(wake)


@dataclass(slots=True)
class Wait:
    """Do I/O until one of `targets` is done or `until` (time.monotonic seconds) has passed; not for less."""

    targets: tuple[Waitable, ...]
    until: float


Gen = Generator[Wait, None, R]
"""A call, written once for both clients: it yields what it waits for and returns the call's value."""
