"""What vLLM's requests ask to be retained, in both ways, from their beginnings to their ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvoffloadd.integrations.common.claims import Directive, RequestPart
from kvoffloadd.integrations.vllm.claims import RequestKeys
from kvoffloadd.integrations.vllm.keys import PLAIN
from kvoffloadd.integrations.vllm.retainhints import RetainHints
from tests.integrations.common.test_hints import Action

Json = Any


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


def test_both_ways_at_once() -> None:
    context = Context({"kvoffloadd.retain": 5}, Envelope([Action({"directives": [{"priority": 1, "duration": 6}]})]))
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


def test_what_is_ignored_is_counted_and_warned_of_with_its_place(heard: pytest.LogCaptureFixture) -> None:
    hints = RetainHints()
    assert begin(hints, by_params("for ever")) == 1
    assert begin(hints, by_params(None)) == 1
    assert begin(hints, by_hints(Action({}, "kv.fetch"), Action({"seconds": 5}, "kvoffloadd.retain"))) == 1
    assert '"kvoffloadd.retain" in kv_transfer_params is ignored: ' in heard.text
    assert "the hint kv.fetch 1.0 is ignored" in heard.text
