"""The curve against whole simulations, and what it refuses to tell."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from kvoffloadd.cache.curve.curve import REFERENCES_MIN, Curve
from kvoffloadd.cache.curve.prompt import AskedKeys
from kvoffloadd.cache.policy import POLICIES, create_policy
from kvoffloadd.model import I64Array
from scripts.replay.trace import ceiling_hits, key_hashes, num_blocks, num_references, simulate
from scripts.replay.workloads import WORKLOADS

KEY_BYTES, BLOCK_TOKENS = 1000, 16
TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)


def curve_of(
    requests: list[I64Array],
    policy: str,
    blocks: int,
    rows_max: int,
    *,
    seed: int = 0,
    disk_blocks: int = 0,
    times: Sequence[float] = TIMES,
) -> Curve:
    curve = Curve(
        partial(create_policy, policy), blocks * KEY_BYTES, disk_blocks * KEY_BYTES, times=times, rows_max=rows_max
    )
    for ids in requests:
        prompt = [AskedKeys(key_hashes(ids, seed), BLOCK_TOKENS, KEY_BYTES)]
        curve.ask(prompt)
        curve.store(prompt)
    return curve


def load(name: str, requests: int) -> list[I64Array]:
    return WORKLOADS[name](np.random.default_rng(3), requests)


def ratios(curve: Curve) -> list[float]:
    return [-1.0 if one.hit_ratio is None else one.hit_ratio for one in curve.estimates()]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_of_all_keys_is_a_whole_simulation(policy: str) -> None:
    requests = load("chat", 200)
    blocks = num_blocks(requests) // 20
    curve = curve_of(requests, policy, blocks, 4096)
    whole = [simulate(requests, policy, round(blocks * many)) / num_references(requests) for many in TIMES]
    assert ratios(curve) == pytest.approx(whole, abs=1e-12)
    assert [(one.rate, one.error) for one in curve.estimates()] == [(1.0, 0.0)] * len(TIMES)


def test_a_small_sample_is_near_the_whole() -> None:
    requests = load("chat", 1500)
    blocks = num_blocks(requests) // 10
    curve = curve_of(requests, "lru", blocks, 512, times=(1.0, 2.0))
    for estimate, many in zip(curve.estimates(), (1, 2), strict=True):
        real = simulate(requests, "lru", blocks * many) / num_references(requests)
        assert estimate.rate < 1
        assert estimate.hit_ratio == pytest.approx(real, abs=0.04)
        assert 0 < estimate.error < 0.025


def test_the_policy_makes_the_curve() -> None:
    """Prompts that never return take half of LRU's memory, and little of the default policy's."""
    requests = load("scan", 1200)
    blocks = num_blocks(requests) // 10
    ours, lru = (ratios(curve_of(requests, policy, blocks, 512, times=(1.0,))) for policy in ("hit-density", "lru"))
    whole = [simulate(requests, policy, blocks) / num_references(requests) for policy in ("hit-density", "lru")]
    assert whole[0] - whole[1] > 0.04
    assert ours[0] - lru[0] == pytest.approx(whole[0] - whole[1], abs=0.02)


def test_one_hot_key_does_not_move_the_curve() -> None:
    """Three in ten references are of one key. Its hash puts it into some samples, and into none of others."""
    random = np.random.default_rng(5)
    requests = [np.array([0, 2 * k, 2 * k + 1]) for k in random.integers(1, 1500, 3000).tolist()]
    whole = simulate(requests, "lru", 700) / num_references(requests)
    for seed in range(4):
        assert ratios(curve_of(requests, "lru", 700, 384, seed=seed, times=(1.0,)))[0] == pytest.approx(whole, abs=0.03)


def test_too_little_is_no_estimate() -> None:
    requests = load("zipf", 60)
    curve = curve_of(requests, "lru", 4000, 256)
    assert curve.estimates()[2].rate < 1
    assert ratios(curve) == [-1.0] * len(TIMES)
    assert Curve(partial(create_policy, "lru"), 1 << 20).estimates()[0].hit_ratio is None


def test_what_was_never_full_would_gain_nothing() -> None:
    requests = load("chat", 300)
    curve = curve_of(requests, "lru", num_blocks(requests) // 2, 4096)
    assert [one.filled for one in curve.estimates()] == [True, True, True, False, False]
    assert ratios(curve)[-1] == pytest.approx(ceiling_hits(requests) / num_references(requests), abs=1e-12)


def test_a_disk_keeps_what_memory_does_not() -> None:
    """300 prompts in turn: memory has room for 100 of them. A disk for all has them all, one for 200 has none."""
    requests = [np.arange(4) + 4 * (number % 300) for number in range(900)]
    for disk_blocks, once, twice in ((600, 0.0, 2 / 3), (1200, 2 / 3, 2 / 3)):
        found = ratios(curve_of(requests, "lru", 400, 4096, disk_blocks=disk_blocks, times=(1.0,)))
        assert found[0] == 0.0
        assert found[1:] == pytest.approx([once, twice])


def test_a_fading_curve_follows_the_load() -> None:
    """The first load hits nothing, the second almost everything."""
    new = [np.arange(8) + 8 * number for number in range(500)]
    old = [np.arange(8) + 8 * (number % 20) for number in range(500)]
    curve = curve_of(new, "lru", 400, 4096, times=(1.0,))
    assert ratios(curve)[0] == 0.0
    curve.fade(0.01)
    for ids in old:
        prompt = [AskedKeys(key_hashes(ids), BLOCK_TOKENS, KEY_BYTES)]
        curve.ask(prompt)
        curve.store(prompt)
    assert ratios(curve)[0] == pytest.approx(0.95, abs=0.03)


def test_memory_is_bounded() -> None:
    tracemalloc.start()
    try:
        curve = Curve(partial(create_policy, "hit-density"), 1 << 40, 1 << 45)
        random = np.random.default_rng(1)
        for _ in range(60):
            hashes = random.integers(0, 1 << 64, 2000, np.uint64)
            curve.ask([AskedKeys(hashes, 16, 1 << 21)])
            curve.store([AskedKeys(hashes, 16, 1 << 21)])
        used_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert used_bytes < 14 << 20  # tables of use counts, mapped apart, take less than 1 MiB
    assert all(one.rate <= 1 / 64 for one in curve.estimates())


def test_keys_that_are_smaller_than_the_first_make_the_sample_smaller() -> None:
    curve = Curve(partial(create_policy, "lru"), 1000 * 1000, times=(1.0,), rows_max=256)
    random = np.random.default_rng(2)
    rates = []
    for size in (4000, 100):
        for _ in range(300):
            hashes = random.integers(0, 1 << 64, 50, np.uint64)
            curve.ask([AskedKeys(hashes, 16, size)])
            curve.store([AskedKeys(hashes, 16, size)])
        rates.append(curve.estimates()[0].rate)
    assert rates == [1.0, 1 / 64]
    assert REFERENCES_MIN <= 2000
