"""Memory that can't be evicted: what a user who is not trusted may hold of it, and what is left for others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvoffloadd.cache.memory import reservation
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import Reservation, Wanted, reserve, reserve_all, reserve_in_steps
from kvoffloadd.cache.memory.steppedlookup import SteppedLookup
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, KeyState, U32Array
from kvoffloadd.scheduling.steps import Steps

from .fakes import keys_of, make_cache
from .fakes import store as store_keys

OURS, FIRST, SECOND = 0, 1001, 1002
PAGES = 1024
SHARE = PAGES * 3 // 4


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = make_cache(pages=PAGES, slab_pages=64)
    made.entries.held.trusted = {OURS}
    yield made
    assert made.entries.held.pages(FIRST) == made.entries.held.pages(SECOND) == 0
    assert check(made, 0, 0) == []
    made.tier.close()


def keyspace_of(cache: Cache, uid: int, group: int = 0, pages: tuple[int, ...] = (1,)) -> Keyspace:
    """A group of a namespace of this user."""
    namespace = cache.open_namespace(uid.to_bytes(16), uid, "test", 32)
    keyspace = cache.declare(namespace, GroupSchema(group, GroupKind.FULL, 16, parts=len(pages)))
    cache.set_part_bytes(keyspace, {part: size * PAGE_BYTES for part, size in enumerate(pages)})
    return keyspace


def store(cache: Cache, keyspace: Keyspace, *numbers: int) -> None:
    for number in numbers:
        store_keys(cache, keyspace, keys_of(number))


def pinned(cache: Cache, keyspace: Keyspace, *numbers: int) -> U32Array:
    rows = cache.find(keyspace, keys_of(*numbers)).hit_rows
    cache.check_hold(keyspace.namespace.uid, rows)
    cache.hold(rows)
    return rows


def room(cache: Cache, keyspace: Keyspace, number: int, parts: int = 1) -> int:
    """How many of `number` new keys get slots; they are given back."""
    made = reserve(cache, keyspace, keys_of(*range(10_000, 10_000 + number)), np.arange(parts, dtype=np.uint16), 0)
    cache.abort(made.parts)
    served = int(np.count_nonzero(made.states == KeyState.RESERVED))
    assert np.all(made.states[served:] == KeyState.NO_SPACE)
    return served


def test_nobody_holds_more_than_is_left_for_others(cache: Cache) -> None:
    first, second, ours = (keyspace_of(cache, uid) for uid in (FIRST, SECOND, OURS))
    store(cache, first, *range(SHARE // 2 + 50))
    rows = [pinned(cache, first, *range(SHARE // 2))]
    assert cache.entries.held.pages(FIRST) == SHARE // 2
    with pytest.raises(LimitError, match=rf"^uid {FIRST} holds 1.50 MiB .* 4 KiB more .* the 3 MiB .* release leases$"):
        pinned(cache, first, SHARE // 2)
    rows.append(pinned(cache, first, 0, 1, 2, 0))  # once more costs nothing
    assert room(cache, first, 10) == 0
    assert room(cache, second, PAGES) == SHARE // 4
    made = reserve(cache, second, keys_of(*range(SHARE // 4)), np.zeros(1, np.uint16), 0)
    assert room(cache, second, 1) == 0
    cache.commit(made.parts)
    assert room(cache, second, 1) == 1, "what is stored can be evicted"
    assert room(cache, ours, PAGES) == PAGES - SHARE // 2, "whoever is trusted gets all that can be evicted"
    for held in rows:
        cache.unhold(held)


def test_what_is_wanted_of_several_groups_and_parts_is_counted_by_its_pages(cache: Cache) -> None:
    wide = keyspace_of(cache, FIRST, 0, (1, 7))
    assert room(cache, wide, PAGES, parts=2) == SHARE // 2 // 8
    narrow = keyspace_of(cache, FIRST, 1, (2,))  # it counts from now on
    made = reserve(cache, narrow, keys_of(*range(10)), np.zeros(1, np.uint16), 0)
    assert cache.entries.held.pages(FIRST) == 20
    cache.abort(made.parts)
    assert room(cache, wide, 2 * PAGES) == SHARE // 2
    assert room(cache, narrow, PAGES) == SHARE // 2 // 2
    made = reserve(cache, wide, keys_of(*range(4)), np.array([1], np.uint16), 0)
    assert cache.entries.held.pages(FIRST) == 28
    assert room(cache, narrow, PAGES) == (SHARE - 56) // 2 // 2
    cache.commit(made.parts)
    cache.hold(np.repeat(cache.entries.find(wide, keys_of(*range(4))).astype(np.uint32), 3))
    assert cache.entries.held.pages(FIRST) == 32, "a key counts with all its slots"
    cache.unhold(np.repeat(cache.entries.find(wide, keys_of(*range(4))).astype(np.uint32), 3))


@pytest.mark.parametrize("step_keys", [64, 4096])
def test_what_is_there_already_costs_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch, step_keys: int) -> None:
    """A request keeps it from eviction only while it lasts."""
    monkeypatch.setattr(reservation, "STEP_KEYS", step_keys)
    first = keyspace_of(cache, FIRST)
    there = SHARE // 2 + 16
    store(cache, first, *range(there))
    wanted = Wanted.from_first(first, keys_of(*range(there + 10)), np.zeros(1, np.uint16), 0)
    (made,) = finish(reserve_in_steps(cache, [wanted]))
    assert made.states.tolist() == [KeyState.HIT] * there + [KeyState.RESERVED] * 10
    cache.abort(made.parts)


def test_a_request_of_several_groups_gets_no_more_than_one_of_one(cache: Cache) -> None:
    one, other = keyspace_of(cache, FIRST, 0), keyspace_of(cache, FIRST, 1, (2,))
    wanted = [
        Wanted.from_first(keyspace, keys_of(*range(SHARE)), np.zeros(1, np.uint16), 0) for keyspace in (other, one)
    ]
    for order in (wanted, wanted[::-1]):
        made = reserve_all(cache, order)
        assert SHARE // 2 - 1 <= cache.entries.held.pages(FIRST) <= SHARE // 2
        for reserved in made:
            cache.abort(reserved.parts)


def test_a_large_request_evicts_nothing_for_what_it_may_not_have(cache: Cache) -> None:
    ours, first = keyspace_of(cache, OURS), keyspace_of(cache, FIRST)
    store(cache, ours, *range(PAGES))
    wanted = Wanted.from_first(first, keys_of(*range(5000)), np.zeros(1, np.uint16), 0)
    (made,) = finish(reserve_in_steps(cache, [wanted]))
    assert len(made.parts) == SHARE // 2
    assert ours.keys >= PAGES - SHARE // 2 - PAGES // 256 - 64, "and some to spare"
    cache.abort(made.parts)


def test_what_was_cleared_counts_until_it_is_let_go(cache: Cache) -> None:
    first = keyspace_of(cache, FIRST)
    store(cache, first, *range(100))
    rows = pinned(cache, first, *range(100))
    cache.epochs.advance(first.namespace.fingerprint)
    for _ in cache.clear(first.namespace):
        pass
    assert cache.entries.held.pages(FIRST) == 100
    cache.unhold(rows)


def finish(steps: Steps[list[Reservation]]) -> list[Reservation]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def test_a_lookup_in_steps_holds_no_more_than_its_user_may(cache: Cache) -> None:
    """Requests without end would keep others from all memory, and what they hold would be free for a lease."""
    keyspace, others = keyspace_of(cache, FIRST), keyspace_of(cache, SECOND)
    keys = range(900)
    for begin in range(0, 900, 100):
        store_keys(cache, keyspace, keys_of(*keys[begin : begin + 100]))
    finding = SteppedLookup(cache, [(keyspace, keys_of(*keys))])
    for _ in finding.steps():
        pass
    assert cache.entries.held.pages(FIRST) == SHARE // 2
    rows = cache.find(keyspace, keys_of(*keys)).hit_rows
    assert cache.may_hold(FIRST, rows).sum() == SHARE // 2
    assert room(cache, others, 10) == 10
    assert finding.results()[0].hits.all(), "what it does not hold is looked for again"
    finding.release()


def test_what_a_lookup_in_steps_may_not_hold_may_go_meanwhile(cache: Cache) -> None:
    keyspace = keyspace_of(cache, FIRST)
    store_keys(cache, keyspace, keys_of(*range(500)))
    finding = SteppedLookup(cache, [(keyspace, keys_of(*range(500)))])
    for _ in finding.steps():
        pass
    cache.drop(cache.find(keyspace, keys_of(0, 499)).hit_rows)
    hits = finding.results()[0].hits
    assert (hits[1], hits[0], hits[499]) == (True, False, False)
    finding.release()
