"""Which namespaces are forgotten, and which are looked at for it: not all that there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from kvoffloadd.cache.memory import namespaces as module
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.errors import LimitError
from kvoffloadd.model import GroupKind, GroupSchema
from tests.cache.fakes import keys_of, make_cache, make_keyspace, store

ONE = (1,)


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = make_cache(pages=1024, slab_pages=64)
    yield made
    assert check(made, 0, 0) == []
    made.tier.close()


def left(cache: Cache, number: int, *, key: int | None = None) -> Namespace:
    """A namespace of one group, perhaps with a key, that its session has left."""
    namespace, keyspace = make_keyspace(cache, number.to_bytes(16), pages=ONE)
    if key is not None:
        store(cache, keyspace, keys_of(key))
    cache.close_namespace(namespace)
    return namespace


def come_and_go(cache: Cache) -> None:
    cache.close_namespace(cache.open_namespace(b"v" * 16, 0, "visitor", 32))


def test_who_comes_or_goes_looks_at_none_of_those_with_keys(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [left(cache, number, key=number) for number in range(1, 101)]
    come_and_go(cache)  # what the last one has left behind

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("all namespaces are walked")

    seen: list[Namespace] = []
    unused = module.Namespaces.is_unused

    def look(self: module.Namespaces, namespace: Namespace) -> bool:
        seen.append(namespace)
        return unused(self, namespace)

    monkeypatch.setattr(module.Namespaces, "is_unused", look)
    for walk in ("__iter__", "values", "items", "keys"):
        monkeypatch.setattr(module.Namespaces, walk, refuse)
    come_and_go(cache)
    monkeypatch.undo()
    assert [one.label for one in seen] == ["visitor"]
    assert all(cache.namespaces[one.fingerprint] is one for one in kept)


def test_one_goes_when_its_last_key_has_gone(cache: Cache) -> None:
    one = left(cache, 1, key=1)
    (keyspace,) = one.keyspaces.values()
    cache.drop(cache.find(keyspace, keys_of(1)).hit_rows)
    assert one.fingerprint in cache.namespaces
    come_and_go(cache)
    assert one.fingerprint not in cache.namespaces
    assert keyspace.retired


def test_one_that_was_cleared_goes_also_while_a_lease_holds_what_it_had(cache: Cache) -> None:
    namespace, keyspace = make_keyspace(cache, b"c" * 16, pages=ONE)
    store(cache, keyspace, keys_of(1))
    rows = cache.find(keyspace, keys_of(1)).hit_rows
    cache.hold(rows)
    cache.close_namespace(namespace)
    for _ in cache.clear(namespace):
        pass
    come_and_go(cache)
    assert namespace.fingerprint not in cache.namespaces
    again, _ = make_keyspace(cache, b"c" * 16, pages=ONE)
    cache.unhold(rows)  # the last key of the one before goes only now
    come_and_go(cache)
    assert cache.namespaces[b"c" * 16] is again


def test_one_that_is_used_again_stays(cache: Cache) -> None:
    one = left(cache, 1)
    assert cache.open_namespace(one.fingerprint, 0, "", 32) is not one, "nobody was there, and it had no keys"
    two = left(cache, 2, key=2)
    (keyspace,) = two.keyspaces.values()
    cache.drop(cache.find(keyspace, keys_of(2)).hit_rows)
    again = cache.open_namespace(two.fingerprint, 0, "", 32)
    assert again is not two, "its groups may be declared anew"
    come_and_go(cache)
    assert cache.namespaces[two.fingerprint] is again


def test_very_many_that_are_emptied_at_once_go_some_at_a_time(cache: Cache) -> None:
    many = [left(cache, number, key=number) for number in range(1, 101)]
    for one in many:
        for _ in cache.clear(one):
            pass
    before = len(cache.namespaces)
    come_and_go(cache)
    assert before - 2 * module.LOOKED_AT <= len(cache.namespaces) < before
    for _ in range(100):
        come_and_go(cache)
    assert not cache.namespaces


def test_a_user_at_the_cap_counts_none_that_may_go(cache: Cache) -> None:
    cache.entries.keyspaces.groups_max = 100
    for number in range(1, 101):
        for _ in cache.clear(left(cache, number, key=number)):
            pass
    namespace = cache.open_namespace(b"m" * 16, 0, "mine", 32)
    cache.check_groups(namespace, set(range(100)))
    with pytest.raises(LimitError):
        cache.check_groups(namespace, set(range(101)))
    other = cache.open_namespace(b"o" * 16, 7, "other", 32)
    cache.declare(other, GroupSchema(0, GroupKind.FULL, 16))
    cache.check_groups(other, set(range(100)))


def test_the_audit_finds_one_that_would_stay(cache: Cache) -> None:
    one = left(cache, 1, key=1)
    (keyspace,) = one.keyspaces.values()
    cache.drop(cache.find(keyspace, keys_of(1)).hit_rows)
    list(cache.entries.keyspaces.emptied.take_any())
    assert any("would stay" in finding for finding in check(cache, 0, 0))
    cache.entries.keyspaces.emptied.add(one)
