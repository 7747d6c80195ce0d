"""Steps: small work ends within its turn, and large work gives others theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kvoffloadd.scheduling import steps
from kvoffloadd.scheduling.steps import TURN_S, Steps, in_turns, take_turn


class Work:
    """Work of `number` steps, whose time the clock of the test determines. Returns 7, or raises `error`."""

    def __init__(self, number: int, error: Exception | None = None) -> None:
        self.number = number
        self.error = error
        self.taken = 0
        self.closed = False

    def steps(self) -> Steps[int]:
        try:
            for _ in range(self.number):
                self.taken += 1
                yield
            if self.error is not None:
                raise self.error
            return 7
        except GeneratorExit:
            self.closed = True
            raise


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each look at it takes 0.2 ms, so that three steps fit into a turn."""
    times = count()
    monkeypatch.setattr(time, "monotonic", lambda: next(times) * 0.0002)
    yield
    monkeypatch.undo()


async def turns_of(task: asyncio.Task[Any]) -> int:
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.mark.usefixtures("clock")
def test_small_work_ends_in_its_first_turn() -> None:
    for number in range(3):
        assert take_turn(Work(number).steps(), time.monotonic() + TURN_S) == 7


@pytest.mark.usefixtures("clock")
async def test_large_work_takes_turns() -> None:
    work = Work(10)
    steps = work.steps()
    assert [take_turn(steps, time.monotonic() + TURN_S) for _ in range(4)] == [None, None, None, 7]
    assert (work.taken, work.closed) == (10, False)
    again = Work(10)
    task = asyncio.ensure_future(in_turns(again.steps()))
    assert again.taken == 0
    await asyncio.sleep(0)
    assert again.taken == 3
    assert 3 <= await turns_of(task) <= 5
    assert (task.result(), again.taken, again.closed) == (7, 10, False)


@pytest.mark.usefixtures("clock")
def test_what_a_step_raises_is_the_callers() -> None:
    steps = Work(4, KeyError("planted")).steps()
    assert take_turn(steps, time.monotonic() + TURN_S) is None
    with pytest.raises(KeyError, match="planted"):
        take_turn(steps, time.monotonic() + TURN_S)


async def test_a_step_that_is_long_is_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "TURN_S", 0.0)
    work = Work(5)
    task = asyncio.ensure_future(in_turns(work.steps()))
    for taken in (1, 2, 3):
        await asyncio.sleep(0)
        assert work.taken == taken
    assert await task == 7


async def test_who_is_cancelled_undoes_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "TURN_S", 0.0)
    work = Work(5)
    task = asyncio.ensure_future(in_turns(work.steps()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.closed
    assert work.taken < 5
