"""The hash table against a dict, and what it promises at scale."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.index import WORDS, Index


def random_keys(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 63, (count, WORDS), dtype=np.uint64)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    steps=st.integers(5, 40),
    width=st.sampled_from([3, 40, 400]),
    expected=st.sampled_from([0, 600, 5000]),
)
def test_agrees_with_a_dict(seed: int, steps: int, width: int, expected: int) -> None:
    rng = np.random.default_rng(seed)
    index = Index(20_000, seed)
    index.expect(expected)
    model: dict[tuple[int, bytes], int] = {}
    for _ in range(steps):
        space = int(rng.integers(0, 3))
        keys = random_keys(rng, int(rng.integers(1, width)))
        if len(model) + len(keys) < index.max_keys:
            rows = index.insert(space, keys)
            for key, row in zip(keys, rows.tolist(), strict=True):
                assert row not in model.values()
                model[space, key.tobytes()] = row
        if rng.random() < 0.5 and model:
            names = [list(model)[i] for i in rng.permutation(len(model))[: rng.integers(1, width)]]
            gone = np.array([model.pop(name) for name in names], np.uint32)
            index.remove(gone)
            index.free(gone)
            for space_, key_ in names:
                assert index.find(space_, np.frombuffer(key_, np.uint64)[None])[0] == -1
        assert len(index) == len(model)
    for space in range(3):
        known = [(key, row) for (s, key), row in model.items() if s == space]
        if known:
            asked = np.frombuffer(b"".join(key for key, _ in known), np.uint64).reshape(-1, WORDS)
            assert index.find(space, asked).tolist() == [row for _, row in known]
            assert (index.find(space + 7, asked) == -1).all(), "a key of one space was found in another"
    assert index.check() == []


def test_keys_that_differ_in_one_bit_are_told_apart() -> None:
    index = Index(1000, 1)
    key = random_keys(np.random.default_rng(0), 1)
    near = np.repeat(key, 256, axis=0)
    for bit in range(256):
        near[bit, bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
    row = index.insert(0, key)[0]
    assert (index.find(0, near) == -1).all()
    assert index.find(0, key)[0] == row


def test_equal_hashes_do_not_make_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole key is compared: with a hash that maps everything to one value, answers stay right."""
    monkeypatch.setattr(Index, "hash", lambda self, space, keys: np.full(len(keys), 12345, np.uint64))
    index = Index(1000, 1)
    keys = random_keys(np.random.default_rng(0), 300)
    rows = index.insert(0, keys)
    assert index.find(0, keys).tolist() == rows.tolist()
    index.remove(rows[::2])
    assert (index.find(0, keys[::2]) == -1).all()
    assert index.find(0, keys[1::2]).tolist() == rows[1::2].tolist()


def test_growth_is_incremental_and_memory_stays_within_the_budget() -> None:
    rng = np.random.default_rng(3)
    index = Index(400_000, 3)
    longest = 0.0
    for _ in range(800):
        keys = random_keys(rng, 500)
        begun = time.perf_counter()
        index.insert(1, keys)
        longest = max(longest, time.perf_counter() - begun)
    assert index.memory_bytes() / len(index) < 60
    assert longest < 0.5, f"one insert held the loop for {longest:.3f} s"


def test_what_was_expected_needs_next_to_no_growth_and_finds_the_same() -> None:
    keys = random_keys(np.random.default_rng(5), 100_000)
    expecting, growing = Index(200_000, 5), Index(200_000, 5)
    expecting.expect(len(keys))
    before = expecting.memory_bytes()
    for at in range(0, len(keys), 5000):
        rows = expecting.insert(3, keys[at : at + 5000])
        assert growing.insert(3, keys[at : at + 5000]).tolist() == rows.tolist()
    assert expecting.find(3, keys).tolist() == growing.find(3, keys).tolist() == list(range(len(keys)))
    table = expecting.memory_bytes() - len(keys) * 34
    assert table < 1.5 * before, "the table is made once"
    assert table < 1.5 * (growing.memory_bytes() - len(keys) * 34)
    assert expecting.check() == []


def test_a_table_outgrows_what_was_expected() -> None:
    keys = random_keys(np.random.default_rng(6), 30_000)
    index = Index(40_000, 6)
    index.expect(2000)
    for at in range(0, len(keys), 500):
        index.insert(1, keys[at : at + 500])
    assert index.find(1, keys).tolist() == list(range(len(keys)))
    assert index.memory_bytes() / len(index) < 60
    assert index.check() == []


def test_expecting_is_harmless_once_there_is_something() -> None:
    index = Index(50_000, 7)
    keys = random_keys(np.random.default_rng(7), 20)
    rows = index.insert(1, keys)
    index.expect(40_000)
    assert index.find(1, keys).tolist() == rows.tolist()
    index.remove(rows)
    index.free(rows)
    index.expect(40_000)  # empty again, with traces of what was there
    again = index.insert(1, np.concatenate([keys, random_keys(np.random.default_rng(8), 3000)]))
    assert (index.find(1, index.keys[again]) == again).all()
    size = index.memory_bytes()
    index.expect(50_000)
    index.expect(0)
    assert index.memory_bytes() == size
    assert index.check() == []
