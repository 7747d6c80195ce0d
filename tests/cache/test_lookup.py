"""Restorable boundaries against a brute-force oracle, and the examples of the layout documents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.memory.lookup import GroupHits, restorable_boundaries
from kvoffloadd.model import GroupKind, GroupSchema


def needed(schema: GroupSchema, length: int) -> range:
    """Indices of the keys that a prefix of `length` keys needs, straight from the definition."""
    if schema.kind is GroupKind.FULL:
        return range(length)
    if schema.kind is GroupKind.MAMBA:
        return range(length - 1, length)
    if schema.kind is GroupKind.CHUNKED:
        return range(length - length % schema.window_keys, length)
    return range(max(0, length - schema.window_keys), length)


def oracle(groups: list[GroupHits]) -> list[int]:
    ends = [(g.first + len(g.hits)) * g.schema.tokens_per_key for g in groups]
    found = []
    for tokens in range(1, min(ends, default=0) + 1):
        ok = True
        for g in groups:
            length, rest = divmod(tokens, g.schema.tokens_per_key)
            held = all(i < g.first or g.hits[i - g.first] for i in needed(g.schema, length))
            ok &= rest == 0 and length > g.first and held
        if ok:
            found.append(tokens)
    return found[::-1]


kinds = st.sampled_from(list(GroupKind))


@st.composite
def group_hits(draw: st.DrawFn) -> GroupHits:
    kind = draw(kinds)
    window = draw(st.integers(1 if kind is GroupKind.CHUNKED else 0, 5))
    windowed = kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
    schema = GroupSchema(0, kind, draw(st.sampled_from([1, 2, 3, 4])), window if windowed else 0)
    hits = draw(st.lists(st.sampled_from([True, True, True, False]), max_size=14))
    return GroupHits(schema, draw(st.integers(0, 3)), np.array(hits, bool))


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(st.lists(group_hits(), max_size=3))
def test_agrees_with_the_definition(groups: list[GroupHits]) -> None:
    assert restorable_boundaries(groups).tolist() == oracle(groups)


@pytest.mark.parametrize(("window", "block", "keys"), [(24, 16, 2), (17, 16, 1), (1024, 64, 16), (1025, 64, 16)])
def test_window_keys_of_a_sliding_window(window: int, block: int, keys: int) -> None:
    """A boundary needs ceil((w-1)/bs) blocks: with exactly those it is restorable, with one less it is not."""
    assert -(-(window - 1) // block) == keys
    schema = GroupSchema(0, GroupKind.SLIDING, block, keys)
    hits = np.zeros(40, bool)
    hits[40 - keys :] = True
    assert restorable_boundaries([GroupHits(schema, 0, hits)]).tolist() == [40 * block]
    hits[40 - keys] = False
    assert restorable_boundaries([GroupHits(schema, 0, hits)]).tolist() == []


def test_what_is_held_locally_counts_as_there() -> None:
    full = GroupHits(GroupSchema(0, GroupKind.FULL, 64), 40, np.ones(23, bool))
    sliding = GroupHits(GroupSchema(1, GroupKind.SLIDING, 64, 16), 50, np.ones(13, bool))
    assert restorable_boundaries([full, sliding])[0] == 63 * 64
    assert restorable_boundaries([full, sliding])[-1] == 51 * 64


@pytest.mark.parametrize("kind", list(GroupKind))
def test_what_the_protocol_can_not_tell_is_not_offered(kind: GroupKind) -> None:
    """A boundary is a u32. The last keys of this prompt end behind the last one that fits into it."""
    schema = GroupSchema(0, kind, 16, window_keys=1)
    first = (1 << 28) - 3
    held = [GroupHits(schema, first, np.ones(9, bool))]
    assert restorable_boundaries(held).tolist() == [(1 << 32) - 16, (1 << 32) - 32]
    largest = GroupSchema(0, kind, (1 << 24) - 1, window_keys=1)
    assert not len(restorable_boundaries([GroupHits(largest, (1 << 31) - 1, np.ones(9, bool))]))
