"""Heavy keys: the few that take more than their share of all references."""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.curve.heavy import COUNTED_MAX, JUDGED_EVERY, SHARE, HeavyKeys

HOT = np.arange(1, 4, dtype=np.uint64)


def feed(heavy: HeavyKeys, hot: np.ndarray, calls: int, rng: np.random.Generator) -> None:
    for _ in range(calls):
        heavy.count(np.concatenate((hot, rng.integers(1 << 20, 1 << 63, 500, np.uint64))))


def test_a_key_above_the_share_is_found_among_many() -> None:
    heavy = HeavyKeys()
    feed(heavy, HOT, 200, np.random.default_rng(0))  # each takes 0.2 %; 100,000 keys pass
    assert COUNTED_MAX < 200 * 500
    assert SHARE < 1 / 503
    assert heavy.keys == set(HOT.tolist())
    assert heavy.among(np.array([2, 9, 3, 1 << 40], np.uint64)).tolist() == [True, False, True, False]


def test_nothing_is_heavy_at_first() -> None:
    heavy = HeavyKeys()
    assert heavy.among(HOT).tolist() == [False] * 3
    assert not heavy.count(HOT)


def test_a_key_that_is_not_asked_for_any_more_is_heavy_no_longer() -> None:
    heavy = HeavyKeys()
    rng = np.random.default_rng(1)
    feed(heavy, HOT, 200, rng)
    feed(heavy, HOT[:1], 8 * JUDGED_EVERY // 500, rng)
    assert heavy.keys == {1}


def test_a_change_is_told_once() -> None:
    heavy = HeavyKeys()
    told = [heavy.count(HOT) for _ in range(3 * JUDGED_EVERY // 3)]
    assert told.count(True) == 1
