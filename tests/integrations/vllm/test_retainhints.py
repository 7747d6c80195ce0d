"""What requests may ask to be retained, in both ways, and what becomes of all else that they ask."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvoffloadd.integrations.vllm.claims import Directive, RequestKeys, RequestPart
from kvoffloadd.integrations.vllm.keys import PLAIN
from kvoffloadd.integrations.vllm.retainhints import (
    ACTIONS_MAX,
    DIRECTIVES_MAX,
    RetainHints,
    asked_for,
    directives_of,
)
from kvoffloadd.protocol.messages import RETAIN_S_MAX

Json = Any


@dataclass
class Action:
    """Stands in for vLLM's KvHintAction."""

    payload: Json
    action_type: str = "kv.retain"
    action_version: str = "1.0"


@dataclass
class Envelope:
    """Stands in for vLLM's KvHintsEnvelope."""

    actions: list[Action]


@dataclass
class Context:
    """Stands in for vLLM's ReqContext."""

    kv_transfer_params: dict[str, Json] | None = None
    kv_hints: Envelope | None = None
    req_id: str = "r"
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict)
    _state: dict[type, object] = field(default_factory=dict)

    def set_state(self, value: object) -> None:
        self._state[type(value)] = value

    def get_state(self, of: type) -> object:
        return self._state.get(of)


def by_params(value: Json) -> Context:
    return Context({"kvoffloadd.retain": value})


def by_hints(*actions: Action) -> Context:
    return Context(kv_hints=Envelope(list(actions)))


def begin(hints: RetainHints, context: Context) -> int:
    return hints.begin(cast(Any, context))


def finish(hints: RetainHints, context: Context) -> RequestKeys | None:
    return hints.finished(cast(Any, context), PLAIN)


def wanted(context: Context) -> list[Directive]:
    """Returns what a request that has run wants."""
    hints = RetainHints()
    begin(hints, context)
    context._offload_key_positions[b"key"] = 32
    hints.scheduled(["r"])
    found = finish(hints, context)
    return [] if found is None else list(found.directives)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm.kvoffloadd"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


# --- kvoffloadd.retain --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "directives"),
    [
        (600, [Directive(600.0)]),
        (0.5, [Directive(0.5)]),
        ({"seconds": 600}, [Directive(600.0)]),
        (
            {"seconds": 600, "priority": 80, "name": "agent 7", "start": 16, "end": 32},
            [Directive(600.0, 80, "agent 7", 16, 32)],
        ),
        ([{"seconds": 60, "end": 32}, {"seconds": 5}], [Directive(60.0, end=32), Directive(5.0)]),
        ({"seconds": 600, "priority": 0}, [Directive(600.0, 0)]),
        ([], []),
    ],
)
def test_values(value: Json, directives: list[Directive]) -> None:
    assert asked_for(value) == directives
    assert wanted(by_params(value)) == directives


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, True, None, "600", "soon", float("nan"), float("inf"), 10**400, RETAIN_S_MAX + 1),
        *({}, {"seconds": "600"}, {"seconds": 0}, {"priority": 80}, {1: 2}),
        *({"seconds": 1, "priority": 101}, {"seconds": 1, "priority": -1}, {"seconds": 1, "priority": True}),
        *({"seconds": 1, "name": "x" * 121}, {"seconds": 1, "name": None}),
        *({"seconds": 1, "start": -1}, {"seconds": 1, "start": 5, "end": 5}, {"seconds": 1, "end": 0}),
        *({"seconds": 1, "for": 5}, [600], [[{"seconds": 1}]], [{"seconds": 1}, {"seconds": 0}]),
        [{"seconds": 1}] * (DIRECTIVES_MAX + 1),
    ],
)
def test_wrong_values_are_ignored_with_one_warning(value: Json, heard: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError):
        asked_for(value)
    hints = RetainHints()
    assert [begin(hints, by_params(value)) for _ in range(3)] == [1, 1, 1]
    assert len(heard.records) == 1
    assert '"kvoffloadd.retain" in kv_transfer_params is ignored: ' in heard.text
    assert wanted(by_params(value)) == []


# --- kv.retain ----------------------------------------------------------------------------------------


def retain(*directives: Json, scope: Json = "alice", **action: str) -> Action:
    return Action({"scope": scope, "directives": list(directives)}, **action)


@pytest.mark.parametrize(
    ("directive", "expected"),
    [
        (
            {"start": 16, "end": 32, "priority": 80, "duration": 60},
            Directive(60.0, 80, start=16, end=32, part=RequestPart.WHOLE),
        ),
        ({"priority": 1}, Directive(RETAIN_S_MAX, 1, part=RequestPart.WHOLE)),
        ({"end": None, "priority": 1, "duration": None}, Directive(RETAIN_S_MAX, 1, part=RequestPart.WHOLE)),
        ({"covers_output": True, "priority": 7, "duration": 5.0}, Directive(5.0, 7, part=RequestPart.OUTPUT)),
    ],
)
@pytest.mark.parametrize("version", ["1.0", "1.3"])
def test_directives(directive: Json, expected: Directive, version: str, heard: pytest.LogCaptureFixture) -> None:
    assert wanted(by_hints(retain(directive, action_version=version))) == [expected]
    assert wanted(by_hints(Action({"directives": [directive]}))) == [expected]
    assert not heard.records


@pytest.mark.parametrize("directive", [{"priority": 0}, {"priority": 9, "duration": 0}])
def test_a_directive_that_asks_for_nothing_claims_nothing(directive: Json, heard: pytest.LogCaptureFixture) -> None:
    """vLLM's own cache ends protection by that; a claim has no scope."""
    assert wanted(by_hints(retain(directive))) == []
    assert not heard.records


@pytest.mark.parametrize(
    "payload",
    [
        *(None, [], {}, {"directives": {}}, {"directives": [], "scope": 5}),
        *({"directives": [one]} for one in ("x", {"start": 0, "end": 16}, {"priority": 101}, {"priority": True})),
        *({"directives": [{"priority": 5, **one}]} for one in ({"start": -1}, {"start": 4, "end": 4}, {"end": 0})),
        *({"directives": [{"priority": 5, **one}]} for one in ({"bogus": 1}, {"covers_output": "false"})),
        *({"directives": [{"priority": 5, "duration": one}]} for one in (-1, float("nan"), 10**400, RETAIN_S_MAX + 1)),
        *({"directives": [{"priority": 5, "covers_output": True, **one}]} for one in ({"start": 0}, {"end": None})),
        {"directives": [{"end": 16, "priority": 30}, {"start": 16, "priority": 80}]},
        {"directives": [{"start": 16, "priority": 80}, {"end": 16, "priority": 30}]},
        {"directives": [{"covers_output": True, "priority": 60}, {"end": 100, "priority": 30}]},
    ],
)
def test_a_wrong_action_is_ignored_alone(payload: Json, heard: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError):
        directives_of(payload, DIRECTIVES_MAX)
    right = retain({"priority": 50, "duration": 9})
    hints = RetainHints()
    assert [begin(hints, by_hints(Action(payload), right)) for _ in range(2)] == [1, 1]
    assert len(heard.records) == 1
    assert heard.records[0].getMessage().startswith("kvoffloadd: the hint kv.retain 1.0 is ignored: ")
    assert wanted(by_hints(Action(payload), right)) == [Directive(9.0, 50, part=RequestPart.WHOLE)]


def test_what_is_not_known_is_ignored_with_a_warning_for_each_kind(heard: pytest.LogCaptureFixture) -> None:
    unknown = [
        retain({"priority": 5}, action_version="2.0"),
        retain({"priority": 5}, action_version=""),
        Action({"keys": []}, action_type="kv.fetch"),
        Action({}, action_type="kv.fetch\nforged: line"),
    ]
    hints = RetainHints()
    assert begin(hints, by_hints(*unknown, *unknown)) == 8
    assert [record.getMessage() for record in heard.records] == [
        f"kvoffloadd: the hint {kind} is ignored: it is not known"
        for kind in ("kv.retain 2.0", "kv.retain ", "kv.fetch 1.0", r"kv.fetch\nforged: line 1.0")
    ]
    assert begin(hints, by_hints(*(Action({}, action_type=f"kv.{number}") for number in range(100)))) == 100
    assert len(heard.records) == 32, "requests do not fill the log"


def test_users_words_forge_no_line_of_the_log(heard: pytest.LogCaptureFixture) -> None:
    hints = RetainHints()
    begin(hints, by_params({"seconds": 1, "x\nforged: line" + "y" * 1000: 1}))
    begin(hints, by_hints(Action({}, action_type="z" * 1000)))
    first, second = (record.getMessage() for record in heard.records)
    assert r"unknown field `x\nforged: line" in first
    assert max(len(first), len(second)) < 300


def test_a_request_has_so_many_at_most() -> None:
    actions = [retain({"start": 16 * at, "priority": 50}) for at in range(ACTIONS_MAX + 1)]
    hints = RetainHints()
    assert begin(hints, by_hints(*actions)) == 1
    assert len(wanted(by_hints(*actions))) == ACTIONS_MAX
    many = [{"start": 16 * at, "priority": 50} for at in range(DIRECTIVES_MAX)]
    assert len(wanted(by_hints(retain(*many[1:]), retain(*many[:9])))) == DIRECTIVES_MAX


# --- from the beginning of a request to its end --------------------------------------------------------


def test_both_ways_at_once() -> None:
    context = Context({"kvoffloadd.retain": 5}, Envelope([retain({"priority": 1, "duration": 6})]))
    assert wanted(context) == [Directive(5.0), Directive(6.0, 1, part=RequestPart.WHOLE)]


def test_the_prompt_ends_where_the_output_begins() -> None:
    """Keys that vLLM has given the request before its first step are the prompt's."""
    hints, context = RetainHints(), by_params(600)
    begin(hints, context)
    context._offload_key_positions |= {b"one": 32, b"two": 64}
    hints.scheduled(["other", "r"])
    context._offload_key_positions |= {b"three": 96}
    hints.scheduled(["r"])
    found = finish(hints, context)
    assert found is not None
    assert (found.offload_keys, found.ends, found.in_prompt) == ([b"one", b"two", b"three"], [32, 64, 96], 2)


def test_a_request_that_never_ran_wants_nothing() -> None:
    hints, context = RetainHints(), by_params(600)
    begin(hints, context)
    context._offload_key_positions |= {b"one": 32}
    assert finish(hints, context) is None
    assert not hints._unscheduled


def test_a_request_without_hints_costs_nothing() -> None:
    for context in (Context(), Context({"kvoffloadd.keep": "soon"})):
        hints = RetainHints()
        assert begin(hints, context) == 0
        hints.scheduled(["r"])
        assert finish(hints, context) is None
        assert not context._state
