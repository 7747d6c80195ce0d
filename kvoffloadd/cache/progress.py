"""Waiting until all jobs (or stores) up to a number have ended, which begin in order and end in any order.

Event loop only.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import attrgetter

WAKES_PER_TURN = 16
"""Of those who wait, and whose moment has come, so many go on in one turn of the loop: each may have as much to do as a
request.
"""

_number = attrgetter("number")


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """`tell()` is called once all up to `number` have ended."""

    number: int
    tell: Callable[[], None]


class Progress:
    """What has begun and not ended, by number. `last` is that of the last one that began."""

    def __init__(self) -> None:
        self.last = 0
        # Oldest first. A plain dict would look for its first one behind the places of all that have gone.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._waiters: list[Waiter] = []  # the lowest number first, so that an end looks at none that still waits

    def begin(self) -> int:
        """One more; its number. Pair with `end`."""
        self.last += 1
        self._open[self.last] = None
        return self.last

    def end(self, number: int) -> None:
        """It has ended: tell those who wait for nothing else."""
        del self._open[number]
        oldest = next(iter(self._open), self.last + 1)
        passed = bisect_left(self._waiters, oldest, key=_number)
        told = self._waiters[:passed]
        del self._waiters[:passed]
        for waiter in told:
            waiter.tell()

    def is_past(self, number: int) -> bool:
        """Whether all up to this one have ended."""
        return next(iter(self._open), number + 1) > number

    def left(self, number: int) -> int:
        """How many up to this one have not."""
        return sum(1 for _ in takewhile(lambda one: one <= number, self._open))

    def join(self, number: int, tell: Callable[[], None]) -> Waiter:
        """Wait until all up to this one, some of which is under way, have ended. Pair with `leave`."""
        waiter = Waiter(number, tell)
        insort(self._waiters, waiter, key=_number)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Wait no longer; nothing happens if it has been told."""
        with suppress(ValueError):
            self._waiters.remove(waiter)


class Waits:
    """Tasks that wait for some progress until a deadline: woken a few each turn of the loop, however many are due."""

    def __init__(self) -> None:
        self._due: deque[asyncio.Future[None]] = deque()

    async def until_past(self, progress: Progress, number: int, until_s: float) -> bool:
        """Wait until all up to this number have ended; False: they have not at `until_s`, a time of the loop."""
        if progress.is_past(number):
            return True
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        due = partial(self._add_due, loop, woken)
        waiter = progress.join(number, due)
        timer = loop.call_at(until_s, due)
        try:
            await woken
        finally:
            timer.cancel()
            progress.leave(waiter)
        return progress.is_past(number)

    def _add_due(self, loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
        if not self._due:
            loop.call_soon(self._wake, loop)
        self._due.append(woken)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(WAKES_PER_TURN, len(self._due))):
            woken = self._due.popleft()
            if not woken.done():  # it may be due twice, or have been cancelled
                woken.set_result(None)
        if self._due:
            loop.call_soon(self._wake, loop)
