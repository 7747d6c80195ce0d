"""What requests may ask to be retained, by any engine's hints and by parameters, and what becomes of all else."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from kvoffloadd.integrations.common.claims import Directive, RequestPart
from kvoffloadd.integrations.common.hints import (
    ACTIONS_MAX,
    DIRECTIVES_MAX,
    HintReader,
    asked_for,
    directives_of,
)
from kvoffloadd.protocol.messages import RETAIN_S_MAX

Json = Any


@dataclass
class Action:
    """Stands in for an engine's KvHintAction."""

    payload: Json
    action_type: str = "kv.retain"
    action_version: str = "1.0"


@pytest.fixture
def reader() -> HintReader:
    return HintReader(logging.getLogger("tests.hints"))


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
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
def test_values(reader: HintReader, value: Json, directives: list[Directive]) -> None:
    assert asked_for(value) == directives
    assert reader.read((), value) == (directives, 0)
    assert reader.read([Action(value, "kvoffloadd.retain", "1.2")]) == (directives, 0), "it is an action, too"


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
def test_wrong_values_are_ignored_with_one_warning(
    reader: HintReader, value: Json, heard: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError):
        asked_for(value)
    assert [reader.read((), value, "the parameters") for _ in range(3)] == [([], 1)] * 3
    assert len(heard.records) == 1
    assert '"kvoffloadd.retain" in the parameters is ignored: ' in heard.text
    assert reader.read([Action(value, "kvoffloadd.retain")]) == ([], 1)


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
def test_directives(
    reader: HintReader, directive: Json, expected: Directive, version: str, heard: pytest.LogCaptureFixture
) -> None:
    assert reader.read([retain(directive, action_version=version)]) == ([expected], 0)
    assert reader.read([Action({"directives": [directive]})]) == ([expected], 0)
    assert not heard.records


@pytest.mark.parametrize("directive", [{"priority": 0}, {"priority": 9, "duration": 0}])
def test_a_directive_that_asks_for_nothing_claims_nothing(
    reader: HintReader, directive: Json, heard: pytest.LogCaptureFixture
) -> None:
    """vLLM's own cache ends protection by that; a claim has no scope."""
    assert reader.read([retain(directive)]) == ([], 0)
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
def test_a_wrong_action_is_ignored_alone(reader: HintReader, payload: Json, heard: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError):
        directives_of(payload)
    right = retain({"priority": 50, "duration": 9})
    expected = [Directive(9.0, 50, part=RequestPart.WHOLE)]
    assert [reader.read([Action(payload), right]) for _ in range(2)] == [(expected, 1)] * 2
    assert len(heard.records) == 1
    assert heard.records[0].getMessage().startswith("kvoffloadd: the hint kv.retain 1.0 is ignored: ")


def test_what_is_not_known_is_ignored_with_a_warning_for_each_kind(
    reader: HintReader, heard: pytest.LogCaptureFixture
) -> None:
    unknown = [
        retain({"priority": 5}, action_version="2.0"),
        retain({"priority": 5}, action_version=""),
        Action({"seconds": 5}, action_type="kvoffloadd.retain", action_version="2"),
        Action({"keys": []}, action_type="kv.fetch"),
        Action({}, action_type="kv.fetch\nforged: line"),
    ]
    assert reader.read([*unknown, *unknown]) == ([], 10)
    assert [record.getMessage() for record in heard.records] == [
        f"kvoffloadd: the hint {kind} is ignored: it is not known"
        for kind in (
            "kv.retain 2.0",
            "kv.retain ",
            "kvoffloadd.retain 2",
            "kv.fetch 1.0",
            r"kv.fetch\nforged: line 1.0",
        )
    ]
    assert reader.read([Action({}, action_type=f"kv.{number}") for number in range(100)]).ignored == 100
    assert len(heard.records) == 32, "requests do not fill the log"


def test_users_words_forge_no_line_of_the_log(reader: HintReader, heard: pytest.LogCaptureFixture) -> None:
    reader.read((), {"seconds": 1, "x\nforged: line" + "y" * 1000: 1})
    reader.read([Action({}, action_type="z" * 1000)])
    first, second = (record.getMessage() for record in heard.records)
    assert r"unknown field `x\nforged: line" in first
    assert max(len(first), len(second)) < 300


def test_a_request_has_so_many_at_most(reader: HintReader) -> None:
    actions = [retain({"start": 16 * at, "priority": 50}) for at in range(ACTIONS_MAX + 1)]
    found = reader.read(actions)
    assert (len(found.directives), found.ignored) == (ACTIONS_MAX, 1)
    many = [{"start": 16 * at, "priority": 50} for at in range(DIRECTIVES_MAX)]
    assert len(reader.read([retain(*many[1:]), retain(*many[:9])]).directives) == DIRECTIVES_MAX
    ours = Action([{"seconds": 1}] * 9, "kvoffloadd.retain")
    assert len(reader.read([retain(*many[1:]), ours], [{"seconds": 1}]).directives) == DIRECTIVES_MAX


def test_all_ways_at_once(reader: HintReader) -> None:
    found = reader.read([retain({"priority": 1, "duration": 6}), Action({"seconds": 7}, "kvoffloadd.retain")], 5)
    assert found == ([Directive(5.0), Directive(6.0, 1, part=RequestPart.WHOLE), Directive(7.0)], 0)
