"""What a restore could use of a sample: as the daemon would answer, if the sample has all keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cache.curve.prompt import AskedKeys, measuring
from kvoffloadd.cache.curve.sample import Thinned, restorable
from kvoffloadd.cache.memory.lookup import GroupHits, restorable_boundaries
from kvoffloadd.model import GroupKind, GroupSchema

KINDS = st.tuples(st.sampled_from(GroupKind), st.sampled_from([1, 2, 4]), st.integers(1, 4))


@given(st.lists(KINDS, min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 1 << 30))
def test_a_sample_of_all_keys_is_judged_as_a_lookup_is(
    shapes: list[tuple[GroupKind, int, int]], blocks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    groups, held, hits = [], [], []
    for number, (kind, per_block, window) in enumerate(shapes):
        first = int(rng.integers(0, 2)) * per_block
        count = (blocks + 1) * per_block - first
        keys = AskedKeys(rng.integers(0, 1 << 64, count, np.uint64), 16 // per_block, 100, number, first, kind, window)
        has = rng.random(count) < 0.8
        groups.append(Thinned(keys, np.arange(count), keys.hashes))
        held.append(has)
        schema = GroupSchema(number, kind, 16 // per_block, window, 1, 1)
        hits.append(GroupHits(schema, first, has))
    at = measuring([group.keys for group in groups])
    measured = groups[at].keys
    ends = (measured.first + 1 + np.arange(len(measured.hashes))) * measured.tokens_per_key
    # A boundary lies after a whole number of the measuring group's keys, as of every group's.
    found = restorable_boundaries(hits)
    longest = int(found[0]) if len(found) else 0
    assert restorable(groups, held).tolist() == (ends <= longest).tolist()


def test_keys_that_are_not_in_the_sample_count_as_held() -> None:
    keys = AskedKeys(np.arange(10, dtype=np.uint64), 16, 100)
    thinned = Thinned(keys, np.array([1, 4, 8]), keys.hashes[[1, 4, 8]])
    assert restorable([thinned], [np.array([True, False, True])]).tolist() == [True, False, False]


def test_a_state_is_needed_where_the_prompt_goes_on() -> None:
    """Attention holds all keys. The state after the fourth block is held, and others in the sample are not."""
    full = AskedKeys(np.arange(8, dtype=np.uint64), 16, 100)
    states = AskedKeys(np.arange(8, dtype=np.uint64), 16, 900, group=1, kind=GroupKind.MAMBA)
    indices = np.array([1, 3, 6])
    thinned = [Thinned(keys, indices, keys.hashes[indices]) for keys in (full, states)]
    assert thinned[0].names != thinned[1].names
    found = restorable(thinned, [np.ones(3, bool), np.array([False, True, False])])
    assert found.tolist() == [True, True, False]


def test_attention_measures_a_prompt() -> None:
    window = AskedKeys(np.arange(9, dtype=np.uint64), 16, 100, kind=GroupKind.SLIDING, window_keys=2)
    full = AskedKeys(np.arange(4, dtype=np.uint64), 16, 100)
    short = AskedKeys(np.arange(2, dtype=np.uint64), 16, 100, kind=GroupKind.SLIDING, window_keys=2)
    assert measuring([window, full]) == 1
    assert measuring([short, window]) == 1
