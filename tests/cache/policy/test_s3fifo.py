"""Filter, second chances, ghosts."""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.policy.s3fifo import S3Fifo
from kvoffloadd.model import BoolArray, U32Array


def every(rows: U32Array) -> BoolArray:
    return np.ones(len(rows), np.bool_)


def put(policy: S3Fifo, *rows: int, hashes: int = 0) -> None:
    array = np.array(rows, np.uint32)
    policy.insert(array, array.astype(np.uint64) + np.uint64(hashes), np.zeros(len(rows), np.uint32))


def use(policy: S3Fifo, row: int, times: int) -> None:
    for _ in range(times):
        policy.touch(np.array([row], np.uint32), np.zeros(1, np.uint32))


def test_keys_used_twice_outlive_a_scan() -> None:
    policy = S3Fifo(20, 40)
    put(policy, 0, 1, 2)
    use(policy, 0, 2)
    use(policy, 1, 1)
    for row in range(3, 20):
        put(policy, row)
    assert policy.victims(19, every).tolist() == [2, 1, *range(3, 20)]


def test_a_key_that_comes_back_soon_skips_the_filter() -> None:
    policy = S3Fifo(20, 40)
    for row in range(20):
        put(policy, row)
    gone = policy.victims(3, every)
    assert gone.tolist() == [0, 1, 2]
    policy.remove(gone)
    put(policy, 30, hashes=-30 % (1 << 64))  # key 0 in another row
    put(policy, 31)
    put(policy, 32)
    assert policy.victims(20, every).tolist() == [*range(3, 20), 31, 32, 30]


def test_a_use_between_choice_and_removal_saves_nothing_but_order() -> None:
    policy = S3Fifo(20, 40)
    put(policy, *range(5))
    first = policy.victims(2, every).tolist()
    use(policy, first[0], 2)
    again = policy.victims(5, every).tolist()
    assert sorted(again) == list(range(5))
    assert again[-1] == first[0]
