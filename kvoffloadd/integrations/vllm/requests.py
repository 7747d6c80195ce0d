"""What one request was told about its keys, and the pins that keep it true."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvoffloadd.client import KeyState
from kvoffloadd.integrations.vllm.keys import group_of, key_of
from kvoffloadd.integrations.vllm.lookup_thread import PinRequest


class LookupState(enum.Enum):
    """As vLLM's LookupResult."""

    MISS = enum.auto()
    HIT = enum.auto()
    PENDING = enum.auto()
    ASKED = enum.auto()


@dataclass(slots=True, eq=False)
class RequestState:
    """Of one request, until it is loaded, preempted or finished. Times are time.monotonic seconds.

    `answers` by offload key; `fresh`: those to ask for at the end of the step; `questions`: asked, and not released.
    `asked_at`: since when it has been waiting. `given_up`: what does not hit by now misses for the rest of its life.
    `postponed_at`: when it was last not asked for want of room; 0: it may be. `loaded`: what the daemon has given it.
    """

    request: str
    answers: dict[bytes, LookupState] = field(default_factory=dict)
    fresh: list[bytes] = field(default_factory=list)
    questions: list[PinRequest] = field(default_factory=list)
    asking: PinRequest | None = None
    asked_at: float = 0.0
    again_at: float = 0.0
    postponed_at: float = 0.0
    loading: bool = False
    finished: bool = False
    given_up: bool = False
    loaded: set[bytes] = field(default_factory=set)

    def lookup(self, key: bytes, now: float, timeout_s: float, wait_s: float) -> LookupState:
        """What is known of it; if nothing is, it will be asked for. Past its time, what is not known misses."""
        answer = self.answers.get(key)
        if answer is LookupState.HIT or answer is LookupState.MISS:
            return answer
        if self.given_up:
            return LookupState.MISS
        if answer is None:
            if self.asking is None and not self.fresh:
                self.asked_at = now
            self.answers[key] = LookupState.ASKED
            self.fresh.append(key)
            return LookupState.ASKED
        if self.postponed_at and now - self.postponed_at > wait_s:
            self.asked_at = now  # nobody has looked since: its turn has not come before
        if now - self.asked_at > (timeout_s if answer is LookupState.ASKED and not self.postponed_at else wait_s):
            self.given_up = True
            return LookupState.MISS
        if answer is LookupState.PENDING and self.asking is None and now >= self.again_at:
            self.fresh.append(key)
        return answer

    def learn(self, question: PinRequest, generation: int) -> int:
        """Take an answer; how many keys hit. What is pending and not on its way from disk is asked for once more."""
        states = {
            group: dict(zip(keys, question.states[group], strict=True)) for group, keys in question.groups.items()
        }
        hits = 0
        for key, known in self.answers.items():
            if known is LookupState.HIT:
                continue
            state = states.get(group_of(key), {}).get(key_of(key, generation))
            if state is None:
                continue
            if state == KeyState.HIT:
                hits += 1
                self.answers[key] = LookupState.HIT
            elif state == KeyState.PENDING:
                self.answers[key] = LookupState.PENDING
            else:
                self.answers[key] = LookupState.MISS
        return hits

    def forget(self) -> list[PinRequest]:
        """Start anew; the questions whose pins are to be released."""
        questions, self.questions = self.questions, []
        self.answers.clear()
        self.fresh.clear()
        self.asking = None
        self.asked_at = self.again_at = self.postponed_at = 0.0
        self.loading = False
        return questions

    def is_there(self, key: bytes) -> bool:
        """Whether the daemon had it when it was last asked, so that it need not be stored."""
        return key in self.loaded or self.answers.get(key) is LookupState.HIT

    def settle(self) -> list[PinRequest]:
        """It computes what it has not loaded by now: pins hold nothing for it any more. What is known stays so."""
        questions, self.questions = self.questions, []
        self.fresh.clear()
        self.asking = None
        return questions

    @property
    def waiting_keys(self) -> int:
        """How many keys are pinned for it before it is loaded."""
        return 0 if self.loading else sum(question.holds for question in self.questions)


def admitted(
    fresh: Iterable[RequestState], everyone: Iterable[RequestState], most: int, now: float
) -> list[RequestState]:
    """Those of `fresh` that may ask now: while `everyone` that waits pins at most so many keys, and one always.

    Who has pins already may ask for more, else two might wait for each other.
    """
    asking = [promises for promises in fresh if promises.fresh and promises.asking is None]
    if not asking:
        return []
    held = sum(promises.waiting_keys for promises in everyone)
    found = []
    for promises in asking:
        wanted = len(promises.fresh)
        if held and held + wanted > most and not promises.questions:
            promises.postponed_at = now
            continue
        if promises.postponed_at:
            promises.postponed_at, promises.asked_at = 0.0, now
        held += wanted
        found.append(promises)
    return found
