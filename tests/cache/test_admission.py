"""Reserving very many keys step by step, and what may happen between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.memory import reservation
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import Admission, Reservation, Wanted, reserve_all
from kvoffloadd.model import KeyState

from .fakes import keys_of, make_cache, make_keyspace, store

R, H, P, M, N = (int(s) for s in (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.MISS, KeyState.NO_SPACE))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "STEP_KEYS", 4)


@pytest.fixture
def cache() -> Iterator[Cache]:
    """Sixteen slots."""
    made = make_cache(pages=16, slab_pages=4, policy="lru")
    yield made
    made.tier.close()


def wanted(keyspace: Keyspace, numbers: range | list[int], first: int = 0) -> Wanted:
    parts = np.arange(keyspace.schema.parts, dtype=np.uint16)
    return Wanted.from_first(keyspace, keys_of(*numbers), parts, first)


def finish(made: Admission) -> list[Reservation]:
    for _ in made.steps():
        pass
    return made.reservations()


def held(cache: Cache, keyspace: Keyspace, numbers: range) -> list[int]:
    found: list[int] = np.flatnonzero(cache.find(keyspace, keys_of(*numbers)).hits).tolist()
    return found


def commit(cache: Cache, reserved: list[Reservation]) -> None:
    for one in reserved:
        cache.commit(one.parts)


@settings(max_examples=40, deadline=None)
@given(
    before=st.lists(st.integers(0, 40), max_size=20, unique=True),
    asked=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=24, unique=True), min_size=1, max_size=2),
    width=st.integers(1, 3),
)
def test_step_by_step_as_in_one(before: list[int], asked: list[list[int]], width: int) -> None:
    """The same states, the same slots by key; and the same keys go first afterwards, if all were new and had room."""
    results = []
    for by_steps in (False, True):
        cache = make_cache(pages=24, slab_pages=4, policy="lru")
        namespace, one = make_keyspace(cache, pages=(1,) * width)
        spaces = [one]
        if len(asked) > 1:
            _, other = make_keyspace(cache, group=1, pages=(1,) * width)
            spaces.append(other)
        store(cache, one, keys_of(*before))
        request = [wanted(space, numbers, 3) for space, numbers in zip(spaces, asked, strict=True)]
        reserved = finish(Admission(cache, request)) if by_steps else reserve_all(cache, request)
        states = [made.states.tolist() for made in reserved]
        filled = [sorted(zip(made.keys.tolist(), made.columns.tolist(), strict=True)) for made in reserved]
        assert check(cache, 0, sum(len(made.parts) for made in reserved)) == []
        commit(cache, reserved)
        for made, space, numbers in zip(reserved, spaces, asked, strict=True):
            rows = cache.find(space, keys_of(*numbers)).rows
            first = cache.entries.first[rows[made.keys]]
            assert (made.parts == first + made.columns).all(), "each slot belongs to the key that it is listed for"
        order = []
        if states == [[R] * len(asked[0])]:
            while found := held(cache, one, range(41)):
                order.append(found)
                queue = one.queue
                assert queue is not None
                cache.eviction.drop(cache.eviction.victims([queue], 1))
        results.append((states, filled, order))
        assert namespace.name
        cache.tier.close()
    assert results[1] == results[0]


def test_nothing_that_the_request_names_is_evicted_for_it(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    (made,) = finish(Admission(cache, [wanted(keyspace, [*range(100, 109), *range(15, 8, -1)])]))
    assert made.states.tolist() == [R] * 9 + [H] * 7


def test_who_is_given_up_leaves_nothing(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    for steps in range(8):
        made = Admission(cache, [wanted(keyspace, range(12))])
        turns = made.steps()
        with contextlib.suppress(StopIteration):
            for _ in range(steps):
                next(turns)
                assert check(cache, 0, made.num_reserved) == []
        made.give_up()
        assert made.num_reserved == 0
        assert check(cache, 0, 0) == []
        assert cache.tier.num_free(1) == 16


def test_a_clear_between_two_steps(cache: Cache) -> None:
    """What was reserved before is the cleared keyspace's, and gone when it is committed; the rest is kept."""
    namespace, keyspace = make_keyspace(cache)
    for at in range(1, 5):
        numbers = range(100 * at, 100 * at + 12)
        made = Admission(cache, [wanted(keyspace, numbers)])
        turns = made.steps()
        for _ in range(at):
            next(turns)
        before = made.num_reserved
        cache.epochs.advance(namespace.fingerprint)
        for _ in cache.clear(namespace):
            pass
        keyspace = namespace.keyspaces[0]
        for _ in turns:
            pass
        (reserved,) = made.reservations()
        assert reserved.states.tolist() == [R] * 12
        assert check(cache, 0, 12) == []
        kept = cache.commit(reserved.parts)
        assert len(kept) == 12 - before
        assert held(cache, keyspace, numbers) == list(range(12 - before)), "the first keys were reserved last"
        assert check(cache, 0, 0) == []


@pytest.mark.parametrize("before", [0, 12])
def test_sizes_that_take_each_others_memory(before: int) -> None:
    """Each finds room alone, not all together: no less of the prompt's beginning is kept than in one step."""
    reserved = []
    for at_once in (True, False):
        cache = make_cache(pages=48, slab_pages=4, policy="lru")
        with contextlib.closing(cache.tier):
            _, other = make_keyspace(cache, b"o" * 16)
            store(cache, other, keys_of(*range(before)))
            _, keyspace = make_keyspace(cache, pages=(1, 2))
            asked = [wanted(keyspace, range(20))]
            (made,) = reserve_all(cache, asked) if at_once else finish(Admission(cache, asked))
            reserved.append(made.states.tolist())
            assert check(cache, 0, len(made.parts)) == []
            cache.abort(made.parts)
    in_one, in_steps = reserved
    assert in_one == [R] * 14 + [N] * 6
    kept = in_steps.count(R)
    assert kept >= 14
    assert in_steps == [R] * kept + [N] * (20 - kept)


def test_nothing_is_evicted_for_keys_behind_a_gap(cache: Cache) -> None:
    """Room that others make later comes too late for them. Other groups of the request go on."""
    _, keyspace = make_keyspace(cache)
    (_, second), (_, other) = make_keyspace(cache, group=1), make_keyspace(cache, b"o" * 16)
    store(cache, other, keys_of(*range(12)))
    rows = cache.find(other, keys_of(*range(12))).hit_rows
    cache.hold(rows)
    made = Admission(cache, [wanted(keyspace, range(40)), wanted(second, range(3))])
    for _ in made.steps():
        if len(rows) and made._gaps:
            cache.unhold(rows)
            rows = rows[:0]
    (reserved, also) = made.reservations()
    assert not len(rows)
    assert reserved.states.tolist() == [R] * 4 + [N] * 36
    assert also.states.tolist() == [R] * 3
    assert len(held(cache, other, range(12))) == 12 - 3
    cache.abort(np.concatenate([reserved.parts, also.parts]))
    assert check(cache, 0, 0) == []


def test_others_take_the_slots_between_two_steps(cache: Cache) -> None:
    """Nothing is kept behind the first key that got none."""
    _, keyspace = make_keyspace(cache)
    _, other = make_keyspace(cache, b"o" * 16)
    made = Admission(cache, [wanted(keyspace, range(12))])
    turns = made.steps()
    next(turns)  # there is room
    next(turns)  # the last four have theirs
    (theirs,) = reserve_all(cache, [wanted(other, range(7))])
    for _ in turns:
        pass
    (reserved,) = made.reservations()
    assert reserved.states.tolist() == [R] * 9 + [N] * 3, "from the first key on"
    assert reserved.keys.tolist() == list(range(9))
    assert cache.counters.keys_without_space == 3
    assert check(cache, 0, 16) == []
    cache.abort(theirs.parts)
    cache.abort(reserved.parts)
    assert check(cache, 0, 0) == []


def test_what_gets_slots_behind_a_key_that_got_none_gives_them_back(cache: Cache) -> None:
    """A prompt is of no use behind its first gap."""
    _, keyspace = make_keyspace(cache)
    _, other = make_keyspace(cache, b"o" * 16)
    (theirs,) = reserve_all(cache, [wanted(other, range(13))])
    made = Admission(cache, [wanted(keyspace, range(12))])
    turns = made.steps()
    while not cache.counters.keys_without_space:
        next(turns)
    cache.abort(theirs.parts)  # room for those behind it
    for _ in turns:
        pass
    (reserved,) = made.reservations()
    assert reserved.states.tolist() == [R] * 3 + [N] * 9
    assert reserved.keys.tolist() == [0, 1, 2]
    assert cache.counters.keys_without_space == 9
    assert check(cache, 0, 3) == []
    cache.abort(reserved.parts)


def test_others_evict_and_store_the_same_keys_between_two_steps(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(16)))
    made = Admission(cache, [wanted(keyspace, range(100, 110))])
    turns = made.steps()
    next(turns)
    next(turns)
    store(cache, keyspace, keys_of(100, 101, 102))
    assert held(cache, keyspace, range(16)) != list(range(16))
    for _ in turns:
        pass
    (reserved,) = made.reservations()
    assert reserved.states.tolist() == [H] * 3 + [R] * 7
    commit(cache, [reserved])
    assert held(cache, keyspace, range(100, 110)) == list(range(10))
    assert check(cache, 0, 0) == []


def test_what_others_store_between_two_steps_is_not_evicted_for_the_steps_behind(cache: Cache) -> None:
    """A key that was reported as a hit is not evicted by the very request that got this report."""
    _, keyspace = make_keyspace(cache)
    made = Admission(cache, [wanted(keyspace, range(12))])
    turns = made.steps()
    next(turns)  # there is room
    next(turns)  # the last four have theirs
    store(cache, keyspace, keys_of(5))
    next(turns)  # the four before them: one hits
    store(cache, keyspace, keys_of(*range(100, 108)))
    for _ in turns:
        pass
    (reserved,) = made.reservations()
    assert reserved.states.tolist() == [R] * 5 + [H] + [R] * 6
    commit(cache, [reserved])
    assert held(cache, keyspace, range(12)) == list(range(12))
    assert check(cache, 0, 0) == []
