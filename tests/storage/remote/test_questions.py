"""Questions to the store: callers are answered in time, and the breaker hears of the store alone."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from kvoffloadd.agentwire.frames import Answer, Exists, Frames, Presence
from kvoffloadd.agentwire.names import ERA_BYTES, FINGERPRINT_BYTES, KEY_BYTES, SHAPE_BYTES, Space
from kvoffloadd.scheduling.lanes import Flow
from kvoffloadd.storage.remote.breaker import TIMEOUTS, BreakerState
from kvoffloadd.storage.remote.calls import Calls
from kvoffloadd.storage.remote.questions import DEPTH, QUESTION_KEYS, ExistsResult, Questions
from kvoffloadd.storage.remote.transfers import Names
from tests.storage.remote.host import until

SPACE = Space(bytes(FINGERPRINT_BYTES), bytes(SHAPE_BYTES), 0, bytes(ERA_BYTES), 0, KEY_BYTES)
LOUD, QUIET = Flow(1001, 1), Flow(1002, 2)


class QuestionScene:
    """Questions to an agent that answers when the test makes it."""

    def __init__(self) -> None:
        self.frames = Frames(by_agent=False)
        self.given: list[Exists] = []
        self.answers: dict[str, list[ExistsResult | None]] = {}
        self.calls = Calls(asyncio.get_running_loop(), self._take, lambda reason: None, 60.0)
        self.calls.begin(stops_at_once=True)
        self.questions = Questions(self.calls, asyncio.get_running_loop(), lambda: None)

    def _take(self, frame: bytes) -> None:
        self.frames.receive(frame)
        call = self.frames.next()
        assert isinstance(call, Exists)
        self.given.append(call)

    def ask(self, who: str, flow: Flow, keys: int = 1, wait_s: float = 60.0) -> None:
        self.answers[who] = []
        names = Names(SPACE, np.full((keys, 4), len(who), np.uint64))
        self.questions.exists(names, time.monotonic() + wait_s, self.answers[who].append, flow, 0)

    def answer(self, number: int, presence: Presence = Presence.YES) -> None:
        call = self.given[number]
        codes = np.full(len(call.keys) // 32 + 1, presence, "<i8")
        self.calls.on_answer(Answer(call.id, codes.tobytes()))


async def test_what_was_late_for_others_before_it_does_not_open_the_breaker() -> None:
    """Here and with the agent: it was not the store."""
    scene = QuestionScene()
    scene.ask("first", LOUD)
    for number in range(4 * TIMEOUTS):
        scene.ask(f"loud {number}", LOUD, wait_s=0.02)
    scene.ask("quiet", QUIET, wait_s=0.02)
    await until(lambda: all(scene.answers[who] == [None] for who in scene.answers if who != "first"))
    assert scene.answers["first"] == []
    assert (scene.questions.breaker.state, scene.questions.breaker.opened) == (BreakerState.CLOSED, 0)
    scene.answer(0)
    await until(lambda: bool(scene.answers["first"]))
    assert scene.questions.breaker.allows()


async def test_an_answer_to_nobody_is_good_news_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = QuestionScene()
    noted: list[bool] = []
    end = scene.questions.breaker.end

    def note(call: int, now_s: float, *, ok: bool, timed_out: bool = False) -> None:
        noted.append(ok)
        end(call, now_s, ok=ok, timed_out=timed_out)

    monkeypatch.setattr(scene.questions.breaker, "end", note)
    scene.ask("first", LOUD)
    scene.ask("second", QUIET, wait_s=0.02)
    await until(lambda: scene.answers["second"] == [None])
    assert noted == []
    scene.answer(1)
    assert noted == [True]
    assert scene.answers["second"] == [None]


@pytest.mark.parametrize("keys", [1, QUESTION_KEYS])
async def test_a_store_that_hangs_opens_it(keys: int) -> None:
    """However few questions the agent has at once otherwise."""
    scene = QuestionScene()
    for number in range(TIMEOUTS):
        assert scene.questions.breaker.state is BreakerState.CLOSED
        scene.ask(str(number), LOUD, keys, wait_s=0.02)
        await until(lambda: scene.answers[str(number)] == [None])  # noqa: B023
    await until(lambda: scene.questions.breaker.state is BreakerState.OPEN)
    assert len(scene.given) == TIMEOUTS <= DEPTH
    scene.ask("refused", LOUD)
    await until(lambda: scene.answers["refused"] == [None])
    assert len(scene.given) == TIMEOUTS


async def test_the_agent_has_few_keys_at_once() -> None:
    """Who has his turn waits for them."""
    scene = QuestionScene()
    for number in range(50):
        scene.ask(f"loud {number}", LOUD, QUESTION_KEYS)
    assert len(scene.given) == 2
    scene.answer(0)
    assert len(scene.given) == 3
    small = QuestionScene()
    for number in range(50):
        small.ask(f"loud {number}", LOUD)
    assert len(small.given) == DEPTH


async def test_a_question_that_never_begins_leaves_the_trial_to_others() -> None:
    scene = QuestionScene()
    breaker = scene.questions.breaker
    for number in range(DEPTH):
        scene.ask(f"before {number}", LOUD)
    for _ in range(TIMEOUTS):
        breaker.end(breaker._stage, 0.0, ok=False, timed_out=True)
    breaker.probed(0.0, ok=True)
    assert breaker.state is BreakerState.TRIAL
    scene.ask("trial", QUIET, wait_s=0.02)
    assert not breaker.allows()
    await until(lambda: scene.answers["trial"] == [None])
    assert breaker.allows()


@pytest.mark.parametrize("presence", [Presence.YES, Presence.NO])
async def test_users_take_turns_whatever_each_has_asked(presence: Presence) -> None:
    scene = QuestionScene()
    for number in range(50):
        scene.ask(f"loud {number}", LOUD, keys=128)
    scene.ask("quiet", QUIET, keys=16)
    for number in range(4):
        scene.answer(number, presence)
    await until(lambda: bool(scene.answers["quiet"]))
    (answer,) = scene.answers["quiet"]
    assert answer is not None
    assert answer.keys.tolist() == [presence] * 16
