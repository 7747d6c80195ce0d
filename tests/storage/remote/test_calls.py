"""Calls that the agent was given, against an agent that may say anything."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.agentwire.frames import (
    AFTER_MAX,
    VALUE_BYTES_MAX,
    Answer,
    Call,
    Code,
    Frames,
    Read,
    Remove,
    Reply,
    Sweep,
    Swept,
    Values,
)
from kvoffloadd.errors import FramingError
from kvoffloadd.scheduling.lanes import Flow
from kvoffloadd.storage.remote import calls as calls_module
from kvoffloadd.storage.remote.calls import CallLine, Calls, PendingCall
from tests.storage.remote.host import until


class Agent:
    """What it was given, and what has become of each call."""

    def __init__(self, *, stuck_s: float = 60.0, stops_at_once: bool = False) -> None:
        self.frames = Frames(by_agent=False)
        self.given: list[Any] = []
        self.killed: list[str] = []
        self.ends: dict[str, list[Any]] = {}
        self.late: list[str] = []
        self.overdue: list[str] = []
        self.calls = Calls(asyncio.get_running_loop(), self._take, self.killed.append, stuck_s)
        self.calls.begin(stops_at_once=stops_at_once)

    def _take(self, frame: bytes) -> None:
        self.frames.receive(frame)
        self.given.append(self.frames.next())

    def ask(self, line: CallLine, name: str, items: int = 1, until_s: float = 60.0, **more: Any) -> PendingCall:
        def make(call_id: int) -> Call:
            answered_by = more.get("answered_by")
            if answered_by is Swept:
                return Sweep(call_id, name, "")
            return Read(call_id, [name] * items) if answered_by is Values else Remove(call_id, [name] * items)

        self.ends[name] = []
        until_s += vars(calls_module)["time"].monotonic()  # a test's own clock, if it has one
        call = PendingCall(
            line, make, items, 100, until_s, self.ends[name].append, lambda: self.late.append(name),
            lambda: self.overdue.append(name), **more,
        )  # fmt: skip
        self.calls.submit(call)
        return call

    def answer(self, number: int, *codes: int) -> None:
        self.calls.on_answer(Answer(self.given[number].id, np.array(codes, "<i8").tobytes()))


async def test_no_more_are_given_than_there_are_threads() -> None:
    agent = Agent()
    line, other = agent.calls.line(2), agent.calls.line(1)
    for name in "abcd":
        agent.ask(line, name)
    agent.ask(other, "x")
    assert [call.names for call in agent.given] == [["a"], ["b"], ["x"]]
    agent.answer(1, 1)
    assert [call.names for call in agent.given[3:]] == [["c"]]
    assert [end.tolist() for end in agent.ends["b"]] == [[1]]
    assert agent.calls.check() == []


async def test_what_has_not_begun_can_be_taken_back() -> None:
    agent = Agent()
    line = agent.calls.line(1)
    begun, waiting = agent.ask(line, "a"), agent.ask(line, "b")
    assert not agent.calls.withdraw(begun)
    assert agent.calls.withdraw(waiting)
    assert not agent.calls.withdraw(waiting)
    agent.answer(0, 1)
    assert len(agent.given) == 1
    assert agent.ends["b"] == []


async def test_what_is_late_before_it_begins_does_not_begin() -> None:
    agent = Agent()
    line = agent.calls.line(1)
    agent.ask(line, "a")
    agent.ask(line, "b", until_s=0.2)
    agent.ask(line, "c", until_s=-1.0)
    await until(lambda: bool(agent.ends["b"] and agent.ends["c"]))
    assert agent.ends["b"] == agent.ends["c"] == [None]
    assert len(agent.given) == 1
    agent.answer(0, 1)
    agent.ask(line, "d", until_s=-1.0)
    assert agent.ends["d"] == []  # never within the call
    await until(lambda: agent.ends["d"] == [None])
    assert len(agent.given) == 1


async def test_what_is_late_after_it_began_goes_on() -> None:
    agent = Agent()
    agent.ask(agent.calls.line(1), "a", until_s=0.2)
    await until(lambda: bool(agent.late))
    assert agent.ends["a"] == []
    agent.answer(0, 5)
    assert agent.ends["a"][0].tolist() == [5]
    assert agent.late == ["a"]


async def test_users_and_engines_take_turns() -> None:
    """However many calls one of them has made before the other's."""
    agent = Agent()
    line = agent.calls.line(1)
    for number in range(20):
        agent.ask(line, f"loud {number}", flow=Flow(1001, 1))
    agent.ask(line, "other engine", flow=Flow(1001, 2))
    agent.ask(line, "other user", flow=Flow(1002, 3))
    for number in range(22):
        agent.answer(number, 1)
    names = [call.names[0] for call in agent.given]
    assert {"other engine", "other user"} <= set(names[1:5])
    assert [name for name in names if name.startswith("loud")] == [f"loud {number}" for number in range(20)]


async def test_a_dear_turn_is_paid_for() -> None:
    agent = Agent()
    line = agent.calls.line(1)
    for number in range(8):
        agent.ask(line, f"large {number}", flow=Flow(1001, 1), cost=64 << 20)
        agent.ask(line, f"small {number}", flow=Flow(1002, 2), cost=8 << 20)
    for number in range(16):
        agent.answer(number, 1)
    names = [call.names[0] for call in agent.given]
    assert sum(name.startswith("large") for name in names[:10]) <= 3


async def test_an_end_takes_back_what_waits_in_any_flow() -> None:
    agent = Agent()
    line = agent.calls.line(1)
    for uid in (1, 2, 3):
        agent.ask(line, str(uid), flow=Flow(uid, 1))
    agent.calls.drop_waiting()
    assert agent.ends == {"1": [], "2": [None], "3": [None]}


async def test_what_waited_in_our_line_has_its_whole_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its caller waited for others is not the store's fault."""
    now_s = time.monotonic()
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent = Agent()
    line = agent.calls.line(1)
    agent.ask(line, "a")
    waiting = agent.ask(line, "b", until_s=10.0)
    now_s += 9.0
    agent.answer(0, 1)
    now_s += 2.0
    agent.calls._on_time(waiting)
    assert (agent.late, agent.overdue) == (["b"], [])
    now_s += 7.5
    agent.calls._on_time(waiting)
    assert agent.overdue == []
    now_s += 0.5
    agent.calls._on_time(waiting)
    assert (agent.late, agent.overdue) == (["b"], ["b"])
    agent.answer(1, 1)
    assert len(agent.ends["b"]) == 1


async def test_one_slow_turn_is_not_those_of_all_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds with the agent, where calls of a line wait for each other."""
    now_s = time.monotonic()
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent = Agent()
    line = agent.calls.line(3, in_order=True)
    calls = [agent.ask(line, name, until_s=10.0) for name in "abc"]

    def look() -> list[str]:
        for call in calls:
            agent.calls._on_time(call)
        return agent.overdue

    now_s += 10.0
    assert look() == ["a"]
    assert agent.late == ["a", "b", "c"]
    now_s += 9.0
    assert look() == ["a"]
    agent.answer(0, 1)
    now_s += 9.0
    assert look() == ["a"], "the turn of b has begun with the answer"
    now_s += 1.0
    assert look() == ["a", "b"]
    now_s += 10.0
    assert look() == ["a", "b", "c"], "one after the other, in a store that hangs"


async def test_a_turn_has_the_patience_that_its_call_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of its caller's time was left when it was made."""
    now_s = time.monotonic()
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent = Agent()
    call = agent.ask(agent.calls.line(1), "a", until_s=1.0, patience_s=10.0)
    now_s += 1.0
    agent.calls._on_time(call)
    assert (agent.late, agent.overdue) == (["a"], [])
    now_s += 9.0
    agent.calls._on_time(call)
    assert agent.overdue == ["a"]


async def test_its_death_ends_everything() -> None:
    agent = Agent()
    line = agent.calls.line(1)
    agent.ask(line, "a")
    agent.ask(line, "b")
    agent.calls.finish()
    assert agent.ends == {"a": [None], "b": [None]}
    assert agent.calls.check() == []
    agent.calls.begin(stops_at_once=True)
    agent.ask(line, "c")
    assert [call.names for call in agent.given] == [["a"], ["c"]]


async def test_a_failed_transfer_keeps_its_memory_until_the_agents_end() -> None:
    """And the agent ends soon: when the others that it was given have ended."""
    agent = Agent()
    line, other = agent.calls.line(1), agent.calls.line(1)
    agent.ask(line, "a", 2, moves_bytes=True)
    agent.ask(line, "b", moves_bytes=True)
    agent.ask(other, "x")
    agent.answer(0, 50, Code.FAILED)
    assert agent.ends["a"] == []
    assert agent.killed == []
    assert not agent.calls.serving
    assert len(agent.given) == 2  # "b" did not begin
    agent.answer(1, 1)
    assert len(agent.ends["x"]) == 1
    assert len(agent.killed) == 1
    assert agent.ends["a"] == []
    assert agent.calls.check() == []
    agent.calls.finish()
    assert [end.tolist() for end in agent.ends["a"]] == [[50, Code.FAILED]]
    assert agent.ends["b"] == [None]


@pytest.mark.parametrize("code", sorted(set(Code) - {Code.FAILED}))
async def test_other_codes_let_go_of_the_memory_at_once(code: Code) -> None:
    agent = Agent()
    agent.ask(agent.calls.line(1), "a", moves_bytes=True)
    agent.answer(0, code)
    assert len(agent.ends["a"]) == 1
    assert agent.killed == []
    assert agent.calls.serving


async def test_an_engine_that_stops_at_once_is_not_killed_for_what_failed() -> None:
    agent = Agent(stops_at_once=True)
    agent.ask(agent.calls.line(1), "a", moves_bytes=True)
    agent.answer(0, Code.FAILED)
    assert len(agent.ends["a"]) == 1
    assert agent.killed == []


async def test_what_moves_no_bytes_may_fail() -> None:
    agent = Agent()
    agent.ask(agent.calls.line(1), "a")
    agent.answer(0, Code.FAILED)
    assert agent.killed == []


async def test_a_call_that_does_not_end_is_the_agents_end() -> None:
    agent = Agent(stuck_s=0.05)
    agent.ask(agent.calls.line(1), "a")
    await until(lambda: bool(agent.killed))
    assert "a call has taken" in agent.killed[0]
    assert agent.ends["a"] == []


async def test_calls_that_end_are_not_stuck_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits with the agent in a line that is answered in order has not begun."""
    now_s = time.monotonic()
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent = Agent(stuck_s=1.0)
    line = agent.calls.line(30, in_order=True)
    for number in range(30):
        agent.ask(line, str(number))
    for number in range(20):
        now_s += 0.3
        agent.calls.look()
        agent.answer(number, 1)
    assert agent.killed == []
    for _ in range(20):
        now_s += 0.3
        agent.calls.look()
    assert agent.killed


async def test_a_pause_of_the_whole_machine_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent = Agent(stuck_s=1.0)
    agent.ask(agent.calls.line(1), "a")
    for _ in range(3):
        now_s += 0.1
        agent.calls.look()
    now_s += 3600.0
    agent.calls.look()
    assert agent.killed == []


def of(codes: list[int]) -> bytes:
    return np.array(codes, "<i8").tobytes()


@pytest.mark.parametrize(
    ("answered_by", "message"),
    [
        (Answer, Answer(99, of([1, 1]))),  # not asked
        (Answer, Answer(0, of([1, 1]))),
        (Answer, Answer(-1, of([1, 1]))),
        (Answer, Answer(1, of([1]))),
        (Answer, Answer(1, of([1, 1, 1]))),
        (Answer, Answer(1, b"")),
        (Answer, Answer(1, of([1, 1])[:-1])),
        (Answer, Answer(1, of([1, 101]))),
        (Answer, Answer(1, of([min(Code) - 1, 1]))),
        (Answer, Answer(1, of([1, -(1 << 63)]))),
        (Answer, Values(1, [b"x", None])),
        (Answer, Swept(1, 1, "")),
        (Values, Values(2, [b"x", None])),
        (Values, Values(1, [])),
        (Values, Values(1, [b"x", None, None])),
        (Values, Values(1, [bytes(VALUE_BYTES_MAX + 1)])),
        (Values, Values(1, [0])),
        (Values, Values(1, [min(Code) - 1])),
        (Values, Answer(1, of([1, 1]))),
        (Swept, Swept(2, 1, "")),
        (Swept, Swept(1, 101, "")),
        (Swept, Swept(1, min(Code) - 1, "")),
        (Swept, Swept(1, Code.FAILED, "7")),
        (Swept, Swept(1, 1, "7" * (AFTER_MAX + 1))),
        (Swept, Answer(1, of([1]))),
    ],
)
async def test_what_can_not_be_is_refused(answered_by: type[Reply], message: Reply) -> None:
    agent = Agent()
    agent.ask(agent.calls.line(1), "a", 2, answered_by=answered_by)
    with pytest.raises(FramingError):
        agent.calls.on_answer(message)
    assert agent.ends["a"] == []
    assert agent.calls.check() == []


@pytest.mark.parametrize(
    ("answered_by", "message"),
    [
        (Values, Values(1, [b"", Code.SIZE])),
        (Values, Values(1, [None])),  # the other one did not fit
        (Swept, Swept(1, 100, "7")),
        (Swept, Swept(1, Code.FAILED, "")),
    ],
)
async def test_other_answers_are_handed_on_as_they_are(answered_by: type[Reply], message: Reply) -> None:
    agent = Agent()
    agent.ask(agent.calls.line(1), "a", 2, answered_by=answered_by)
    agent.calls.on_answer(message)
    assert agent.ends["a"] == [message]


async def test_what_may_hang_is_no_reason_to_end_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs alone, next to calls that end, and next to one that does not."""
    now_s = time.monotonic()
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent = Agent(stuck_s=1.0)
    line = agent.calls.line(1)
    agent.ask(agent.calls.line(1, may_hang=True), "hangs", answered_by=Swept)

    def go_on() -> None:
        nonlocal now_s
        for _ in range(20):
            now_s += 0.3
            agent.calls.look()

    go_on()
    agent.ask(line, "a")
    agent.answer(1, 1)
    go_on()
    assert agent.killed == []
    agent.ask(line, "b")
    go_on()
    assert agent.killed


async def test_what_may_hang_does_not_put_off_an_end_that_is_due() -> None:
    """The memory of a failed transfer is free only then."""
    agent = Agent()
    agent.ask(agent.calls.line(1, may_hang=True), "hangs", answered_by=Swept)
    agent.ask(agent.calls.line(1), "a", moves_bytes=True)
    agent.answer(1, Code.FAILED)
    assert len(agent.killed) == 1
    agent.calls.finish()
    assert agent.ends["hangs"] == [None]


async def test_an_answer_comes_once() -> None:
    agent = Agent()
    agent.ask(agent.calls.line(1), "a")
    agent.answer(0, 1)
    with pytest.raises(FramingError):
        agent.answer(0, 1)
    assert len(agent.ends["a"]) == 1


@given(steps=st.lists(st.tuples(st.sampled_from("aglwfx"), st.integers(0, 9)), max_size=60))
def test_every_call_ends_exactly_once_unless_taken_back(steps: list[tuple[str, int]]) -> None:
    """Whatever happens in whatever order; and none that may still move bytes ends before the agent."""

    async def run() -> None:
        agent = Agent()
        lines = [agent.calls.line(1), agent.calls.line(2, in_order=True)]
        made: list[PendingCall] = []
        taken_back: set[str] = set()
        open_calls: dict[int, int] = {}

        for step, number in steps:
            if step == "a":
                made.append(agent.ask(lines[number % 2], str(len(made)), moves_bytes=number > 4))
            for at, call in enumerate(agent.given):
                open_calls.setdefault(at, call.id)
            waiting = [at for at in open_calls if open_calls[at]]
            if step in "gf" and waiting:
                at = waiting[number % len(waiting)]
                open_calls[at] = 0
                agent.answer(at, 1 if step == "g" else Code.FAILED)
            elif step == "w" and made:
                at = number % len(made)
                if agent.calls.withdraw(made[at]):
                    taken_back.add(str(at))
            elif step == "x":
                agent.calls.finish()
                agent.calls.begin(stops_at_once=False)
                open_calls = dict.fromkeys(range(len(agent.given)), 0)
            assert agent.calls.check() == []
            assert all(len(ends) <= 1 for ends in agent.ends.values())
        agent.calls.finish()
        for name, ends in agent.ends.items():
            assert len(ends) == (0 if name in taken_back else 1)

    asyncio.run(run())
