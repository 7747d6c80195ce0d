"""Questions to the store for the presence of keys: one line for all callers, and the breaker that judges the answers.

Event loop only. Users and engines take turns, so a user with many questions delays the others by one question. A caller
gets a result by its deadline, whatever the state of the question. The breaker gets the result of the question's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvoffloadd.agentwire.frames import Exists, Presence
from kvoffloadd.model import U8Array
from kvoffloadd.scheduling.lanes import DAEMON, Flow
from kvoffloadd.storage.remote.breaker import Breaker
from kvoffloadd.storage.remote.calls import Calls, PendingCall, Result
from kvoffloadd.storage.remote.transfers import Names

DEPTH = 4
"""The number of questions that the agent has at once: one is being asked while the next ones come. This number of
hanging questions is enough for the breaker.
"""

QUESTION_KEYS = 128
"""The best number of keys in one question: the time that other callers wait for it."""

ITEMS_MAX = 2 * QUESTION_KEYS
"""The agent gets no question while it has this number of keys to ask for: the next in turn waits for that."""


KEY_COST = 1024
"""The cost that a key adds to a question, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ExistsResult:
    """`marker`: a `Presence`, of the era's marker; `keys`: (n,) u8, the same for each key. No key counts without the
    marker.
    """

    marker: int
    keys: U8Array


Answered = Callable[[ExistsResult | None], None]


class _Question:
    """A question that the agent has, or will get. `token`: the breaker's; None: the breaker gets no report."""

    def __init__(self, questions: Questions, answered: Answered, token: int | None) -> None:
        self._questions = questions
        self._answered: Answered | None = answered
        self._token = token

    def on_late(self) -> None:
        """Answers None to the caller, whose deadline is over."""
        self._answer(None)

    def on_overdue(self) -> None:
        """Reports to the breaker that the store takes too long."""
        self._judge(ok=False, timed_out=True)

    def on_end(self, codes: Result | None, *, begun: bool) -> None:
        """Takes the answer, or the lack of one."""
        found = codes if isinstance(codes, np.ndarray) else None
        if begun:
            self._judge(ok=found is not None and bool((found != Presence.UNKNOWN).any()))
        elif self._token is not None:
            self._questions.breaker.withdraw(self._token)
        self._answer(None if found is None else ExistsResult(int(found[0]), found[1:].astype(np.uint8)))

    def _answer(self, answer: ExistsResult | None) -> None:
        answered, self._answered = self._answered, None
        if answered is not None:
            self._questions.loop.call_soon(answered, answer)

    def _judge(self, *, ok: bool, timed_out: bool = False) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._questions.breaker.end(token, time.monotonic(), ok=ok, timed_out=timed_out)
            self._questions.on_breaker()


class Questions:
    """`on_breaker` is called after each report to the `breaker`."""

    def __init__(self, calls: Calls, loop: asyncio.AbstractEventLoop, on_breaker: Callable[[], None]) -> None:
        self.breaker = Breaker()
        self.loop = loop
        self.on_breaker = on_breaker
        self._calls = calls
        self._line = calls.line(DEPTH, items_max=ITEMS_MAX, in_order=True)

    def exists(self, names: Names, until_s: float, answered: Answered, flow: Flow, urgent: int) -> None:
        """See `RemoteStore.exists`."""
        if self._calls.serving and self.breaker.allows():
            self._ask(names, until_s, answered, self.breaker.begin(), flow, urgent)
        else:
            self.loop.call_soon(answered, None)

    def probe(self, names: Names, until_s: float, answered: Answered) -> None:
        """Asks, whatever the state of the breaker, which gets no report."""
        self._ask(names, until_s, answered, None, DAEMON, 0)

    def _ask(
        self, names: Names, until_s: float, answered: Answered, token: int | None, flow: Flow, urgent: int
    ) -> None:
        question = _Question(self, answered, token)
        space, keys = names.space, names.packed()
        call = PendingCall(
            self._line, lambda call_id: Exists(call_id, space, keys), len(names.keys) + 1, max(Presence), until_s,
            lambda codes: question.on_end(codes, begun=call.begun), question.on_late, question.on_overdue,
            code_min=min(Presence), flow=flow, urgent=urgent, cost=KEY_COST * len(names.keys),
        )  # fmt: skip
        self._calls.submit(call)
