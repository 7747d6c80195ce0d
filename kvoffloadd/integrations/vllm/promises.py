"""What one request was told about its keys, and the pins that keep it true."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffloadd.client import KeyState
from kvoffloadd.integrations.vllm.names import group_of, key_of

if TYPE_CHECKING:
    from kvoffloadd.integrations.vllm.asker import Question


class Answer(enum.Enum):
    """As vLLM's LookupResult."""

    MISS = enum.auto()
    HIT = enum.auto()
    PENDING = enum.auto()
    ASKED = enum.auto()


@dataclass(slots=True, eq=False)
class Promises:
    """Of one request, until it is loaded, preempted or finished. Times are time.monotonic seconds.

    `answers` by offload key; `fresh`: those to ask for at the end of the step; `questions`: asked, and not released.
    `asked_at`: since when it has been waiting. `given_up`: what does not hit by now misses for the rest of its life.
    """

    request: str
    answers: dict[bytes, Answer] = field(default_factory=dict)
    fresh: list[bytes] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    asking: Question | None = None
    asked_at: float = 0.0
    again_at: float = 0.0
    loading: bool = False
    finished: bool = False
    given_up: bool = False

    def lookup(self, key: bytes, now: float, timeout_s: float, wait_s: float) -> Answer:
        """What is known of it; if nothing is, it will be asked for. Past its time, what is not known misses."""
        answer = self.answers.get(key)
        if answer is Answer.HIT or answer is Answer.MISS:
            return answer
        if self.given_up:
            return Answer.MISS
        if answer is None:
            if self.asking is None and not self.fresh:
                self.asked_at = now
            self.answers[key] = Answer.ASKED
            self.fresh.append(key)
            return Answer.ASKED
        if now - self.asked_at > (timeout_s if answer is Answer.ASKED else wait_s):
            self.given_up = True
            return Answer.MISS
        if answer is Answer.PENDING and self.asking is None and now >= self.again_at:
            self.fresh.append(key)
        return answer

    def learn(self, question: Question, generation: int) -> int:
        """Take an answer; how many keys hit. What is pending and not on its way from disk is asked for once more."""
        states = {
            group: dict(zip(keys, question.states[group], strict=True)) for group, keys in question.groups.items()
        }
        hits = 0
        for key, known in self.answers.items():
            if known is Answer.HIT:
                continue
            state = states.get(group_of(key), {}).get(key_of(key, generation))
            if state is None:
                continue
            if state == KeyState.HIT:
                hits += 1
                self.answers[key] = Answer.HIT
            elif state == KeyState.PENDING:
                self.answers[key] = Answer.PENDING
            else:
                self.answers[key] = Answer.MISS
        return hits

    def forget(self) -> list[Question]:
        """Start anew; the questions whose pins are to be released."""
        questions, self.questions = self.questions, []
        self.answers.clear()
        self.fresh.clear()
        self.asking = None
        self.asked_at = self.again_at = 0.0
        self.loading = False
        return questions
