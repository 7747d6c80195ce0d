"""Waits until all jobs (or stores) up to a number have ended, which begin in order and end in any order.

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

from kvoffloadd.cache.memory.changing import changing

WAKES_PER_TURN = 16
"""The number of waiting tasks that go on in one turn of the loop: each may have as much to do as a request."""

_number = attrgetter("number")


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Describes a call of `resume()` that is due once all up to `number` have ended."""

    number: int
    resume: Callable[[], None]


class Progress:
    """Keeps what has begun and not ended, by number."""

    def __init__(self) -> None:
        self.last = 0  # the number of the last one that began
        # Oldest first. A plain dict would search for its first entry among the places of all that have gone.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._waiters: list[Waiter] = []  # the lowest number first, so that an end inspects none that still waits

    def begin(self) -> int:
        """Begins one more. Returns its number. Pair with `end`."""
        self.last += 1
        self._open[self.last] = None
        return self.last

    def end(self, number: int) -> None:
        """Ends this one, and resumes the waiters that wait for nothing else."""
        del self._open[number]
        oldest = next(iter(self._open), self.last + 1)
        passed = bisect_left(self._waiters, oldest, key=_number)
        due = self._waiters[:passed]
        del self._waiters[:passed]
        for waiter in due:
            waiter.resume()

    def is_past(self, number: int) -> bool:
        """Returns whether all up to this one have ended."""
        return next(iter(self._open), number + 1) > number

    def left(self, number: int) -> int:
        """Returns how many up to this one have not ended."""
        return sum(1 for _ in takewhile(lambda begun: begun <= number, self._open))

    @changing
    def join(self, number: int, resume: Callable[[], None]) -> Waiter:
        """Registers `resume` for a call when all up to this one have ended; some must not have ended yet. Pair with
        `leave`.
        """
        waiter = Waiter(number, resume)
        insort(self._waiters, waiter, key=_number)
        return waiter

    @changing
    def leave(self, waiter: Waiter) -> None:
        """Removes a waiter; nothing happens if it has been resumed."""
        with suppress(ValueError):
            self._waiters.remove(waiter)


class Waits:
    """Wakes tasks that wait for some progress until a deadline: a few in each turn of the loop, for any number of
    tasks.
    """

    def __init__(self) -> None:
        self._due: deque[asyncio.Future[None]] = deque()

    async def until_past(self, progress: Progress, number: int, until_s: float) -> bool:
        """Waits until all up to this number have ended. Returns False if they have not at `until_s`, a time of the
        loop.
        """
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

    @changing
    def _add_due(self, loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
        if not self._due:
            loop.call_soon(self._wake, loop)
        self._due.append(woken)

    @changing
    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(WAKES_PER_TURN, len(self._due))):
            woken = self._due.popleft()
            if not woken.done():  # it may be due twice, or have been cancelled
                woken.set_result(None)
        if self._due:
            loop.call_soon(self._wake, loop)
