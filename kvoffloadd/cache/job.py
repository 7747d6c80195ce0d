"""One store or load under way: what it is to do, what it waits for, and how it ends.

The life of a job is one coroutine, which waits in `Job.step` and `pause` alone. It is no task: it runs to its first
wait within `Jobs.store` or `Jobs.load`, and goes on within the callback of whatever it waited for. So nothing happens
between that callback and what the job makes of it, a job that waits for nothing but its copy has begun it when the
request is answered (a large one some turns of the loop later), and a job is never cancelled while its copy is in
flight.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from kvoffloadd.cache.stats.histogram import Histogram
from kvoffloadd.device.base import Copy, Device
from kvoffloadd.device.signals import ReadySignal
from kvoffloadd.device.work import BlockList
from kvoffloadd.lanes import DAEMON, Flow
from kvoffloadd.model import BoolArray, Direction, I64Array, Outcome, U32Array

T = TypeVar("T")


class Phase(StrEnum):
    """What a job waits for."""

    DISK = "disk"  # or the remote store
    VERIFICATION = "verification"  # of payloads, before they are loaded
    SIGNAL = "signal"  # the worker's
    COPY = "copy"
    END = "end"  # nothing: it ends behind the reply


class Verification(StrEnum):
    """What is verified of a device's loads."""

    COPIED = "copied"  # all that is sealed, while it is copied; before, where that can't be
    BEFORE = "before"  # all that is sealed, before it is copied
    ADOPTED = "adopted"  # what an earlier daemon left, and nothing else


class Stopped(Exception):
    """A job ends before its copy has begun. The message is the reason, for the worker."""

    def __init__(self, outcome: Outcome, reason: str = "") -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, eq=False)
class CopyOptions:
    """How a job is to be copied."""

    device: Device
    deadline_s: float  # loop time after which no further piece of it begins
    urgent: bool = False  # before other jobs of its direction
    ready: ReadySignal | None = None  # nothing is copied before this signal; None: at once
    flow: Flow = DAEMON  # the user and engine whose share of the lanes it uses


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """How a job ended."""

    outcome: Outcome
    bytes: int
    seconds: float
    bad: BoolArray  # parts of keys that failed verification (load), or were cleared meanwhile (store)
    reason: str = ""


TOOK_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds of how long jobs take: from one of a few small keys to one that waits for a slow disk."""


@dataclass(slots=True)
class JobCounters:
    """What the jobs of one direction have moved since the start."""

    jobs: int = 0  # also those that had nothing to move
    keys: int = 0  # payloads that were moved
    bytes: int = 0
    seconds: float = 0.0
    took_s: Histogram = field(default_factory=lambda: Histogram(TOOK_S))  # from admission to end, of each job
    descriptors: int = 0
    copies: int = 0  # issued, after descriptors were coalesced
    not_done: int = 0  # jobs that failed, were cancelled or expired
    # Payloads that were not moved, by how their job ended; `keys_bad`: see `Completion.bad`.
    keys_failed: int = 0
    keys_cancelled: int = 0
    keys_expired: int = 0
    keys_bad: int = 0


@types.coroutine
def suspend() -> Generator[None, Any, Any]:
    return (yield)


@dataclass(slots=True, eq=False)
class Job:
    """A job under way."""

    direction: Direction
    options: CopyOptions
    on_end: Callable[[Completion], None]  # called once, after the last access
    began_s: float
    # Record numbers that it reads or writes, the row of each one's key, and which of them are known to be wrong. A
    # load holds its rows.
    parts: I64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: U32Array = field(default_factory=lambda: np.zeros(0, np.uint32))
    bad: BoolArray = field(default_factory=lambda: np.zeros(0, bool))
    hashed: BoolArray = field(default_factory=lambda: np.zeros(0, bool))  # of a load: which its copy is to verify
    settled: int = 0  # of a store: so many of its parts, the last ones, are committed or freed by now
    lists: list[BlockList] = field(default_factory=list)  # what is copied; given to the copy when it begins
    phase: Phase = Phase.END
    copy: Copy | None = None
    stopped: Outcome | None = None  # how it ends if its copy has not begun
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _life: Coroutine[None, Any, None] | None = None
    _give_up: Callable[[], bool] | None = None  # how to stop what it waits for, see `step`

    def start(self, life: Coroutine[None, Any, None]) -> None:
        """Run the job's coroutine to its first wait."""
        self._life = life
        self._go_on(None)

    def cancel(self) -> None:
        self.stop(Outcome.CANCELLED)

    def stop(self, outcome: Outcome) -> None:
        """Drop what has not begun; the job ends with this outcome. `on_end` is still called, after the last access."""
        if self.stopped is None or outcome is Outcome.CANCELLED:  # what the worker asked for last
            self.stopped = outcome
        give_up = self._give_up
        if give_up is not None and give_up():
            self._give_up = None
            with suppress(StopIteration):
                self._life.throw(Stopped(self.stopped))  # type: ignore[union-attr]  # it waits, so it has begun

    async def step(
        self, phase: Phase, begin: Callable[[Callable[[T], None]], Callable[[], bool]], until_s: float | None = None
    ) -> T:
        """Begin something, and wait for what it calls back with. `begin(resume)`: `resume` is to be called once, later;
        it returns how to give it up, which says whether it is over at once: then `resume` is not called. `until_s`:
        loop time at which the job is stopped.

        Raises Stopped: the job was stopped before, or what it waits for was given up.
        """
        if self.stopped is not None:
            raise Stopped(self.stopped)
        self.phase = phase
        self._give_up = begin(self._go_on)
        timer = None
        if until_s is not None:
            timer = asyncio.get_running_loop().call_at(until_s, self.stop, Outcome.EXPIRED)
        try:
            value: T = await suspend()
        finally:
            self._give_up = None
            if timer is not None:
                timer.cancel()
        return value

    async def pause(self) -> None:
        """Go on in the next turn of the loop, stopped or not: for what comes behind the copy."""
        asyncio.get_running_loop().call_soon(self._go_on, None)
        await suspend()

    async def let_others_go_first(self) -> None:
        """Go on behind whatever comes in the next turn of the loop, stopped or not: see `behind_others`."""
        behind_others(self._go_on)
        await suspend()

    def _go_on(self, value: object) -> None:
        with suppress(StopIteration):
            self._life.send(value)  # type: ignore[union-attr]  # as in `stop`


def next_turn(resume: Callable[[None], None]) -> Callable[[], bool]:
    """For `Job.step`: go on in the next turn of the loop."""
    asyncio.get_running_loop().call_soon(resume, None)
    return lambda: False


def behind_others(resume: Callable[[None], None]) -> Callable[[], bool]:
    """For `Job.step`: go on in the turn after the next: in the next one, this would come before sockets are read."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, resume, None)
    return lambda: False
