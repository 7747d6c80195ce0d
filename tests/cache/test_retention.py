"""Claims: what they keep, and how they end; against a model that knows only the rules."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.cache.claimsaver import ClaimSaver
from kvoffloadd.cache.memory import audit, retention, tierclaims
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema
from kvoffloadd.protocol.messages import ClaimFigures
from tests.cache.fakes import keys_of, make_cache, make_keyspace, store

each_policy = pytest.mark.parametrize("policy", ["", *POLICIES])


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def cache_of(pages: int = 64, *, slab_pages: int = 16, policy: str = "", share: float = 0.25) -> tuple[Cache, Clock]:
    cache, clock = make_cache(pages, slab_pages, policy=policy), Clock()
    cache.retention.clock, cache.retention.memory.share = clock, share
    return cache, clock


def retain(
    cache: Cache, keyspace: Keyspace, *numbers: int, priority: int = 50, seconds: float = 60.0, name: str = ""
) -> Claim | None:
    return cache.retention.retain(
        keyspace.namespace, [(keyspace, 0, keys_of(*numbers))], priority=priority, seconds=seconds, name=name
    )


def forget(cache: Cache, claims: list[Claim]) -> None:
    cache.retention.forget(claims)
    cache.retention.expire()


def resident(cache: Cache, keyspace: Keyspace, *numbers: int) -> list[int]:
    hits = cache.find(keyspace, keys_of(*numbers)).hits
    return [number for number, hit in zip(numbers, hits.tolist(), strict=True) if hit]


def num_kept(cache: Cache, claim: Claim) -> int:
    """How many keys of a claim memory keeps: fewer than it names if it was cut."""
    kept = cache.retention.memory.get(claim)
    return 0 if kept is None else len(kept.numbers)


def flood(cache: Cache, keyspace: Keyspace, count: int, begin: int = 1000) -> None:
    """Stores keys that nobody asks for, each by itself."""
    for number in range(begin, begin + count):
        store(cache, keyspace, keys_of(number))


def check(cache: Cache) -> None:
    findings = audit.check(cache, 0, 0) + cache.namespaces.check()
    assert not findings, findings


# --- what a claim keeps ---------------------------------------------------------------------------


@each_policy
def test_what_is_claimed_outlives_ten_turnovers_and_nothing_else_does(policy: str) -> None:
    cache, _ = cache_of(policy=policy)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(32)))
    retain(cache, keyspace, *range(8, 16))
    flood(cache, keyspace, 640)
    assert resident(cache, keyspace, *range(32)) == list(range(8, 16))
    assert cache.eviction.keys_unkept == 0
    check(cache)


@each_policy
def test_a_claim_holds_for_keys_that_come_later_and_that_are_used(policy: str) -> None:
    cache, _ = cache_of(policy=policy)
    _, keyspace = make_keyspace(cache)
    retain(cache, keyspace, *range(8))
    assert not resident(cache, keyspace, *range(8))
    store(cache, keyspace, keys_of(*range(8)))
    for turn in range(10):
        cache.uses.add([(keyspace, cache.find(keyspace, keys_of(*range(4))), 0)])
        flood(cache, keyspace, 100, 1000 * (turn + 1))
    assert resident(cache, keyspace, *range(8)) == list(range(8))
    check(cache)


@each_policy
def test_what_is_lost_or_let_go_by_a_reader_stays_claimed(policy: str) -> None:
    cache, _ = cache_of(policy=policy)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(8)))
    rows = cache.find(keyspace, keys_of(*range(4))).hit_rows
    cache.hold(rows)
    retain(cache, keyspace, *range(8))
    found = cache.find(keyspace, keys_of(100, *range(4, 8)))  # the head of this prompt is gone: its rest is lost
    cache.uses.add_prompt([(keyspace, found, 0)], 0)
    flood(cache, keyspace, 100)
    cache.unhold(rows)
    flood(cache, keyspace, 100, 2000)
    assert resident(cache, keyspace, *range(8)) == list(range(8))
    check(cache)


@each_policy
def test_a_claim_that_is_over_keeps_nothing(policy: str) -> None:
    cache, clock = cache_of(policy=policy)
    _, keyspace = make_keyspace(cache)
    woken: list[float] = []
    cache.retention.wake = woken.append
    store(cache, keyspace, keys_of(*range(8)))
    retain(cache, keyspace, *range(8), seconds=10)
    assert woken == [clock.now_s + 10]
    clock.now_s += 9.9
    assert cache.retention.expire() == woken[0]
    flood(cache, keyspace, 100)
    assert resident(cache, keyspace, *range(8)) == list(range(8))
    clock.now_s += 0.1
    assert cache.retention.expire() is None
    assert len(cache.retention) == 0
    flood(cache, keyspace, 100, 2000)
    assert not resident(cache, keyspace, *range(8))
    check(cache)


def test_a_claim_never_makes_a_store_fail() -> None:
    """All memory is claimed; a store evicts what is claimed, from the claim of the lowest priority and its end."""
    cache, _ = cache_of(pages=16, share=1.0)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    retain(cache, keyspace, *range(8), priority=1)
    retain(cache, keyspace, *range(8, 16), priority=2)
    store(cache, keyspace, keys_of(100, 101, 102))
    assert resident(cache, keyspace, *range(16), 100, 101, 102) == [*range(5), *range(8, 16), 100, 101, 102]
    assert cache.eviction.keys_unkept == 3
    store(cache, keyspace, keys_of(200))
    assert resident(cache, keyspace, *range(16), 200) == [*range(5), *range(8, 16), 200], "102 was not claimed"
    store(cache, keyspace, keys_of(7))
    flood(cache, keyspace, 10)
    assert resident(cache, keyspace, 7) == [7], "it came back under its claim"
    check(cache)


def test_leased_keys_in_the_way_do_not_cost_a_claim() -> None:
    cache, _ = cache_of(pages=16)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    retain(cache, keyspace, 0, 1)
    rows = cache.find(keyspace, keys_of(*range(2, 16))).hit_rows
    cache.hold(rows)
    made = reserve(cache, keyspace, keys_of(100, 101, 102), np.zeros(1, np.uint16), 0)
    assert len(made.parts) == 2, "claims are soft: a lease is not"
    cache.abort(made.parts)
    cache.unhold(rows)
    check(cache)


@each_policy
def test_a_search_that_gives_up_takes_nothing_that_is_claimed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not policy:
        pytest.skip("the simplest policy never gives up")
    monkeypatch.setattr("kvoffloadd.cache.policy.selection.IN_USE_MAX", 8)
    monkeypatch.setattr("kvoffloadd.cache.memory.eviction.IN_USE_MAX", 8)
    cache, _ = cache_of(pages=128, policy=policy)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(64)))
    store(cache, keyspace, keys_of(*range(64, 128)))
    retain(cache, keyspace, *range(120, 128))
    rows = cache.find(keyspace, keys_of(*range(64))).hit_rows
    cache.hold(rows)
    for number in range(40):
        store(cache, keyspace, keys_of(1000 + number))
    assert resident(cache, keyspace, *range(120, 128)) == list(range(120, 128))
    cache.unhold(rows)
    check(cache)


@each_policy
def test_slabs_with_claimed_keys_change_hands_last(policy: str) -> None:
    cache, _ = cache_of(pages=64, slab_pages=8, policy=policy, share=0.5)
    _, small = make_keyspace(cache)
    _, large = make_keyspace(cache, b"L" * 16, pages=(4,))
    store(cache, small, keys_of(*range(64)))
    for slab in range(4):
        retain(cache, small, 8 * slab)
    store(cache, large, keys_of(*range(8)))
    assert resident(cache, large, *range(8)) == list(range(8))
    assert resident(cache, small, 0, 8, 16, 24) == [0, 8, 16, 24]
    held = cache.find(large, keys_of(*range(8))).hit_rows
    cache.hold(held)
    store(cache, large, keys_of(100, 101))
    assert resident(cache, large, 100, 101) == [100, 101], "soft: the other size gets room in the end"
    assert cache.eviction.keys_unkept == 1
    cache.unhold(held)
    check(cache)


@each_policy
def test_a_size_gets_room_where_every_slab_has_a_claimed_key(policy: str) -> None:
    cache, _ = cache_of(pages=160 * 8, slab_pages=8, policy=policy, share=0.5)
    _, small = make_keyspace(cache)
    _, large = make_keyspace(cache, b"L" * 16, pages=(4,))
    store(cache, small, keys_of(*range(160 * 8)))
    entries, tier = cache.entries, cache.tier
    rows = cache.find(small, keys_of(*range(160 * 8))).hit_rows
    slabs = tier.slabs_of(entries.parts.page[entries.first[rows]])
    for slab in range(160):
        retain(cache, small, int(np.flatnonzero(slabs == slab)[0]))
    assert len(cache.retention) == 160
    for number in range(4):
        store(cache, large, keys_of(number))
        assert resident(cache, large, number) == [number]
    assert cache.eviction.keys_unkept == 1, "one slab is enough: its keys take turns"
    check(cache)


def test_the_slab_without_claims_is_found_among_many_with_claims() -> None:
    cache, _ = cache_of(pages=160 * 8, slab_pages=8, share=0.5)
    _, small = make_keyspace(cache)
    _, large = make_keyspace(cache, b"L" * 16, pages=(4,))
    store(cache, small, keys_of(*range(160 * 8)))
    entries, tier = cache.entries, cache.tier
    rows = cache.find(small, keys_of(*range(160 * 8))).hit_rows
    slabs = tier.slabs_of(entries.parts.page[entries.first[rows]])
    claimed = [int(np.flatnonzero(slabs == slab)[0]) for slab in tier.coldest_slabs(4)[:-1].tolist()]
    for number in claimed:
        retain(cache, small, number)
    store(cache, large, keys_of(0, 1))
    assert resident(cache, large, 0, 1) == [0, 1]
    assert resident(cache, small, *claimed) == claimed
    check(cache)


def test_claims_that_are_made_between_two_takeovers_count_in_the_second() -> None:
    cache, _ = cache_of(pages=24, slab_pages=8, share=1.0)
    _, small = make_keyspace(cache)
    _, large = make_keyspace(cache, b"L" * 16, pages=(4,))
    store(cache, small, keys_of(*range(24)))
    entries, tier = cache.entries, cache.tier
    rows = cache.find(small, keys_of(*range(24))).hit_rows
    slabs = tier.slabs_of(entries.parts.page[entries.first[rows]])
    first, second, third = (int(np.flatnonzero(slabs == slab)[0]) for slab in tier.coldest_slabs(4).tolist())
    retain(cache, small, first)
    store(cache, large, keys_of(0, 1))
    kept, other = resident(cache, small, first, second, third)
    assert kept == first
    retain(cache, small, other)
    held = cache.find(large, keys_of(0, 1)).hit_rows
    cache.hold(held)
    store(cache, large, keys_of(2))
    assert resident(cache, large, 2) == [2], "no slab is without claims: one of them goes, at the first try"
    cache.unhold(held)
    check(cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_claimed_keys_that_are_used_are_in_no_searchs_way(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffloadd.cache.policy.selection.IN_USE_MAX", 16)
    monkeypatch.setattr("kvoffloadd.cache.memory.eviction.IN_USE_MAX", 16)
    cache, _ = cache_of(pages=128, policy=policy, share=0.5)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(64)))
    retain(cache, keyspace, *range(64))
    cache.uses.add([(keyspace, cache.find(keyspace, keys_of(*range(64))), 0)])
    store(cache, keyspace, keys_of(*range(64, 128)))
    cache.uses.settle()
    assert cache.entries.claimed.pages_of_user(0) == 64
    made = reserve(cache, keyspace, keys_of(*range(200, 232)), np.zeros(1, np.uint16), 0)
    assert len(made.parts) == 32, "64 claimed keys are more than one search may meet in vain"
    cache.abort(made.parts)
    check(cache)


def test_records_are_not_made_room_for_with_claimed_keys() -> None:
    """Keys of many parts need records; complete keys that are claimed keep theirs."""
    cache, _ = cache_of(pages=256, share=1.0)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(64)))
    retain(cache, keyspace, *range(64))
    owners = cache.entries.owners(np.arange(cache.entries.parts.runs.used))
    idle = cache.scarcity._idle(owners, None, spares=False)
    assert not len(idle)
    forget(cache, cache.retention.claims)
    assert len(cache.scarcity._idle(owners, None, spares=False)) == 64


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hint", ["drop", "soon", "lost", "found again"])
def test_claimed_keys_that_are_told_about_are_in_no_searchs_way(
    policy: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffloadd.cache.policy.selection.IN_USE_MAX", 16)
    monkeypatch.setattr("kvoffloadd.cache.memory.eviction.IN_USE_MAX", 16)
    cache, _ = cache_of(pages=128, policy=policy, share=0.5)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(128)))
    retain(cache, keyspace, *range(64))
    if hint in ("drop", "soon"):
        cache.keep([(keyspace, keys_of(*range(64)))], soon=hint == "soon")
    else:
        cache.uses.add_prompt([(keyspace, cache.find(keyspace, keys_of(500, *range(64))), 0)], 0)
        cache.uses.settle()
        assert cache.entries.lost[cache.find(keyspace, keys_of(*range(64))).hit_rows].all()
    if hint == "found again":
        store(cache, keyspace, keys_of(*range(64)))
        assert not cache.entries.lost[cache.find(keyspace, keys_of(*range(64))).hit_rows].any()
    cache.uses.add([(keyspace, cache.find(keyspace, keys_of(*range(64, 128))), 0)])  # those that may go are the younger
    cache.uses.settle()
    made = reserve(cache, keyspace, keys_of(*range(200, 232)), np.zeros(1, np.uint16), 0)
    assert len(made.parts) == 32
    cache.abort(made.parts)
    assert resident(cache, keyspace, *range(64)) == list(range(64))
    check(cache)


@each_policy
def test_claims_do_not_make_others_settle_their_uses(policy: str) -> None:
    """What is aside for a claim's sake alone costs no release of a lease anything."""
    cache, _ = cache_of(policy=policy)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(32)))
    retain(cache, keyspace, *range(8))
    flood(cache, keyspace, 100)
    assert not cache.eviction.any_aside
    rows = cache.find(keyspace, keys_of(*range(1090, 1100))).hit_rows
    cache.hold(rows)
    flood(cache, keyspace, 100, 2000)
    is_aside = cache.eviction.any_aside
    assert is_aside == bool(policy)
    for _ in range(2):  # the second one finds that nothing is aside any more
        cache.unhold(rows)
        cache.hold(rows)
    cache.unhold(rows)
    is_aside = cache.eviction.any_aside
    assert not is_aside
    check(cache)


@pytest.mark.parametrize("parts", [1, 8])
def test_no_more_is_taken_from_claims_than_is_needed(parts: int) -> None:
    cache, _ = cache_of(pages=16 * parts, slab_pages=16 * parts, share=1.0)
    _, keyspace = make_keyspace(cache, pages=(1,) * parts)
    store(cache, keyspace, keys_of(*range(16)))
    retain(cache, keyspace, *range(16))
    store(cache, keyspace, keys_of(100))
    assert resident(cache, keyspace, *range(16)) == list(range(15))
    assert cache.eviction.keys_unkept == 1
    check(cache)


def test_a_claim_of_several_groups_gives_up_its_end_in_all_of_them() -> None:
    cache, _ = cache_of(pages=32, share=1.0)
    namespace, keyspace = make_keyspace(cache)
    second = cache.declare(namespace, GroupSchema(1, GroupKind.FULL, 16))
    cache.set_part_bytes(second, {0: PAGE_BYTES})
    for group in (keyspace, second):
        store(cache, group, keys_of(*range(16)))
    prompt = [(group, 0, keys_of(*range(16))) for group in (keyspace, second)]
    cache.retention.retain(namespace, prompt, priority=1, seconds=60)
    flood(cache, keyspace, 1)
    store(cache, keyspace, keys_of(*range(100, 108)))
    left = [resident(cache, group, *range(16)) for group in (keyspace, second)]
    assert abs(len(left[0]) - len(left[1])) <= 1, left
    assert left == [list(range(len(group))) for group in left]


def test_the_user_who_keeps_the_most_gives_up_first() -> None:
    cache, _ = cache_of(pages=32, share=1.0)
    _, mine = make_keyspace(cache)
    other = cache.open_namespace(b"o" * 16, 1000, "other", 32)
    theirs = cache.declare(other, GroupSchema(0, GroupKind.FULL, 16))
    cache.set_part_bytes(theirs, {0: PAGE_BYTES})
    store(cache, mine, keys_of(*range(12)))
    store(cache, theirs, keys_of(*range(20)))
    retain(cache, mine, *range(12), priority=0)
    retain(cache, theirs, *range(20), priority=100)
    store(cache, mine, keys_of(100, 101, 102))
    assert len(resident(cache, theirs, *range(20))) == 17
    assert resident(cache, mine, *range(12)) == list(range(12))


def test_a_search_of_claims_that_are_in_use_goes_on_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffloadd.cache.memory.tierclaims.SEARCHED_CLAIMS", 2)
    cache, _ = cache_of(pages=16, share=1.0)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    for number in range(16):
        retain(cache, keyspace, number)
    rows = cache.find(keyspace, keys_of(*range(5))).hit_rows
    cache.hold(rows)
    made = [len(reserve(cache, keyspace, keys_of(100 + n), np.zeros(1, np.uint16), 0).parts) for n in range(3)]
    assert made == [0, 0, 1]
    cache.unhold(rows)


def test_records_in_vain_are_looked_for_again_when_a_claim_ends() -> None:
    cache, _ = cache_of(pages=256, share=1.0)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(256)))
    retain(cache, keyspace, *range(256))
    assert not list(cache.scarcity._windows(None, None, spares=False))
    forget(cache, cache.retention.claims)
    assert sum(len(rows) for _, _, _, rows in cache.scarcity._windows(None, None, spares=False)) == 256


# --- the share ------------------------------------------------------------------------------------


def test_beyond_the_share_the_lowest_priority_lapses_and_then_the_oldest() -> None:
    cache, _ = cache_of(pages=64)  # 16 of them
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(40)))
    first = retain(cache, keyspace, *range(8), priority=10)
    second = retain(cache, keyspace, *range(8, 16), priority=10)
    third = retain(cache, keyspace, *range(16, 24), priority=20)
    assert first is not None and not first.is_in_force
    assert retain(cache, keyspace, *range(24, 32), priority=5) is None
    fourth = retain(cache, keyspace, *range(32, 36), priority=10)
    assert second is not None and not second.is_in_force
    assert third is not None and third.is_in_force and fourth is not None and fourth.is_in_force
    assert cache.entries.claimed.pages_of_user(0) == 12
    check(cache)


def test_what_is_not_made_lets_nothing_lapse(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = cache_of(pages=64)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(40)))
    low, high = retain(cache, keyspace, *range(4), priority=10), retain(cache, keyspace, *range(4, 14), priority=90)
    assert retain(cache, keyspace, *range(14, 26), priority=50) is None, "12 pages, and 10 are kept at 90"
    assert low is not None and low.is_in_force and high is not None and high.is_in_force
    assert retain(cache, keyspace, *range(12, 18), priority=50) is not None, "two of them are kept already"
    assert not low.is_in_force and high.is_in_force
    monkeypatch.setattr("kvoffloadd.cache.memory.tierclaims.KEYS_MAX", 64)
    few = retain(cache, keyspace, *range(100, 110), priority=10)
    assert retain(cache, keyspace, *range(200, 220), priority=20) is None, "it would take what is kept at 50 and 90"
    assert few is not None and few.is_in_force
    figures = cache.retention.figures()
    assert (figures["claims_made"], figures["claims_lapsed"], len(cache.retention)) == (4, 1, 3)
    check(cache)


def test_claims_of_the_same_keys_lapse_together_and_those_that_are_not_in_the_way_stay() -> None:
    cache, _ = cache_of(pages=64)  # 16 of them
    _, keyspace = make_keyspace(cache)
    same = [retain(cache, keyspace, *range(10, 30), priority=20) for _ in range(5)]
    inside, absent = retain(cache, keyspace, 0, 1, priority=10), retain(cache, keyspace, 500, priority=1)
    high = retain(cache, keyspace, *range(8), priority=30)
    store(cache, keyspace, keys_of(*range(8)))
    store(cache, keyspace, keys_of(*range(10, 30)))
    assert [claim is not None and claim.is_in_force for claim in same] == [False] * 5
    for claim in (inside, absent, high):
        assert claim is not None and claim.is_in_force
    assert cache.retention.memory.num_lapsed == 5
    check(cache)
    forget(cache, [claim for claim in (high, inside) if claim is not None])
    again = [retain(cache, keyspace, *range(10, 30), priority=20) for _ in range(5)]
    kept = [claim for claim in again if claim is not None and claim.is_in_force]
    assert [num_kept(cache, claim) for claim in kept] == [16], "the newest of them is cut to what fits"
    check(cache)


def test_nothing_is_claimed_where_the_share_is_nothing() -> None:
    cache, _ = cache_of(share=0.0)
    _, keyspace = make_keyspace(cache)
    assert retain(cache, keyspace, 1) is None
    check(cache)


def test_sizes_that_become_known_count() -> None:
    cache, _ = cache_of(pages=64)
    namespace = cache.open_namespace(b"n" * 16, 0, "test", 32)
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16, parts=2))
    cache.set_part_bytes(keyspace, {0: PAGE_BYTES})
    store(cache, keyspace, keys_of(*range(16)), [0])
    claim = retain(cache, keyspace, *range(16))
    assert claim is not None and num_kept(cache, claim) == 16
    cache.set_part_bytes(keyspace, {1: PAGE_BYTES})
    assert num_kept(cache, claim) == 8
    check(cache)


def test_what_is_told_of_a_claim_fits_its_message() -> None:
    """Also if it was cut: its last key is another one then, that was used less."""
    cache, _ = cache_of(pages=64)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    claim = retain(cache, keyspace, *range(16))
    assert claim is not None
    for _ in range(5):
        cache.uses.add([(keyspace, cache.find(keyspace, keys_of(15)), 0)])
        cache.uses.settle()
    assert cache.retention.describe(claim)["hits"] == 5
    cache.retention.memory.change_share(0.125)
    told = cache.retention.describe(claim)
    assert (told["hits"], told["memory_keys"]) == (5, 8)
    assert ClaimFigures(**told) == msgspec.convert(told, ClaimFigures)
    cache.uses.add([(keyspace, cache.find(keyspace, keys_of(7)), 0)])
    cache.uses.settle()
    assert cache.retention.describe(claim)["hits"] == 6
    check(cache)


def test_keys_that_come_later_count_and_the_last_claim_is_cut_to_its_beginning() -> None:
    cache, _ = cache_of(pages=64)
    namespace, keyspace = make_keyspace(cache)
    wide = cache.declare(namespace, GroupSchema(1, GroupKind.FULL, 32, parts=1))
    cache.set_part_bytes(wide, {0: 2 * PAGE_BYTES})
    claim = cache.retention.retain(
        namespace, [(keyspace, 0, keys_of(*range(20))), (wide, 0, keys_of(*range(10)))], priority=1, seconds=60
    )
    assert claim is not None
    assert (claim.tokens, claim.num_keys) == (320, 30)
    store(cache, keyspace, keys_of(*range(20)))
    assert num_kept(cache, claim) == 24, "16 of its 20 pages, and what the other group has up to there"
    store(cache, wide, keys_of(*range(10)))
    assert cache.entries.claimed.pages_of_user(0) <= 16
    assert claim.is_in_force and num_kept(cache, claim) == 12
    flood(cache, keyspace, 100)
    flood(cache, wide, 100)
    assert resident(cache, keyspace, *range(20)) == list(range(8))
    assert resident(cache, wide, *range(10)) == list(range(4))
    assert cache.retention.memory.num_cut == 2
    check(cache)


def test_another_users_claims_are_not_in_the_way() -> None:
    cache, _ = cache_of(pages=64)
    _, mine = make_keyspace(cache)
    other = cache.open_namespace(b"o" * 16, 1000, "other", 32)
    theirs = cache.declare(other, GroupSchema(0, GroupKind.FULL, 16))
    cache.set_part_bytes(theirs, {0: PAGE_BYTES})
    store(cache, mine, keys_of(*range(16)))
    store(cache, theirs, keys_of(*range(16)))
    first, second = retain(cache, mine, *range(16)), retain(cache, theirs, *range(16), priority=100)
    assert first is not None and first.is_in_force and second is not None and second.is_in_force
    flood(cache, mine, 200)
    assert resident(cache, mine, *range(16)) == resident(cache, theirs, *range(16)) == list(range(16))
    check(cache)


def test_a_smaller_share_counts_at_once() -> None:
    cache, _ = cache_of(pages=64)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    for number in range(16):
        retain(cache, keyspace, number)
    cache.retention.memory.change_share(0.125)
    assert [int(cache.entries.claimed.pages_of_user(0)), len(cache.retention)] == [8, 8]
    cache.retention.memory.change_share(0.0)
    assert len(cache.retention) == 0
    assert retain(cache, keyspace, 0) is None
    check(cache)


def test_claims_are_bounded_in_number_and_in_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "CLAIMS_PER_USER", 4)
    monkeypatch.setattr(tierclaims, "KEYS_MAX", 64)
    cache, _ = cache_of()
    _, keyspace = make_keyspace(cache)
    claims = [retain(cache, keyspace, number, priority=number) for number in (3, 1, 2, 4)]
    retain(cache, keyspace, 5, priority=5)
    assert [claim.priority for claim in cache.retention.claims] == [3, 2, 4, 5]
    assert claims[1] is not None and not claims[1].is_in_force
    assert retain(cache, keyspace, 6, priority=1) is None, "it would be the first to lapse"
    with pytest.raises(LimitError, match="33 keys in one claim are more than the 32 of all claims: claim fewer"):
        retain(cache, keyspace, *range(100, 133))
    assert len(cache.retention) == 4, "what is refused changes nothing"
    big = retain(cache, keyspace, *range(100, 130), priority=9)
    assert big is not None and big.is_in_force
    check(cache)


def test_each_user_may_have_half_of_the_claims_that_the_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "CLAIMS_MAX", 8)
    cache, _ = cache_of()
    keyspaces = [make_keyspace(cache, bytes([uid]) * 16, uid=uid)[1] for uid in range(5)]
    for turn in range(2):
        for keyspace in keyspaces:
            for number in range(6):
                retain(cache, keyspace, 10 * turn + number)
            check(cache)
        claims = cache.retention.claims
        counts = [sum(claim.namespace.uid == uid for claim in claims) for uid in range(5)]
        assert counts == [4, 2, 1, 0, 0], "the last two find none of their own to end"
    assert [claim.namespace.uid for claim in claims[-7:]] == [0, 0, 0, 0, 1, 1, 2], "each has ended its own"


# --- several claims of a key, names, ends -------------------------------------------------------------


def test_the_highest_priority_of_a_keys_claims_counts_as_long_as_it_lasts() -> None:
    cache, clock = cache_of(pages=16, share=1.0)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    retain(cache, keyspace, *range(8), priority=10, seconds=100)
    retain(cache, keyspace, *range(8, 16), priority=50, seconds=100)
    high = retain(cache, keyspace, *range(4), priority=90, seconds=10)
    store(cache, keyspace, keys_of(*range(100, 104)))
    assert resident(cache, keyspace, *range(16)) == [*range(4), *range(8, 16)]
    assert high is not None
    cache.retention.extend([high], 10, priority=60)
    check(cache)
    cache.retention.extend([high], 10, priority=5)
    check(cache)
    clock.now_s += 10
    cache.retention.expire()
    check(cache)
    store(cache, keyspace, keys_of(100, 101, 102, 103, 104, 105))
    assert resident(cache, keyspace, *range(8)) == [0, 1], "at 10 again, not free, and not at 90"
    assert resident(cache, keyspace, *range(8, 16)) == list(range(8, 16))
    check(cache)


def test_a_name_stands_for_one_claim_of_a_namespace() -> None:
    cache, clock = cache_of()
    _, keyspace = make_keyspace(cache)
    _, other = make_keyspace(cache, b"o" * 16)
    store(cache, keyspace, keys_of(*range(16)))
    retain(cache, keyspace, *range(4), name="agent 7")
    cache.uses.add([(keyspace, cache.find(keyspace, keys_of(*range(4))), 0)])
    cache.uses.settle()
    retain(cache, other, 1, name="agent 7")
    longer = retain(cache, keyspace, *range(8), name="agent 7", seconds=30)
    assert len(cache.retention) == 2 and longer is not None
    told = cache.retention.describe(longer)
    assert told == {
        "number": longer.number, "name": "agent 7", "namespace": keyspace.namespace.name, "uid": 0, "priority": 50,
        "left_s": 30.0, "tokens": 128, "keys": 8, "memory_keys": 8, "memory_bytes": 8 * PAGE_BYTES,
        "disk_keys": 0, "disk_bytes": 0, "hits": 1,
    }  # fmt: skip
    cache.uses.add([(keyspace, cache.find(keyspace, keys_of(*range(8))), 0)])
    cache.uses.settle()
    assert cache.retention.describe(longer)["hits"] == 2
    found = [claim for claim in cache.retention.claims if claim.name == "agent 7"]
    assert len(found) == 2
    cache.retention.extend(found, 500)
    clock.now_s += 400
    cache.retention.expire()
    assert len(cache.retention) == 2
    forget(cache, found)
    assert len(cache.retention) == 0
    check(cache)


def test_a_clear_ends_claims_also_of_keys_that_come_after_it() -> None:
    cache, _ = cache_of()
    namespace, keyspace = make_keyspace(cache)
    _, other = make_keyspace(cache, b"o" * 16)
    store(cache, keyspace, keys_of(*range(8)))
    retain(cache, keyspace, *range(8), name="a")
    retain(cache, other, 1)
    for _ in cache.clear(namespace):
        check_claims_only(cache)
    assert [claim.namespace.name for claim in cache.retention.claims] == [other.namespace.name]
    keyspace = namespace.keyspaces[0]
    store(cache, keyspace, keys_of(*range(8)))
    flood(cache, keyspace, 100)
    assert not resident(cache, keyspace, *range(8))
    check(cache)


def test_a_clear_on_another_host_ends_claims() -> None:
    cache, _ = cache_of()
    namespace, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(8)))
    retain(cache, keyspace, *range(8))
    for _ in cache.drop_older(namespace, cache.epochs.began + 1):
        check_claims_only(cache)
    assert len(cache.retention) == 0 and not resident(cache, keyspace, *range(8))
    retain(cache, keyspace, *range(8))
    for _ in cache.drop_older(namespace, 0):
        pass
    assert len(cache.retention) == 1, "what was stored in this run came after that clear"
    cache.retention.expire()
    check(cache)


def test_many_claims_end_a_few_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ENDED_CLAIMS", 3)
    cache, clock = cache_of()
    namespace, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(10)))
    woken: list[float] = []
    cache.retention.wake = woken.append
    for number in range(10):
        retain(cache, keyspace, number, seconds=10)
    clock.now_s += 10
    turns = 0
    while (at_s := cache.retention.expire()) is not None and at_s <= clock.now_s:
        turns += 1
        check(cache)
    assert (turns, len(cache.retention)) == (3, 0)
    for number in range(10):
        retain(cache, keyspace, number)
    woken.clear()
    for _ in cache.clear(namespace):
        pass
    assert len(cache.retention) == 0 and woken == [clock.now_s]
    turns = 0
    while (at_s := cache.retention.expire()) is not None and at_s <= clock.now_s:
        turns += 1
        check(cache)
    assert turns == 3
    check(cache)


def check_claims_only(cache: Cache) -> None:
    assert not (findings := cache.retention.check()), findings


def test_a_claim_keeps_its_namespace_known_until_it_ends() -> None:
    cache, clock = cache_of()
    namespace, keyspace = make_keyspace(cache)
    retain(cache, keyspace, *range(8), seconds=10)
    cache.close_namespace(namespace)
    assert cache.open_namespace(namespace.fingerprint, 0, "test", 32) is namespace
    store(cache, keyspace, keys_of(*range(8)))
    flood(cache, keyspace, 100)
    assert resident(cache, keyspace, *range(8)) == list(range(8))
    cache.close_namespace(namespace)
    cache.drop(np.concatenate(list(cache.entries.scan(keyspace))))
    clock.now_s += 10
    cache.retention.expire()
    assert cache.namespaces.find(namespace.fingerprint) is None
    check(cache)


def test_ends_are_forgotten_with_their_claims() -> None:
    cache, clock = cache_of()
    _, keyspace = make_keyspace(cache)
    claim = retain(cache, keyspace, 1)
    assert claim is not None
    for _ in range(10_000):
        clock.now_s += 0.001
        cache.retention.extend([claim], 1000.0)
    assert len(cache.retention._ends) <= 2 + retention.ENDS_SPARE


def test_keys_that_have_almost_equal_hashes_are_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = cache_of()
    namespace, keyspace = make_keyspace(cache)
    second = cache.declare(namespace, GroupSchema(1, GroupKind.FULL, 16))
    retain(cache, keyspace, 1, 2)
    insert = cache.entries.claimed.index.insert

    def refuse(numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        if len(keys) == 4:
            raise LimitError("too many keys have almost equal hashes")
        return insert(numbers, keys)

    monkeypatch.setattr(cache.entries.claimed.index, "insert", refuse)
    with pytest.raises(LimitError):
        cache.retention.retain(
            namespace, [(keyspace, 0, keys_of(1, 5)), (second, 0, keys_of(1, 2, 3))], priority=99, seconds=5
        )
    assert not cache.entries.claimed.has(second) and len(cache.retention) == 1
    check(cache)


# --- anything in any order, against the rules ------------------------------------------------------------


@dataclasses.dataclass
class Wish:
    """A claim as the model knows it."""

    claim: Claim
    which: int
    keys: list[int]
    priority: int
    ends_s: float
    name: str


which = st.integers(0, 1)
some_keys = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)


class AnyOrder(RuleBasedStateMachine):
    """Two users with a namespace each, 48 pages, claims of at most 12 pages each."""

    @initialize(policy=st.sampled_from(["", *POLICIES]))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.cache, self.clock = cache_of(pages=48, slab_pages=8, policy=policy)
        self.open()
        self.wishes: list[Wish] = []
        self.lease: np.ndarray = np.zeros(0, np.uint32)

    def open(self) -> None:
        self.namespaces: list[Namespace] = []
        for uid, pages in ((0, 1), (1000, 2)):
            namespace = self.cache.open_namespace(bytes([uid % 256]) * 16, uid, "test", 32)
            keyspace = self.cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16))
            self.cache.set_part_bytes(keyspace, {0: pages * PAGE_BYTES})
            self.namespaces.append(namespace)
        self.saver = ClaimSaver(self.cache, None, stuck_s=1.0, now=self.clock)

    def keyspace(self, n: int) -> Keyspace:
        return self.namespaces[n].keyspaces[0]

    @rule(n=which, keys=some_keys)
    def store(self, n: int, keys: list[int]) -> None:
        kept = {key: wish.claim for wish in self.wishes if wish.which == n for key in wish.keys}
        before = set(resident(self.cache, self.keyspace(n), *kept)) if kept else set()
        unkept = self.cache.eviction.keys_unkept
        store(self.cache, self.keyspace(n), keys_of(*keys))
        after = set(resident(self.cache, self.keyspace(n), *kept)) if kept else set()
        live = [wish for wish in self.wishes if wish.which == n and wish.claim.is_in_force]
        lost = {key for key in before - after if any(key in self.named(wish) for wish in live)}
        assert len(lost) <= self.cache.eviction.keys_unkept - unkept

    @rule(
        n=which, keys=some_keys, priority=st.integers(0, 100), seconds=st.integers(1, 30),
        name=st.sampled_from(["", "", "a", "b"]),
    )  # fmt: skip
    def retain(self, n: int, keys: list[int], priority: int, seconds: int, name: str) -> None:
        if name:
            self.wishes = [wish for wish in self.wishes if (wish.which, wish.name) != (n, name)]
        claim = retain(self.cache, self.keyspace(n), *keys, priority=priority, seconds=seconds, name=name)
        if claim is not None:
            self.wishes.append(Wish(claim, n, keys, priority, self.clock.now_s + seconds, name))

    @rule(seed=st.integers(0, 1 << 16), seconds=st.integers(1, 30), priority=st.none() | st.integers(0, 100))
    def extend(self, seed: int, seconds: int, priority: int | None) -> None:
        live = [wish for wish in self.wishes if wish.claim.is_in_force]
        if live:
            wish = live[seed % len(live)]
            self.cache.retention.extend([wish.claim], seconds, priority)
            wish.ends_s = self.clock.now_s + seconds
            wish.priority = wish.priority if priority is None else priority

    @rule(seed=st.integers(0, 1 << 16))
    def forget(self, seed: int) -> None:
        live = [wish for wish in self.wishes if wish.claim.is_in_force]
        if live:
            wish = live[seed % len(live)]
            forget(self.cache, [wish.claim])
            self.wishes.remove(wish)

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.now_s += seconds
        self.cache.retention.expire()
        self.wishes = [wish for wish in self.wishes if wish.ends_s > self.clock.now_s]

    @rule(n=which)
    def clear(self, n: int) -> None:
        for _ in self.cache.clear(self.namespaces[n]):
            pass
        self.wishes = [wish for wish in self.wishes if wish.which != n]

    @rule(n=which, keys=some_keys)
    def drop(self, n: int, keys: list[int]) -> None:
        self.cache.drop(self.cache.find(self.keyspace(n), keys_of(*keys)).hit_rows)

    @rule(n=which, keys=some_keys)
    def pin_and_let_go(self, n: int, keys: list[int]) -> None:
        self.cache.unhold(self.lease)
        found = self.cache.find(self.keyspace(n), keys_of(*keys))
        self.lease = found.hit_rows
        self.cache.hold(self.lease)
        self.cache.uses.add([(self.keyspace(n), found, 0)])

    @rule(quarter=st.integers(0, 4))
    def change_share(self, quarter: int) -> None:
        self.cache.retention.memory.change_share(quarter / 4)

    @rule()
    def restart(self) -> None:
        """Nothing but the claims is left."""
        old = self.cache
        asyncio.run(self.saver.save())
        self.cache, _ = cache_of(pages=48, slab_pages=8, policy=self.policy, share=old.retention.memory.share)
        self.clock.now_s += 1.0
        self.cache.retention.clock = self.clock
        self.cache.epochs.merge(old.epochs.base, old.epochs.last, old.epochs.by_namespace)
        self.open()
        asyncio.run(self.saver.read(old.saved_claims, "the last run"))
        asyncio.run(self.saver.restore())
        self.cache.retention.expire()
        self.wishes = [wish for wish in self.wishes if wish.claim.is_in_force and wish.ends_s > self.clock.now_s]
        if not self.cache.retention.memory.budget_pages(
            0
        ):  # a share of nothing is given to no claim, even of keys to come
            self.wishes.clear()
        found = {claim.number: claim for claim in self.cache.retention.claims}
        for wish in self.wishes:
            kept = old.retention.memory.get(wish.claim)
            wish.keys = wish.keys[: len(kept.numbers)] if kept is not None else []
            wish.claim = found[wish.claim.number]
            assert (wish.claim.num_keys, wish.claim.name) == (len(wish.keys), wish.name)
        self.lease = np.zeros(0, np.uint32)
        old.tier.close()

    def named(self, wish: Wish) -> list[int]:
        """The keys that a claim names: fewer than the wish if it was cut."""
        return wish.keys[: num_kept(self.cache, wish.claim)]

    @invariant()
    def no_user_has_more_than_the_share(self) -> None:
        if hasattr(self, "cache"):
            for uid in (0, 1000):
                assert self.cache.entries.claimed.pages_of_user(uid) <= self.cache.retention.memory.budget_pages(uid)

    @invariant()
    def no_claim_outlives_its_end_and_none_is_missing(self) -> None:
        if hasattr(self, "cache"):
            live = {claim.number for claim in self.cache.retention.claims}
            assert live == {wish.claim.number for wish in self.wishes if wish.claim.is_in_force}
            for wish in self.wishes:
                if wish.claim.is_in_force:
                    assert (wish.claim.priority, wish.claim.ends_s) == (wish.priority, wish.ends_s)

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "cache"):
            findings = audit.check(self.cache, len(self.lease), 0)
            assert not findings, findings


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
