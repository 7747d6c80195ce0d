"""A million rows: no call's work grows with what is held."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvoffloadd.cache.policy import POLICIES, create_policy
from kvoffloadd.cache.policy.s3fifo import CHANCES_MIN
from kvoffloadd.cache.policy.selection import BLOCK_MAX, IN_USE_MAX
from kvoffloadd.model import BoolArray, U32Array
from kvoffloadd.testing.process import rss_anon_bytes
from kvoffloadd.testing.wait import HANG_S
from tests.calls import Calls, assert_short

ROWS, PROMPT = 1_000_000, 500
CALL_S_MAX = 0.1
"""CPU time of this thread; calls take tens of microseconds, anything that walks all rows takes longer than this."""


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_keys_touch_little_of_a_large_policy(name: str) -> None:
    """Memory is zeroed when it is first touched, a huge page in some milliseconds: what is hashed to places all over a
    table may not be on huge pages, or the first request stops the loop. (Where the kernel has none, this can't fail.)
    """
    policy, before = create_policy(name, 1 << 26, 1 << 26), rss_anon_bytes(os.getpid())
    hashes = np.random.default_rng(0).integers(0, 1 << 64, PROMPT, dtype=np.uint64)
    rows = np.arange(PROMPT, dtype=np.uint32)
    policy.insert(rows, hashes, rows)
    assert len(policy.victims(10, lambda rows: np.ones(len(rows), bool))) == 10
    policy.remove(rows)
    policy.insert(rows, hashes, rows)
    assert rss_anon_bytes(os.getpid()) - before < 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_calls_stay_short_with_a_million_rows(name: str) -> None:
    positions = np.arange(PROMPT, dtype=np.uint32)

    def trial() -> Calls:
        random = np.random.default_rng(0)
        calls = Calls()
        asked = 0

        def evictable(rows: U32Array) -> BoolArray:
            nonlocal asked
            asked += len(rows)
            free: BoolArray = rows % 64 != 0
            return free

        with calls.timed("construct"):
            policy = create_policy(name, ROWS, ROWS)
        for start in range(0, ROWS, PROMPT):
            rows = np.arange(start, start + PROMPT, dtype=np.uint32)
            hashes = random.integers(0, 1 << 64, PROMPT, dtype=np.uint64)
            with calls.timed("insert"):
                policy.insert(rows, hashes, positions)
        evicted = 0
        for _ in range(300):
            rows = positions + np.uint32(PROMPT * random.integers(0, ROWS // PROMPT))
            with calls.timed("touch"):
                policy.touch(rows, positions)
            scattered = np.unique(random.integers(0, ROWS, PROMPT)).astype(np.uint32)
            with calls.timed("touch scattered"):
                policy.touch(scattered, positions[: len(scattered)])
            wanted = int(random.integers(1, PROMPT))
            with calls.timed("victims"):
                victims = policy.victims(wanted, evictable)
            assert len(victims) == wanted
            evicted += wanted
            with calls.timed("remove"):
                policy.remove(victims)
            hashes = random.integers(0, 1 << 64, wanted, dtype=np.uint64)
            with calls.timed("insert"):
                policy.insert(victims, hashes, positions[:wanted])
        assert asked <= 4 * evicted + 300 * 2 * 64
        return calls

    assert_short(trial, CALL_S_MAX)


@pytest.mark.parametrize("name", POLICIES)
def test_calls_stay_short_while_nearly_all_of_a_million_rows_are_in_use(name: str) -> None:
    """One row of each 20,000 may go: it is found, and no call looks at more than some of the others."""

    def trial() -> Calls:
        random = np.random.default_rng(0)
        calls = Calls()
        in_use = np.arange(ROWS) % 20_000 != 13
        asked: list[int] = []

        def evictable(rows: U32Array) -> BoolArray:
            asked.append(len(rows))
            free: BoolArray = ~in_use[rows]
            return free

        policy = create_policy(name, ROWS, ROWS)
        for start in range(0, ROWS, PROMPT):
            rows = np.arange(start, start + PROMPT, dtype=np.uint32)
            policy.insert(rows, random.integers(0, 1 << 64, PROMPT, dtype=np.uint64), rows - np.uint32(start))
        found, most = [], 0
        for _ in range(200):
            asked.clear()
            with calls.timed("victims"):
                victims = policy.victims(1, evictable)
            most = max(most, sum(asked))
            policy.remove(victims)
            found += victims.tolist()
        assert sorted(found) == np.flatnonzero(~in_use).tolist()
        assert policy.num_aside == len(policy) == ROWS - len(found)
        assert most < IN_USE_MAX + 2 * BLOCK_MAX + CHANCES_MIN, "one call looks at some of them"
        asked.clear()
        for _ in range(100):
            assert not len(policy.victims(500, evictable))
        assert not asked, "what was met once is not met again"
        in_use[7000:7500] = False
        policy.readmit(np.arange(7000, 7500, dtype=np.uint32))
        assert policy.victims(500, evictable).tolist() == list(range(7499, 6999, -1))
        assert sum(asked) <= 1000
        return calls

    assert_short(trial, CALL_S_MAX)


_MAKE_A_LARGE_ONE = """
import os, sys
from kvoffloadd.cache.policy import create_policy

def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident_bytes()
policy = create_policy(sys.argv[1], 1_000, 50_000_000)
print(resident_bytes() - before, len(policy))
"""


@pytest.mark.parametrize("name", POLICIES)
def test_rows_not_used_cost_no_memory(name: str) -> None:
    """A process of its own makes it: threads that earlier tests have left may take memory in this one."""
    command = [sys.executable, "-c", _MAKE_A_LARGE_ONE, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    grown_bytes, keys = map(int, done.stdout.split())
    assert grown_bytes < 32 << 20
    assert keys == 0
