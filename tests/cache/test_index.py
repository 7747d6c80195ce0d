"""The hash table against a dict, and what it promises at scale."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvoffloadd.cache.memory.index import WORDS, Index
from kvoffloadd.cache.memory.keytable import KeyTable
from kvoffloadd.errors import LimitError
from kvoffloadd.model import U16Array, U64Array
from kvoffloadd.native import loader
from tests.calls import Calls, assert_short

ALL = (1 << 64) - 1
BITS = (0, 0x3F, 0xFF00, 0b11 << 62, ALL >> 8, ALL << 8 & ALL, ALL)
"""Of a bad hash: none; those that name the bucket, or the tag; two that name a segment; all but those for either."""


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this file holds for both."""
    if request.param == "numpy":
        monkeypatch.setattr(loader, "HELPER", None)
    elif loader.HELPER is None:
        pytest.skip("the C code was not compiled here")


def random_keys(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 63, (count, WORDS), dtype=np.uint64)


def check(index: Index) -> list[str]:
    """What is wrong with the table, and with what it finds: every key is looked up."""
    findings = index.check_table()
    rows = index._in_table()
    if (index.find(index.keyspace[rows], index.keys[rows]) != rows).any():
        findings.append("index: a key in the table can't be found")
    return findings


@pytest.mark.slow
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
        keyspace = int(rng.integers(0, 3))
        keys = random_keys(rng, int(rng.integers(1, width)))
        if len(model) + len(keys) < index.max_keys:
            rows = index.insert(keyspace, keys)
            for key, row in zip(keys, rows.tolist(), strict=True):
                assert row not in model.values()
                model[keyspace, key.tobytes()] = row
        if rng.random() < 0.5 and model:
            names = [list(model)[i] for i in rng.permutation(len(model))[: rng.integers(1, width)]]
            gone = np.array([model.pop(name) for name in names], np.uint32)
            index.remove(gone)
            index.free(gone)
            for space_, key_ in names:
                assert index.find(space_, np.frombuffer(key_, np.uint64)[None])[0] == -1
        assert len(index) == len(model)
    for keyspace in range(3):
        known = [(key, row) for (s, key), row in model.items() if s == keyspace]
        if known:
            asked = np.frombuffer(b"".join(key for key, _ in known), np.uint64).reshape(-1, WORDS)
            assert index.find(keyspace, asked).tolist() == [row for _, row in known]
            assert (index.find(keyspace + 7, asked) == -1).all(), "a key of one space was found in another"
    assert check(index) == []


def test_keys_that_differ_in_one_bit_are_told_apart() -> None:
    index = Index(1000, 1)
    key = random_keys(np.random.default_rng(0), 1)
    near = np.repeat(key, 256, axis=0)
    for bit in range(256):
        near[bit, bit // 64] ^= np.uint64(1) << np.uint64(bit % 64)
    row = index.insert(0, key)[0]
    assert (index.find(0, near) == -1).all()
    assert index.find(0, key)[0] == row


class Colliding(Index):
    """Has hashes that differ only in some bits."""

    def __init__(self, max_keys: int, seed: int, bits: int) -> None:
        super().__init__(max_keys, seed)
        self._bits = np.uint64(bits)
        self.base = np.uint64(0x3900)

    def hash(self, keyspace: int | U16Array, keys: U64Array) -> U64Array:
        """See `Index`."""
        return super().hash(keyspace, keys) & self._bits | self.base


def test_equal_hashes_do_not_make_equal_keys() -> None:
    """The whole key is compared: with a hash that maps everything to one value, answers stay right."""
    index = Colliding(1000, 1, 0)
    keys = random_keys(np.random.default_rng(0), 300)
    rows = index.insert(0, keys)
    assert index.find(0, keys).tolist() == rows.tolist()
    index.remove(rows[::2])
    assert (index.find(0, keys[::2]) == -1).all()
    assert index.find(0, keys[1::2]).tolist() == rows[1::2].tolist()


@pytest.mark.parametrize("step", [1, 100, 870, 16_384])
@pytest.mark.parametrize("max_keys", [1000, 40_000, 10_000_000])
def test_keys_of_one_hash_are_refused_once_they_do_not_fit(max_keys: int, step: int) -> None:
    index = Colliding(max_keys, 1, 0)
    rng = np.random.default_rng(0)
    held: list[np.ndarray] = []
    with pytest.raises(LimitError, match="almost equal"):
        while sum(map(len, held)) < 1024:
            keys = random_keys(rng, step)
            index.insert(0, keys)
            held.append(keys)
    count, size = sum(map(len, held)), index.memory_bytes()
    assert size < 64 << 20
    assert len(index) == count == index.rows_end, "a refused insertion takes no rows"
    assert count > 300 or step > 300
    for _ in range(3):
        with pytest.raises(LimitError):
            index.insert(0, random_keys(rng, 1024))
    assert index.memory_bytes() == size, "what is refused again costs nothing again"
    assert check(index) == []
    if held:
        asked = np.concatenate(held)
        rows = index.find(0, asked)
        assert rows.tolist() == list(range(count))
        index.remove(rows.astype(np.uint32))
        index.free(rows.astype(np.uint32))
        assert (index.find(0, asked) == -1).all()
        again = index.insert(0, asked[:50])
        assert (index.find(0, asked[:50]) == again).all()
    assert check(index) == []


def test_segments_that_can_not_be_split_do_not_outgrow_the_table() -> None:
    """One hash after the other until its segment is as deep as may be; segments are not given back."""
    index = Colliding(1000, 3, 0)
    rng = np.random.default_rng(3)
    for prefix in range(32):
        index.base = np.uint64(prefix << 59)
        with contextlib.suppress(LimitError):
            rows = index.insert(0, random_keys(rng, 400))
            index.remove(rows)
            index.free(rows)
        with pytest.raises(LimitError, match="almost equal"):
            index.insert(0, random_keys(rng, 1000))
        assert check(index) == []
    assert index.memory_bytes() < 1 << 20


def test_others_are_held_while_keys_of_one_hash_are_refused() -> None:
    class OneSpaceCollides(Index):
        def hash(self, keyspace: int | U16Array, keys: U64Array) -> U64Array:
            collides = np.broadcast_to(np.asarray(keyspace, np.uint64), len(keys)) == 9
            return np.where(collides, np.uint64(0xABCD << 40), super().hash(keyspace, keys))

    index = OneSpaceCollides(100_000, 4)
    rng = np.random.default_rng(4)
    rows: dict[int, int] = {}
    keys = random_keys(rng, 60_000)
    for at in range(0, len(keys), 2000):
        for row in index.insert(1, keys[at : at + 2000]).tolist():
            rows[row] = len(rows)
        with contextlib.suppress(LimitError):
            index.insert(9, random_keys(rng, 700))
    assert (index.find(1, keys) == list(rows)).all()
    assert index.memory_bytes() < 20 << 20
    assert check(index) == []


@pytest.mark.parametrize("bits", [0, ALL])
def test_a_row_that_is_not_in_the_table_is_a_bug_that_is_told(bits: int) -> None:
    index = Colliding(5000, 2, bits)
    rows = index.insert(0, random_keys(np.random.default_rng(2), 200))
    index.remove(rows[:1])
    with pytest.raises(LookupError, match="1 of 1 rows are not in the table"):
        index.remove(rows[:1])


class AgainstADict(RuleBasedStateMachine):
    """Any hash is right, be it as bad as it may, and what is refused changes nothing."""

    @initialize(seed=st.integers(0, 1 << 32), bits=st.sampled_from(BITS), max_keys=st.sampled_from([900, 6000]))
    def begin(self, seed: int, bits: int, max_keys: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.index = Colliding(max_keys, seed, bits)
        self.rows: dict[tuple[int, bytes], int] = {}
        self.gone: list[tuple[int, bytes]] = []

    @rule(keyspace=st.integers(0, 2), count=st.sampled_from([1, 16, 17, 300, 900]))
    def insert(self, keyspace: int, count: int) -> None:
        count = min(count, self.index.max_keys - len(self.rows))
        keys = random_keys(self.rng, count)
        end = self.index.rows_end
        try:
            rows = self.index.insert(keyspace, keys)
        except LimitError:
            assert self.index.rows_end == end
            self.gone += [(keyspace, key.tobytes()) for key in keys[:20]]
            return
        assert not set(rows.tolist()) & set(self.rows.values())
        self.rows.update(zip([(keyspace, key.tobytes()) for key in keys], rows.tolist(), strict=True))

    @rule(count=st.sampled_from([1, 50, 2000]))
    def remove(self, count: int) -> None:
        names = [list(self.rows)[at] for at in self.rng.permutation(len(self.rows))[:count]]
        rows = np.array([self.rows.pop(name) for name in names], np.uint32)
        self.index.remove(rows)
        self.index.free(rows)
        self.gone += names[:20]

    @rule(count=st.sampled_from([1, 3000]))
    def expect(self, count: int) -> None:
        self.index.expect(count)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "rows"):
            return
        assert len(self.index) == self.index.num_found == len(self.rows)
        for names in (list(self.rows), [name for name in self.gone if name not in self.rows]):
            for keyspace in range(4):
                chosen = [name for name in names if name[0] == keyspace or keyspace == 3]
                asked = np.frombuffer(b"".join(key for _, key in chosen), np.uint64).reshape(-1, WORDS)
                assert self.index.find(keyspace, asked).tolist() == [
                    self.rows.get((keyspace, name[1]), -1) for name in chosen
                ]
        assert self.index.check_table() == []


def test_any_steps_agree_with_a_dict() -> None:
    run_state_machine_as_test(AgainstADict, settings=settings(max_examples=30, stateful_step_count=12, deadline=None))


def test_growth_is_incremental_and_memory_stays_within_the_budget() -> None:
    def trial() -> Calls:
        rng = np.random.default_rng(3)
        index = Index(400_000, 3)
        calls = Calls()
        for _ in range(800):
            keys = random_keys(rng, 500)
            with calls.timed("insert"):
                index.insert(1, keys)
        assert index.memory_bytes() / len(index) < 60
        return calls

    assert_short(trial, 0.5)


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
    assert check(expecting) == []


def test_a_table_outgrows_what_was_expected() -> None:
    keys = random_keys(np.random.default_rng(6), 30_000)
    index = Index(40_000, 6)
    index.expect(2000)
    for at in range(0, len(keys), 500):
        index.insert(1, keys[at : at + 500])
    assert index.find(1, keys).tolist() == list(range(len(keys)))
    assert index.memory_bytes() / len(index) < 60
    assert check(index) == []


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
    assert check(index) == []


def test_both_implementations_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of keyspaces of each key, of hashes that collide, and where segments have split and rows have gone."""
    rng = np.random.default_rng(5)
    for bits in BITS[1:]:
        index = Colliding(20_000, 7, bits)
        keys = random_keys(rng, 400)
        with contextlib.suppress(LimitError):
            for at in range(0, len(keys), 50):
                index.insert(at % 3, keys[at : at + 50])
        index.remove(np.arange(0, len(index), 5, dtype=np.uint32))
        asked = np.concatenate([keys, random_keys(rng, 100)])[rng.permutation(500)]
        keyspaces = rng.integers(0, 4, 500).astype(np.uint16)
        for count in (0, 1, 2, 17, 500):
            for keyspace in (1, keyspaces[:count]):
                found = index.find(keyspace, asked[:count])
                with monkeypatch.context() as other:
                    other.setattr(loader, "HELPER", None)
                    assert index.find(keyspace, asked[:count]).tolist() == found.tolist()


def test_hits_are_marked_as_numpy_marks_them() -> None:
    missing = np.zeros(100, np.uint16)
    missing[::3] = 2
    rng = np.random.default_rng(3)
    entries = SimpleNamespace(missing=missing)
    for count in (0, 1, 40):
        rows = rng.integers(-1, 100, count)
        states, some_incomplete = KeyTable.states(entries, rows)  # type: ignore[arg-type]
        assert states.tolist() == [int(row >= 0 and row % 3 != 0) for row in rows.tolist()]
        assert some_incomplete == any(row >= 0 and row % 3 == 0 for row in rows.tolist())


def test_leases_are_counted_as_often_as_a_row_is_named() -> None:
    """And of each keyspace the rows that have any."""
    entries: Any = SimpleNamespace(
        leases=np.zeros(10, np.uint32),
        index=SimpleNamespace(keyspace=np.array([0, 0, 0, 1, 0, 2, 0, 2, 2, 2], np.uint16)),
        held=SimpleNamespace(rows=np.zeros(3, np.int64)),
        barren=None,
    )
    KeyTable.count_leases(entries, np.array([3, 5, 3], np.uint32), 1)
    assert entries.leases.tolist() == [0, 0, 0, 2, 0, 1, 0, 0, 0, 0]
    assert entries.held.rows.tolist() == [0, 1, 1]
    KeyTable.count_leases(entries, np.array([3, 5, 3], np.uint32)[:2], -1)
    assert entries.leases.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert entries.held.rows.tolist() == [0, 1, 0]
    KeyTable.count_leases(entries, np.zeros(0, np.uint32), 1)
    KeyTable.count_leases(entries, np.array([7, 8, 7], np.uint32), 1)
    assert entries.held.rows.tolist() == [0, 1, 2]
    KeyTable.count_leases(entries, np.array([7, 8, 7, 3], np.uint32), -1)
    assert entries.held.rows.tolist() == [0, 0, 0]


def test_rows_that_are_not_there_are_refused() -> None:
    if loader.HELPER is None:
        pytest.skip("numpy has no such call")
    with pytest.raises(IndexError):
        loader.HELPER.mark_hits(np.array([100]), np.zeros(100, np.uint16), np.zeros(1, np.uint8))
    counts, kinds, held = np.zeros(10, np.uint32), np.zeros(10, np.uint16), np.zeros(1, np.int64)
    for row, of_rows in ((10, kinds), (9, kinds[:9]), (0, kinds + np.uint16(1))):
        with pytest.raises(IndexError):
            loader.HELPER.add_counts(counts, np.array([row], np.uint32), 1, of_rows, held)
    assert not counts.any()
    with pytest.raises(ValueError, match="bytes"):
        loader.HELPER.mark_hits(np.array([1, 2]), np.zeros(100, np.uint16), np.zeros(1, np.uint8))


def test_keys_and_rows_that_do_not_match_are_refused() -> None:
    native = loader.HELPER
    if native is None:
        pytest.skip("numpy has no such call")
    keys, secret, table = random_keys(np.random.default_rng(0), 4), np.zeros(22, np.uint64), np.zeros(6, np.uint64)
    hashes, rows = np.zeros(4, np.uint64), np.zeros(4, np.int64)
    read_only = np.frombuffer(bytes(32), np.uint64)
    for wrong in (
        (secret[:21], 0, keys, hashes),
        (secret, 0, keys, hashes[:3]),
        (secret, np.zeros(3, np.uint16), keys, hashes),
        (secret, 0, keys[:, ::2], hashes),
        (secret, 0, keys, read_only),
        (secret, -1, keys, hashes),
        (secret, 0, keys),
    ):
        with pytest.raises((ValueError, BufferError, OverflowError, TypeError)):
            native.hash_keys(*wrong)
    for other in (
        (table[:5], 0, keys, hashes, rows),
        (table, 0, keys, hashes, rows[:3]),
        (table, np.zeros(5, np.uint16), keys, hashes, rows),
        (table, 0, keys, hashes),
    ):
        with pytest.raises((ValueError, TypeError)):
            native.find_rows(*other)
