"""Calls that the agent has, or will get: which ones wait, are being answered, or are overdue. Event loop only.

Calls of one kind share a line, in which users and engines take turns (see `lanes.Flow`). The agent never has more of
them than threads for them: calls that wait here have not begun, and can be withdrawn. A call that the agent has can't:
only an answer, or the agent's end, ends it.

A call is late when its caller's time is over, in any state. It is overdue when its own turn takes that long: waiting
for the turns of others, here and in the agent, is not the store's fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvoffloadd.agentwire.frames import (
    AFTER_MAX,
    CODE_MIN,
    VALUE_BYTES_MAX,
    Answer,
    Call,
    Code,
    Reply,
    Swept,
    Values,
    encode,
)
from kvoffloadd.errors import FramingError
from kvoffloadd.model import I64Array
from kvoffloadd.scheduling.fairqueue import FairQueue
from kvoffloadd.scheduling.lanes import DAEMON, Flow, path_of
from kvoffloadd.scheduling.stuckdetector import StuckDetector

RESULT_MAX: Final = 1 << 48
"""The limit of a code that counts bytes or objects."""

NO_LIMIT: Final = 1 << 62

LOOKS = 8
"""How often a call is checked before it counts as stuck."""

TURN_COST_MIN = 64 << 10
"""The minimum cost of a turn to its flow, however little it moves."""

EARLY_S = 0.001
"""How early timers may fire."""

Result = I64Array | Values | Swept
"""The result of a call: the codes of an `Answer`, or the contents of another answer."""


@dataclass(slots=True, eq=False)
class CallLine:
    """One kind of call. `depth`: calls of it that the agent may have at once. `items_max`: no call is given to the
    agent while its calls have this number of items, not counting overdue calls. `in_order`: one thread answers them one
    by one. `may_hang`: its calls may take any time, even for ever, without a reason to end the agent.
    """

    depth: int
    items_max: int
    in_order: bool
    may_hang: bool
    waiting: FairQueue[PendingCall] = field(default_factory=lambda: FairQueue(TURN_COST_MIN))
    given: dict[PendingCall, None] = field(default_factory=dict)  # in order
    last_answer_s: float = 0.0
    turn_ended_s: float = 0.0  # `in_order`: when the last turn ended, by an answer or by its time limit

    @property
    def has_room(self) -> bool:
        """Whether the agent may have one call more."""
        items = sum(call.items for call in self.given if not call.overdue)
        return len(self.given) < self.depth and items < self.items_max

    def turn_ends_s(self, call: PendingCall, now_s: float) -> float:
        """Returns when a call of the agent is overdue, or the earliest time at which it may be."""
        began_s = call.given_s
        if self.in_order and call in self.given:
            first = next(given for given in self.given if not given.overdue)
            began_s = max(began_s, self.turn_ended_s) if call is first else now_s
        return began_s + call.patience_s


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call.

    `make(id)`: its frame, made when it is given to the agent. `items`: codes in its answer, each from `code_min` to
    `code_max`. `on_late()`: its time is over, and it continues. `on_overdue()`: the time for its own turn is over, too:
    its time at creation, or `patience_s` if that is more. `end(result)`: it has ended, once: with the result that
    `answered_by` brings, or with None: the agent died, or it was never begun (`begun`).

    `cost`: of its turn, in bytes.
    """

    line: CallLine
    make: Callable[[int], Call]
    items: int
    code_max: int
    until_s: float
    end: Callable[[Result | None], None]
    on_late: Callable[[], None] | None = None
    on_overdue: Callable[[], None] | None = None
    code_min: int = CODE_MIN
    moves_bytes: bool = False  # between the store and the daemon's memory
    answered_by: type[Reply] = Answer
    flow: Flow = DAEMON
    urgent: int = 0
    cost: int = 0
    patience_s: float = 0.0
    late: bool = False
    overdue: bool = False
    begun: bool = False
    ended: bool = False
    given_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    held: I64Array | None = None  # an answer that does not end it, since bytes may still move


class Calls:
    """`send` gives a frame to the agent; `kill` ends it, with a reason."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[bytes], None],
        kill: Callable[[str], None],
        stuck_s: float,
    ) -> None:
        self._loop = loop
        self._send = send
        self._kill = kill
        self._stuck_s = stuck_s
        self._given: dict[int, PendingCall] = {}
        self._unsettled: list[PendingCall] = []
        self._lines: list[CallLine] = []
        self._next_id = 1
        self._serving = False
        self._stops_at_once = False
        self._look: asyncio.TimerHandle | None = None
        self._patience = StuckDetector(stuck_s / LOOKS)

    def line(
        self, depth: int, *, items_max: int = NO_LIMIT, in_order: bool = False, may_hang: bool = False
    ) -> CallLine:
        """Returns a new line."""
        self._lines.append(CallLine(depth, items_max, in_order, may_hang))
        return self._lines[-1]

    @property
    def serving(self) -> bool:
        """Whether an agent takes calls. False while one is about to be ended, too."""
        return self._serving

    @property
    def unsettled(self) -> int:
        """The number of failed calls that keep their memory until the agent's end."""
        return len(self._unsettled)

    def begin(self, *, stops_at_once: bool) -> None:
        """Begins to serve an agent. `stops_at_once`: of its engine."""
        self._serving = True
        self._stops_at_once = stops_at_once

    def finish(self) -> None:
        """Ends every call after the agent's death, as reported by the kernel; calls with answers first."""
        self._serving = False
        self._stop_looking()
        unsettled, self._unsettled = self._unsettled, []
        given, self._given = list(self._given.values()), {}
        for line in self._lines:
            line.given.clear()
        for call in unsettled:
            self._end(call, call.held)
        for call in given:
            self._end(call, None)
        self.drop_waiting()

    def stop(self) -> None:
        """Stops giving calls to the agent."""
        self._serving = False

    def drop_waiting(self) -> None:
        """Ends calls that have not begun."""
        for line in self._lines:
            while (call := line.waiting.take()) is not None:
                self._end(call, None)

    def submit(self, call: PendingCall) -> None:
        """Gives a call to the agent in its turn, if there still is time then."""
        now_s = time.monotonic()
        left_s = max(call.until_s - now_s, 0.0)
        call.patience_s = max(call.patience_s, left_s)
        call.timer = self._loop.call_later(left_s, self._on_time, call)
        call.line.waiting.push(path_of(call.flow, call.urgent), call, max(call.cost, TURN_COST_MIN))
        self._pump(call.line, now_s)

    def withdraw(self, call: PendingCall) -> bool:
        """Withdraws a call. Returns True if it had not begun: then its `end` is never called."""
        if call.begun or call.ended:
            return False
        call.line.waiting.remove(call)
        call.ended = True
        self._cancel_timer(call)
        return True

    def on_answer(self, message: Reply) -> None:
        """Takes an answer. Raises FramingError if it fits no call."""
        call = self._given.get(message.id)
        if call is None:
            raise FramingError(f"an answer to call {message.id}, which is not pending")
        result = self._checked(call, message)
        del self._given[message.id]
        del call.line.given[call]
        now_s = call.line.last_answer_s = call.line.turn_ended_s = time.monotonic()
        may_move = call.moves_bytes and not self._stops_at_once
        if may_move and isinstance(result, np.ndarray) and (result == Code.FAILED).any():
            # A failed call may still move bytes to and from this memory, and into other hosts' objects: only the
            # agent's end stops it. Successful calls may end meanwhile.
            call.held = result
            self._unsettled.append(call)
            self._serving = False
            self._look_soon()
        else:
            self._end(call, result)
        if self._unsettled:
            self._kill_when_idle()
        self._pump(call.line, now_s)

    def check(self) -> list[str]:
        """Audits the calls; an empty list: no errors."""
        found = []
        for line in self._lines:
            given = [call for call in self._given.values() if call.line is line]
            if given != list(line.given) or len(given) > line.depth:
                counted = f"{len(line.given)} of {line.depth}"
                found.append(f"remote: {len(given)} calls are with the agent, counted {counted}")
        if any(call.ended for call in (*self._given.values(), *self._unsettled)):
            found.append("remote: a call has ended before the agent has let go of it")
        return found

    # --- internals ---

    def _pump(self, line: CallLine, now_s: float) -> None:
        while self._serving and line.has_room and (call := line.waiting.take()) is not None:
            if call.until_s <= now_s:
                self._loop.call_soon(self._on_time, call)
                continue
            call.begun = True
            call.given_s = now_s
            call_id, self._next_id = self._next_id, self._next_id + 1
            self._given[call_id] = call
            line.given[call] = None
            self._look_soon()
            self._send(encode(call.make(call_id)))

    def _checked(self, call: PendingCall, message: Reply) -> Result:
        if type(message) is not call.answered_by:
            raise FramingError(f"a {type(message).__name__} to a call that has a {call.answered_by.__name__}")
        if isinstance(message, Values):
            check_values(message, call.items)
            return message
        if isinstance(message, Swept):
            codes = np.array([message.removed])
            if len(message.after) > AFTER_MAX or (message.after and message.removed < 0):
                raise FramingError("a sweep that goes on nowhere")
        else:
            if len(message.codes) != 8 * call.items:
                raise FramingError(f"an answer of {len(message.codes)} bytes for {call.items} codes")
            codes = np.frombuffer(message.codes, "<i8").astype(np.int64)
        if ((codes < call.code_min) | (codes > call.code_max)).any():
            raise FramingError("an unknown code")
        return message if isinstance(message, Swept) else codes

    def _on_time(self, call: PendingCall) -> None:
        """Handles a time that is over, for the call or possibly for its turn."""
        if call.ended:
            return
        if not call.begun:
            call.line.waiting.remove(call)
            self._end(call, None)
            return
        if call.on_overdue is not None:
            now_s = time.monotonic()
            left_s = call.line.turn_ends_s(call, now_s) - now_s
            if left_s > EARLY_S:
                call.timer = self._loop.call_later(left_s, self._on_time, call)
            else:
                call.overdue = True
                call.line.turn_ended_s = now_s
                call.on_overdue()
                self._pump(call.line, now_s)
        if call.on_late is not None and not call.late:
            call.late = True
            call.on_late()

    def _end(self, call: PendingCall, result: Result | None) -> None:
        call.ended = True
        self._cancel_timer(call)
        call.end(result)

    def _kill_when_idle(self) -> None:
        if not self._watched():
            self._kill("a transfer failed, and may still move bytes")

    # --- stuck calls ---

    def _look_soon(self) -> None:
        if self._look is None:
            self._patience = StuckDetector(self._stuck_s / LOOKS)
            self._look = self._loop.call_later(self._stuck_s / LOOKS, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        if self._watched():
            self._look = self._loop.call_later(self._stuck_s / LOOKS, self._look_again)
            self.look()

    def look(self) -> None:
        """Checks for a call of the agent that does not end: then the agent is killed."""
        watched = self._watched()
        if not watched:
            return
        now = time.monotonic()
        busy_s = max(now - self._began_s(call) for call in watched)
        if self._patience.is_over(busy_s, now, self._stuck_s):
            self._kill(f"a call has taken {busy_s:.1f} s")

    def _watched(self) -> list[PendingCall]:
        """Returns the agent's calls that have to end."""
        return [call for call in self._given.values() if not call.line.may_hang]

    @staticmethod
    def _began_s(call: PendingCall) -> float:
        return max(call.given_s, call.line.last_answer_s) if call.line.in_order else call.given_s

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    @staticmethod
    def _cancel_timer(call: PendingCall) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None


def check_values(message: Values, names: int) -> None:
    """Raises FramingError for values that can't answer a `Read` of this number of names."""
    if not 0 < len(message.values) <= names:
        raise FramingError(f"{len(message.values)} values for {names} names")
    for value in message.values:
        if isinstance(value, bytes) and len(value) > VALUE_BYTES_MAX:
            raise FramingError(f"a value of {len(value)} bytes")
        if isinstance(value, int) and not CODE_MIN <= value < 0:
            raise FramingError("an unknown code")
