"""What a load copies: the keys that were promised and are in memory, each with all parts that the rank holds."""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.jobs.loadplan import GroupLoad, LoadPlan, plan_load
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.device.plan import GroupPlan, Tensor
from kvoffloadd.model import PAGE_BYTES, Ref

from .fakes import keys_of, make_cache, make_keyspace, store

PLAN = GroupPlan.build([Tensor(0, 64, PAGE_BYTES, PAGE_BYTES)], [Ref(0, 0, PAGE_BYTES)], 1)
KEYS = 6


def group_load(keyspace: Keyspace, *wanted: int, held: int = 1) -> GroupLoad:
    """A load of KEYS keys that wants only these, by a rank that holds `held` parts."""
    mask = np.isin(np.arange(KEYS), wanted)
    blocks = np.arange(KEYS, dtype=np.uint32)[:, None]
    return GroupLoad(keyspace, keys_of(*range(KEYS)), blocks, np.arange(held, dtype=np.uint16), (PLAN,) * held, mask)


def planned(cache: Cache, *groups: GroupLoad) -> LoadPlan:
    return plan_load(cache.entries, groups, cache.find_all([(group.keyspace, group.keys) for group in groups]))


def test_what_is_in_memory_and_was_promised_is_copied() -> None:
    cache = make_cache()
    keyspace = make_keyspace(cache)[1]
    parts = store(cache, keyspace, keys_of(0, 1, 2, 4))
    plan = planned(cache, group_load(keyspace, 1, 2, 3))
    assert plan.parts.tolist() == parts[1:3].tolist()
    assert plan.rows.tolist() == cache.entries.parts.row[parts[1:3]].tolist()
    assert plan.lists[0].keys.tolist() == [1, 2]
    assert plan.lists[0].addresses.tolist() == cache.entries.payload_addresses(parts[1:3]).tolist()
    assert plan.lost[0].tolist() == [0, 3, 4, 5], "the others are not written to, whatever came meanwhile"


def test_groups_and_parts_lie_side_by_side() -> None:
    cache = make_cache()
    one = make_keyspace(cache)[1]
    two = make_keyspace(cache, bytes([2]) * 16, pages=(1, 1))[1]
    firsts, seconds = store(cache, one, keys_of(5)), store(cache, two, keys_of(0, 3))
    plan = planned(cache, group_load(one, *range(KEYS)), group_load(two, *range(KEYS), held=2))
    assert sorted(plan.parts.tolist()) == sorted([*firsts.tolist(), *seconds.tolist()])
    assert (cache.entries.parts.row[plan.parts] == plan.rows).all()
    assert [group.keys.tolist() for group in plan.lists] == [[5], [0, 0, 3, 3]]
    assert plan.lists[1].columns.tolist() == [0, 1, 0, 1]
    addresses = np.concatenate([group.addresses for group in plan.lists])
    assert (addresses == cache.entries.payload_addresses(plan.parts)).all()
    assert [lost.tolist() for lost in plan.lost] == [[0, 1, 2, 3, 4], [1, 2, 4, 5]]


def test_a_load_of_nothing() -> None:
    cache = make_cache()
    assert planned(cache).lists == []
    plan = planned(cache, group_load(make_keyspace(cache)[1], *range(KEYS)))
    assert (len(plan.rows), len(plan.parts), plan.lost[0].tolist()) == (0, 0, list(range(KEYS)))
