"""What a request is told about a key, from the first question to the end."""

from __future__ import annotations

from kvoffloadd.client import KeyState
from kvoffloadd.integrations.vllm.asker import Question
from kvoffloadd.integrations.vllm.names import by_group
from kvoffloadd.integrations.vllm.promises import Answer, Promises

KEYS = [bytes([at]) * 32 + bytes(4) for at in range(3)]


def asked(promises: Promises, now: float = 0.0) -> Question:
    """Looks every key up, as a step does, and asks."""
    assert [promises.lookup(key, now, 1.0, 10.0) for key in KEYS] == [Answer.ASKED] * 3
    question = Question("r", by_group(promises.fresh))
    promises.fresh.clear()
    promises.asking = question
    promises.questions.append(question)
    return question


def answers(promises: Promises, now: float) -> list[Answer]:
    return [promises.lookup(key, now, 1.0, 10.0) for key in KEYS]


def test_answers_are_kept() -> None:
    promises = Promises("r")
    question = asked(promises)
    question.states = {0: bytes([KeyState.HIT, KeyState.MISS, KeyState.PENDING])}
    assert promises.learn(question, 0) == 1
    assert answers(promises, 5.0) == [Answer.HIT, Answer.MISS, Answer.PENDING]


def test_a_pending_key_is_asked_for_again_once_its_answer_is_there() -> None:
    promises = Promises("r")
    question = asked(promises)
    question.states = {0: bytes([KeyState.HIT, KeyState.HIT, KeyState.PENDING])}
    promises.learn(question, 0)
    answers(promises, 0.5)
    assert promises.fresh == []
    promises.asking = None
    answers(promises, 0.5)
    assert promises.fresh == [KEYS[2]]


def test_nobody_waits_for_ever() -> None:
    promises = Promises("r")
    asked(promises)
    assert answers(promises, 0.9) == [Answer.ASKED] * 3
    assert answers(promises, 1.1) == [Answer.MISS] * 3
    assert promises.given_up


def test_keys_from_disk_may_take_longer() -> None:
    promises = Promises("r")
    question = asked(promises)
    question.states = {0: bytes([KeyState.PENDING] * 3)}
    promises.learn(question, 0)
    assert answers(promises, 9.0) == [Answer.PENDING] * 3
    assert answers(promises, 11.0) == [Answer.MISS] * 3


def test_what_is_forgotten_is_to_be_released() -> None:
    promises = Promises("r")
    question = asked(promises)
    assert promises.forget() == [question]
    assert promises.questions == []
    assert promises.answers == {}
