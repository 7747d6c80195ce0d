"""`replay_trace` with small traces whose hits are known: by hand, and by brute force."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.memory.eviction import SPARE_MAX, SPARE_SHARE
from scripts.replay.tenants import MODELS, OTHER_UID, tenants_of
from scripts.replay.trace import ceiling_hits
from scripts.replay.workloads import TENANT_IDS, WORKLOADS, tenants_in
from tests.scripts.running import run_script

pytestmark = pytest.mark.slow

Requests = list[list[int]]


def result_of(trace: Path, *arguments: str) -> dict[str, Any]:
    done = run_script("replay_trace", str(trace), *arguments)
    assert done.status == 0, done.said
    assert done.figures["wrong_bytes"] == 0
    assert done.figures["verified_loads"] == done.figures["loads"]
    assert done.figures["findings"] == []
    return done.figures


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


def hits_with_lru(requests: Requests, capacity: int, spare: int) -> int:
    """A request moves what is held of it to the young end, its first block last, then puts in the rest, likewise. An
    eviction frees some slots to spare.
    """
    held: dict[int, None] = {}  # oldest first
    hits = 0
    for ids in requests:
        hits += next((at for at, number in enumerate(ids) if number not in held), len(ids))
        kept = [number for number in ids if number in held]
        new = [number for number in ids if number not in held][: capacity - len(kept)]
        held = {number: None for number in held if number not in kept} | dict.fromkeys(reversed(kept))
        short = len(held) + len(new) - capacity
        for number in list(held)[: short + spare if short > 0 else 0]:
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


def test_what_is_pending_is_counted(tmp_path: Path) -> None:
    """Each request goes on from the one before, whose store is still under way when it comes."""
    trace = write(tmp_path / "trace.jsonl", [list(range(length)) for length in range(1, 20)])
    found = result_of(trace, "--workers", "3", "--slow-copies", "0.05")
    assert found["shortfall"] == found["pending_misses"] > 0
    assert found["block_hits"] + found["pending_misses"] == sum(range(1, 19))


def test_bounded_lru_hits_what_brute_force_does(trace: Path, requests: Requests) -> None:
    blocks = len({number for ids in requests for number in ids})
    found = result_of(trace, "--policy", "lru", "--capacities", "0.1,0.5", "--seed", "7")
    assert [one["capacity_blocks"] for one in found["capacities"]] == [round(0.1 * blocks), round(0.5 * blocks)]
    for one in found["capacities"]:
        capacity, references = one["capacity_blocks"], found["block_references"] // 2  # of each of the two capacities
        assert one["block_hits"] == hits_with_lru(requests, capacity, min(SPARE_MAX, capacity // SPARE_SHARE))
        assert one["lru_hit_rate"] == round(hits_with_lru(requests, capacity, 0) / references, 5)
        assert one["hit_rate"] == round(one["block_hits"] / references, 5) < one["ceiling_hit_rate"]
        assert one["belady_hit_rate"] <= one["ceiling_hit_rate"]
        assert one["tenants"][0]["simulated_hits"] == one["block_hits"]
        assert one["estimated_ceiling"] == pytest.approx(one["ceiling_hit_rate"], abs=0.02)
        assert one["evictions"] > 0
    assert found["block_hits"] == sum(one["block_hits"] for one in found["capacities"])


def test_a_planted_corruption_is_noticed(trace: Path) -> None:
    done = run_script("replay_trace", str(trace), "--plant-corruption")
    assert done.status == 1
    assert done.figures["wrong_bytes"] == done.figures["loads"] - done.figures["verified_loads"] > 0
    assert done.figures["wrong_bytes"] == done.figures["loads"] // 10


@pytest.mark.parametrize("load", ["flood-5", "drift"])
def test_daemon_and_simulator_agree_on_a_workload_by_its_name(load: str) -> None:
    found = result_of(Path(load), "--limit", "600", "--capacity", "0.2", "--sizes", "1")
    assert found["evictions"] > 0
    assert found["hit_rate"] == found["simulated_hit_rate"] <= found["ceiling_hit_rate"]
    assert [tenant["block_hits"] for tenant in found["tenants"]] == [t["simulated_hits"] for t in found["tenants"]]
    assert found["policy_hit_rate"] <= found["ceiling_hit_rate"]


def test_a_flood_of_another_user_in_another_size() -> None:
    found = result_of(Path("flood-5"), "--limit", "300", "--capacity", "0.2", "--sizes", "2,1")
    tenant, flood = found["tenants"]
    assert (tenant["payload_bytes"], flood["payload_bytes"]) == (8192, 4096)
    assert tenant["requests"] + flood["requests"] == 275
    assert (flood["uid"] != tenant["uid"]) == (os.getuid() == 0)
    assert (flood["restorable"], flood["block_hits"], flood["restored"]) == (0, 0, None)
    assert 0 < tenant["block_hits"] == found["block_hits"] <= tenant["restorable"]
    assert tenant["block_hits"] == tenant["simulated_hits"]
    assert found["evictions"] > 0
    assert found["slabs_taken_over"] > 0
    assert [found[f"{name}_hit_rate"] for name in ("policy", "lru", "belady")] == [None] * 3


def test_workers_of_three_tenants_take_turns() -> None:
    found = result_of(Path("tenants"), "--limit", "80", "--workers", "2")
    assert [tenant["payload_bytes"] for tenant in found["tenants"]] == [4096, 3 * 4096, 2 * 4096]
    assert sum(tenant["requests"] for tenant in found["tenants"]) == 80
    restorable = sum(tenant["restorable"] for tenant in found["tenants"])
    assert found["block_hits"] + found["pending_misses"] == restorable > 0
    assert sum(tenant["simulated_hits"] for tenant in found["tenants"]) == restorable


@pytest.mark.parametrize(("uid", "uids"), [(0, [0, OTHER_UID, OTHER_UID + 1]), (1000, [1000] * 3)])
def test_only_root_has_tenants_be_other_users(monkeypatch: pytest.MonkeyPatch, uid: int, uids: list[int]) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    tenants = tenants_of(MODELS["gpt-oss-20b"], None, [3, 1], 3)
    assert [tenant.uid for tenant in tenants] == uids
    assert [tenant.slot_bytes for tenant in tenants] == [3 * 4096, 4096, 3 * 4096]
    assert len({tenant.namespace for tenant in tenants}) == 3


@pytest.mark.parametrize("load", WORKLOADS)
def test_a_request_is_one_tenants(load: str) -> None:
    requests = WORKLOADS[load](np.random.default_rng(3), 400)
    whose = tenants_in(load, requests)
    assert all((ids // TENANT_IDS == number).all() for ids, number in zip(requests, whose, strict=True))
    others = [ids for ids, number in zip(requests, whose, strict=True) if number]
    if load == "scan" or load.startswith("flood"):
        assert 0 < len(others) < len(requests)
        assert ceiling_hits(others) == 0
    else:
        assert set(whose.tolist()) == ({0, 1, 2} if load == "tenants" else {0})


def test_a_table_of_policies() -> None:
    done = run_script("policy_table", "flood-1", "drift", "--seeds", "2", "--requests", "100")
    assert done.status == 0, done.said
    rates = done.figures["rates"]
    assert set(rates) == {"flood-1", "drift"}
    for of_load in rates.values():
        assert set(of_load) == {"hit-density", "lru", "s3-fifo"}
        assert all(0 <= rate <= 100 for of_policy in of_load.values() for rate in of_policy)
    wrong = run_script("policy_table", "flood-1", "--policies", "mru")
    assert (wrong.status, "'mru' is not one of" in wrong.said) == (2, True)


def test_errors_of_the_curve() -> None:
    options = ("tree", "--requests", "200", "--policies", "lru", "--seeds", "2", "--rows")
    exact, sampled = (run_script("curve_error", *options, rows).figures["results"][0] for rows in ("4096", "64"))
    assert exact["errors"] == [[0.0] * 5] * 2
    assert exact["rates"] == sampled["rates"]
    assert min(sampled["sample_rates"]) < 1
    wrong = run_script("curve_error", "--policies", "mru")
    assert (wrong.status, "'mru' is not one of" in wrong.said) == (2, True)
    assert run_script("curve_error", "no-such-file").status == 2


def test_more_workers_than_requests(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [[0, 1, 2], [0, 1, 3]])
    found = run_script("replay_trace", str(trace), "--workers", "3").figures
    assert found["block_hits"] + found["pending_misses"] == 2
    assert (found["stores"], found["wrong_bytes"]) == (2, 0)
    # If the second request came before the first one's store had ended, there was nothing to check, which it must say.
    assert found["findings"] == ([] if found["block_hits"] else ["no load was verified"])


def test_what_can_not_be_replayed_is_told(tmp_path: Path, trace: Path) -> None:
    absent = run_script("replay_trace", str(tmp_path / "absent.jsonl"))
    assert (absent.status, "absent.jsonl" in absent.said, "Traceback" in absent.said) == (2, True, False)
    (tmp_path / "broken.jsonl").write_text('{"hash_ids": "none"}\n', encoding="utf-8")
    broken = run_script("replay_trace", str(tmp_path / "broken.jsonl"))
    assert (broken.status, "line 1" in broken.said, "Traceback" in broken.said) == (2, True, False)
    small = run_script("replay_trace", str(trace), "--capacity", "100B")
    assert (small.status, '--capacity "100B" is less than a block' in small.said) == (2, True)
    sizes = run_script("replay_trace", str(trace), "--sizes", "1,0")
    assert (sizes.status, "--sizes: from 1 to 256" in sizes.said) == (2, True)
    large = run_script("replay_trace", str(trace), "--capacity", "1PiB")
    assert (large.status, "are available" in large.said, "Traceback" in large.said) == (1, True, False)
