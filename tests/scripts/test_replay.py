"""`replay_trace` with small traces whose hits are known: by hand, and by brute force."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Requests = list[list[int]]


def run(trace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "replay_trace.py"), str(trace), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def result_of(trace: Path, *arguments: str) -> dict[str, Any]:
    done = run(trace, *arguments, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong_bytes"] == 0
    assert found["verified_loads"] == found["loads"]
    assert found["findings"] == []
    return found


def write(path: Path, requests: Requests) -> Path:
    lines = (
        json.dumps({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
        for ids in requests
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def conversations(rng: random.Random, count: int) -> Requests:
    """Requests that go on from an earlier one, or from a prefix of it, or begin anew."""
    requests: Requests = []
    unused = 0
    for _ in range(count):
        earlier = rng.choice(requests) if requests and rng.random() < 0.8 else []
        prefix = earlier[: rng.randint(0, len(earlier))]
        new = rng.randint(1, 6)
        requests.append([*prefix, *range(unused, unused + new)])
        unused += new
    return requests


def hits_without_bounds(requests: Requests) -> int:
    held: set[int] = set()
    hits = 0
    for ids in requests:
        hits += next((at for at, number in enumerate(ids) if number not in held), len(ids))
        held |= set(ids)
    return hits


def hits_with_lru(requests: Requests, capacity: int) -> int:
    """A request moves what is held of it to the young end, its first block last, then puts in the rest, likewise."""
    held: dict[int, None] = {}  # oldest first
    hits = 0
    for ids in requests:
        hits += next((at for at, number in enumerate(ids) if number not in held), len(ids))
        kept = [number for number in ids if number in held]
        new = [number for number in ids if number not in held][: capacity - len(kept)]
        held = {number: None for number in held if number not in kept} | dict.fromkeys(reversed(kept))
        for number in list(held)[: max(0, len(held) + len(new) - capacity)]:
            del held[number]
        held |= dict.fromkeys(reversed(new))
    return hits


@pytest.fixture
def requests(rng: random.Random) -> Requests:
    return conversations(rng, 150)


@pytest.fixture
def trace(tmp_path: Path, requests: Requests) -> Path:
    return write(tmp_path / "trace.jsonl", requests)


def test_hits_by_hand(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [[0, 1, 2], [0, 1, 3], [0, 4], [0, 1, 2]])
    found = result_of(trace)
    assert (found["block_references"], found["block_hits"], found["hit_rate"]) == (11, 2 + 1 + 3, round(6 / 11, 5))
    assert (found["stores"], found["loads"], found["evictions"]) == (3, 3, 0)
    assert found["keys_stored"] == 5


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
def test_nothing_is_missing_but_what_was_pending(trace: Path, requests: Requests, workers: int, model: str) -> None:
    found = result_of(trace, "--workers", str(workers), "--model", model)
    ceiling = hits_without_bounds(requests)
    assert found["block_references"] == sum(map(len, requests))
    assert found["ceiling_hit_rate"] == round(ceiling / found["block_references"], 5)
    assert ceiling - found["block_hits"] == found["shortfall"] == found["pending_misses"]
    if workers == 1:
        assert found["pending_misses"] == 0


def test_bounded_lru_hits_what_brute_force_does(trace: Path, requests: Requests) -> None:
    blocks = len({number for ids in requests for number in ids})
    found = result_of(trace, "--policy", "lru", "--capacities", "0.1,0.5", "--seed", "7")
    assert [one["capacity_blocks"] for one in found["capacities"]] == [round(0.1 * blocks), round(0.5 * blocks)]
    for one in found["capacities"]:
        assert one["block_hits"] == hits_with_lru(requests, one["capacity_blocks"])
        assert one["hit_rate"] == one["lru_hit_rate"] < one["ceiling_hit_rate"]
        assert one["belady_hit_rate"] <= one["ceiling_hit_rate"]
        assert one["evictions"] > 0
    assert found["block_hits"] == sum(one["block_hits"] for one in found["capacities"])


def test_a_planted_corruption_is_noticed(trace: Path) -> None:
    done = run(trace, "--plant-corruption", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["wrong_bytes"] == found["loads"] - found["verified_loads"] == found["loads"] // 10 > 0


def test_what_can_not_be_replayed_is_told(tmp_path: Path, trace: Path) -> None:
    absent = run(tmp_path / "absent.jsonl")
    assert (absent.returncode, "absent.jsonl" in absent.stderr, "Traceback" in absent.stderr) == (2, True, False)
    (tmp_path / "broken.jsonl").write_text('{"hash_ids": "none"}\n', encoding="utf-8")
    broken = run(tmp_path / "broken.jsonl")
    assert (broken.returncode, "Traceback" in broken.stderr) == (2, False)
    small = run(trace, "--capacity", "100B")
    assert (small.returncode, "less than a block" in small.stderr) == (2, True)
