"""A keyspace's number never means two keyspaces, even while the one that it belonged to is still referenced."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvoffloadd.cache.memory import keyspaces as module
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keyspaces import NUMBERS, Keyspaces
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.errors import InternalError, LimitError
from kvoffloadd.model import GroupKind, GroupSchema, KeyState

from .fakes import keys_of, make_cache, make_keyspace, store

ONE = np.array([0], np.uint16)
SCHEMA = GroupSchema(0, GroupKind.FULL, 16)


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = make_cache()
    yield made
    made.tier.close()


def namespace() -> Namespace:
    return Namespace(b"n" * 16, 0, "test", 32, 0)


def clear(cache: Cache, namespace: Namespace) -> None:
    cache.epochs.advance(namespace.fingerprint)
    for _ in cache.clear(namespace):
        pass


# --- numbers ---


def test_every_number_is_given_once_before_any_is_given_again() -> None:
    keyspaces = Keyspaces()
    owner = namespace()
    given = []
    for _ in range(NUMBERS):
        keyspace = keyspaces.add(owner, SCHEMA, [0])
        given.append(keyspace.id)
        keyspaces.retire(keyspace)
    assert sorted(given) == list(range(NUMBERS))


def test_a_number_is_nobody_else_s_while_its_space_is_referred_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The space may be on the table or off it."""
    monkeypatch.setattr(module, "NUMBERS", 8)
    keyspaces = Keyspaces()
    owner = namespace()
    kept = keyspaces.add(owner, SCHEMA, [0])
    for _ in range(2):
        keyspaces.retire(kept)
        assert not keyspaces.has(kept)
    for _ in range(20):
        other = keyspaces.add(owner, SCHEMA, [0])
        assert other.id != kept.id
        keyspaces.retire(other)
    number = kept.id
    del kept, other
    assert number in {keyspaces.add(owner, SCHEMA, [0]).id for _ in range(8)}


def test_when_no_number_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMBERS", 4)
    keyspaces = Keyspaces()
    owner = namespace()
    held = [keyspaces.add(owner, SCHEMA, [0]) for _ in range(4)]
    keyspaces.retire(held[2])
    with pytest.raises(LimitError):
        keyspaces.add(owner, SCHEMA, [0])
    del held[2]
    assert keyspaces.add(owner, SCHEMA, [0]).id == 2


def test_a_cap_for_each_user() -> None:
    keyspaces = Keyspaces()
    keyspaces.groups_max = 3
    owner, other = namespace(), Namespace(b"o" * 16, 7, "test", 32, 0)
    held = [keyspaces.add(owner, SCHEMA, [0]) for _ in range(3)]
    with pytest.raises(LimitError, match="uid 0 has 3 of 3 groups"):
        keyspaces.check_room(0, 1)
    keyspaces.check_room(7, 3)
    keyspaces.check_room(0, 3, cleared=True)
    with pytest.raises(LimitError, match="what was cleared is held by leases"):
        keyspaces.check_room(0, 4, cleared=True)
    keyspaces.add(other, SCHEMA, [0])
    assert keyspaces.by_uid == {0: 3, 7: 1}
    held[0].rows = 1
    for keyspace in held[:2]:
        keyspaces.retire(keyspace)
    keyspaces.check_room(0, 1)
    with pytest.raises(LimitError):
        keyspaces.check_room(0, 2)
    held[0].rows = 0
    keyspaces.let_go(held[0])
    keyspaces.retire(held[2])
    assert keyspaces.by_uid == {7: 1}


def test_a_namespace_that_nobody_uses_makes_room_when_its_last_key_has_gone(cache: Cache) -> None:
    cache.entries.keyspaces.groups_max = 1
    owner, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(1))
    cache.close_namespace(owner)
    other = cache.open_namespace(b"o" * 16, 0, "test", 32)
    with pytest.raises(LimitError):
        cache.check_groups(other, {0})
    cache.drop(cache.find(keyspace, keys_of(1)).hit_rows)
    cache.check_groups(other, {0})


def test_a_number_that_is_asked_for() -> None:
    keyspaces = Keyspaces()
    owner = namespace()
    assert keyspaces.add(owner, SCHEMA, [0], 70).id == 70
    with pytest.raises(ValueError, match="another space's"):
        keyspaces.add(owner, SCHEMA, [0], 70)
    assert [keyspaces.add(owner, SCHEMA, [0]).id for _ in range(3)] == [0, 1, 2]


def test_a_retired_space_stays_on_the_table_until_its_last_row_goes(cache: Cache) -> None:
    owner, old = make_keyspace(cache)
    store(cache, old, keys_of(1, 2))
    rows = cache.find(old, keys_of(1, 2)).hit_rows
    cache.hold(rows)
    clear(cache, owner)
    assert cache.entries.keyspaces.has(old)
    cache.unhold(rows[:1])
    assert cache.entries.keyspaces.has(old)
    cache.unhold(rows[1:])
    assert not cache.entries.keyspaces.has(old)
    assert check(cache, 0, 0) == []


# --- what a number is never taken for ---


def test_a_clear_takes_nobody_else_s_space_off_the_table(cache: Cache) -> None:
    """Its last row goes between two steps; the next keyspace comes before the last step."""
    owner, old = make_keyspace(cache)
    store(cache, old, keys_of(1))
    rows = cache.find(old, keys_of(1)).hit_rows
    cache.hold(rows)
    cache.epochs.advance(owner.fingerprint)
    walk = cache.clear(owner)
    next(walk)
    next(walk)
    cache.unhold(rows)
    cache.entries.keyspaces._next = old.id
    other = make_keyspace(cache, b"o" * 16)[1]
    for _ in walk:
        pass
    assert other.id != old.id
    assert cache.entries.keyspaces.has(other)
    assert store(cache, other, keys_of(7)).size == 1
    assert cache.find(other, keys_of(7)).hits.all()
    assert check(cache, 0, 0) == []


@pytest.mark.parametrize("how", ["cleared", "cleared while a lease holds it", "forgotten"])
def test_who_still_has_a_retired_space_reaches_nothing(cache: Cache, how: str) -> None:
    """Neither what it had, nor what others store; and nothing is stored through it."""
    owner, old = make_keyspace(cache)
    if how != "forgotten":
        store(cache, old, keys_of(1))
    held = np.zeros(0, np.uint32)
    if how == "cleared while a lease holds it":
        held = cache.find(old, keys_of(1)).hit_rows
        cache.hold(held)
    if how == "forgotten":
        cache.close_namespace(owner)
    else:
        clear(cache, owner)
    cache.entries.keyspaces._next = old.id
    other = make_keyspace(cache, b"o" * 16)[1]
    store(cache, other, keys_of(1, 2))
    assert other.id != old.id
    found = cache.find(old, keys_of(1, 2))
    assert found.rows.tolist() == [-1, -1]
    assert found.states.tolist() == [int(KeyState.MISS)] * 2
    assert not found.hits.any()
    assert cache.snapshot(old, 0) == (b"", 0)
    rows = [row for step in cache.entries.scan(old) for row in step.tolist()]
    assert rows == held.tolist()
    before = check(cache, len(held), 0)
    with pytest.raises(InternalError):
        reserve(cache, old, keys_of(3), ONE, 0)
    with pytest.raises(InternalError):
        cache.entries.insert([(old, 1)], keys_of(3), np.zeros(1, np.uint64), np.zeros(1, np.uint32))
    assert check(cache, len(held), 0) == before == []
    cache.unhold(held)


def test_nothing_is_found_through_a_space_that_is_being_cleared(cache: Cache) -> None:
    """This holds from the first step on, while its rows are still there."""
    owner, old = make_keyspace(cache)
    store(cache, old, keys_of(1))
    cache.epochs.advance(owner.fingerprint)
    walk = cache.clear(owner)
    next(walk)
    assert old.rows == 1
    assert not cache.find(old, keys_of(1)).hits.any()
    assert cache.snapshot(old, 0) == (b"", 0)
    for _ in walk:
        pass


def test_a_walk_of_a_space_that_goes_meanwhile(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and never meets rows of another keyspace."""
    monkeypatch.setattr("kvoffloadd.cache.memory.keytable.STEP_ROWS", 4)
    owner, old = make_keyspace(cache)
    store(cache, old, keys_of(*range(12)))
    walk = cache.entries.scan(old)
    seen = next(walk).tolist()
    clear(cache, owner)
    cache.entries.keyspaces._next = old.id
    store(cache, make_keyspace(cache, b"o" * 16)[1], keys_of(*range(12)))
    assert [row for step in walk for row in step.tolist()] == []
    assert len(seen) == 4


def test_the_audit_sees_a_namespace_s_space_that_is_off_the_table(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    cache.entries.keyspaces.retire(keyspace)
    assert any("retired or not on the table" in finding for finding in check(cache, 0, 0))


def test_a_namespace_that_is_forgotten_gives_its_numbers_back_at_once(cache: Cache) -> None:
    """A client that opens and leaves namespaces all day never runs out, with or without a garbage collector."""
    numbers = set()
    for _ in range(3):
        cache.entries.keyspaces._next = 0
        owner, keyspace = make_keyspace(cache)
        numbers.add(keyspace.id)
        cache.close_namespace(owner)
        del owner, keyspace
    assert numbers == {0}
