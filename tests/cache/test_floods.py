"""What is stored once sweeps nothing that is used, in whatever size and for whatever user. Users get their victims by
what their keys are worth.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvoffloadd.cache.memory import eviction
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, U32Array

from .fakes import keys_of, make_cache, store

USED, ROUNDS, ONCE = 24, 3, 1600
"""Keys that are used again after so many others, round by round."""


def tenant(cache: Cache, uid: int, pages: int) -> Keyspace:
    """A user's keys, with payloads of `pages` pages."""
    namespace = cache.open_namespace(bytes([uid, pages]) * 8, uid, "test", 32)
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16))
    cache.set_part_bytes(keyspace, {0: pages * PAGE_BYTES})
    return keyspace


def use(cache: Cache, keyspace: Keyspace, count: int) -> int:
    """A request uses the first `count` keys. Returns how many are there."""
    found = cache.find(keyspace, keys_of(*range(count)))
    cache.uses.add([(keyspace, found, 0)])
    return found.num_hits


@pytest.mark.parametrize("uid", [1, 2], ids=["same user", "another"])
@pytest.mark.parametrize("pages", [1, 2, 4])
def test_keys_in_use_outlive_what_is_stored_once(uid: int, pages: int) -> None:
    cache = make_cache(pages=256, slab_pages=16, policy="hit-density")
    used, other = tenant(cache, 1, 2), tenant(cache, uid, pages)
    number = USED
    store(cache, used, keys_of(*range(USED)))
    for _ in range(3):
        use(cache, used, USED)
    for _ in range(ROUNDS):
        for _ in range(ONCE // 16):
            store(cache, other, keys_of(*range(number, number + 16)))
            number += 16
        assert use(cache, used, USED) == USED
    assert check(cache, 0, 0) == []
    cache.tier.close()


@pytest.mark.parametrize("pages", [1, 2])
def test_memory_goes_to_who_begins_to_use_it(pages: int) -> None:
    """Another user's keys, which were used long ago, give way, in the same slots and in others."""
    cache = make_cache(pages=256, slab_pages=16, policy="hit-density")
    idle, busy = tenant(cache, 1, 1), tenant(cache, 2, pages)
    store(cache, idle, keys_of(*range(256)))
    use(cache, idle, 256)
    wanted = 192 // pages
    for _ in range(40):
        if use(cache, busy, wanted) < wanted:
            store(cache, busy, keys_of(*range(wanted)))
    assert use(cache, busy, wanted) == wanted
    assert 0 < use(cache, idle, 256) <= 64
    assert check(cache, 0, 0) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_of_two_users_the_one_whose_key_is_worth_less_loses_it(policy: str) -> None:
    cache = make_cache(pages=16, slab_pages=4, policy=policy)
    first, second = tenant(cache, 1, 1), tenant(cache, 2, 1)
    for number in range(8):
        store(cache, first, keys_of(number))
        store(cache, second, keys_of(number))
    store(cache, first, keys_of(8))
    store(cache, second, keys_of(8))
    assert [cache.find(keyspace, keys_of(0)).num_hits for keyspace in (first, second)] == [0, 0]
    assert [len(queue.policy) for queue in cache.eviction.queues.values()] == [8, 8]
    assert check(cache, 0, 0) == []
    cache.tier.close()


def test_a_user_with_many_sizes_leaves_queues_to_others() -> None:
    cache = make_cache(pages=64, slab_pages=64, policy="lru")
    for pages in range(1, 2 * eviction.QUEUES_PER_USER):
        tenant(cache, 1, pages)
    assert len(cache.eviction.queues) == eviction.QUEUES_PER_USER
    assert tenant(cache, 2, 40).queue is cache.eviction.queues[eviction.QueuePlace(2, 40)]
    for uid in range(3, 3 + eviction.QUEUES_MAX):
        tenant(cache, uid, 1)
    assert len(cache.eviction.queues) == eviction.QUEUES_MAX
    store(cache, tenant(cache, 200, 1), keys_of(1))
    assert np.count_nonzero([len(queue.policy) for queue in cache.eviction.queues.values()]) == 1
    assert check(cache, 0, 0) == []
    cache.tier.close()


USERS = 3 * eviction.QUEUES_ASKED


def test_many_users_keep_what_they_use_beside_a_flood() -> None:
    """An eviction asks some users' queues, in turn, and the flood's each time."""
    cache = make_cache(pages=1024, slab_pages=64, policy="hit-density")
    users = [tenant(cache, uid, 1) for uid in range(1, USERS + 1)]
    for keyspace in users:
        store(cache, keyspace, keys_of(*range(8)))
    for _ in range(3):
        for keyspace in users:
            use(cache, keyspace, 8)
    flood = tenant(cache, USERS + 1, 1)
    for number in range(0, 4 * 1024, 16):
        store(cache, flood, keys_of(*range(number, number + 16)))
    assert [use(cache, keyspace, 8) for keyspace in users] == [8] * USERS
    assert check(cache, 0, 0) == []
    cache.tier.close()


def test_an_eviction_asks_few_users_unless_all_of_theirs_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(pages=USERS * 16, slab_pages=USERS * 16, policy="lru")
    users = [tenant(cache, uid, 1) for uid in range(1, USERS + 1)]
    for keyspace in users:
        store(cache, keyspace, keys_of(*range(16)))
    asked = []

    def count(self: eviction.Eviction, queue: Queue, wanted: int) -> U32Array:
        asked.append(queue)
        return following(self, queue, wanted)

    following = eviction.Eviction._next
    monkeypatch.setattr(eviction.Eviction, "_next", count)
    store(cache, users[0], keys_of(100))
    assert len(asked) == eviction.QUEUES_ASKED
    turn = cache.eviction._turn
    last = cache.eviction._in_turn([keyspace.queue for keyspace in users if keyspace.queue is not None])[-1]
    cache.eviction._turn = turn
    in_use = [
        cache.find(keyspace, keys_of(*range(16), 100)).hit_rows for keyspace in users if keyspace.queue is not last
    ]
    for rows in in_use:
        cache.hold(rows)
    for number in range(200, 216):
        store(cache, users[0], keys_of(number))
        in_use.append(cache.find(users[0], keys_of(number)).hit_rows)
        assert len(in_use[-1]) == 1
        cache.hold(in_use[-1])
    for rows in in_use:
        cache.unhold(rows)
    assert check(cache, 0, 0) == []
    cache.tier.close()
