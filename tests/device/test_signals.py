"""Waiting for a worker's signal: when it ends, and that a wait that was given up reads nothing more."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvoffloadd.device.signals import Ready, Signals
from kvoffloadd.errors import UsageError
from kvoffloadd.model import Outcome

SOON_S = 60.0


class Scene:
    """Signals with eight words, and what was told."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.signals = Signals(self.loop)
        self.words = np.zeros(8, np.uint64)
        self.told: list[tuple[int, Outcome]] = []
        self.changed = asyncio.Event()

    def wait(self, word: int, value: int, deadline_s: float = SOON_S) -> object:
        ready = Ready(self.words.ctypes.data + 8 * word, value)
        return self.signals.wait(ready, self.loop.time() + deadline_s, lambda outcome: self.tell(word, outcome))

    def tell(self, word: int, outcome: Outcome) -> None:
        self.told.append((word, outcome))
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while len(self.told) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    made.signals.close()
    await asyncio.sleep(0)


async def test_what_has_come_is_told_at_once_but_not_within_the_call(scene: Scene) -> None:
    scene.words[0] = 7
    scene.wait(0, 7)
    assert scene.told == []
    await scene.until(1)
    assert scene.told == [(0, Outcome.DONE)]


async def test_waits_end_in_the_order_of_their_signals(scene: Scene) -> None:
    for word in range(4):
        scene.wait(word, 1)
    for word in (2, 0, 3, 1):
        scene.words[word] = 1
        await scene.until(len(scene.told) + 1)
    assert [word for word, _ in scene.told] == [2, 0, 3, 1]


async def test_a_value_below_is_no_signal_and_one_above_is(scene: Scene) -> None:
    scene.wait(0, 10)
    scene.words[0] = 9
    await asyncio.sleep(0.05)
    assert scene.told == []
    scene.words[0] = (1 << 63) + 5  # u64, not a signed word
    await scene.until(1)


async def test_the_deadline_ends_a_wait(scene: Scene) -> None:
    began = time.monotonic()
    scene.wait(0, 1, deadline_s=0.05)
    scene.wait(1, 1)
    await scene.until(1)
    assert scene.told == [(0, Outcome.EXPIRED)]
    assert time.monotonic() - began >= 0.05
    assert len(scene.signals) == 1


async def test_a_cancelled_wait_says_nothing_and_reads_nothing(scene: Scene) -> None:
    private = ctypes.create_string_buffer(16)
    address = ctypes.addressof(private) + -ctypes.addressof(private) % 8
    wait = scene.signals.wait(Ready(address, 1), scene.loop.time() + SOON_S, lambda outcome: scene.tell(0, outcome))
    assert scene.signals.cancel(wait)
    ctypes.memset(address, 0xFF, 8)
    await asyncio.sleep(0.02)
    assert scene.told == []
    assert len(scene.signals) == 0
    assert not scene.signals.cancel(wait)


async def test_close_cancels_and_refuses(scene: Scene) -> None:
    scene.wait(0, 1)
    scene.signals.close()
    await scene.until(1)
    assert scene.told == [(0, Outcome.CANCELLED)]
    with pytest.raises(UsageError, match="closed"):
        scene.wait(0, 1)


async def test_many_waits(scene: Scene, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(500):
        scene.wait(int(rng.integers(0, 8)), int(rng.integers(1, 50)))
    for value in range(1, 51):
        scene.words[:] = value
        if value % 10 == 0:
            await asyncio.sleep(0)
    await scene.until(500)
    assert all(outcome is Outcome.DONE for _, outcome in scene.told)
