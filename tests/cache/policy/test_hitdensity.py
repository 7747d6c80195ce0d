"""What the density learns, and what the policy makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffloadd.cache.policy.base import Clock
from kvoffloadd.cache.policy.ghost import USES_MAX, UseCounts
from kvoffloadd.cache.policy.hitdensity import (
    BELIEFS,
    CHAIN,
    CLASSES,
    DONE,
    NUM_CLASSES,
    SOON,
    TRUST_WEIGHT,
    WINDOW_SLOTS,
    HitDensity,
    HitDensityPolicy,
    _trusted_beliefs,
    densities,
)
from kvoffloadd.cache.policy.returning import RECENT_MIN, Returning
from kvoffloadd.model import BoolArray, U32Array


def bucket(age: int) -> int:
    """The bucket of an age below 2**32: two buckets per power of two."""
    return max(1, age * age).bit_length() - 1


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
    assert np.allclose(values[:-3:2] * 2.0 ** np.arange(31), values[0], rtol=1e-9)


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


def test_who_loses_memory_keeps_what_was_learned() -> None:
    """Another size has taken its slabs over: without its use counts its keys would come back as unknown ones."""
    policy, rows = HitDensityPolicy(1000, 1000), np.arange(8, dtype=np.uint32)
    hashes, positions = _hashes(1, 8), np.zeros(8, np.uint32)
    policy.insert(rows, hashes, positions)
    for _ in range(3):
        policy.touch(rows, positions)
    policy.remove(rows)
    policy.resize(8)
    policy.insert(rows, hashes, positions)
    assert policy._uses[rows].tolist() == [5] * 8


def test_keys_used_often_are_believed_in_as_far_as_they_return_more_often() -> None:
    def trusted(once: float, more: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        expected = np.full(NUM_CLASSES, 1e6)
        returned = np.where(np.arange(NUM_CLASSES) < CLASSES[0, 2], once, more) * expected
        return _trusted_beliefs(returned, expected)

    alike = np.ones_like(BELIEFS)
    alike[DONE:] = BELIEFS[DONE:]  # what a client declares is another matter
    assert np.allclose(trusted(0.5, 1.5), BELIEFS)
    assert np.allclose(trusted(1.0, 1.0), alike, atol=0.01)
    assert np.allclose(trusted(1.2, 0.8), alike)
    assert np.all(alike <= trusted(1.0, 1.5))
    assert np.all(trusted(1.0, 1.5) <= BELIEFS)
    assert 2 < trusted(1.0, 1.5).max() < 10
    nothing = np.zeros(NUM_CLASSES)
    assert np.allclose(_trusted_beliefs(nothing, nothing), BELIEFS)
    assert np.allclose(_trusted_beliefs(nothing + TRUST_WEIGHT / 50, nothing + TRUST_WEIGHT / 50), BELIEFS, rtol=0.3)


def test_a_sweep_shows_where_few_keys_were_used_before() -> None:
    once, again = np.ones(16, np.uint8), np.full(16, 2, np.uint8)
    returning = Returning(100)
    for _ in range(20):
        returning.record(once)
    assert returning.factor == 1.0  # nothing else is known
    for _ in range(10 * RECENT_MIN // 16):
        returning.record(again)
        returning.record(again)
        returning.record(once)
        assert returning.factor == 1.0
    returning.record(once)
    assert returning.factor == 1.0
    for _ in range(4 * RECENT_MIN // 16):
        returning.record(once)
    assert returning.factor < 0.1
    for _ in range(2 * RECENT_MIN // 16):
        returning.record(again)
    assert returning.factor == 1.0
    for _ in range(1000 * RECENT_MIN // 16):
        returning.record(once)
    returning.record(again)
    assert returning.factor == 1.0  # by then that is usual
    for _ in range(100):
        returning.record(again)
    for _ in range(32):
        returning.record(np.ones(100 * RECENT_MIN, np.uint8))
    assert 0 < returning.factor < 0.1


def test_a_single_long_prompt_is_no_sweep() -> None:
    """However long it is; several are."""
    returning = Returning(100)
    for _ in range(100):
        returning.record(np.full(16, 2, np.uint8))
    returning.record(np.ones(100 * RECENT_MIN, np.uint8))
    assert returning.factor == 1.0
    for _ in range(3):
        returning.record(np.ones(100 * RECENT_MIN, np.uint8))
    assert returning.factor < 1.0


def test_a_sweep_is_told_by_more_keys_where_more_are_held() -> None:
    once, again = np.ones(16, np.uint8), np.full(16, 2, np.uint8)
    small, large = Returning(100), Returning(100)
    large.resize(100 * RECENT_MIN)
    for returning in (small, large):
        for _ in range(10_000):
            returning.record(again)
        for _ in range(2 * RECENT_MIN // 16):
            returning.record(once)
    assert small.factor < 0.5
    assert large.factor == 1.0


def test_a_sweep_takes_the_place_of_keys_used_once() -> None:
    """A batch comes by in a row. Keys used once had returned as often as others, but those of the batch do not."""
    prompt, capacity = 16, 1600
    policy, positions = HitDensityPolicy(capacity, capacity), np.arange(prompt, dtype=np.uint32)
    held: dict[int, U32Array] = {}
    free = [np.arange(at, at + prompt, dtype=np.uint32) for at in range(0, capacity, prompt)]

    def use(name: int) -> bool:
        if name in held:
            policy.touch(held[name], positions)
            return True
        if not free:
            rows = policy.victims(prompt, every)
            policy.remove(rows)
            gone = set(rows.tolist())
            for other in [other for other, its in held.items() if gone & set(its.tolist())]:
                del held[other]
            free.append(rows)
        held[name] = free.pop()
        policy.insert(held[name], _hashes(name, prompt), positions)
        return False

    random = np.random.default_rng(0)
    weights = np.arange(1, 201) ** -0.9
    for name in random.choice(200, 600, p=weights / weights.sum()).tolist():
        use(name)
    of_use = set(held)
    for name in range(1000, 1400):
        use(name)
    assert len(of_use) > 90
    assert len(of_use & set(held)) > 0.6 * len(of_use)  # without the factor of `Returning`: 12 of 96
    assert policy.worth(held[1399]).max() < policy.worth(held[0]).min() / 50
    assert policy.worth(held[1399]).max() < min(policy.worth(held[name]).min() for name in of_use & set(held))


def test_one_policy_learns_at_a_time() -> None:
    clock = Clock()
    policies = [HitDensityPolicy(10_000, 10_000, clock) for _ in range(3)]
    rows = np.arange(9000, dtype=np.uint32)
    for policy in policies:
        policy.insert(rows, rows.astype(np.uint64) << np.uint64(20), np.zeros(9000, np.uint32))
        assert policy._learned.is_stale
    for left in (2, 1, 0):
        for policy in policies:
            policy.victims(1, every)
        assert sum(policy._learned.is_stale for policy in policies) == left
        clock.advance(1)
