"""What the density learns, and what the policy makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffloadd.cache.policy.ghost import USES_MAX, UseCounts
from kvoffloadd.cache.policy.hitdensity import (
    CHAIN,
    CLASSES,
    NUM_CLASSES,
    SOON,
    WINDOW_SLOTS,
    HitDensity,
    HitDensityPolicy,
    bucket,
    densities,
)
from kvoffloadd.model import BoolArray, U32Array


def every(rows: U32Array) -> BoolArray:
    return np.ones(len(rows), np.bool_)


def test_unlearned_density_falls_with_age_alike_for_all_classes() -> None:
    learned = HitDensity(3)
    ages = [2**n for n in range(31)]
    densities = [learned.density(0, age) for age in ages]
    assert densities == sorted(densities, reverse=True)
    assert all(learned.density(2, age) == learned.density(0, age) for age in ages)


@pytest.mark.parametrize("age", [0, 1, 2, 3, 5, 6, 1000, 1 << 20, 3037000500, (1 << 32) - 1])
def test_one_age_has_one_bucket(age: int) -> None:
    # The vectorised buckets are seen through what one return at this age changes.
    learned = HitDensity(1)
    slot, known = np.zeros(1, np.uint32), np.ones(1, np.bool_)
    learned.record(slot, ~known, np.zeros(1, np.uint8), 0)
    before = [learned.density(0, 2**n) for n in range(32)]
    for _ in range(50):
        learned.record(slot, known, np.zeros(1, np.uint8), age)
        learned.record(slot, ~known, np.zeros(1, np.uint8), 0)
    learned.refresh(0)
    assert 0 <= bucket(age) < 64
    assert learned.density(0, age) > 0
    if age >= 2:
        assert learned.density(0, age) > before[bucket(age) // 2]


def test_classes_that_come_back_are_worth_more_and_dead_ages_less() -> None:
    learned = HitDensity(2)
    number, now = 256, 0
    slots = np.arange(2 * number, dtype=np.uint32)
    classes = (slots % 2).astype(np.uint8)
    for round_ in range(40):
        known = (classes == 1) & (round_ > 0)  # class 1 returns at age 100, class 0 never: other keys take its slots
        learned.record(slots, known, classes, now)
        now += 100
    learned.refresh(now)
    assert learned.density(1, 50) > 10 * learned.density(0, 50)
    assert learned.density(1, 16) >= learned.density(1, 64)  # farther from the hit, but used later than the other
    assert learned.density(1, 1000) < learned.density(1, 64)


def test_what_was_learned_outlasts_uses_without_evictions() -> None:
    """Densities are worked out when keys are evicted. Until then what is observed fades as it comes, and not all of it
    at once, the newest as the oldest.
    """
    learned = HitDensity(2)
    number, now, many = 4096, 0, 250
    slots = np.arange(2 * number, dtype=np.uint32)
    classes = (slots % 2).astype(np.uint8)
    for round_ in range(many):
        learned.record(slots, (classes == 1) & (round_ > 0), classes, now)  # class 1 returns, class 0 never
        now += 100
    assert 2 * number * many > 30 * WINDOW_SLOTS
    assert learned.is_stale
    learned.refresh(now)
    assert not learned.is_stale
    assert learned.density(1, 50) > 10 * learned.density(0, 50)


def test_use_counts_are_remembered_by_tag_and_fade_by_collision() -> None:
    counts = UseCounts(1000)
    assert counts.num_slots == 1024
    tags = np.array([5, 6, 7 | 0xABC << 20], np.uint32)  # two with a mark of 0, as an empty slot has
    assert not counts.look_up(tags)[0].any()
    counts.record(tags, np.array([1, 2, USES_MAX], np.uint8))
    known, uses = counts.look_up(tags)
    assert known.all()
    assert uses.tolist() == [1, 2, 192]  # of 255
    other = tags ^ np.uint32(1 << 20)
    assert not counts.look_up(other)[0].any()
    counts.record(other[:1], np.array([9], np.uint8))
    assert counts.look_up(tags)[1].tolist() == [0, 2, 192]


def test_use_counts_are_remembered_in_half_powers_of_two() -> None:
    counts = UseCounts(1024)
    tags = np.arange(USES_MAX).astype(np.uint32)
    exact = np.arange(1, USES_MAX + 1).astype(np.uint8)
    counts.record(tags, exact)
    known, uses = counts.look_up(tags)
    assert known.all()
    assert (uses <= exact).all()
    assert (uses > 2 / 3 * exact - 1).all()
    assert uses[:4].tolist() == [1, 2, 3, 4]
    _, _, now = counts.count(tags, exact, None)
    assert int(now.max()) == USES_MAX


def test_classes_tell_turns_apart_where_uses_are_few() -> None:
    assert len(set(CLASSES[:, 1].tolist())) == 3
    assert len(set(CLASSES[:, 15].tolist())) == 1
    assert CLASSES[0].tolist() == sorted(CLASSES[0].tolist())


def _learned(chain: list[tuple[int, int]], random: np.random.Generator) -> HitDensity:
    """Random observations, few in most buckets."""
    learned = HitDensity(NUM_CLASSES, chain)
    now = 0
    for _ in range(200):
        number = int(random.integers(1, 20))
        slots = np.unique(random.integers(0, 500, number)).astype(np.uint32)
        now += int(2 ** random.uniform(0, 20))
        learned.record(slots, random.random(len(slots)) < 0.5, CLASSES.reshape(-1)[slots], now & 0xFFFFFFFF)
    learned.refresh(now & 0xFFFFFFFF)
    return learned


def test_no_key_is_worth_less_than_one_behind_it_in_its_prompt() -> None:
    ages = [2**n for n in range(32)]
    broken_without = 0
    for seed in range(5):
        for chain in (CHAIN, []):
            learned = _learned(chain, np.random.default_rng(seed))
            worth = {key_class: [learned.density(key_class, age) for age in ages] for key_class in range(NUM_CLASSES)}
            assert all(of_class == sorted(of_class, reverse=True) for of_class in worth.values())
            pairs = [(worth[behind], worth[before]) for behind, before in CHAIN]
            wrong = sum(low > high * (1 + 1e-9) for lows, highs in pairs for low, high in zip(lows, highs, strict=True))
            assert not (chain and wrong)
            broken_without += wrong
    assert broken_without > 100


def test_classes_follow_each_other_along_a_prompt() -> None:
    assert {behind for behind, _ in CHAIN} == set(range(SOON - 1))
    assert all(behind < before for behind, before in CHAIN)
    for of_turn in CLASSES:
        uses = np.flatnonzero(np.diff(of_turn))
        assert {(int(of_turn[at]), int(of_turn[at + 1])) for at in uses.tolist()} <= set(CHAIN)


def test_densities_where_next_to_nothing_is_left_are_exact() -> None:
    # Nine of ten that are left come back in each half power of two: at twice the age, half as dense.
    values = densities(np.full((1, 64), 0.9))[0]
    assert np.allclose(values[:-2:2] * 2.0 ** np.arange(31), values[0], rtol=1e-9)


@pytest.mark.slow
def test_hot_prefixes_survive_scans_where_lru_loses_them() -> None:
    random = np.random.default_rng(0)
    capacity, prompt = 400, 10
    policy = HitDensityPolicy(capacity, capacity)
    positions = np.arange(prompt, dtype=np.uint32)
    row_of: dict[int, U32Array] = {}
    free = [np.arange(n, n + prompt, dtype=np.uint32) for n in range(0, capacity, prompt)]
    hot_hits = hot = 0
    for number in range(6000):
        is_hot = random.random() < 0.3
        name = int(random.integers(0, 20)) if is_hot else 1000 + number
        hot += is_hot and number > 2000
        if name in row_of:
            hot_hits += number > 2000
            policy.touch(row_of[name], positions)
            continue
        if not free:
            victims = policy.victims(prompt, every)
            policy.remove(victims)
            gone = set(victims.tolist())
            row_of = {name: rows for name, rows in row_of.items() if not gone & set(rows.tolist())}
            free.append(victims)
        row_of[name] = free.pop()
        hashes = random.integers(0, 1 << 64, prompt, dtype=np.uint64) if not is_hot else _hashes(name, prompt)
        policy.insert(row_of[name], hashes, positions)
    # LRU gets 35 % here: 40 prompts fit, and a hot one comes back after 66 requests on average.
    assert hot_hits / hot > 0.9


def _hashes(name: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.random.default_rng(name).integers(0, 1 << 64, count, dtype=np.uint64)
