"""Quotas: keys of one owner never take more than their maximum, and others never take what their minimum grants."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.cache.memory import audit, eviction, quotaroom, reservation
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.quota import Quota
from kvoffloadd.cache.memory.requeue import change_quotas
from kvoffloadd.cache.memory.reservation import Wanted, reserve, reserve_in_steps
from kvoffloadd.cache.memory.savedstate import read_saved_state
from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.config import QuotasConfig
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, KeyState, U32Array
from kvoffloadd.quotalimits import QuotaLimits
from kvoffloadd.storage.arenafile import ArenaFile
from tests.steps import finish

from .fakes import keys_of, make_cache, store

ALICE, BOB, CAROL = 1, 2, 3
PAGES = 64


def limits(name: int | str, least: int = 0, most: int = 0) -> QuotaLimits:
    """A quota in pages."""
    return QuotaLimits(str(name), least * PAGE_BYTES, most * PAGE_BYTES)


def set_quotas(cache: Cache, users: Iterable[QuotaLimits] = (), namespaces: Iterable[QuotaLimits] = ()) -> None:
    finish(change_quotas(cache, QuotasConfig(tuple(users), tuple(namespaces))))


def keyspace_of(cache: Cache, uid: int, label: str = "model", pages: int = 1, group: int = 0) -> Keyspace:
    namespace = cache.open_namespace(f"{uid}{label}".encode().ljust(16), uid, label, 32)
    keyspace = cache.declare(namespace, GroupSchema(group, GroupKind.FULL, 16))
    cache.set_part_bytes(keyspace, {0: pages * PAGE_BYTES})
    return keyspace


def fill(cache: Cache, keyspace: Keyspace, count: int, begin: int = 0) -> int:
    """Stores keys one after another. Returns how many of them are there now."""
    for number in range(begin, begin + count):
        store(cache, keyspace, keys_of(number))
    return resident(cache, keyspace, begin, begin + count)


def resident(cache: Cache, keyspace: Keyspace, begin: int = 0, end: int = 1000) -> int:
    return cache.find(keyspace, keys_of(*range(begin, end))).num_hits


def quota(cache: Cache, name: int | str) -> Quota:
    return next(each for each in cache.entries.keyspaces.quotas.all if each.name == str(name))


def end(cache: Cache, holds: int = 0, reserved: int = 0) -> None:
    assert audit.check(cache, holds, reserved) == []
    cache.tier.close()


# --- the maximum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_at_the_maximum_the_owners_own_keys_go_and_nobody_elses(policy: str) -> None:
    cache = make_cache(pages=PAGES, slab_pages=16, policy=policy)
    set_quotas(cache, [limits(ALICE, most=8)])
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    assert fill(cache, bob, 20) == 20
    for number in range(40):
        store(cache, alice, keys_of(number))
        assert resident(cache, alice, number, number + 1) == 1, "each new key finds room"
        assert alice.taken_pages == quota(cache, ALICE).pages <= 8
    assert resident(cache, alice) == 8 and resident(cache, bob) == 20
    assert (quota(cache, ALICE).keys_evicted, quota(cache, ALICE).keys_refused) == (32, 0)
    end(cache)


def test_what_does_not_fit_is_refused_like_without_space() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    set_quotas(cache, [limits(ALICE, most=8)])
    alice = keyspace_of(cache, ALICE)
    made = reserve(cache, alice, keys_of(*range(12)), np.zeros(1, np.uint16), 0)
    assert made.states.tolist() == [KeyState.RESERVED] * 8 + [KeyState.NO_SPACE] * 4
    assert quota(cache, ALICE).keys_refused == 4
    more = reserve(cache, alice, keys_of(100), np.zeros(1, np.uint16), 0)
    assert more.states.tolist() == [KeyState.NO_SPACE], "nothing of the owner can go: all is reserved"
    cache.commit(made.parts)
    rows = cache.find(alice, keys_of(*range(8))).hit_rows
    cache.hold(rows)
    assert resident(cache, alice) == 8 and fill(cache, alice, 1, 100) == 0, "what is leased counts, and stays"
    cache.unhold(rows)
    assert fill(cache, alice, 1, 100) == 1
    end(cache)


def test_keys_that_are_cleared_and_still_held_count() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    set_quotas(cache, [limits(ALICE, most=8)])
    alice = keyspace_of(cache, ALICE)
    fill(cache, alice, 8)
    rows = cache.find(alice, keys_of(*range(6))).hit_rows
    cache.hold(rows)
    for _ in cache.clear(alice.namespace):
        pass
    alice = alice.namespace.keyspaces[0]
    assert quota(cache, ALICE).pages == 6
    assert audit.check(cache, len(rows), 0) == []
    assert fill(cache, alice, 5) == 2, "three follow one another in the two pages that are left"
    cache.unhold(rows)
    assert quota(cache, ALICE).pages == alice.taken_pages == 2
    end(cache)


def test_a_large_request_within_a_quota_is_served_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "STEP_KEYS", 8)
    monkeypatch.setattr(quotaroom, "KEYS_MAX", 8)
    cache = make_cache(pages=PAGES, slab_pages=16)
    set_quotas(cache, [limits(ALICE, most=24)])
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    fill(cache, bob, 40)
    fill(cache, alice, 24, 500)
    wanted = Wanted.from_first(alice, keys_of(*range(20)), np.zeros(1, np.uint16), 0)
    (made,) = finish(reserve_in_steps(cache, [wanted]))
    assert made.states.tolist() == [KeyState.RESERVED] * 20
    cache.commit(made.parts)
    wanted = Wanted.from_first(alice, keys_of(*range(100, 130)), np.zeros(1, np.uint16), 0)
    (made,) = finish(reserve_in_steps(cache, [wanted]))
    served = int(np.count_nonzero(made.states == KeyState.RESERVED))
    assert (made.states[:served] == KeyState.RESERVED).all() and 20 <= served <= 24
    assert resident(cache, bob) == 40 and quota(cache, ALICE).pages <= 24
    cache.abort(made.parts)
    end(cache)


def test_claimed_keys_go_last_among_the_owners_own() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    cache.retention.change_shares(1.0, 0.0)
    set_quotas(cache, [limits(ALICE, most=8)], [limits("other*", most=4)])
    alice, other, bob = keyspace_of(cache, ALICE), keyspace_of(cache, ALICE, "other"), keyspace_of(cache, BOB)
    for owner, count in ((alice, 4), (bob, 8)):
        cache.retention.retain(owner.namespace, [(owner, 0, keys_of(*range(count)))], priority=1, seconds=60)
        fill(cache, owner, count)
    fill(cache, alice, 10, 100)
    assert resident(cache, alice, 0, 4) == 4, "others of hers go first"
    cache.retention.retain(other.namespace, [(other, 0, keys_of(*range(4)))], priority=50, seconds=60)
    fill(cache, other, 4)
    assert resident(cache, other, 0, 4) == 4
    fill(cache, alice, 1, 200)
    assert resident(cache, alice, 200, 201) == 1, "a store finds room even if all is claimed"
    fill(cache, other, 1, 200)
    assert resident(cache, other, 200, 201) == 1 and resident(cache, other, 0, 4) == 3
    assert resident(cache, bob) == 8
    end(cache)


def test_claims_keep_no_more_than_the_maximum_of_their_user() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    cache.retention.change_shares(0.5, 0.0)
    alice = keyspace_of(cache, ALICE)
    for number in range(8):
        cache.retention.retain(
            alice.namespace, [(alice, 0, keys_of(2 * number, 2 * number + 1))], priority=1, seconds=9
        )
        fill(cache, alice, 2, 2 * number)
    assert cache.retention.memory.totals() == (16, 16)
    set_quotas(cache, [limits(ALICE, most=6)])
    assert cache.retention.memory.totals() == (6, 6)
    assert len(cache.retention.memory) == 3, "the others have lapsed, and do not come back with their keys"
    assert resident(cache, alice, 10, 16) == 6, "the claims of the first keys have lapsed, and these went"
    end(cache)


# --- the minimum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_others_never_take_what_a_minimum_grants(policy: str) -> None:
    cache = make_cache(pages=PAGES, slab_pages=16, policy=policy)
    set_quotas(cache, [limits(ALICE, least=20)])
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    assert fill(cache, alice, 30) == 30
    fill(cache, bob, 300)
    assert alice.taken_pages >= 20 and resident(cache, bob) == PAGES - alice.taken_pages
    assert alice.taken_pages == 20 or not policy, "the simplest one compares keys of two users by their places alone"
    fill(cache, bob, 4, 500)
    assert resident(cache, bob, 500, 504) == 4, "he goes on with his own"
    end(cache)


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_a_minimum_that_others_use_is_given_back_at_once(policy: str) -> None:
    cache = make_cache(pages=PAGES, slab_pages=16, policy=policy)
    set_quotas(cache, [limits(ALICE, least=20)])
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    assert fill(cache, bob, PAGES) == PAGES
    for number in range(20):
        store(cache, alice, keys_of(number))
        assert alice.taken_pages == number + 1, "her own keys do not go as long as she is owed more"
    end(cache)


def test_claims_of_others_do_not_keep_a_minimum_from_its_owner() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    cache.retention.change_shares(1.0, 0.0)
    set_quotas(cache, [limits(ALICE, least=20)])
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    cache.retention.retain(bob.namespace, [(bob, 0, keys_of(*range(PAGES)))], priority=100, seconds=60)
    fill(cache, bob, PAGES)
    assert fill(cache, alice, 20) == 20
    end(cache)


def test_a_slab_with_keys_that_a_minimum_protects_changes_no_hands() -> None:
    cache = make_cache(pages=PAGES, slab_pages=8, policy="lru")
    set_quotas(cache, [limits(ALICE, least=16)])
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    fill(cache, alice, 16)
    fill(cache, bob, 48)
    wide = keyspace_of(cache, CAROL, pages=4)
    fill(cache, wide, 40)
    assert 2 <= resident(cache, wide) <= 12, "her slabs are the coldest, and others have come to it"
    assert resident(cache, alice) == 16
    fill(cache, bob, 10, 500)
    end(cache)


def test_part_records_are_not_made_room_for_at_the_cost_of_a_minimum() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    set_quotas(cache, [limits(ALICE, least=8)])
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    fill(cache, alice, 10)
    cache.entries.keyspaces.quotas.begin(bob.quotas)
    windows = cache.scarcity._windows(None, None, spares=False)
    assert sum(len(rows) for _, _, _, rows in windows) == 2
    cache.entries.keyspaces.quotas.begin(alice.quotas)
    windows = cache.scarcity._windows(None, None, spares=False)
    assert sum(len(rows) for _, _, _, rows in windows) == 10
    end(cache)


def test_nobody_holds_what_is_granted_to_others() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    cache.entries.held.trusted = {0, BOB}
    set_quotas(cache, [limits(ALICE, least=30)], [limits("tenant*", least=10)])
    alice, bob, ours = keyspace_of(cache, ALICE), keyspace_of(cache, BOB), keyspace_of(cache, BOB, "tenant")
    held = cache.entries.held
    assert (held.left(ALICE), held.left(BOB), held.left(CAROL)) == (24, 34, 24), "a minimum of one's own does not count"
    fill(cache, bob, PAGES)
    rows = cache.find(bob, keys_of(*range(34))).hit_rows
    assert cache.may_hold(BOB, cache.find(bob, keys_of(*range(PAGES))).hit_rows).sum() == 34
    cache.check_hold(BOB, rows)
    cache.hold(rows)
    with pytest.raises(LimitError, match="4 KiB more would exceed what the quotas of others leave: release leases"):
        cache.check_hold(BOB, cache.find(bob, keys_of(40)).hit_rows)
    made = reserve(cache, ours, keys_of(1), np.zeros(1, np.uint16), 0)
    assert made.states.tolist() == [KeyState.NO_SPACE], "what is reserved can't be given back at once, either"
    assert fill(cache, alice, 30) == 30
    cache.unhold(rows)
    end(cache)


# --- namespaces, and both together --------------------------------------------------------------------


def test_the_first_pattern_that_matches_holds_for_a_namespace() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    set_quotas(cache, namespaces=[limits("llama-7*", most=4), limits("llama*", most=6), limits("*", least=1)])
    small, large, other = (keyspace_of(cache, ALICE, label) for label in ("llama-70b", "llama-8b", "qwen"))
    assert [[each.name for each in keyspace.quotas] for keyspace in (small, large, other)] == [
        ["llama-7*"], ["llama*"], ["*"],
    ]  # fmt: skip
    for keyspace, most in ((small, 4), (large, 6), (other, 20)):
        fill(cache, keyspace, 20)
        assert keyspace.taken_pages == most
    twin = keyspace_of(cache, BOB, "llama-8x")
    fill(cache, twin, 5)
    assert twin.taken_pages + large.taken_pages == 6, "all namespaces of a pattern share it"
    end(cache)


def test_a_users_quota_and_that_of_a_namespace_both_hold() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16, policy="lru")
    set_quotas(cache, [limits(ALICE, most=10)], [limits("one*", least=3, most=6), limits("two*", most=8)])
    one, two = keyspace_of(cache, ALICE, "one"), keyspace_of(cache, ALICE, "two")
    fill(cache, one, 20)
    fill(cache, two, 20)
    assert one.taken_pages >= 3 and quota(cache, ALICE).pages == 10, (
        "her own other namespace does not fall below its minimum"
    )
    fill(cache, one, 20, 100)
    assert one.taken_pages <= 6 and quota(cache, ALICE).pages == 10
    fill(cache, two, 100, 200)
    assert one.taken_pages == 3 and two.taken_pages == 7
    end(cache)


def test_a_namespace_that_is_owed_something_takes_it_within_its_users_maximum() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    set_quotas(cache, [limits(ALICE, most=10)], [limits("one*", least=5)])
    one, two = keyspace_of(cache, ALICE, "one"), keyspace_of(cache, ALICE, "two")
    fill(cache, two, 10)
    for number in range(5):
        store(cache, one, keys_of(number))
        assert one.taken_pages == number + 1
    assert two.taken_pages == 5
    end(cache)


def test_more_queues_than_usual_are_made_for_quotas_and_shared_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "QUEUES_MAX", 2)
    cache = make_cache(pages=PAGES, slab_pages=PAGES, policy="lru")
    set_quotas(cache, [limits(uid, most=4) for uid in range(5, 9)])
    plain = [keyspace_of(cache, uid) for uid in (1, 2, 3)]
    counted = [keyspace_of(cache, uid, pages=pages) for uid in range(5, 9) for pages in (1,)]
    assert plain[2].queue is plain[1].queue or plain[2].queue is plain[0].queue
    queues = [keyspace.queue for keyspace in counted]
    assert len({id(queue) for queue in queues}) == 4 and not {id(keyspace.queue) for keyspace in plain} & {
        id(queue) for queue in queues
    }
    wide = cache.declare(counted[0].namespace, GroupSchema(1, GroupKind.FULL, 16))
    cache.set_part_bytes(wide, {0: 3 * PAGE_BYTES})
    assert wide.queue is counted[0].queue, "beyond the limit, another size shares the owner's queue"
    for keyspace in [*plain, *counted]:
        fill(cache, keyspace, 6)
    assert all(keyspace.taken_pages == 4 for keyspace in counted)
    end(cache)


# --- changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_a_lower_maximum_evicts_at_once_what_can_go_and_the_rest_later(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotaroom, "KEYS_MAX", 4)
    cache = make_cache(pages=PAGES, slab_pages=16, policy=policy)
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    fill(cache, bob, 20)
    fill(cache, alice, 30)
    rows = cache.find(alice, keys_of(*range(12))).hit_rows
    cache.hold(rows)
    config = QuotasConfig((limits(ALICE, most=10),))
    assert len(list(change_quotas(cache, config))) > 4, "in steps"
    assert alice.taken_pages == 12 and resident(cache, bob) == 20
    assert fill(cache, alice, 1, 100) == 0
    cache.unhold(rows)
    assert fill(cache, alice, 1, 100) == 1 and alice.taken_pages <= 10
    set_quotas(cache)
    fill(cache, alice, 30, 200)
    assert alice.taken_pages > 30 and not cache.entries.keyspaces.quotas
    end(cache)


def test_a_maximum_goes_before_the_minimums_within_it() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    one, two = keyspace_of(cache, ALICE, "one"), keyspace_of(cache, ALICE, "two")
    fill(cache, one, 10)
    fill(cache, two, 10)
    set_quotas(cache, [limits(ALICE, most=12)], [limits("one*", least=8)])
    assert (one.taken_pages, two.taken_pages) == (10, 2) or (one.taken_pages >= 8)
    assert quota(cache, ALICE).pages == 12
    set_quotas(cache, [limits(ALICE, most=5)], [limits("one*", least=8)])
    assert quota(cache, ALICE).pages == 5
    end(cache)


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_keys_of_a_namespace_move_to_a_queue_of_its_own(policy: str) -> None:
    cache = make_cache(pages=PAGES, slab_pages=16, policy=policy)
    cache.retention.change_shares(1.0, 0.0)
    one, two = keyspace_of(cache, ALICE, "one"), keyspace_of(cache, ALICE, "two")
    cache.retention.retain(one.namespace, [(one, 0, keys_of(3, 4))], priority=1, seconds=60)
    fill(cache, one, 20)
    fill(cache, two, 20)
    assert one.queue is two.queue
    found = cache.find(one, keys_of(*range(6)))
    cache.uses.add([(one, found, 0)])
    before = one.queue
    set_quotas(cache, namespaces=[limits("one*", most=6)])
    assert one.queue is not before and one.queue is not None and two.queue is before
    assert len(one.queue.policy) == resident(cache, one) == 6 and resident(cache, two) == 20
    assert resident(cache, one, 3, 5) == 2, "claimed keys went last"
    if policy:
        assert resident(cache, one, 0, 6) == 6, "so did those of most worth"
    queue = one.queue
    set_quotas(cache, namespaces=[limits("one*", most=12)])
    assert one.queue is queue
    set_quotas(cache)
    assert one.queue is queue, "it stays where it is"
    end(cache)


def test_a_warm_restart_with_a_lower_maximum_takes_over_what_fits() -> None:
    cache = make_cache(pages=PAGES, slab_pages=16)
    alice, bob = keyspace_of(cache, ALICE), keyspace_of(cache, BOB)
    fill(cache, alice, 30)
    fill(cache, bob, 20)
    pool = ArenaFile(os.dup(cache.tier.pool.fd), PAGES * PAGE_BYTES, 16 * PAGE_BYTES, is_old=True)
    end(cache)
    after = make_cache(pages=PAGES, slab_pages=16, pool=pool)
    assert len(adopt(after, read_saved_state(pool.names()))) == 50
    set_quotas(after, [limits(ALICE, most=8)], [limits("model*", least=1)])
    alice, bob = keyspace_of(after, ALICE), keyspace_of(after, BOB)
    assert alice.taken_pages == quota(after, ALICE).pages == 8 and resident(after, bob) == 20
    assert quota(after, "model*").pages == 28
    fill(after, alice, 20, 100)
    assert alice.taken_pages == 8
    end(after)


# --- anything in any order ----------------------------------------------------------------------------

USERS = (ALICE, BOB, CAROL)
WHICH = [(ALICE, "one", 1), (ALICE, "two", 2), (BOB, "one", 1), (CAROL, "three", 1)]
which = st.integers(0, len(WHICH) - 1)
some_keys = st.lists(st.integers(0, 60), min_size=1, max_size=14, unique=True)
bounds = st.tuples(st.integers(0, 12), st.integers(0, 20)).map(lambda b: (b[0], b[1] and max(b)))


class AnyOrder(RuleBasedStateMachine):
    """Three users with four namespaces in two sizes, quotas of users and of namespaces."""

    @initialize(policy=st.sampled_from(["", *POLICIES]), user=bounds, other=bounds, namespace=bounds)
    def start(self, policy: str, user: tuple[int, int], other: tuple[int, int], namespace: tuple[int, int]) -> None:
        self.cache = make_cache(pages=48, slab_pages=8, policy=policy)
        self.cache.retention.change_shares(0.5, 0.0)
        self.keyspaces = [keyspace_of(self.cache, *each) for each in WHICH]
        self.lease: U32Array = np.zeros(0, np.uint32)
        self.reserved = np.zeros(0, np.int64)
        self.change(user, other, namespace)

    @rule(user=bounds, other=bounds, namespace=bounds)
    def change(self, user: tuple[int, int], other: tuple[int, int], namespace: tuple[int, int]) -> None:
        self.let_go()
        set_quotas(self.cache, [limits(ALICE, *user), limits(BOB, *other)], [limits("one*", *namespace)])

    def current(self, n: int) -> Keyspace:
        return self.keyspaces[n].namespace.keyspaces[0]

    def reserve(self, n: int, keys: list[int]) -> np.ndarray:
        """Stores keys; nobody else falls below a minimum, and the owner finds what he is owed."""
        keyspace, quotas = self.current(n), self.cache.entries.keyspaces.quotas.all
        before = {each: each.pages for each in quotas}
        made = reserve(self.cache, keyspace, keys_of(*keys), np.zeros(1, np.uint16), 0)
        for each in quotas:
            if each not in keyspace.quotas:
                assert each.pages >= min(before[each], each.min_pages), (each, before[each])
        return made.parts

    @rule(n=which, keys=some_keys)
    def store(self, n: int, keys: list[int]) -> None:
        parts = self.reserve(n, keys)
        kept = self.cache.commit(parts)
        self.cache.seal(kept, self.cache.entries.parts.generation[kept], np.zeros((len(kept), 2), np.uint64))

    @rule(n=which, keys=some_keys)
    def only_reserve(self, n: int, keys: list[int]) -> None:
        self.cache.abort(self.reserved)
        self.reserved = np.zeros(0, np.int64)
        self.reserved = self.reserve(n, keys)

    @rule(n=which, keys=some_keys)
    def lease_some(self, n: int, keys: list[int]) -> None:
        self.let_go()
        found = self.cache.find(self.current(n), keys_of(*keys))
        rows = found.hit_rows
        self.lease = rows[self.cache.may_hold(self.current(n).namespace.uid, rows)]
        self.cache.hold(self.lease)
        self.cache.uses.add([(self.current(n), found, 0)])

    @rule()
    def let_go(self) -> None:
        self.cache.unhold(self.lease)
        self.lease = np.zeros(0, np.uint32)
        self.cache.abort(self.reserved)
        self.reserved = np.zeros(0, np.int64)

    @rule(n=which, keys=some_keys, priority=st.integers(0, 100))
    def retain(self, n: int, keys: list[int], priority: int) -> None:
        keyspace = self.current(n)
        prompt = [(keyspace, 0, keys_of(*keys))]
        self.cache.retention.retain(keyspace.namespace, prompt, priority=priority, seconds=60)

    @rule(n=which)
    def clear(self, n: int) -> None:
        for _ in self.cache.clear(self.keyspaces[n].namespace):
            pass

    @rule(n=which, keys=some_keys)
    def drop(self, n: int, keys: list[int]) -> None:
        self.cache.drop(self.cache.find(self.current(n), keys_of(*keys)).hit_rows)

    @invariant()
    def no_quota_is_exceeded(self) -> None:
        if hasattr(self, "cache"):
            for each in self.cache.entries.keyspaces.quotas.all:
                assert each.pages <= each.max_pages
            assert audit.check(self.cache, len(self.lease), len(self.reserved)) == []

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.let_go()
            for n in range(len(WHICH)):
                self.clear(n)
            assert all(each.pages == 0 for each in self.cache.entries.keyspaces.quotas.all)
            end(self.cache)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
