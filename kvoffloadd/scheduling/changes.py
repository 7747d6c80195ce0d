"""A condition variable for the event loop: wait until a predicate holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """An `asyncio.Condition` without a lock, for state of the event loop: code that changes the state calls
    `notify_all`, and waiters check it again. "No `await` in between" replaces the lock: no other callback runs between
    a check and the wait, nor between a wait that ends because its predicate holds and the code after it.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        """Signals a change: all present waiters check again, in a later turn of the loop."""
        self._changed.set()
        self._changed.clear()

    async def wait(self, deadline_s: float | None = None) -> bool:
        """Waits until the next change. Returns False if there was none by the deadline, in seconds from now."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_for(self, predicate: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Waits until the predicate holds; returns at once if it does. Returns False if it did not by the deadline, in
        seconds from now.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while not predicate():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
