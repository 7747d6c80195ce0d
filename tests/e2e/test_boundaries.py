"""Restorable boundaries over the socket, with the figures of gemma-3 and the like."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, NamespaceSpec, Ref
from scripts.harness.daemon import Daemon
from tests.e2e.rank import Keys, Rank, new_keys

TOKENS = 64
PROMPT = 63

FULL, SLIDING, MAMBA, CHUNKED, COARSE = range(5)
GROUPS = (
    Group(FULL, GroupKind.FULL, TOKENS, refs=(Ref(0, 0, 64),)),
    # A window of 1,024 tokens: a boundary needs ceil(1,023 / 64) = 16 keys.
    Group(SLIDING, GroupKind.SLIDING, TOKENS, refs=(Ref(0, 64, 64),), window_keys=16),
    Group(MAMBA, GroupKind.MAMBA, TOKENS, refs=(Ref(0, 128, 64),)),
    Group(CHUNKED, GroupKind.CHUNKED, TOKENS, refs=(Ref(0, 192, 64),), window_keys=4),
    Group(COARSE, GroupKind.FULL, 4 * TOKENS, refs=(Ref(0, 256, 64),), blocks_per_key=4),
)


@pytest.fixture
def rank(daemon: Daemon) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket, GROUPS, namespace=NamespaceSpec(model="boundaries")))
    return found


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), PROMPT)


def held(rank: Rank, group: int, keys: Keys, which: list[int]) -> None:
    """These keys of the prompt are stored, no others."""
    rank.store_keys(keys[which], group)


def boundaries(rank: Rank, wanted: dict[int, Keys], first: int | dict[int, int] = 0) -> list[int]:
    """Returns the boundaries in keys of TOKENS tokens."""
    found: list[int] = rank.client.lookup(wanted, first).boundaries.tolist()
    assert all(tokens % TOKENS == 0 for tokens in found)
    return [tokens // TOKENS for tokens in found]


def test_full_attention_ends_at_the_first_miss(rank: Rank, keys: Keys) -> None:
    held(rank, FULL, keys, [*range(10), *range(11, 20)])
    assert boundaries(rank, {FULL: keys}) == list(range(10, 0, -1))
    assert boundaries(rank, {FULL: keys[10:]}, 10) == []
    assert boundaries(rank, {FULL: keys[11:]}, 11) == list(range(20, 11, -1))


LOADED = list(range(46, 63))


@pytest.mark.parametrize(
    ("missing", "found"), [(None, [63, 62]), (62, [62]), (61, []), (60, []), (50, []), (47, []), (46, [63])]
)
def test_a_sliding_window_of_which_17_keys_are_there(
    rank: Rank, keys: Keys, missing: int | None, found: list[int]
) -> None:
    """The failures of layouts.md E: cutting at the key that is missing would serve wrong bytes."""
    held(rank, FULL, keys, list(range(PROMPT)))
    held(rank, SLIDING, keys, [key for key in LOADED if key != missing])
    assert boundaries(rank, {FULL: keys, SLIDING: keys}) == found


def test_a_short_prompt_needs_less_than_a_window(rank: Rank, keys: Keys) -> None:
    held(rank, SLIDING, keys, [*range(5), *range(6, 22)])
    assert boundaries(rank, {SLIDING: keys}) == [22, 5, 4, 3, 2, 1]


def test_keys_that_are_held_locally_count(rank: Rank, keys: Keys) -> None:
    """40 of 63 blocks are local: 23 full keys and the last 16 sliding ones are asked for."""
    held(rank, FULL, keys, list(range(40, PROMPT)))
    held(rank, SLIDING, keys, list(range(47, PROMPT)))
    found = boundaries(rank, {FULL: keys[40:], SLIDING: keys[47:]}, {FULL: 40, SLIDING: 47})
    assert found[0] == 63
    assert min(found) > 47


def test_mamba_needs_the_one_state_at_the_boundary(rank: Rank, keys: Keys) -> None:
    held(rank, MAMBA, keys, [3, 17, 40])
    assert boundaries(rank, {MAMBA: keys}) == [41, 18, 4]
    held(rank, FULL, keys, list(range(30)))
    assert boundaries(rank, {FULL: keys, MAMBA: keys}) == [18, 4]


def test_chunked_attention_needs_its_chunk(rank: Rank, keys: Keys) -> None:
    """Chunks of 4 keys: a boundary at a chunk's start needs nothing before it."""
    held(rank, CHUNKED, keys, [0, 1, 4, 5, 6, 9])
    assert boundaries(rank, {CHUNKED: keys[:12]}) == [12, 8, 7, 6, 5, 4, 2, 1]


def test_a_boundary_lies_behind_whole_keys_of_every_group(rank: Rank, keys: Keys) -> None:
    held(rank, FULL, keys, list(range(14)))
    held(rank, COARSE, keys, list(range(3)))
    assert boundaries(rank, {FULL: keys, COARSE: keys[:15]}) == [12, 8, 4]


def test_nothing_asked_nothing_found(rank: Rank, keys: Keys) -> None:
    assert boundaries(rank, {}) == []
    assert boundaries(rank, {FULL: keys[:0]}) == []
    assert boundaries(rank, {FULL: keys}) == []


def test_pin_finds_what_lookup_finds(rank: Rank, keys: Keys) -> None:
    held(rank, FULL, keys, [0, 1, 2, 5])
    looked, pinned = rank.client.lookup({FULL: keys}), rank.client.pin({FULL: keys})
    assert looked.boundaries.tolist() == pinned.boundaries.tolist() == [3 * TOKENS, 2 * TOKENS, TOKENS]
    assert looked.states[0].tolist() == pinned.states[0].tolist()
    assert (looked.lease, bool(pinned.lease)) == (0, True)
    rank.client.release(pinned.lease)
