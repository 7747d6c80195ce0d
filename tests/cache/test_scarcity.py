"""Part records run short: who serves whom, who has to go, and who can't starve whom."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.memory import recordreclaim as scarcity_module
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keytable import KeyTable, RowState
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.reservation import Wanted, reserve, reserve_all
from kvoffloadd.cache.memory.runallocator import BLOCK
from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.model import GroupKind, GroupSchema, I64Array, KeyState, U32Array

from .fakes import keys_of, make_cache, store

ONE = np.array([0], np.uint16)
H, M, P, R, N = (int(s) for s in (KeyState.HIT, KeyState.MISS, KeyState.PENDING, KeyState.RESERVED, KeyState.NO_SPACE))


@pytest.fixture(params=["", *sorted(POLICIES)])
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    made = make_cache(pages=1024, slab_pages=64, policy=request.param)
    yield made
    made.tier.close()


def keyspace_of(cache: Cache, name: str, width: int, uid: int = 0, known: int = 1) -> tuple[Namespace, Keyspace]:
    """Keys of `width` parts; ranks have declared the sizes of the first `known`: a page each."""
    namespace = cache.open_namespace(name.encode() * 16, uid, name, 32)
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16, parts=width))
    for part in range(known):
        cache.set_part_bytes(keyspace, {part: 4096})
    return namespace, keyspace


def capacity(cache: Cache) -> int:
    return cache.entries.parts.runs.max_records


def left(cache: Cache) -> int:
    return capacity(cache) - cache.entries.parts.runs.taken


def reserve_keys(cache: Cache, keyspace: Keyspace, *numbers: int) -> tuple[list[int], I64Array]:
    made = reserve(cache, keyspace, keys_of(*numbers), ONE, 0)
    return made.states.tolist(), made.parts


def looked_at(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Begin and end of all records that searches look at from now on."""
    owners, seen = KeyTable.owners, list[tuple[int, int]]()

    def note(records: I64Array) -> I64Array:
        if len(records):
            seen.append((int(records[0]), int(records[-1]) + 1))
        return owners(cache.entries, records)

    monkeypatch.setattr(cache.entries, "owners", note)
    return seen


def fill(cache: Cache, wide: Keyspace, others: Keyspace) -> int:
    """Two users' keys of one part of 1,024 take all records, but for less than another one takes. The first one's."""
    num_keys = int(cache.scarcity.share) // 1024
    store(cache, wide, keys_of(*range(num_keys)), [0])
    store(cache, others, keys_of(*range(left(cache) // 1024)), [0])
    assert left(cache) < 1024
    assert cache.eviction.keys_evicted == 0
    return num_keys


def test_records_of_one_width_serve_another_once_they_are_free(cache: Cache) -> None:
    namespace, wide = keyspace_of(cache, "a", 1024, uid=1)
    fill(cache, wide, keyspace_of(cache, "b", 1024, uid=2)[1])
    for _ in cache.clear(namespace):
        pass
    _, narrow = keyspace_of(cache, "c", 3, uid=3, known=3)
    evicted = cache.eviction.keys_evicted
    store(cache, narrow, keys_of(*range(300)))
    assert cache.find(narrow, keys_of(*range(300))).hits.all()
    assert cache.eviction.keys_evicted == evicted, "there were enough that were free"
    assert check(cache, 0, 0) == []


def test_exactly_as_many_keys_go_for_their_records_as_are_needed(cache: Cache) -> None:
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    _, others = keyspace_of(cache, "b", 1024, uid=2)
    filled = fill(cache, wide, others)
    _, narrow = keyspace_of(cache, "c", 2, uid=3, known=2)
    evicted, spare = cache.eviction.keys_evicted, left(cache) // 2
    assert reserve_keys(cache, narrow, *range(spare))[0] == [R] * spare
    assert cache.eviction.keys_evicted == evicted
    assert reserve_keys(cache, narrow, 1000, 1001, 1002)[0] == [R] * 3
    assert cache.eviction.keys_evicted == evicted + 1, "one of 1,024 records does for three of two"
    assert reserve_keys(cache, narrow, *range(2000, 2000 + 509))[0] == [R] * 509
    assert cache.eviction.keys_evicted == evicted + 1, "and for 509 more"
    assert wide.rows + others.rows == filled + (capacity(cache) // 1024 - filled) - 1
    assert check(cache, 0, reserved=spare + 512) == []


def test_keys_that_can_be_loaded_stay_while_others_lack_parts(cache: Cache) -> None:
    _, narrow = keyspace_of(cache, "c", 1, uid=3)
    store(cache, narrow, keys_of(*range(200)))  # the oldest: any policy would have them go first
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    fill(cache, wide, keyspace_of(cache, "b", 1024, uid=2)[1])
    _, eights = keyspace_of(cache, "d", 8, uid=4)
    count = left(cache) // 8 + 100
    assert reserve_keys(cache, eights, *range(count))[0] == [R] * count
    assert cache.find(narrow, keys_of(*range(200))).hits.all()
    assert cache.eviction.keys_evicted == 1
    assert check(cache, 0, reserved=count) == []


def test_what_is_named_leased_or_in_flight_does_not_go_for_its_records(cache: Cache) -> None:
    _, wide = keyspace_of(cache, "a", 1024, uid=1, known=2)
    _, others = keyspace_of(cache, "b", 1024, uid=2)
    filled = fill(cache, wide, others)
    in_flight = reserve(cache, wide, keys_of(*range(filled - 2)), np.array([1], np.uint16), 0).parts
    rows = cache.entries.find(others, keys_of(*range(100)))
    leased = rows[rows >= 0].astype(np.uint32)
    cache.hold(leased)
    evicted = cache.eviction.keys_evicted
    # Of two that could go one is named.
    states, parts = reserve_keys(cache, wide, filled - 1, 5000, 5001)
    assert states == [H, R, N]
    assert cache.eviction.keys_evicted == evicted + 1
    assert cache.entries.find(wide, keys_of(*range(filled - 2), filled - 1)).min() >= 0
    cache.abort(np.concatenate([parts, in_flight]))
    cache.unhold(leased)
    assert check(cache, 0, 0) == []


def test_keys_of_many_widths_go_together_where_a_wide_one_is_to_lie(cache: Cache) -> None:
    """Nothing lacks a part: then what can be loaded goes, for as many records in a row as are needed."""
    runs = cache.entries.parts.runs
    _, narrow = keyspace_of(cache, "c", 1, uid=3)
    store(cache, narrow, keys_of(*range(1000)))
    rest = runs.ready(BLOCK, 1 << 20)  # taken by others: nothing but the first block is left
    kept = runs.allocate(BLOCK, rest)
    tail = runs.allocate(1, runs.ready(1, BLOCK))
    runs.free(1, tail[::2])
    _, wide = keyspace_of(cache, "a", 1000, uid=1)
    states, parts = reserve_keys(cache, wide, 1, 2)
    assert states == [R, N]
    assert cache.find(narrow, keys_of(*range(1000))).hits.sum() <= 24
    cache.abort(parts)
    runs.free(BLOCK, kept)
    runs.free(1, tail[1::2])
    assert check(cache, 0, 0) == []


def test_one_user_can_not_take_what_others_need(cache: Cache) -> None:
    """Though all of his keys are in flight, so that none of them can go."""
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    states, parts = reserve_keys(cache, wide, *range(200))
    took = states.count(R)
    assert states == [R] * took + [N] * (200 - took)
    assert took == cache.scarcity.share // 1024
    _, narrow = keyspace_of(cache, "b", 8, uid=2, known=8)
    every = np.arange(8, dtype=np.uint16)
    assert reserve(cache, narrow, keys_of(*range(100)), every, 0).states.tolist() == [R] * 100
    assert left(cache) >= capacity(cache) // 4 - 1024 - 800
    assert left(cache) + 800 >= cache.tier.num_pages, "what is left would do for a memory full of complete keys"
    assert check(cache, 0, reserved=took + 800) == []
    cache.abort(parts)
    assert reserve_keys(cache, wide, *range(300, 310))[0] == [R] * 10
    assert check(cache, 0, reserved=810) == []


def test_who_has_his_share_makes_room_for_his_own_keys_alone(cache: Cache) -> None:
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    _, others = keyspace_of(cache, "b", 1024, uid=2)
    store(cache, others, keys_of(1, 2, 3), [0])
    filled = cache.scarcity.share // 1024
    store(cache, wide, keys_of(*range(filled)), [0])
    assert left(cache) > 4 * 1024
    evicted = cache.eviction.keys_evicted
    store(cache, wide, keys_of(1000, 1001, 1002), [0])
    assert cache.eviction.keys_evicted == evicted + 3
    assert (wide.rows, others.rows) == (filled, 3)
    _, small = keyspace_of(cache, "c", 5, uid=1)
    assert reserve_keys(cache, small, *range(10))[0] == [R] * 10
    assert wide.rows >= filled - 1
    assert check(cache, 0, reserved=10) == []


def test_who_can_not_be_served_evicts_nothing(cache: Cache) -> None:
    _, small = keyspace_of(cache, "s", 2, uid=1)
    store(cache, small, keys_of(*range(10)), [0])
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    reserve_keys(cache, wide, *range(200))
    assert small.rows == 10 or wide.rows == cache.scarcity.share // 1024
    evicted, rows = cache.eviction.keys_evicted, small.rows
    assert reserve_keys(cache, wide, 900)[0] == [N], "ten keys of two are less than one of 1,024"
    assert (cache.eviction.keys_evicted, small.rows) == (evicted, rows)


def test_keys_that_have_their_records_need_none(cache: Cache) -> None:
    _, wide = keyspace_of(cache, "a", 1024, uid=1, known=2)
    took = reserve_keys(cache, wide, *range(200))[0].count(R)
    again = [Wanted.from_first(wide, keys_of(*range(took + 5)), np.array([1], np.uint16), 0)]
    assert reserve_all(cache, again)[0].states.tolist() == [R] * took + [N] * 5


def test_a_search_goes_on_where_the_last_one_ended(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarcity_module, "WINDOW", BLOCK)
    monkeypatch.setattr(scarcity_module, "WINDOWS_MAX", 1)
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    _, others = keyspace_of(cache, "b", 1024, uid=2)
    fill(cache, wide, others)
    _, narrow = keyspace_of(cache, "c", 1024, uid=3)
    served = sum(reserve_keys(cache, narrow, *range(10 * n, 10 * n + 3))[0].count(R) for n in range(6))
    assert served >= 6
    assert check(cache, 0, reserved=served) == []


def test_a_search_that_goes_round_meets_no_key_twice(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in use has grown since one ended at its end, so that the next one begins amid a window."""
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    _, others = keyspace_of(cache, "b", 1024, uid=2)
    store(cache, wide, keys_of(*range(8)), [0])
    reserved = reserve_keys(cache, wide, *range(100, 160))[1]
    cache.commit(reserved)
    store(cache, others, keys_of(*range(16)), [0])
    owners = cache.entries.owners(np.arange(scarcity_module.WINDOW))
    held = np.unique(owners[owners >= 0]).astype(np.uint32)
    cache.hold(held)
    for hand in (0, 1, 3 * BLOCK, cache.entries.parts.runs.used - 1, cache.entries.parts.runs.used):
        cache.scarcity._hand = hand
        cache.entries.barren.forget_all()
        seen = looked_at(cache, monkeypatch)
        list(cache.scarcity._windows(None, None, spares=False))
        assert sorted(seen)[0][0] == 0
        assert sum(stop - start for start, stop in seen) == cache.entries.parts.runs.used
    cache.scarcity._hand = 9 * BLOCK
    evict, gone = cache.scarcity._evict, []

    def note(rows: U32Array) -> None:
        gone.extend(rows.tolist())
        evict(rows)

    monkeypatch.setattr(cache.scarcity, "_evict", note)
    evicted, before = cache.eviction.keys_evicted, cache.entries.records_by_uid[1]
    states, parts = reserve_keys(cache, wide, *range(1000, 1051))
    assert len(gone) == len(set(gone)) == cache.eviction.keys_evicted - evicted > 0
    assert cache.entries.records_by_uid[1] == before + 1024 * (states.count(R) - len(gone))
    assert check(cache, len(held), reserved=len(parts)) == []


def test_whose_spaces_are_whose_is_looked_up_once_per_search(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarcity_module, "WINDOW", BLOCK)
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    took = reserve_keys(cache, wide, *range(200))[0].count(R)  # none of them may go
    values, asked = cache.entries.keyspaces.values, []

    def note() -> ValuesView[Keyspace]:
        asked.append(1)
        return values()

    monkeypatch.setattr(cache.entries.keyspaces, "values", note)
    assert reserve_keys(cache, wide, 900)[0] == [N]
    assert 1 <= len(asked) <= 2 < took


def test_who_has_his_share_is_searched_for_in_vain_once(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts until something of this user's is let go: then that place is searched, and no other."""
    monkeypatch.setattr(scarcity_module, "WINDOW", BLOCK)
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    _, others = keyspace_of(cache, "b", 8, uid=2)
    parts = reserve_keys(cache, wide, *range(200))[1]
    for number in (900, 901):  # a search that is long goes on with the next one
        assert reserve_keys(cache, wide, number)[0] == [N]
    seen = looked_at(cache, monkeypatch)
    for number in range(1000, 1020):
        assert reserve_keys(cache, wide, number)[0] == [N]
    assert seen == []
    store(cache, others, keys_of(1, 2, 3), [0])
    assert reserve_keys(cache, wide, 1020)[0] == [N]
    assert seen == [], "that was another's"
    cache.commit(parts[:1])
    states, more = reserve_keys(cache, wide, 1021, 1022)
    assert states == [R, N]
    first = int(cache.entries.first[cache.entries.parts.row[parts[0]]])
    assert {start // BLOCK for start, _ in seen} == {first // BLOCK}
    del seen[:]
    rows = cache.entries.parts.row[parts[1:2]]
    cache.hold(rows)
    cache.commit(parts[1:2])
    assert reserve_keys(cache, wide, 1023)[0] == [N]
    del seen[:]
    cache.unhold(rows)
    assert reserve_keys(cache, wide, 1024)[0] == [R]
    assert len(seen) == 1
    assert check(cache, 0, reserved=len(parts) - 2 + len(more) + 1) == []


def test_a_search_is_in_vain_once_where_nobody_s_keys_may_go(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarcity_module, "WINDOW", BLOCK)
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    _, others = keyspace_of(cache, "b", 1024, uid=2)
    _, third = keyspace_of(cache, "c", 1024, uid=3)
    took = sum(reserve_keys(cache, whose, *range(100))[0].count(R) for whose in (wide, others))
    for number in (900, 901):
        assert reserve_keys(cache, third, number)[0] == [N]
    seen = looked_at(cache, monkeypatch)
    for number in range(2, 12):
        assert reserve_keys(cache, third, number)[0] == [N]
    assert seen == []
    assert check(cache, 0, reserved=took) == []


def test_what_is_known_of_searches_is_forgotten_once_there_is_room(cache: Cache) -> None:
    _, wide = keyspace_of(cache, "a", 1024, uid=1)
    parts = reserve_keys(cache, wide, *range(200))[1]
    assert reserve_keys(cache, wide, 900)[0] == [N]
    assert cache.entries.barren
    cache.abort(parts)
    reserve_keys(cache, wide, 1)
    assert not cache.entries.barren


ACTIONS = st.tuples(
    st.sampled_from(["reserve", "reserve", "end", "end", "hold", "unhold", "clear"]),
    st.sampled_from(range(4)),
    st.sampled_from([1, 7, 60]),
    st.booleans(),
)


@given(actions=st.lists(ACTIONS, max_size=40))
@settings(deadline=None)
def test_what_counts_as_barren_is(actions: list[tuple[str, int, int, bool]]) -> None:
    """Whatever is reserved, committed, freed, held, released and cleared, for any user and in any order."""
    cache = make_cache(pages=1024, slab_pages=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scarcity_module, "WINDOW", BLOCK)
        patch.setattr(scarcity_module, "WINDOWS_MAX", 4)
        spaces = [keyspace_of(cache, name, width, uid) for name, width, uid in
                  (("a", 1024, 1), ("b", 1, 1), ("c", 1024, 2), ("d", 900, 3))]  # fmt: skip
        reserved, held, numbers = list[I64Array](), list[U32Array](), count()
        for what, which, amount, flag in actions:
            namespace, keyspace = spaces[which]
            if what == "reserve":
                reserved.append(reserve_keys(cache, keyspace, *(next(numbers) for _ in range(amount)))[1])
            elif what == "end" and reserved:
                (cache.commit if flag else cache.abort)(reserved.pop(0))
            elif what == "hold":
                rows = np.flatnonzero(cache.entries.state[: cache.entries.index.rows_end] == RowState.LIVE)
                held.append(rows.astype(np.uint32)[which :: 3 + amount])
                cache.hold(held[-1])
            elif what == "unhold" and held:
                cache.unhold(held.pop(0))
            elif what == "clear":
                for _ in cache.clear(namespace):
                    pass
                spaces[which] = namespace, namespace.keyspaces[0]
            for (uid, spares), barren in cache.entries.barren._flags.items():
                of_user = None if uid is None else cache.scarcity._own_keyspaces(uid)
                records = np.arange(cache.entries.parts.runs.used)
                owners = cache.entries.owners(records[barren[records // BLOCK]])
                assert not len(cache.scarcity._idle(owners, of_user, spares=spares))
    cache.tier.close()


def test_a_late_hash_does_not_seal_a_record_that_is_of_another_width_by_now(cache: Cache) -> None:
    namespace, wide = keyspace_of(cache, "a", 1024, uid=1, known=2)
    fill(cache, wide, keyspace_of(cache, "b", 1024, uid=2)[1])
    parts = np.flatnonzero(cache.entries.parts.state != PartState.EMPTY)
    parts = parts[cache.entries.index.keyspace[cache.entries.parts.row[parts]] == wide.id]
    generations = cache.entries.parts.generation[parts]
    for _ in cache.clear(namespace):
        pass
    assert not cache.entries.parts.unverified.any()
    _, narrow = keyspace_of(cache, "c", 1, uid=3)
    fresh = store(cache, narrow, keys_of(*range(1024)), seals=False)
    late = np.isin(parts, fresh)
    assert late.any(), "a record is another key's now"
    sealed = cache.counters.parts_sealed
    cache.seal(parts[late], generations[late], np.ones((int(late.sum()), 2), np.uint64))
    assert cache.counters.parts_sealed == sealed
    assert (cache.entries.parts.state[fresh] == PartState.COMMITTED).all()
    assert check(cache, 0, 0) == []
