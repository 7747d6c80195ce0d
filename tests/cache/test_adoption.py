"""What a successor takes over from an arena, and what it leaves: see also the stateful test."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvoffloadd.cache.adoption import Estate, adopt, estate_of
from kvoffloadd.cache.audit import check
from kvoffloadd.cache.cache import Cache
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, U64Array
from kvoffloadd.tiers import pool as pool_module
from kvoffloadd.tiers.pool import Pool

from .fakes import keys_of, make_cache, make_space, store

PAGES, SLAB_PAGES = 64, 16
NAME = b"n" * 16


def heir(cache: Cache, **changes: int) -> tuple[Cache, Estate]:
    """What a daemon starts with after this cache's process was killed; the estate with these changes."""
    pool = Pool(os.dup(cache.tier.pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
    successor = make_cache(PAGES, SLAB_PAGES, pool)
    estate = estate_of(pool.names()) or Estate(0, 0, {}, [])
    successor.epochs.merge(
        changes.get("base", estate.base), changes.get("last", estate.last), estate.epochs if not changes else {}
    )
    return successor, estate


def hits(cache: Cache, keys: U64Array, pages: tuple[int, ...] = (1,)) -> list[bool]:
    """Of the keys, as a worker that registers anew would be told."""
    found: list[bool] = cache.find(make_space(cache, NAME, pages=pages)[1], keys).hits.tolist()
    return found


def test_what_was_sealed_is_taken_over() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    space = make_space(cache, NAME)[1]
    store(cache, space, keys_of(1, 2, 3))
    store(cache, space, keys_of(4), seals=False)
    cache.reserve(space, keys_of(5), np.array([0], np.uint16), 0)
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 3
    assert check(after, 0, 0) == []
    assert hits(after, keys_of(1, 2, 3, 4, 5)) == [True, True, True, False, False]
    figures = after.figures()
    assert (figures["keys_adopted"], figures["parts_not_adopted"]) == (3, 0)


def test_nothing_is_taken_over_twice() -> None:
    """Of keys whose parts were not all there nothing is left for the successor's successor."""
    cache = make_cache(PAGES, SLAB_PAGES)
    space = make_space(cache, NAME, pages=(1, 2))[1]
    store(cache, space, keys_of(1), [0])
    store(cache, space, keys_of(2), [1])
    store(cache, space, keys_of(3))
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 1
    assert after.figures()["parts_not_adopted"] == 2
    assert check(after, 0, 0) == []
    again, estate = heir(after)
    assert len(adopt(again, estate)) == 1
    assert again.figures()["parts_not_adopted"] == 0
    assert hits(again, keys_of(1, 2, 3), (1, 2)) == [False, False, True]


def test_what_was_dropped_while_a_lease_held_it() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    space = make_space(cache, NAME)[1]
    store(cache, space, keys_of(1, 2))
    rows = cache.find(space, keys_of(1, 2)).hit_rows
    cache.hold(rows)
    cache.drop(rows[:1])
    after, estate = heir(cache)
    adopt(after, estate)
    assert hits(after, keys_of(1, 2)) == [False, True]


def test_a_late_checksum_of_what_was_dropped() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    space = make_space(cache, NAME)[1]
    parts = store(cache, space, keys_of(1), seals=False)
    rows = cache.find(space, keys_of(1)).hit_rows
    cache.hold(rows)
    cache.drop(rows)
    cache.seal(parts, cache.entries.parts.generation[parts], np.zeros((1, 2), np.uint64))
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 0


def test_a_clear_holds_from_its_first_step_on() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    namespace, space = make_space(cache, NAME)
    store(cache, space, keys_of(1))
    cache.epochs.advance(NAME)
    next(cache.clear(namespace))
    cache.remember()
    store(cache, namespace.spaces[0], keys_of(2))
    after, estate = heir(cache)
    adopt(after, estate)
    assert hits(after, keys_of(1, 2)) == [False, True]
    assert check(after, 0, 0) == []


def test_a_clear_that_only_the_disk_remembers() -> None:
    """It was made while this arena was out of use."""
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_space(cache, NAME)[1], keys_of(1))
    after, estate = heir(cache, base=7, last=7)
    assert len(adopt(after, estate)) == 0
    assert hits(after, keys_of(1)) == [False]
    assert check(after, 0, 0) == []


def test_without_names_nothing_is_anybody_s() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_space(cache, NAME)[1], keys_of(1))
    cache.tier.pool.save_names(b"")
    pool = Pool(os.dup(cache.tier.pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
    after = make_cache(PAGES, SLAB_PAGES, pool)
    assert estate_of(pool.names()) is None
    assert len(adopt(after, None)) == 0
    assert after.figures()["parts_not_adopted"] == 1
    assert after.tier.num_free(1) == PAGES
    assert check(after, 0, 0) == []


def test_a_place_that_changed_its_size() -> None:
    """A record that says another size than its slab has is nobody's."""
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_space(cache, NAME)[1], keys_of(1, 2))
    cache.tier.pool.slabs[0] = 2
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 0
    assert check(after, 0, 0) == []


def test_the_latest_go_last() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    space = make_space(cache, NAME)[1]
    for key in (5, 3, 9):
        store(cache, space, keys_of(key))
    after, estate = heir(cache)
    rows = adopt(after, estate)
    assert after.entries.index.keys[rows, 1].tolist() == [5, 3, 9]


def test_names_are_written_before_a_key_is_and_not_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    written = []
    save = cache.tier.pool.save_names

    def count(names: bytes) -> bool:
        written.append(names)
        return save(names)

    monkeypatch.setattr(cache.tier.pool, "save_names", count)
    spaces = [make_space(cache, NAME, group=group)[1] for group in range(50)]
    assert written == [], "nobody has a key yet"
    store(cache, spaces[0], keys_of(1), seals=False)
    assert written == []
    store(cache, spaces[0], keys_of(2))
    assert len(written) == 1
    for space in spaces:
        store(cache, space, keys_of(3))
    assert len(written) == 1, "nothing has changed"
    store(cache, make_space(cache, NAME, group=50)[1], keys_of(3))
    assert len(written) == 2
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 52


def test_a_number_that_changed_hands_before_any_key_was_sealed() -> None:
    """The names that a successor finds are those of whose keys they are, not of who had the number before: also if
    the new one has told only some of its sizes.
    """
    cache = make_cache(PAGES, SLAB_PAGES)
    old, space = make_space(cache, NAME)
    store(cache, space, keys_of(1))
    rows = cache.find(space, keys_of(1)).hit_rows
    cache.drop(rows)
    number = space.id
    cache.close_namespace(old)
    del old, space
    cache.entries.spaces._next = number
    other = cache.open_namespace(b"o" * 16, 0, "test", 32)
    half = cache.declare(other, GroupSchema(0, GroupKind.FULL, 16, parts=2))
    cache.learn_parts(half, {0: PAGE_BYTES})
    assert half.id == number
    store(cache, half, keys_of(1), [0])
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 0
    assert hits(after, keys_of(1)) == [False]


def test_names_that_are_too_many_are_left_out_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user's restarts are cold then, not everybody's."""
    monkeypatch.setattr(pool_module, "NAMES_BYTES", 4000)
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_space(cache, NAME)[1], keys_of(1))
    many = cache.open_namespace(b"m" * 16, 7, "test", 32)
    for group in range(100):
        space = cache.declare(many, GroupSchema(group, GroupKind.FULL, 16))
        cache.learn_parts(space, {0: PAGE_BYTES})
    store(cache, space, keys_of(2))
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 1
    assert hits(after, keys_of(1)) == [True]
    assert check(after, 0, 0) == []


@pytest.mark.parametrize("groups", [1, 3])
def test_the_successor_goes_on(groups: int) -> None:
    """It stores, evicts and is succeeded as if it had stored all of it itself."""
    cache = make_cache(PAGES, SLAB_PAGES)
    for group in range(groups):
        store(cache, make_space(cache, NAME, group=group)[1], keys_of(*range(20)))
    after, estate = heir(cache)
    assert len(adopt(after, estate)) == 20 * groups
    for group in range(groups):
        store(after, make_space(after, NAME, group=group)[1], keys_of(*range(100, 150)))
        assert check(after, 0, 0) == []
    assert after.eviction.keys_evicted > 0
    again, estate = heir(after)
    assert len(adopt(again, estate)) == PAGES
    assert check(again, 0, 0) == []
