"""Waiting for a worker's signal: when it ends, and that a wait that was given up reads nothing more."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from kvoffloadd.device import signals
from kvoffloadd.device.copyruns import read_words
from kvoffloadd.device.signals import ReadySignal, Signals, SignalWait
from kvoffloadd.errors import UsageError
from kvoffloadd.model import BoolArray, Outcome, U64Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import TURN_S

SOON_S = 60.0
OURS, THEIRS = 0, 4001


class SignalScene:
    """Signals with eight words, and the outcomes that were reported."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.signals = Signals(self.loop)
        self.words = np.zeros(8, np.uint64)
        self.told: list[tuple[int, Outcome]] = []
        self.changes = Changes()

    def wait(self, word: int, value: int, uid: int = OURS) -> SignalWait:
        ready = ReadySignal(self.words.ctypes.data + 8 * word, value)
        return self.signals.wait(ready, lambda outcome: self.tell(word, outcome), uid)

    def tell(self, word: int, outcome: Outcome) -> None:
        self.told.append((word, outcome))
        self.changes.notify_all()

    async def until(self, count: int) -> None:
        assert await self.changes.wait_for(lambda: len(self.told) >= count, SOON_S)


@pytest.fixture
async def scene() -> AsyncIterator[SignalScene]:
    made = SignalScene()
    yield made
    made.signals.close()
    await asyncio.sleep(0)


async def test_what_has_come_is_told_at_once_but_not_within_the_call(scene: SignalScene) -> None:
    scene.words[0] = 7
    scene.wait(0, 7)
    assert scene.told == []
    await scene.until(1)
    assert scene.told == [(0, Outcome.DONE)]


@pytest.mark.parametrize("where", ["read_words", "_Snapshot"])
async def test_a_look_without_memory_is_made_again(
    scene: SignalScene, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No waits end with the thread that looks, and a wait that is given up meanwhile has its end."""
    tried, more = threading.Semaphore(0), threading.Event()

    def short(*_: object) -> None:
        tried.release()
        if where == "read_words":
            more.wait(SOON_S)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(signals, where, short)
        given_up = scene.wait(0, 1)
        assert await asyncio.to_thread(tried.acquire, timeout=SOON_S)
        if not scene.signals.cancel(given_up):  # the look has begun
            more.set()
            await scene.until(1)
            assert scene.told == [(0, Outcome.CANCELLED)]
    more.set()
    scene.told.clear()
    scene.words[1] = 1
    scene.wait(1, 1)
    await scene.until(1)
    assert scene.told == [(1, Outcome.DONE)]


async def test_waits_end_in_the_order_of_their_signals(scene: SignalScene) -> None:
    for word in range(4):
        scene.wait(word, 1)
    for word in (2, 0, 3, 1):
        scene.words[word] = 1
        await scene.until(len(scene.told) + 1)
    assert [word for word, _ in scene.told] == [2, 0, 3, 1]


async def test_a_value_below_is_no_signal_and_one_above_is(scene: SignalScene) -> None:
    scene.wait(0, 10)
    scene.words[0] = 9
    await asyncio.sleep(0.05)
    assert scene.told == []
    scene.words[0] = (1 << 63) + 5  # u64, not a signed word
    await scene.until(1)


class GatedReader:
    """Reads words once it is open; `looks` counts those that have begun, `read` what they name. `only`: the address
    of a word without which a look need not wait.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.only: int | None = None
        self.read: list[int] = []
        self.open = threading.Event()
        monkeypatch.setattr(signals, "read_words", self)

    def __call__(self, addresses: U64Array) -> tuple[U64Array, BoolArray]:
        self.read = addresses.tolist()
        if self.read and self.only in (None, *self.read):
            self.looks += 1
            assert self.open.wait(SOON_S)
        return read_words(addresses)

    async def until(self, looks: int) -> None:
        async with asyncio.timeout(SOON_S):
            while self.looks < looks:  # noqa: ASYNC110  a thread reads
                await asyncio.sleep(0.001)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedReader]:
    made = GatedReader(monkeypatch)
    yield made
    made.open.set()


async def test_a_page_that_can_t_be_read_keeps_nobody_waiting(gate: GatedReader, scene: SignalScene) -> None:
    """It is being punched out: the thread waits, the loop goes on, with waits, cancels and the end."""
    first, second = scene.wait(0, 1), scene.wait(1, 1)
    await gate.until(1)
    third = scene.wait(2, 1)
    assert not scene.signals.cancel(first), "it is being read"
    assert not scene.signals.cancel(third)
    await asyncio.sleep(0.02)
    assert scene.told == [], "nobody may unmap it before"
    gate.open.set()
    await scene.until(2)
    assert set(scene.told) == {(0, Outcome.CANCELLED), (2, Outcome.CANCELLED)}
    assert len(scene.signals) == 1
    assert second.done is not None


async def test_a_page_of_another_user_keeps_nobody_else_waiting(gate: GatedReader, scene: SignalScene) -> None:
    """The user's own thread waits; all others have theirs, and see their words meanwhile."""
    scene.signals.admit(THEIRS)
    gate.only = scene.words.ctypes.data
    stuck = scene.wait(0, 1, THEIRS)
    await gate.until(1)
    scene.words[1:4] = 1
    scene.wait(1, 1)
    scene.signals.admit(THEIRS + 1)
    scene.wait(2, 1, THEIRS + 1)
    await scene.until(2)
    assert set(scene.told) == {(1, Outcome.DONE), (2, Outcome.DONE)}
    scene.wait(3, 1, THEIRS)
    assert stuck.busy_s(time.monotonic() + 100) >= 100
    assert not scene.signals.cancel(stuck), "it is being read"
    assert len(scene.signals) == 1
    scene.told.clear()
    gate.open.set()
    await scene.until(2)
    assert set(scene.told) == {(0, Outcome.CANCELLED), (3, Outcome.DONE)}


async def test_the_end_during_a_look(gate: GatedReader, scene: SignalScene) -> None:
    scene.wait(0, 1)
    await gate.until(1)
    scene.signals.close()
    await asyncio.sleep(0.02)
    assert scene.told == []
    gate.open.set()
    await scene.until(1)
    assert scene.told == [(0, Outcome.CANCELLED)]


async def test_a_cancelled_wait_says_nothing_and_reads_nothing(
    gate: GatedReader, scene: SignalScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled between two looks."""
    monkeypatch.setattr(signals, "_pause_s", lambda *_: SOON_S)
    gate.open.set()
    wait = scene.wait(0, 1)
    await gate.until(1)
    async with asyncio.timeout(SOON_S):
        while wait.busy_s(time.monotonic()):  # noqa: ASYNC110  a thread reads
            await asyncio.sleep(0.001)
    assert scene.signals.cancel(wait)
    scene.words[0] = 1
    scene.wait(1, 1)
    await gate.until(2)
    assert gate.read == [scene.words.ctypes.data + 8]
    assert scene.told == []
    assert len(scene.signals) == 1
    assert not scene.signals.cancel(wait)


async def test_a_wait_that_is_over_can_not_be_cancelled(scene: SignalScene) -> None:
    scene.words[0] = 1
    wait = scene.wait(0, 1)
    await scene.until(1)
    assert scene.told == [(0, Outcome.DONE)]
    assert not scene.signals.cancel(wait)
    assert len(scene.signals) == 0


async def test_a_new_wait_is_looked_at_at_once(
    gate: GatedReader, scene: SignalScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the thread would have paused for those before it."""
    monkeypatch.setattr(signals, "_pause_s", lambda *_: 10 * SOON_S)
    gate.open.set()
    scene.wait(0, 1)
    await gate.until(1)
    scene.words[1] = 1
    scene.wait(1, 1)
    await scene.until(1)
    assert scene.told == [(1, Outcome.DONE)]


async def test_close_cancels_and_refuses(scene: SignalScene) -> None:
    scene.wait(0, 1)
    scene.signals.close()
    await scene.until(1)
    assert scene.told == [(0, Outcome.CANCELLED)]
    with pytest.raises(UsageError, match="closed"):
        scene.wait(0, 1)


async def test_many_waits(scene: SignalScene, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(500):
        scene.wait(int(rng.integers(0, 8)), int(rng.integers(1, 50)))
    for value in range(1, 51):
        scene.words[:] = value
        if value % 10 == 0:
            await asyncio.sleep(0)
    await scene.until(500)
    assert all(outcome is Outcome.DONE for _, outcome in scene.told)


async def test_many_words_and_many_waits_for_each(scene: SignalScene, seed: int) -> None:
    """Words come and go while others are waited for: each wait ends with its own value, cancelled ones never."""
    rng = np.random.default_rng(seed)
    scene.words = np.zeros(300, np.uint64)
    due = rng.integers(1, 4, 300)
    waits = [scene.wait(word, int(due[word])) for word in range(300)]
    other = [scene.wait(word, 3) for word in range(0, 300, 2)]
    cancelled = [scene.signals.cancel(wait) for wait in waits[::3]].count(False)
    await scene.until(cancelled)  # those that were being read
    scene.told.clear()
    for value in (1, 2, 3):
        scene.words[:] = value
        expected = {word for word in range(300) if word % 3 and due[word] <= value}
        await scene.until(len(expected) + (len(other) if value == 3 else 0))
        if value < 3:
            assert {word for word, _ in scene.told} == expected
    assert len(scene.signals) == 0
    assert len(scene.told) == 200 + len(other)


async def test_a_word_is_read_once_however_many_wait_for_it(
    scene: SignalScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counting(addresses: U64Array) -> tuple[U64Array, BoolArray]:
        read.append(len(addresses))
        return read_words(addresses)

    monkeypatch.setattr(signals, "read_words", counting)
    for number in range(1000):
        scene.wait(number % 4, number + 1)
    read.clear()
    await asyncio.sleep(0.05)
    scene.wait(5, 1)  # a new one hastens the next look
    async with asyncio.timeout(SOON_S):
        while max(read, default=0) < 4:  # noqa: ASYNC110  a thread reads
            await asyncio.sleep(0.001)
    assert set(read) <= {1, 4, 5}


async def test_what_ends_at_once_is_told_over_several_turns(scene: SignalScene) -> None:
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(ended) < 40:
            scene.loop.call_soon(turn)

    ended: list[int] = []

    def done(number: int) -> None:
        ended.append(number)
        time.sleep(TURN_S / 2)

    ready = ReadySignal(scene.words.ctypes.data, 1)
    for number in range(40):
        scene.signals.wait(ready, lambda _, number=number: done(number))  # type: ignore[misc]
    scene.words[0] = 1
    time.sleep(0.05)  # noqa: ASYNC251  all have ended before the loop looks
    scene.loop.call_soon(turn)
    async with asyncio.timeout(SOON_S):
        while len(ended) < 40:  # noqa: ASYNC110  each is one turn
            await asyncio.sleep(0)
    assert ended == list(range(40))
    assert turns > 10, "others had their turns in between"


async def test_nothing_of_a_wait_that_is_over_is_kept(scene: SignalScene) -> None:
    class Job:
        def done(self, outcome: Outcome) -> None:
            over.append(outcome)

    over: list[Outcome] = []
    jobs = [Job() for _ in range(100)]
    alive = weakref.WeakSet(jobs)
    ready = ReadySignal(scene.words.ctypes.data, 1)
    kept = scene.wait(0, 5)  # the word is waited for all the time
    for job in jobs:
        if scene.signals.cancel(scene.signals.wait(ready, job.done)):
            over.append(Outcome.CANCELLED)
    jobs.clear()
    del job
    async with asyncio.timeout(SOON_S):
        while len(over) < 100 or kept.busy_s(time.monotonic()):  # noqa: ASYNC110  a thread reads
            await asyncio.sleep(0.001)
    assert set(over) == {Outcome.CANCELLED}
    gc.collect()
    assert len(alive) == 0


@pytest.mark.parametrize(
    ("lasted_s", "look_s", "pause_s"),
    [(0, 0, 20e-6), (1e-3, 1e-5, 62.5e-6), (0.1, 1e-5, 1e-3), (5, 1e-5, 5e-3), (600, 1e-5, 10e-3), (0, 1e-4, 4e-4)],
)
def test_pauses_grow_with_the_wait_and_with_the_look(lasted_s: float, look_s: float, pause_s: float) -> None:
    assert signals._pause_s(lasted_s, look_s) == pytest.approx(pause_s)
