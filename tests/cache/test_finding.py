"""Very many keys are found over several turns: what happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.memory import audit
from kvoffloadd.cache.memory import steppedlookup as finding
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.memory.steppedlookup import SteppedLookup, find_in_steps
from kvoffloadd.model import KeyState, U64Array
from kvoffloadd.server.context import Context
from tests.cache.fakes import keys_of, make_cache, make_context, make_keyspace, store
from tests.steps import finish

ONE_PART = np.zeros(1, np.uint16)
PAGES = 16
HIT, MISS, PENDING = KeyState.HIT, KeyState.MISS, KeyState.PENDING


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "STEP_KEYS", 4)


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = make_cache(pages=PAGES, slab_pages=4)
    yield cache
    assert audit.check(cache, 0, 0) == [], "all is let go"
    cache.tier.close()


@pytest.fixture
def keyspace(cache: Cache) -> Keyspace:
    return make_keyspace(cache)[1]


def begun(cache: Cache, keyspace: Keyspace, keys: U64Array, reserved: int = 0) -> tuple[SteppedLookup, Iterator[None]]:
    """Begins a lookup and makes its first step; `reserved` parts are reserved."""
    found = SteppedLookup(cache, [(keyspace, keys)])
    steps = found.steps()
    next(steps)
    assert audit.check(cache, found.num_held, reserved) == []
    return found, steps


def states(found: SteppedLookup) -> list[int]:
    (result,) = found.results()
    assert (result.hits == (result.states == HIT)).all()
    assert (result.rows[result.states == MISS] < 0).all()
    return [int(state) for state in result.states]


def test_it_says_what_find_all_says(cache: Cache, keyspace: Keyspace) -> None:
    other = make_keyspace(cache, b"o" * 16)[1]
    store(cache, keyspace, keys_of(1, 2, 3, 4, 5, 6))
    store(cache, other, keys_of(3))
    pending = reserve(cache, keyspace, keys_of(9), ONE_PART, 0).parts
    groups = [(keyspace, keys_of(*range(11))), (other, keys_of()), (other, keys_of(4, 3, 3))]
    found = SteppedLookup(cache, groups)
    assert len(list(found.steps())) == 4, "of 14 keys"
    for result, expected in zip(found.results(), cache.find_all(groups), strict=True):
        arrays: Any
        for arrays in zip(result, expected, strict=True):
            one, another = arrays
            assert one.dtype == another.dtype
            assert one.tolist() == another.tolist()
    found.release()
    cache.abort(pending)


def test_what_was_found_is_not_evicted(cache: Cache, keyspace: Keyspace) -> None:
    """What was not yet is."""
    store(cache, keyspace, keys_of(*range(PAGES)))
    found, steps = begun(cache, keyspace, keys_of(*range(8)))
    store(cache, keyspace, keys_of(*range(100, 100 + PAGES)))
    for _ in steps:
        pass
    assert states(found) == [HIT] * 4 + [MISS] * 4
    found.release()
    store(cache, keyspace, keys_of(*range(200, 200 + PAGES)))
    assert cache.find(keyspace, keys_of(*range(8))).num_hits == 0, "it is, afterwards"


def test_what_was_cleared_is_a_miss(cache: Cache, keyspace: Keyspace) -> None:
    store(cache, keyspace, keys_of(*range(8)))
    found, steps = begun(cache, keyspace, keys_of(*range(8)))
    for _ in cache.clear(keyspace.namespace):
        pass
    for _ in steps:
        pass
    assert states(found) == [MISS] * 8
    assert cache.tier.num_free(1) == PAGES - 4, "they are held"
    found.release()
    assert cache.tier.num_free(1) == PAGES


def test_what_turned_out_to_be_wrong_is_a_miss(cache: Cache, keyspace: Keyspace) -> None:
    store(cache, keyspace, keys_of(*range(8)))
    found, steps = begun(cache, keyspace, keys_of(*range(8)))
    cache.drop(cache.find(keyspace, keys_of(1, 6)).hit_rows)
    for _ in steps:
        pass
    assert states(found) == [HIT, MISS, HIT, HIT, HIT, HIT, MISS, HIT]
    found.release()


def test_the_row_of_a_store_that_failed_is_not_another_keys(cache: Cache, keyspace: Keyspace) -> None:
    """Its row would be the next to be given away."""
    pending = reserve(cache, keyspace, keys_of(0), ONE_PART, 0).parts
    found, steps = begun(cache, keyspace, keys_of(*range(5)), 1)
    cache.abort(pending)
    store(cache, keyspace, keys_of(50))
    for _ in steps:
        pass
    assert states(found) == [MISS] * 5
    found.release()


def test_rows_that_lose_their_slots_are_not_held(cache: Cache, keyspace: Keyspace) -> None:
    """There are only as many rows as slots: a peer that lets a reservation go while another looks for its keys could
    leave none for the next store.
    """
    theirs = reserve(cache, keyspace, keys_of(*range(PAGES)), ONE_PART, 0).parts
    found, steps = begun(cache, keyspace, keys_of(*range(PAGES)), PAGES)
    for _ in steps:
        pass
    cache.abort(theirs)
    assert audit.check(cache, found.num_held, 0) == []
    store(cache, keyspace, keys_of(*range(100, 100 + PAGES)))
    assert states(found) == [MISS] * PAGES
    found.release()


def test_a_key_of_which_a_part_is_committed_is_held(cache: Cache) -> None:
    _, wide = make_keyspace(cache, b"w" * 16, pages=(1, 1))
    store(cache, wide, keys_of(*range(8)), parts=[0])
    found, steps = begun(cache, wide, keys_of(*range(8)))
    store(cache, wide, keys_of(*range(100, 100 + PAGES)), parts=[0])
    for _ in steps:
        pass
    assert found.rows()[0][:4].min() >= 0
    assert found.rows()[0][4:].max() < 0, "these were evicted before they were found"
    found.release()


def test_what_is_evicted_after_its_release_goes_from_a_prompts_end_on() -> None:
    """What was set aside while it was held is put back in the prompt's order, not step by step."""
    cache = make_cache(pages=PAGES, slab_pages=4, policy="lru")
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(8)))
    found, steps = begun(cache, keyspace, keys_of(*range(8)))
    for _ in steps:
        pass
    assert keyspace.queue is not None
    assert not len(cache.eviction.victims([keyspace.queue], 8))
    assert cache.eviction.any_aside
    found.release()
    order = cache.entries.index.keys[cache.eviction.victims([keyspace.queue], 8)][:, 1].tolist()
    assert order == [7, 6, 5, 4, 3, 2, 1, 0]
    assert audit.check(cache, 0, 0) == []
    cache.tier.close()


@pytest.mark.parametrize(("group_keys", "steps"), [(0, 5), (2, 10)])
def test_many_small_groups_take_few_steps(
    cache: Cache, group_keys: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step finds four keys here; a group counts as some more."""
    monkeypatch.setattr(finding, "GROUP_KEYS", group_keys)
    groups = [(make_keyspace(cache, bytes([number]) * 16)[1], keys_of(1, 2)) for number in range(10)]
    found = SteppedLookup(cache, groups)
    assert len(list(found.steps())) == steps
    assert [len(rows) for rows in found.rows()] == [2] * 10
    found.release()


def test_what_is_stored_meanwhile_hits(cache: Cache, keyspace: Keyspace) -> None:
    pending = reserve(cache, keyspace, keys_of(0, 1), ONE_PART, 0).parts
    found, steps = begun(cache, keyspace, keys_of(*range(5)), 2)
    assert states(found) == [PENDING, PENDING, MISS, MISS]
    cache.commit(pending)
    for _ in steps:
        pass
    assert states(found) == [HIT, HIT, MISS, MISS, MISS]
    found.release()


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_between_two_steps_the_audit_knows_what_is_held_and_a_close_lets_go(
    cache: Cache, keyspace: Keyspace, turns: int
) -> None:
    store(cache, keyspace, keys_of(*range(10)))
    context = make_context(cache)
    steps = find_in_steps(cache, [(keyspace, keys_of(*range(12)))])
    for _ in range(turns):
        next(steps)
        assert cache.unfinished
        assert audit.check(cache, *Context._accounts(context)) == []
    steps.close()
    assert not cache.unfinished
    assert audit.check(cache, 0, 0) == []


def test_the_steps_return_what_is_found_and_hold_nothing(cache: Cache, keyspace: Keyspace) -> None:
    store(cache, keyspace, keys_of(*range(10)))
    for many in (4, 12):
        (result,) = finish(find_in_steps(cache, [(keyspace, keys_of(*range(many)))]))
        assert result.states.tolist() == [HIT] * min(many, 10) + [MISS] * max(many - 10, 0)
        assert not cache.unfinished
        assert audit.check(cache, 0, 0) == []
