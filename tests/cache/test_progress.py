"""Waiters for what has begun: woken when all of it has ended and no sooner, and a few in each turn of the loop."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from random import Random

from kvoffloadd.cache.progress import WAKES_PER_TURN, Progress, Waits
from kvoffloadd.testing.wait import HANG_S

from .fakes import num_waiters

MANY = 500
FAR_S = 60.0


def test_an_end_tells_those_alone_for_whom_it_was_the_last(rng: Random) -> None:
    """A model shows that each waiter is notified once, in the step in which the last of its numbers ends."""
    progress = Progress()
    under_way: set[int] = set()
    waiting: dict[int, int] = {}
    woken: list[int] = []
    for name in range(5000):
        if under_way and rng.random() < 0.5:
            ended = rng.choice([min(under_way), rng.choice(sorted(under_way))])
            under_way.remove(ended)
            progress.end(ended)
        else:
            under_way.add(progress.begin())
            assert progress.last == max(under_way)
        due = [other for other, number in waiting.items() if not any(one <= number for one in under_way)]
        assert sorted(woken) == due
        numbers = [waiting.pop(other) for other in woken]
        assert numbers == sorted(numbers)
        woken.clear()
        number = rng.randint(1, progress.last)
        assert progress.is_past(number) == (not any(one <= number for one in under_way))
        assert progress.left(number) == sum(one <= number for one in under_way)
        if not progress.is_past(number):
            waiting[name] = number
            progress.join(number, partial(woken.append, name))
        assert num_waiters(progress) == len(waiting)


def test_who_leaves_is_not_told() -> None:
    progress, woken = Progress(), list[int]()
    number = progress.begin()
    first, second = (progress.join(number, partial(woken.append, name)) for name in (1, 2))
    progress.leave(first)
    progress.leave(first)
    progress.end(number)
    progress.leave(second)
    assert (woken, num_waiters(progress)) == ([2], 0)


class WaitingTasks:
    """Tasks that wait for one thing that is under way; notes how many have gone on by each turn of the loop."""

    def __init__(self, count: int, deadline_s: float) -> None:
        self.progress, self.waits = Progress(), Waits()
        self.number = self.progress.begin()
        self.went_on: list[bool] = []
        until_s = asyncio.get_running_loop().time() + deadline_s
        self.tasks = [asyncio.ensure_future(self._wait(until_s)) for _ in range(count)]

    async def _wait(self, until_s: float) -> None:
        self.went_on.append(await self.waits.until_past(self.progress, self.number, until_s))

    async def all_wait(self) -> None:
        async with asyncio.timeout(HANG_S):
            while num_waiters(self.progress) < len(self.tasks):  # noqa: ASYNC110  a turn or two
                await asyncio.sleep(0)

    async def turns(self) -> list[int]:
        """How many went on in each turn, until all tasks are done."""
        seen = [len(self.went_on)]
        async with asyncio.timeout(HANG_S):
            while not all(task.done() for task in self.tasks):
                await asyncio.sleep(0)
                seen.append(len(self.went_on))
        return [after - before for before, after in pairwise(seen)]


async def test_many_who_wait_for_the_same_go_on_over_many_turns() -> None:
    crowd = WaitingTasks(MANY, FAR_S)
    await crowd.all_wait()
    later = crowd.progress.begin()
    crowd.progress.end(crowd.number)
    each = await crowd.turns()
    assert max(each) <= WAKES_PER_TURN
    assert crowd.went_on == [True] * MANY
    assert (num_waiters(crowd.progress), crowd.progress.is_past(later)) == (0, False)


async def test_many_whose_deadline_passes_go_on_over_many_turns() -> None:
    crowd = WaitingTasks(MANY, 0.2)
    each = await crowd.turns()
    assert max(each) <= WAKES_PER_TURN
    assert crowd.went_on == [False] * MANY
    assert num_waiters(crowd.progress) == 0
    crowd.progress.end(crowd.number)


async def test_what_ends_while_one_whose_deadline_has_passed_waits_for_its_turn_has_ended() -> None:
    crowd = WaitingTasks(MANY, 0.1)
    async with asyncio.timeout(HANG_S):
        while not crowd.went_on:  # noqa: ASYNC110  the first turn is meant
            await asyncio.sleep(0)
    crowd.progress.end(crowd.number)
    await crowd.turns()
    assert crowd.went_on[0] is False
    assert crowd.went_on[-1] is True


async def test_who_is_cancelled_leaves_nothing_behind() -> None:
    crowd = WaitingTasks(MANY, FAR_S)
    await crowd.all_wait()
    for task in crowd.tasks[::2]:
        task.cancel()
    await asyncio.gather(*crowd.tasks[::2], return_exceptions=True)
    assert (num_waiters(crowd.progress), crowd.went_on) == (MANY // 2, [])
    crowd.progress.end(crowd.number)
    for task in crowd.tasks[1::4]:
        task.cancel()  # they are due, and have not been woken
    await crowd.turns()
    assert (num_waiters(crowd.progress), crowd.went_on) == (0, [True] * (MANY // 4))


async def test_who_has_nothing_to_wait_for_does_not_wait() -> None:
    progress = Progress()
    assert await Waits().until_past(progress, 0, 0.0)
    number = progress.begin()
    progress.begin()
    progress.end(number)
    assert await Waits().until_past(progress, number, 0.0)
    assert num_waiters(progress) == 0
