"""What leases hold, all together, and how those of an instance that is gone end bit by bit."""

from __future__ import annotations

import tracemalloc
from random import Random

import numpy as np
import pytest

from kvoffloadd.cache.memory.lease import LEASE_KEYS, Holdings, Leases, ReleasedLease
from kvoffloadd.errors import LeaseError
from kvoffloadd.model import I64Array, U32Array


def rows(*numbers: int) -> U32Array:
    return np.array(numbers, np.uint32)


def parts(*numbers: int) -> I64Array:
    return np.array(numbers, np.int64)


def told(ended: ReleasedLease) -> tuple[list[int], list[int], int]:
    return ended.rows.tolist(), ended.parts.tolist(), ended.charged


def test_what_they_hold_is_counted() -> None:
    leases = Leases()
    read = leases.add_read(rows(1, 2, 2))
    write = leases.add_write(parts(9, 7, 8))
    assert leases.held == Holdings(read=1, keys=3, write=1, parts=3)
    leases.grow(read, rows(5))
    leases.fill(write, parts(7, 9))
    assert leases.held == Holdings(read=1, keys=4, write=1, parts=1)
    assert told(leases.end(read.id)) == ([1, 2, 2, 5], [], LEASE_KEYS + 4)
    assert told(leases.end(write.id)) == ([], [8], LEASE_KEYS + 1)
    assert (leases.held, len(leases)) == (Holdings(), 0)
    with pytest.raises(LeaseError):
        leases.end(read.id)


def test_a_filled_lease_counts_until_its_end() -> None:
    leases = Leases()
    lease = leases.add_write(parts(1, 2))
    leases.fill(lease, parts(1, 2))
    assert leases.held == Holdings(write=1)
    assert leases.write(lease.id) is lease
    assert told(leases.end(lease.id)) == ([], [], LEASE_KEYS)


@pytest.mark.parametrize("held", [(), (7,), (3, 7, 9)])
def test_which_parts_a_lease_has(held: tuple[int, ...]) -> None:
    lease = Leases().add_write(parts(*held))
    asked = np.array([[3, 7], [8, 9], [0, 10]])
    assert lease.has(asked).tolist() == np.isin(asked, held).tolist()


def test_what_counts_for_a_key_takes_no_more_memory_than_a_part() -> None:
    """However few of them a lease has: the cap is to bound memory."""
    leases, each = Leases(), [parts(number) for number in range(1000)]
    tracemalloc.start()
    try:
        for one in each:
            leases.add_write(one)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= 1000 * (LEASE_KEYS + 1) * parts(0).itemsize


def test_the_oldest_end_first_and_what_is_first_is_to_be_evicted_last() -> None:
    leases = Leases()
    for lease in (rows(1, 2, 3), rows(4, 5)):
        leases.add_read(lease)
    assert told(leases.end_some(1)) == ([3], [], 1)
    assert leases.held == Holdings(read=2, keys=4)
    assert told(leases.end_some(5)) == ([4, 5, 1, 2], [], 2 * LEASE_KEYS + 4)
    assert told(leases.end_some(5)) == ([], [], 0)


def test_one_lease_ends_in_steps() -> None:
    leases = Leases()
    read, write = leases.add_read(rows(1, 2, 3)), leases.add_write(parts(7, 8, 9))
    assert (leases.size(read.id), leases.size(write.id), leases.size(read.id - 1)) == (3, 3, 0)
    assert told(leases.end(read.id, 2)) == ([2, 3], [], 2), "the beginning of a prompt goes last"
    assert told(leases.end(write.id, 2)) == ([], [8, 9], 2)
    assert leases.held == Holdings(read=1, keys=1, write=1, parts=1)
    assert told(leases.end(read.id, 2)) == ([1], [], LEASE_KEYS + 1)
    assert read.id not in leases
    leases.fill(write, parts(7))
    assert write.id in leases, "it ends by its release alone"
    assert told(leases.end(write.id, 2)) == ([], [], LEASE_KEYS)
    assert (leases.held, len(leases)) == (Holdings(), 0)


@pytest.mark.parametrize("most", [1, 7, 100])
def test_each_step_is_bounded_and_all_end(rng: Random, most: int) -> None:
    leases, charged, before = Leases(), 0, Holdings()
    for number in range(200):
        size = rng.choice([0, 1, 1, 2, 30, 300])
        if rng.random() < 0.5 and size:
            leases.add_read(np.full(size, number, np.uint32))
            before.read, before.keys = before.read + 1, before.keys + size
        else:
            leases.add_write(np.full(size, number, np.int64))
            before.write, before.parts = before.write + 1, before.parts + size
        charged += LEASE_KEYS + size
    assert leases.held == before
    while len(leases):
        count = len(leases)
        ended = leases.end_some(most)
        assert len(ended.rows) + len(ended.parts) + count - len(leases) <= most + 1
        before.keys -= len(ended.rows)
        before.parts -= len(ended.parts)
        assert (leases.held.keys, leases.held.parts) == (before.keys, before.parts)
        assert leases.held.read + leases.held.write == len(leases)
        charged -= ended.charged
    assert (charged, leases.held) == (0, Holdings())
