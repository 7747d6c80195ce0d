"""The hash of keys: what it is, and that keys can't be chosen for it without knowing its seed."""

from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cache.memory.index import WORDS, Index
from kvoffloadd.cache.memory.keyhash import SEED_BITS, KeyHash
from kvoffloadd.cache.stats.missreasons import MissReasons
from kvoffloadd.model import U64Array
from kvoffloadd.native import loader

SEEDS = (0, 1, 2, 12345, (1 << 62) + 7, (1 << SEED_BITS) - 1)
ALL = (1 << 64) - 1

words = st.integers(0, ALL)


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this file holds for both."""
    if request.param == "numpy":
        monkeypatch.setattr(loader, "HELPER", None)
    elif loader.HELPER is None:
        pytest.skip("the C code was not compiled here")


def by_the_book(seed: int, purpose: str, keyspace: int, key: list[int]) -> int:
    """The same, one key at a time, in Python's integers."""
    secret: tuple[int, ...] = struct.unpack(
        "<22Q", hashlib.shake_256(seed.to_bytes(16, "little") + purpose.encode()).digest(176)
    )
    halves = [half for word in key for half in (word & 0xFFFFFFFF, word >> 32)]
    low, high = (
        (sum(half * factor for half, factor in zip(halves, secret[one:16:2], strict=True)) + keyspace * secret[16 + one]
         + secret[18 + one]) & ALL
        for one in (0, 1)
    )  # fmt: skip
    h = low >> 32 | high & ~0xFFFFFFFF
    h = (h ^ h >> 32) * (secret[20] | 1) & ALL
    h = (h ^ h >> 29) * (secret[21] | 1) & ALL
    return h ^ h >> 32


@given(st.integers(0, (1 << SEED_BITS) - 1), st.integers(0, 65535), st.lists(words, min_size=4, max_size=4))
def test_it_is_what_the_book_says(seed: int, keyspace: int, key: list[int]) -> None:
    found = KeyHash(seed, "some")(keyspace, np.array([key], np.uint64))
    assert found.tolist() == [by_the_book(seed, "some", keyspace, key)]


def chosen() -> dict[str, U64Array]:
    """Keys that are like each other in ways that sums of whole words, and many other hashes, can't distinguish."""
    top = np.arange(16, dtype=np.uint64) << np.uint64(60)
    tops = np.stack([column.ravel() for column in np.meshgrid(top, top, top, top)], axis=1)
    names = [struct.pack(">4Q", *name) for name in itertools.product(range(2), range(4), range(64), range(256))]
    counts = np.arange(1 << 16, dtype=np.uint64)
    progression = np.repeat(np.array([[3, 5, 7, 11]], np.uint64), len(counts), axis=0)
    progression += counts[:, None] * np.array([[1 << 33, 1, (1 << 63) + 1, ALL]], np.uint64)
    zeros = np.zeros_like(progression)
    zeros[:, 3] = counts << np.uint64(48)
    swaps = np.array(list(itertools.permutations(range(8))), np.uint32)
    return {
        "top bits of all words": tops,
        "small integers, big-endian": np.frombuffer(b"".join(names), np.uint64).reshape(-1, WORDS),
        "small integers": np.frombuffer(b"".join(names), np.uint64).byteswap().reshape(-1, WORDS),
        "an arithmetic progression": progression,
        "top bits of one word": zeros,
        "the same halves in other places": swaps.view(np.uint64),
    }


@pytest.mark.parametrize("what", chosen())
@pytest.mark.parametrize("seed", SEEDS)
def test_keys_that_are_like_each_other_have_hashes_that_are_not(seed: int, what: str) -> None:
    keys = chosen()[what]
    h = KeyHash(seed, "index")(3, keys)
    assert len(np.unique(h)) == len(keys)
    # Where the index looks: the top bits name a segment, the lowest a bucket, those from 8 on are the tag.
    for shift, bits in ((54, 10), (0, 6), (8, 10), (32, 10)):
        counts = np.bincount((h >> np.uint64(shift) & np.uint64((1 << bits) - 1)).astype(np.int64), minlength=1 << bits)
        mean = len(keys) / (1 << bits)
        assert np.abs(counts - mean).max() < 7 * mean**0.5, (shift, bits)


def test_another_seed_or_purpose_is_another_hash() -> None:
    keys = chosen()["small integers"][:4096]
    hashes = [KeyHash(seed, purpose)(3, keys) for seed in SEEDS for purpose in ("index", "ghosts")]
    for one, other in itertools.combinations(hashes, 2):
        # Keys that share a bucket, a segment or a tag with one seed are no more likely to share it with another.
        for shift, bits in ((0, 6), (54, 10), (8, 16)):
            mask = np.uint64((1 << bits) - 1)
            same = np.count_nonzero((one ^ other) >> np.uint64(shift) & mask == 0)
            assert same < 16 + 2 * len(keys) / (1 << bits)


def test_what_one_seed_maps_to_one_value_another_does_not() -> None:
    """Differences that harm only the hash that they were made for."""
    counts = np.arange(1 << 20, dtype=np.uint64)
    keys = np.zeros((len(counts), WORDS), np.uint64)
    keys[:, 0] = counts
    known = KeyHash(1, "index")
    alike = keys[known(3, keys) >> np.uint64(54) == 77]
    assert len(alike) > 900
    for seed in SEEDS[2:]:
        segments = np.bincount((KeyHash(seed, "index")(3, alike) >> np.uint64(54)).astype(np.int64))
        assert segments.max() < 12


@pytest.mark.parametrize("seed", SEEDS)
def test_a_space_for_all_keys_is_that_space_for_each(seed: int) -> None:
    keys = chosen()["an arithmetic progression"][:100]
    keyspaces = np.arange(100).astype(np.uint16)
    each = KeyHash(seed, "index")(keyspaces, keys)
    assert each.tolist() == [int(KeyHash(seed, "index")(i, keys[i : i + 1])[0]) for i in range(100)]
    assert len(np.unique(KeyHash(seed, "index")(keyspaces, keys[:1].repeat(100, axis=0)))) == 100


def test_whoever_hashes_keys_hashes_them_with_a_seed() -> None:
    keys = chosen()["top bits of all words"]
    assert not np.intersect1d(Index(10, 1).hash(3, keys), Index(10, 2).hash(3, keys)).size
    assert not np.intersect1d(MissReasons(1).hash(3, keys), MissReasons(2).hash(3, keys)).size
    assert not np.intersect1d(Index(10, 1).hash(3, keys), MissReasons(1).hash(3, keys)).size
    assert len(np.unique(MissReasons(1).hash(3, keys))) == len(keys)
