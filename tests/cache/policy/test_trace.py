"""The simulator's reading and counting by hand; the known figures where the trace is at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.errors import ConfigError
from kvoffloadd.model import I64Array
from scripts.replay.trace import (
    Signal,
    belady_hits,
    ceiling_hits,
    half_right,
    load_trace,
    lru_hits,
    num_blocks,
    num_references,
    perfect_signals,
    simulate,
)
from scripts.replay.workloads import chat

TRACE = Path(__file__).resolve().parents[4] / "shared" / "data" / "conversation_trace.jsonl"


def requests_of(*requests: list[int]) -> list[I64Array]:
    return [np.array(request, np.int64) for request in requests]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object with `hash_ids`"),
        ('{"hash_ids": [true]}', "line 2: `hash_ids` is not a list of integers"),
        ('{"hash_ids": [1, -1]}', "line 2: `hash_ids` is not a list of integers"),
        ('{"hash_ids": 3}', "line 2: `hash_ids` is not a list of integers"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"hash_ids": [1, 2], "timestamp": 0}}\n{line}\n')
    with pytest.raises(ConfigError, match=complaint):
        load_trace(path)


def test_blank_lines_are_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n\n{"hash_ids": []}\n')
    assert [request.tolist() for request in load_trace(path)] == [[0, 1], []]


def test_hits_by_hand() -> None:
    requests = requests_of([1, 2, 3], [1, 2, 4], [5, 2], [1, 2, 3], [])
    assert num_blocks(requests) == 5
    assert num_references(requests) == 11
    assert ceiling_hits(requests) == 5  # 2 behind the new 5 is no hit
    assert lru_hits(requests, 3) == 2  # [5, 2] pushes 1 out
    assert belady_hits(requests, 3) == 5
    for policy in POLICIES:
        assert simulate(requests, policy, 5) == 5
        assert simulate(requests, policy, 1) <= 2
        assert simulate([], policy, 1) == 0


@pytest.mark.slow
def test_simulated_lru_is_the_exact_one() -> None:
    random = np.random.default_rng(1)
    requests = [random.choice(300, int(random.integers(1, 40)), replace=False) for _ in range(500)]
    for capacity in (1, 7, 50, 299):
        assert simulate(requests, "lru", capacity) == lru_hits(requests, capacity)
        assert lru_hits(requests, capacity) <= ceiling_hits(requests)


def test_perfect_signals_by_hand() -> None:
    never, none = Signal.DROP, Signal.NONE
    assert perfect_signals(requests_of([1, 2, 3], [1, 2, 4], [5], [])) == [none, never, never, never]
    soon = perfect_signals(requests_of([1, 2], *([[7]] * 100)))
    assert soon == [never, *[Signal.SOON] * 99, never]


@pytest.mark.slow
def test_signals_help_as_far_as_they_are_right() -> None:
    requests = chat(np.random.default_rng(0))[:4000]
    perfect, capacity = perfect_signals(requests), int(0.02 * num_blocks(requests))
    none, half, whole = (
        simulate(requests, "hit-density", capacity, signals=signals) for signals in (None, half_right(perfect), perfect)
    )
    assert 1.05 * none < half
    assert 1.05 * half < whole
    wrong = [Signal.SOON if signal is Signal.DROP else Signal.DROP for signal in perfect]
    lied_to = {name: simulate(requests, name, capacity, signals=wrong) for name in ("lru", "hit-density")}
    assert lied_to["lru"] < 0.8 * none
    assert lied_to["hit-density"] > 0.95 * none


@pytest.mark.soak
@pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not at hand")
def test_known_figures_of_the_conversation_trace() -> None:
    requests = load_trace(TRACE)
    references = num_references(requests)
    assert (references, num_blocks(requests), ceiling_hits(requests)) == (288_500, 182_790, 105_710)

    def rate(hits: int) -> float:
        return round(100 * hits / references, 1)

    for share, lru, belady, least in ((0.01, 5.2, 24.6, 9.3), (0.1, 27.9, 36.6, 28.6)):
        capacity = int(share * num_blocks(requests))
        assert rate(lru_hits(requests, capacity)) == lru
        assert simulate(requests, "lru", capacity) == lru_hits(requests, capacity)
        assert rate(belady_hits(requests, capacity)) == belady
        assert rate(simulate(requests, "hit-density", capacity)) >= least
    assert rate(simulate(requests, "s3-fifo", int(0.1 * num_blocks(requests)))) == pytest.approx(24.5, abs=0.2)
