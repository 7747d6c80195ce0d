"""Which keys of the store are fetched, against a brute-force oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cache.memory.lookup import GroupHits, restorable_boundaries
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.remote.request import RemoteKeys, needed_keys
from kvoffloadd.model import BoolArray, GroupKind, GroupSchema

MUCH = 1 << 40


@dataclass
class FakeKeyspace:
    schema: GroupSchema
    part_bytes: list[int]


def keys_of(schema: GroupSchema, local: list[bool], first: int = 0, size: int = 10) -> RemoteKeys:
    keyspace = cast(Keyspace, FakeKeyspace(schema, [size]))
    return RemoteKeys(keyspace, first, np.zeros((len(local), 4), np.uint64), np.array(local, bool), None)


def boundaries(groups: list[RemoteKeys], hits: list[BoolArray]) -> list[int]:
    of = [GroupHits(g.keyspace.schema, g.first, mask) for g, mask in zip(groups, hits, strict=True)]
    found: list[int] = restorable_boundaries(of).tolist()
    return found


def wanted_boundaries(groups: list[RemoteKeys], there: list[BoolArray]) -> set[int]:
    """The longest, and where it ends with the keys that are asked for, the next one; none that is there already."""
    found = boundaries(groups, [g.local | has for g, has in zip(groups, there, strict=True)])
    asked = min((g.first + len(g.keys)) * g.keyspace.schema.tokens_per_key for g in groups)
    local = boundaries(groups, [g.local for g in groups])
    longest_local = local[0] if local else 0
    return {tokens for tokens in found[: 2 if found[:1] == [asked] else 1] if tokens > longest_local}


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[RemoteKeys], list[BoolArray]]:
    groups, there = [], []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(GroupKind)))
        window = draw(st.integers(1, 4)) if kind in (GroupKind.SLIDING, GroupKind.CHUNKED) else 0
        schema = GroupSchema(number, kind, 16 * draw(st.integers(1, 2)), window)
        states = draw(st.lists(st.sampled_from(["local", "there", "no"]), min_size=1, max_size=12))
        first = draw(st.integers(0, 3))
        groups.append(keys_of(schema, [state == "local" for state in states], first, draw(st.integers(1, 50))))
        there.append(np.array([state == "there" for state in states], bool))
    return groups, there


@given(requests())
def test_the_longest_prefix_can_be_restored_and_no_key_less_would_do(
    request: tuple[list[RemoteKeys], list[BoolArray]],
) -> None:
    """Nor for the next one, which an engine restores that has to compute the prompt's last token."""
    groups, there = request
    chosen = needed_keys(groups, there, MUCH)
    for mask, has, group in zip(chosen, there, groups, strict=True):
        assert not (mask & ~has).any()
        assert not (mask & group.local).any()
    wanted = wanted_boundaries(groups, there)
    assert wanted <= set(boundaries(groups, [g.local | mask for g, mask in zip(groups, chosen, strict=True)]))
    if not wanted:
        assert not any(mask.any() for mask in chosen)
    for number, mask in enumerate(chosen):
        for at in np.flatnonzero(mask).tolist():
            fewer = [m.copy() for m in chosen]
            fewer[number][at] = False
            assert not wanted <= set(boundaries(groups, [g.local | m for g, m in zip(groups, fewer, strict=True)]))


@given(requests(), st.integers(0, 400))
def test_no_more_than_may_come(request: tuple[list[RemoteKeys], list[BoolArray]], bytes_max: int) -> None:
    groups, there = request
    chosen = needed_keys(groups, there, bytes_max)
    size = sum(int(m.sum()) * g.keyspace.part_bytes[0] for m, g in zip(chosen, groups, strict=True))
    assert size <= bytes_max


def test_full_attention_takes_a_shorter_prefix_where_all_is_too_much() -> None:
    group = keys_of(GroupSchema(0, GroupKind.FULL, 16), [True] * 2 + [False] * 8)
    there = np.array([False] * 2 + [True] * 8)
    assert needed_keys([group], [there], 30)[0].tolist() == [False] * 2 + [True] * 3 + [False] * 5
    assert not needed_keys([group], [there], 9)[0].any()


def test_keys_behind_a_gap_are_of_no_use() -> None:
    group: Any = keys_of(GroupSchema(0, GroupKind.FULL, 16), [False] * 5)
    there = np.array([True, True, False, True, True])
    assert needed_keys([group], [there], MUCH)[0].tolist() == [True, True, False, False, False]


def test_where_the_last_token_is_to_be_computed_the_shorter_prefix_has_its_window() -> None:
    """A prompt that is a whole number of keys: the engine restores all but the last key, or all of it."""
    groups = [keys_of(GroupSchema(0, GroupKind.FULL, 16), [False] * 8)]
    groups += [keys_of(GroupSchema(1, GroupKind.SLIDING, 16, 3), [False] * 8)]
    groups += [keys_of(GroupSchema(2, GroupKind.MAMBA, 16), [False] * 8)]
    there = [np.ones(8, bool) for _ in groups]
    chosen = needed_keys(groups, there, MUCH)
    assert [mask.tolist() for mask in chosen] == [[True] * 8, [False] * 4 + [True] * 4, [False] * 6 + [True] * 2]
    there[0][7] = (
        False  # the longest prefix ends before the prompt does: nothing is left to be computed but what follows
    )
    chosen = needed_keys(groups, there, MUCH)
    assert [np.flatnonzero(mask).tolist() for mask in chosen] == [[0, 1, 2, 3, 4, 5, 6], [4, 5, 6], [6]]
