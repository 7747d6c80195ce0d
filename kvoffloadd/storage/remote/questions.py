"""Questions to the store, whether it has keys: one line for all who ask, and the breaker that judges the answers.

Event loop only. Users and engines take turns, so many questions of one delay the others by one of theirs. Who asked is
told by his deadline, wherever the question is then. The breaker is told what became of the question's own turn.
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
"""Questions that are with the agent at once: one is being asked while the next ones come. So many that hang are enough
for the breaker.
"""

QUESTION_KEYS = 128
"""Best keys of one question: others wait so long for it."""

ITEMS_MAX = 2 * QUESTION_KEYS
"""No question is given to the agent while it has so much to ask: who has his turn waits for that."""


KEY_COST = 1024
"""What a key adds to a question, as if it moved so many bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ExistsResult:
    """`marker`: whether the era's marker is there, a `Presence`; `keys`: (n,) u8, the same for each key. No key counts
    without the marker.
    """

    marker: int
    keys: U8Array


Answered = Callable[[ExistsResult | None], None]


class _Question:
    """One that the agent was given, or will be. `token`: the breaker's; None: it says nothing to it."""

    def __init__(self, questions: Questions, answered: Answered, token: int | None) -> None:
        self._questions = questions
        self._answered: Answered | None = answered
        self._token = token

    def on_late(self) -> None:
        """Nobody waits any more."""
        self._answer(None)

    def on_overdue(self) -> None:
        """The store takes too long."""
        self._judge(ok=False, timed_out=True)

    def on_end(self, codes: Result | None, *, begun: bool) -> None:
        """There is an answer, or there will be none."""
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
    """`on_breaker` is called after each word to the `breaker`."""

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
        """Ask, whatever the breaker says. It is not told."""
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
