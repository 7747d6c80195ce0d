"""Waiting for a change on the event loop."""

from __future__ import annotations

import asyncio

from kvoffloadd.scheduling.changes import Changes

SOON_S = 0.01


async def test_who_waits_goes_on_when_the_predicate_holds_and_not_before() -> None:
    changes, numbers = Changes(), list[int]()
    waiting = asyncio.create_task(changes.wait_for(lambda: len(numbers) == 2))
    for number in range(2):
        await asyncio.sleep(0)
        assert not waiting.done()
        numbers.append(number)
        changes.notify_all()
    assert await waiting


async def test_a_predicate_that_holds_needs_no_change() -> None:
    assert await Changes().wait_for(lambda: True, 0.0)


async def test_a_change_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    changes = Changes()
    waiting = [asyncio.create_task(changes.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    changes.notify_all()
    assert not await changes.wait(SOON_S)
    assert await asyncio.gather(*waiting) == [True] * 3


async def test_a_deadline_ends_the_wait() -> None:
    changes = Changes()
    assert not await changes.wait_for(lambda: False, SOON_S)
    assert not await changes.wait(SOON_S)
