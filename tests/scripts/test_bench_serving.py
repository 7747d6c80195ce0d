"""What `bench_serving` makes of times and counters, and how it sends requests; vLLM is not needed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.vllm.serving import pair
from scripts.vllm.serving.bench import ALONE, GROUPS, NO_GROUPS, options_of, result_of, show
from scripts.vllm.serving.engine import Answered, Asked
from scripts.vllm.serving.figures import (
    FIGURES,
    LOAD_FIGURES,
    MIB,
    RequestSample,
    ServingRound,
    TransferTotals,
    differing,
    figures_of,
    rows,
)
from scripts.vllm.serving.models import KINDS
from scripts.vllm.serving.pair import Pair

GIVEN = argparse.Namespace(model="hybrid", requests=3, rounds=2, tokens=2050, answer=4, clients=2)


def sample(ttft_s: float, answer: tuple[int, ...] = (1, 2)) -> RequestSample:
    return RequestSample(ttft_s, whole_s=ttft_s + 1, prefill_s=0.9, token_s=0.01, cached=2049, answer=answer)


def one_round(ttft_s: float, *, load_bytes: int = MIB) -> ServingRound:
    samples = [sample(ttft_s), replace(sample(ttft_s * 2), cached=0), sample(ttft_s * 3)]
    moved = TransferTotals(jobs=0.5, keys=90, descriptors=180, bytes=load_bytes, seconds=0.008)
    return ServingRound(samples, own=[sample(0.02)], busy=samples, busy_s=1.5, store=moved, load=moved, memcpy_s=0.005)


def test_moved() -> None:
    def status(keys: int) -> dict[str, Any]:
        way = {"keys": keys, "descriptors": 2 * keys, "bytes": 4 * keys, "seconds": keys / 8, "jobs": keys / 5}
        return {"transfers": {"load": way, "store": {}}}

    assert TransferTotals.between(status(10), status(30), "load", 4) == TransferTotals(1, 5, 10, 20, 0.625)
    assert TransferTotals(0.5, 5, 10, 20, 0.625).job_bytes == 40
    assert TransferTotals(0, 0, 0, 0, 0).job_bytes == 0


def test_figures() -> None:
    found = figures_of([one_round(0.01), one_round(0.03), one_round(0.05)])
    assert found.keys() == {**FIGURES, **LOAD_FIGURES}.keys()
    assert found["ttft_p50_ms"] == 60
    assert found["ttft_p99_ms"] == pytest.approx(146), "of all rounds"
    assert (found["own_p50_ms"], found["memcpy_ms"], found["ratio_to_limit"]) == (20, 5, 2.4)
    assert (found["busy_handed_tokens"], found["busy_computed_percent"]) == (1366, 33.333)
    assert (found["requests_per_s"], found["busy_token_ms"], found["load_mib"], found["store_ms"]) == (2, 10, 1, 8)


def test_rows() -> None:
    cases = {"a": {"x": 0.0, "y": 0.0, "z": 1234.5}, "b": {"x": 0.0, "y": 1.234, "z": 90.0}}
    names = {"x": "none has it", "y": "one has it", "z": "both have it"}
    assert rows(cases, names) == [("one has it", "-", "1.23"), ("both have it", "1,234", "90")]


def test_differing() -> None:
    assert differing([sample(1), sample(1)], [sample(2), sample(2, (1, 3))]) == 1


@pytest.mark.parametrize(
    ("kind", "tokens", "share"), [("hybrid", 2050, 15 / 65), ("hybrid", 100, 1.0), ("dense", 9, 1)]
)
def test_what_the_next_token_needs(kind: str, tokens: int, share: float) -> None:
    assert KINDS[kind].needed_share(tokens) == pytest.approx(share)
    assert KINDS["hybrid"].token_bytes == 12 * 2 * 4 * 128 * 4


def test_result(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {ALONE: [one_round(0.5)], GROUPS: [one_round(0.02)], NO_GROUPS: [one_round(0.03, load_bytes=5 * MIB)]}
    right = result_of(GIVEN, rounds, dict.fromkeys(rounds, 0))
    assert (right["within_budget"], right["wrong_answers"], right["ratio_to_limit"]) == (True, 0, 1.6)
    show(right)
    shown = capsys.readouterr().out
    assert all(text in shown for text in (*rounds, *FIGURES.values(), *LOAD_FIGURES.values()))
    slow = rounds | {GROUPS: [one_round(0.6, load_bytes=4 * MIB)]}
    missed = result_of(GIVEN, slow, {**dict.fromkeys(rounds, 0), GROUPS: 2})
    assert missed["wrong_answers"] == 2
    assert [bound["what"] for bound in missed["bounds"] if not bound["kept"]] == [
        "with groups: answers that differ", "with groups: TTFT of no hand-over",
        "with groups: bytes of a load of without groups",
    ]  # fmt: skip


def test_options(tmp_path: Path) -> None:
    by_case = {case: options_of(case, tmp_path, tmp_path / "s", GIVEN) for case in (ALONE, GROUPS, NO_GROUPS)}
    assert by_case[ALONE].connector is None
    assert by_case[ALONE].engine == by_case[GROUPS].engine
    assert by_case[NO_GROUPS].engine == by_case[GROUPS].engine | {"disable_hybrid_kv_cache_manager": True}
    assert by_case[NO_GROUPS].connector == by_case[GROUPS].connector


class FakeEngine:
    """Answers at once, the last request first. `asked_s`: when it was asked."""

    def __init__(self, first_s: float, params: dict[str, Any] | None) -> None:
        self.asked: list[Asked] = []
        self.waiting: list[Asked] = []
        self.most_waiting = 0
        self._first_s, self._params = first_s, params

    def ask(self, asked: Asked) -> float:
        self.asked.append(asked)
        self.waiting.append(asked)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return 10.0 * len(self.asked)

    def answers(self) -> list[Answered]:
        asked = self.waiting.pop()
        tokens = [asked.prompt[0]] * asked.max_tokens
        first_s = 10.0 * (self.asked.index(asked) + 1) + self._first_s
        return [Answered(asked.name, first_s, first_s + 3, tokens, 7, self._params)]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    def ready(engines: list[Any], deadline_s: float) -> list[Any]:
        return [engine for engine in engines if engine.waiting][:1]

    monkeypatch.setattr(pair, "await_any", ready)
    params = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 0}
    return FakeEngine(0.5, None), FakeEngine(2.0, params)


def test_a_pair_serves(fakes: tuple[Any, Any]) -> None:
    """Each prompt goes to one engine and then, with the parameters from its answer, to the other one."""
    decode, prefill = fakes
    prompts = [[number] for number in range(5)]
    samples = Pair(decode, prefill).serve(prompts, 4, "salt", 2)
    assert [one.answer for one in samples] == [(number,) * 4 for number in range(5)], "in the order of the prompts"
    assert all((one.ttft_s, one.prefill_s, one.token_s, one.cached) == (0.5, 5.0, 1.0, 7) for one in samples)
    assert sorted(asked.prompt[0] for asked in prefill.asked) == [*range(5)]
    assert all((one.max_tokens, one.params) == (1, {"do_remote_decode": True}) for one in prefill.asked)
    assert all((one.max_tokens, one.params) == (4, {"do_remote_prefill": True}) for one in decode.asked)
    assert prefill.most_waiting == 2


def test_an_engine_serves_alone(fakes: tuple[Any, Any]) -> None:
    decode, _ = fakes
    (one,) = Pair(decode, None).serve([[8]], 4, "salt", 3)
    assert one == RequestSample(ttft_s=0.5, whole_s=0.5, prefill_s=0.0, token_s=1.0, cached=7, answer=(8,) * 4)
    assert decode.asked == [Asked("0", [8], 4, "salt", None)]
