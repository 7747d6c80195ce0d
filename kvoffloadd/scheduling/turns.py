"""Shares the event loop fairly between requests and their follow-up work: by user, then engine, then session, as lanes
share theirs.

A loop that served each readable socket in order of arrival would share by the number of sockets, and a turn of it would
take as long as one request of each: many sessions with large requests would delay all others, and all completions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from kvoffloadd.scheduling.fairqueue import FairQueue
from kvoffloadd.scheduling.steps import TURN_S

ROUND_S = 0.002
"""The time that all may be served before the loop checks its sockets, timers and completions again: no turn begins
later.
"""

FIRST_TURN_US = int(TURN_S * 1e6)
"""The cost of a first turn: a whole turn, or many newcomers would have as many turns for nothing."""


class Served(Protocol):
    """An object that is served turn by turn: a connection, the events of a namespace, a continuation."""

    turn_us: int  # duration of its last turn, which it pays for with the next one

    def __hash__(self) -> int: ...

    @property
    def flow(self) -> tuple[int, int, int]:
        """Returns its user, its engine, itself."""

    def serve(self) -> None:
        """Serves some of its requests: one turn."""


class Turns:
    """The queue of objects that wait for their turn. Event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: FairQueue[Served] = FairQueue(FIRST_TURN_US)
        self._waiting = False  # some may be in the queue
        self._round_ends = 0.0
        self._scheduled = False

    def begin(self, served: Served) -> bool:
        """Serves it at once if no other waits and this turn of the loop has time left. Returns False if it has to
        queue; it should read nothing more until its turn has come.
        """
        if self._scheduled and (self._waiting or time.monotonic() >= self._round_ends):
            return False
        if not self._scheduled:
            self._schedule()
        served.serve()
        return True

    def queue(self, served: Served) -> None:
        """Serves it once, later, when it is due."""
        self._queue.push([(key, 1) for key in served.flow], served, max(served.turn_us, 1))
        self._waiting = True
        if not self._scheduled:
            self._schedule()

    def forget(self, served: Served) -> None:
        """Removes one that has ended."""
        self._queue.remove(served)

    def _schedule(self) -> None:
        self._scheduled = True
        self._round_ends = time.monotonic() + ROUND_S
        self._loop.call_soon(self._round)

    def _round(self) -> None:
        ends = time.monotonic() + ROUND_S
        try:
            while self._waiting:
                served = self._queue.take()
                if served is None:
                    self._waiting = False
                    break
                served.serve()
                if time.monotonic() >= ends:
                    break
        finally:  # a bug in one must not end the others
            self._scheduled = False
            if self._waiting:
                self._schedule()


class Continuation:
    """The next steps of one piece of work, each in a turn of its flow."""

    def __init__(self, turns: Turns, flow: tuple[int, int, int], go_on: Callable[[], None]) -> None:
        self.flow = flow
        self.turn_us = FIRST_TURN_US
        self._turns = turns
        self._go_on = go_on

    def later(self) -> None:
        """Continues when the turn is due."""
        self._turns.queue(self)

    def serve(self) -> None:
        """See `Served`."""
        began_s = time.monotonic()
        try:
            self._go_on()
        finally:
            self.turn_us = int((time.monotonic() - began_s) * 1e6)
