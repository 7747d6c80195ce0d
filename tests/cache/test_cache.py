"""The cache's promises, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.memory import eviction
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keys import has_duplicates, keys_array
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.reservation import Wanted, reserve, reserve_all
from kvoffloadd.cache.policy import POLICIES, ghost, s3fifo
from kvoffloadd.errors import KeyWidthError, SchemaError
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, I64Array, KeyState, U32Array

from .fakes import keys_of, make_cache, make_keyspace

ONE = np.array([0], np.uint16)
BOTH = np.array([0, 1], np.uint16)
R, H, P, M, N = (int(s) for s in (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.MISS, KeyState.NO_SPACE))


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = make_cache(pages=8, slab_pages=4)
    yield made
    made.tier.close()


def store(cache: Cache, keyspace: Keyspace, *numbers: int) -> I64Array:
    """Reserve and commit at once; what was reserved."""
    reservation = reserve(cache, keyspace, keys_of(*numbers), np.arange(keyspace.schema.parts, dtype=np.uint16), 0)
    cache.commit(reservation.parts)
    return reservation.parts


def states(cache: Cache, keyspace: Keyspace, *numbers: int) -> list[int]:
    found: list[int] = cache.find(keyspace, keys_of(*numbers)).states.tolist()
    return found


def test_nothing_but_a_commit_makes_a_key_hit(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    reservation = reserve(cache, keyspace, keys_of(1, 2), ONE, 0)
    assert reservation.states.tolist() == [R, R]
    assert states(cache, keyspace, 1, 2, 3) == [P, P, M]
    assert states(cache, keyspace, 1, 2) == [P, P]
    cache.commit(reservation.parts[:1])
    cache.abort(reservation.parts[1:])
    assert states(cache, keyspace, 1, 2) == [H, M]
    assert check(cache, 0, 0) == []


def test_more_slot_sizes_than_slabs_are_warned_of_once_for_each(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(pages=8, slab_pages=4)
    for group, pages in enumerate((1, 2, 1)):
        make_keyspace(cache, group=group, pages=(pages,))
    assert (cache.figures()["slabs"], cache.figures()["slot_sizes"]) == (2, 2)
    assert caplog.text == ""
    make_keyspace(cache, group=3, pages=(3,))
    make_keyspace(cache, group=4, pages=(3,))
    assert caplog.text.count("slots of 3 sizes share 2 slabs") == 1
    assert "memory.slab_bytes" in caplog.text
    make_keyspace(cache, group=5, pages=(4,))
    assert "slots of 4 sizes share 2 slabs" in caplog.text
    cache.tier.close()


def test_keys_that_the_index_can_not_hold_get_no_space() -> None:
    cache = make_cache(pages=2048)
    cache.entries.index.hash = lambda keyspace, keys: np.full(len(keys), 7, np.uint64)  # type: ignore[method-assign]
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, *range(300))
    reservation = reserve(cache, keyspace, keys_of(*range(299, 1400)), ONE, 0)
    assert reservation.states.tolist() == [H] + [N] * 1100
    assert not len(reservation.parts)
    assert states(cache, keyspace, *range(302)) == [H] * 300 + [M] * 2
    assert check(cache, 0, 0) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_held_can_go_once_it_is_let_go(policy: str) -> None:
    cache = make_cache(pages=8, slab_pages=4, policy=policy)
    _, keyspace = make_keyspace(cache)

    def one_more(number: int) -> tuple[list[int], I64Array]:
        reservation = reserve(cache, keyspace, keys_of(number), ONE, 0)
        return reservation.states.tolist(), reservation.parts

    reserved = reserve(cache, keyspace, keys_of(*range(8)), ONE, 0).parts
    assert one_more(8)[0] == [N], "all is being written"
    cache.commit(reserved)
    assert [one_more(number)[0] for number in range(100, 109)] == [[R]] * 8 + [[N]]
    cache.abort(np.flatnonzero(cache.entries.parts.state == PartState.RESERVED))
    store(cache, keyspace, *range(8))
    rows = cache.find(keyspace, keys_of(*range(8))).hit_rows
    cache.hold(rows)
    cache.hold(rows[:4])
    assert one_more(8)[0] == [N], "all is leased"
    cache.unhold(np.concatenate([rows, rows[:2]]))
    found = [one_more(8 + n) for n in range(8)]
    assert [state for state, _ in found] == [[R]] * 6 + [[N]] * 2
    for _, parts in found[:6]:
        cache.abort(parts)
    cache.unhold(rows[2:4])
    assert one_more(20)[0] == [R]
    assert check(cache, 0, reserved=1) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_key_of_which_one_part_is_not_written_can_go(policy: str) -> None:
    cache = make_cache(pages=4, slab_pages=4, policy=policy)
    _, keyspace = make_keyspace(cache, pages=(1, 1))
    store(cache, keyspace, 1, 2)
    first = reserve(cache, keyspace, keys_of(7), ONE, 0).parts
    cache.commit(first)
    second = reserve(cache, keyspace, keys_of(7), BOTH[1:], 0).parts
    assert reserve(cache, keyspace, keys_of(8, 9), BOTH, 0).states.tolist() == [R, N]
    cache.abort(second)
    assert reserve(cache, keyspace, keys_of(9), BOTH, 0).states.tolist() == [R]
    assert check(cache, 0, reserved=4) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_request_names_in_any_group_is_no_victim_of_it(policy: str) -> None:
    cache = make_cache(pages=8, slab_pages=4, policy=policy)
    namespace, one = make_keyspace(cache)
    two = cache.declare(namespace, GroupSchema(1, GroupKind.FULL, 16))
    cache.set_part_bytes(two, {0: 4096})
    store(cache, two, 1, 2, 3)
    store(cache, one, 4, 5, 6, 7)
    request = [
        Wanted.from_first(one, keys_of(4, 8, 9), ONE, 0),
        Wanted.from_first(two, keys_of(1, 2, 10, 11, 12, 13), ONE, 0),
    ]
    found = [made.states.tolist() for made in reserve_all(cache, request)]
    assert found == [[H, R, R], [H, H, R, R, R, N]], "three of eight are named, and five are taken"
    assert states(cache, one, 4) == [H]
    assert states(cache, two, 1, 2, 3) == [H, H, M]
    assert check(cache, 0, reserved=5) == []
    assert reserve_all(cache, []) == []
    cache.tier.close()


def test_the_first_reservation_wins(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1)
    first = reserve(cache, keyspace, keys_of(1, 2), ONE, 0)
    second = reserve(cache, keyspace, keys_of(1, 2, 3), ONE, 0)
    assert first.states.tolist() == [H, R]
    assert second.states.tolist() == [H, P, R]
    assert check(cache, 0, reserved=2) == []


def test_only_complete_keys_hit(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache, pages=(1, 2))
    first = reserve(cache, keyspace, keys_of(1), ONE, 0)
    cache.commit(first.parts)
    assert states(cache, keyspace, 1) == [M], "one part of two is nothing to load"
    again = reserve(cache, keyspace, keys_of(1), ONE, 0)
    assert again.states.tolist() == [H], "this part is there"
    rest = reserve(cache, keyspace, keys_of(1), BOTH, 0)
    assert rest.states.tolist() == [R]
    assert len(rest.parts) == 1, "only what lacks is reserved"
    cache.commit(rest.parts)
    assert states(cache, keyspace, 1) == [H]
    assert keyspace.bytes == 3 * 4096
    assert check(cache, 0, 0) == []


def test_eviction_takes_exactly_what_is_needed(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, *range(8))
    store(cache, keyspace, 10, 11, 12)
    assert cache.eviction.keys_evicted == 3
    assert states(cache, keyspace, *range(8)) == [M, M, M, H, H, H, H, H]


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_some_slots_are_freed_for_the_stores_to_come(policy: str) -> None:
    """A 256th of 2,048 slots, each time that there is no room; never keys that are held or named."""
    cache = make_cache(pages=2048, slab_pages=64, policy=policy)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, *range(2040))
    store(cache, keyspace, *range(3000, 3008))
    assert cache.eviction.keys_evicted == 0, "there was room"
    held = cache.find(keyspace, keys_of(*range(2030))).hit_rows
    cache.hold(held)
    gone = []
    for number in range(4000, 4012):
        store(cache, keyspace, number)
        gone.append(cache.eviction.keys_evicted)
    assert gone == [9] * 9 + [18] * 3
    assert states(cache, keyspace, *range(2030)) == [H] * 2030
    named = [*range(2030, 2040), *range(3000, 3008), *range(4000, 4012)]
    there = [number for number, state in zip(named, states(cache, keyspace, *named), strict=True) if state == H]
    free = cache.tier.num_free(1)
    made = reserve(cache, keyspace, keys_of(*there, *range(5000, 5001 + free)), ONE, 0)
    assert made.states.tolist() == [H] * len(there) + [R] * free + [N], "all others are held"
    cache.unhold(held)
    assert check(cache, 0, free) == []
    cache.tier.close()


def asked_of(keyspace: Keyspace) -> list[int]:
    """How many victims the policy of this keyspace is asked for, from now on."""
    asked: list[int] = []
    assert keyspace.queue is not None
    victims = keyspace.queue.policy.victims

    def note(wanted: int, evictable: Any) -> U32Array:
        asked.append(wanted)
        return victims(wanted, evictable)

    keyspace.queue.policy.victims = note  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_what_others_might_store_makes_no_eviction_long(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose keys would have 64 parts each: as many keys as are needed go all the same, in few rounds."""
    monkeypatch.setattr(eviction, "SPARE_MAX", 0)
    cache = make_cache(pages=512, slab_pages=16, policy=policy)
    _, keyspace = make_keyspace(cache)
    asked = asked_of(keyspace)
    _, foreign = make_keyspace(cache, b"f" * 16, pages=(1,) * 64)
    assert foreign.queue is keyspace.queue
    store(cache, keyspace, *range(512))
    store(cache, keyspace, *range(1000, 1400))
    assert cache.eviction.keys_evicted == 400
    assert len(asked) <= 8, "of 64 slots each, as many; then twice as many, and so on"
    assert check(cache, 0, 0) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_keys_of_several_sizes_are_evicted_as_they_are_needed(policy: str) -> None:
    """Slots of one size that keys have two of, or one, or none: not a key goes behind the last one that is needed."""
    cache = make_cache(pages=64, slab_pages=64, policy=policy)
    _, two = make_keyspace(cache, b"a" * 16, pages=(1, 1))
    _, one = make_keyspace(cache, b"b" * 16, pages=(1,))
    store(cache, one, 0, 1, 2)
    for number in range(30):
        store(cache, two, number)
    store(cache, one, 3)
    assert cache.tier.num_free(1) == 0
    for wanted in (6, 1, 5, 7):
        reserve(cache, one, keys_of(*range(1000 * wanted, 1000 * wanted + wanted)), ONE, 0)
        assert cache.tier.num_free(1) <= 1, "the second slot of the last key"
    cache.tier.close()


@pytest.mark.parametrize("policy", ["", *POLICIES])
@pytest.mark.parametrize("same", [True, False])
def test_what_has_none_of_the_slots_that_are_wanted_stays(
    policy: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is next to go. Those that have some are behind it in the queue, or in another one."""
    monkeypatch.setattr(eviction, "SPARE_MAX", 0)
    cache = make_cache(pages=1024, slab_pages=64, policy=policy)
    _, large = make_keyspace(cache, b"a" * 16, pages=(1, 3))
    _, other = make_keyspace(cache, b"b" * 16, pages=(3,))
    _, small = make_keyspace(cache, b"c" * 16, pages=(1,))
    for number in range(0, 448, 8):
        made = reserve(cache, large, keys_of(*range(number, number + 8)), ONE, 0).parts
        cache.commit(made)
    for number in range(1000, 1128):
        store(cache, large if same else other, number)
    reserve(cache, other, keys_of(*range(5000, 5000 + cache.tier.num_free(3))), ONE, 0)
    reserve(cache, small, keys_of(*range(6000, 6000 + cache.tier.num_free(1))), ONE, 0)
    rows = cache.entries.find(large, keys_of(*range(448))).astype(np.uint32)
    held = rows[::16]  # so that no slab of theirs can be taken over
    cache.hold(held)
    kept = large.rows if not same else 448
    for wanted in (1, 5, 20):
        evicted = cache.eviction.keys_evicted
        states = reserve(cache, other, keys_of(*range(100 * wanted + 7000, 101 * wanted + 7000)), ONE, 0).states
        assert states.tolist() == [R] * wanted
        assert cache.eviction.keys_evicted == evicted + wanted
    assert (cache.entries.find(large, keys_of(*range(448))) >= 0).sum() == kept
    evicted = cache.eviction.keys_evicted
    reserve(cache, small, keys_of(*range(8000, 8400)), ONE, 0)
    assert cache.eviction.keys_evicted == evicted + 400 - (26 if same else 0), "what was passed over goes now"
    assert check(cache, len(held), int((cache.entries.parts.state == PartState.RESERVED).sum())) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_what_one_request_evicts_is_bounded_from_its_first_look_on(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "RECORDS_MAX", 4 * 1024)
    cache = make_cache(pages=1024, slab_pages=64, policy=policy)
    _, one = make_keyspace(cache, b"b" * 16)
    store(cache, one, *range(984))
    cache.hold(cache.find(one, keys_of(*range(984))).hit_rows)
    wide = cache.declare(cache.open_namespace(b"w" * 16, 1, "", 32), GroupSchema(0, GroupKind.FULL, 16, parts=1024))
    cache.set_part_bytes(wide, {0: 4096})
    made = reserve(cache, wide, keys_of(*range(40)), ONE, 0).parts
    cache.commit(made)
    assert cache.tier.num_free(1) == 0
    for number in (1, 2, 3):
        states = reserve(cache, one, keys_of(*range(1000 * number, 1000 * number + 30)), ONE, 0).states.tolist()
        assert states == [R] * 4 + [N] * 26
        assert wide.rows == 40 - 4 * number
    assert check(cache, 984, 12) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_slabs_that_one_request_takes_over_are_bounded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab of small keys may hold a hundred thousand of them."""
    monkeypatch.setattr(eviction, "RECORDS_MAX", 40)
    cache = make_cache(pages=256, slab_pages=16, policy=policy)
    _, small = make_keyspace(cache, b"a" * 16)
    store(cache, small, *range(256))
    _, large = make_keyspace(cache, b"b" * 16, pages=(16,))
    for taken in (3, 6):
        states = reserve(cache, large, keys_of(*range(100 * taken, 100 * taken + 8)), ONE, 0).states.tolist()
        assert states == [R] * 3 + [N] * 5
        assert cache.eviction.slabs_taken_over == taken
    cache.tier.close()


def test_sizes_and_queues_go_with_the_last_space_that_uses_them() -> None:
    cache = make_cache(pages=64, slab_pages=16)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1)
    assert keyspace.queue is not None
    other, foreign = make_keyspace(cache, b"f" * 16, pages=(1, 1, 1, 2))
    assert (keyspace.queue.most_per_key(1), cache.figures()["slot_sizes"]) == (3, 2)
    assert (keyspace.queue.num_spaces, keyspace.queue.widest) == (2, 4)
    store(cache, foreign, 1)
    cache.close_namespace(other)
    assert keyspace.queue.most_per_key(1) == 3, "it has keys"
    for _ in cache.clear(other):
        pass
    cache.close_namespace(cache.open_namespace(b"g" * 16, 0, "", 32))  # a search for unused namespaces
    assert (keyspace.queue.most_per_key(1), cache.figures()["slot_sizes"]) == (1, 1)
    assert (keyspace.queue.num_spaces, keyspace.queue.widest) == (1, 1)
    for pages in range(2, 12):
        passing, _ = make_keyspace(cache, b"p" * 16, pages=(pages,))
        cache.close_namespace(passing)
    assert set(cache.eviction.queues) == {eviction.QueuePlace(0, 1), eviction.QueuePlace(0, 11)}
    assert check(cache, 0, 0) == []
    cache.tier.close()


def test_a_policy_forgets_nothing_for_what_nobody_stores() -> None:
    """Groups whose sizes of slots have no slabs, and keys that were never stored."""
    cache = make_cache(pages=64, slab_pages=16)
    _, keyspace = make_keyspace(cache)
    _, large = make_keyspace(cache, b"l" * 16, pages=(4,))
    sizes: list[int] = []
    assert keyspace.queue is not None
    keyspace.queue.policy.resize = sizes.append  # type: ignore[method-assign,assignment]
    make_keyspace(cache, b"f" * 16, pages=(1,) * 64)
    make_keyspace(cache, b"g" * 16, pages=(1, 16, 16, 16))
    store(cache, keyspace, *range(64))
    store(cache, large, 1)
    assert cache.eviction.slabs_taken_over == 1
    assert sizes == [48]
    cache.tier.close()


def test_a_policy_is_told_of_the_slots_that_its_keys_use() -> None:
    cache = make_cache(pages=64, slab_pages=16)
    _, keyspace = make_keyspace(cache)
    _, large = make_keyspace(cache, b"l" * 16, pages=(4,))
    make_keyspace(cache, b"f" * 16, pages=(1, 16, 16, 16))
    sizes: list[int] = []
    assert keyspace.queue is not None
    keyspace.queue.policy.resize = sizes.append  # type: ignore[method-assign,assignment]
    store(cache, keyspace, *range(20))
    cache.drop(cache.find(keyspace, keys_of(*range(4, 16))).hit_rows)
    store(cache, large, *range(9))
    assert (cache.eviction.slabs_taken_over, keyspace.rows) == (1, 4)
    assert sizes == [64], "nobody has slots of 16 pages"
    cache.tier.close()


def test_what_is_held_or_written_is_no_victim(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, *range(6))
    held = cache.find(keyspace, keys_of(0, 1)).hit_rows
    cache.hold(held)
    writing = reserve(cache, keyspace, keys_of(6, 7), ONE, 0)
    answer = reserve(cache, keyspace, keys_of(*range(20, 26)), ONE, 0)
    assert answer.states.tolist() == [R, R, R, R, N, N]
    assert cache.counters.keys_without_space == 2
    assert states(cache, keyspace, *range(8)) == [H, H, M, M, M, M, P, P]
    assert check(cache, holds=2, reserved=6) == []
    cache.unhold(held)
    cache.abort(np.concatenate([writing.parts, answer.parts]))
    assert check(cache, 0, 0) == []


def test_a_request_does_not_evict_what_it_names(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, *range(8))
    answer = reserve(cache, keyspace, keys_of(0, 1, 2, 30, 31), ONE, 0)
    assert answer.states.tolist() == [H, H, H, R, R]
    assert states(cache, keyspace, 0, 1, 2) == [H, H, H]


def test_a_held_key_outlives_clear_and_drop_but_does_not_hit(cache: Cache) -> None:
    namespace, keyspace = make_keyspace(cache)
    parts = store(cache, keyspace, 1, 2)
    rows = cache.find(keyspace, keys_of(1, 2)).hit_rows
    cache.hold(rows)
    cache.drop(rows[:1])
    assert states(cache, keyspace, 1, 2) == [M, H]
    freed = [sum(step) for step in zip(*cache.clear(namespace), strict=True)]
    assert freed[0] == 1
    keyspace = namespace.keyspaces[0]
    assert states(cache, keyspace, 1, 2) == [M, M]
    assert cache.tier.gauges()["used_bytes"] == 2 * 4096, "a running load may still read them"
    assert check(cache, holds=2, reserved=0) == []
    store(cache, keyspace, 1)
    assert set(store(cache, keyspace, 3).tolist()).isdisjoint(parts.tolist())
    cache.unhold(rows)
    assert cache.tier.gauges()["used_bytes"] == 2 * 4096
    assert check(cache, 0, 0) == []


def test_a_store_under_way_does_not_survive_a_clear(cache: Cache) -> None:
    namespace, keyspace = make_keyspace(cache)
    reservation = reserve(cache, keyspace, keys_of(1), ONE, 0)
    for _ in cache.clear(namespace):
        pass
    assert cache.commit(reservation.parts).tolist() == [], "nothing is left to hash"
    assert states(cache, namespace.keyspaces[0], 1) == [M]
    assert cache.tier.gauges()["used_bytes"] == 0
    assert check(cache, 0, 0) == []


def test_a_late_hash_does_not_seal_the_slots_next_tenant(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    parts = store(cache, keyspace, 1)
    generations = cache.entries.parts.generation[parts]
    cache.drop(cache.find(keyspace, keys_of(1)).hit_rows)
    again = store(cache, keyspace, 2)
    assert again.tolist() == parts.tolist(), "the record is reused at once"
    cache.seal(parts, generations, np.ones((1, 2), np.uint64))
    assert cache.counters.parts_sealed == 0


def test_late_hashes_seal_those_alone_that_are_there_still(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    parts = store(cache, keyspace, 1, 2)
    generations = cache.entries.parts.generation[parts]
    cache.drop(cache.find(keyspace, keys_of(1)).hit_rows)
    again = store(cache, keyspace, 3)
    assert again.tolist() == parts[:1].tolist(), "the record is reused at once"
    cache.seal(parts, generations, np.array([[1, 1], [2, 2]], np.uint64))
    assert cache.entries.parts.state[parts].tolist() == [PartState.COMMITTED, PartState.SEALED]
    assert cache.entries.parts.digest[parts[1]].tolist() == [2, 2]
    assert check(cache, 0, 0) == []


def test_a_starving_size_takes_over_the_coldest_slab() -> None:
    cache = make_cache(pages=32, slab_pages=8, policy="lru")
    _, small = make_keyspace(cache, b"a" * 16)
    store(cache, small, *range(32))
    cache.uses.add([(small, cache.find(small, keys_of(*range(24))), 0)])
    _, large = make_keyspace(cache, b"b" * 16, pages=(4,))
    store(cache, large, 1, 2)
    assert cache.eviction.slabs_taken_over == 1
    assert states(cache, large, 1, 2) == [H, H]
    assert states(cache, small, *range(24)) == [H] * 24, "what was used last is kept"
    assert check(cache, 0, 0) == []
    cache.tier.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_that_finds_no_memory_for_larger_tables_keeps_its_own(
    policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(pages=1 << 14, slab_pages=1 << 12, policy=policy)
    _, small = make_keyspace(cache, b"a" * 16)
    store(cache, small, *range(3 << 12))
    _, large = make_keyspace(cache, b"b" * 16, pages=(1 << 8,))

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("planted")

    for module in (ghost, s3fifo):
        monkeypatch.setattr(module, "reserve_array", fail)
    store(cache, large, *range(48))
    assert cache.eviction.slabs_taken_over > 0
    assert ("planted" in caplog.text) == (policy == "s3-fifo"), "the others need no more"
    assert check(cache, 0, 0) == []
    monkeypatch.undo()
    store(cache, small, *range(3 << 12, 4 << 12))
    assert check(cache, 0, 0) == []
    cache.tier.close()


def test_a_clear_needs_no_memory_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever part of a group was known first. Half a clear would leave the other half."""
    cache = make_cache(pages=64, slab_pages=16)
    namespace = cache.open_namespace(b"n" * 16, 0, "test", 32)
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16, parts=2))
    cache.set_part_bytes(keyspace, {1: 2 * PAGE_BYTES})
    cache.set_part_bytes(keyspace, {0: PAGE_BYTES})
    store(cache, keyspace, 1)

    def fail(capacity_rows: int, max_rows: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(cache.eviction, "_make_policy", fail)
    queue = keyspace.queue
    for _ in range(2):
        cache.epochs.advance(namespace.fingerprint)
        for _ in cache.clear(namespace):
            pass
        assert namespace.keyspaces[0].queue is queue
        assert check(cache, 0, 0) == []
        store(cache, namespace.keyspaces[0], 1, 2)
        assert check(cache, 0, 0) == []
    cache.tier.close()


@pytest.mark.parametrize("held", ["reserved", "pinned"])
def test_slabs_in_use_starve_no_other_size(held: str) -> None:
    """However many of them lie before those that could be taken over."""
    cache = make_cache(pages=256, slab_pages=8)
    _, small = make_keyspace(cache, b"a" * 16)
    for number in range(256):
        store(cache, small, number)
    if held == "reserved":
        _, large = make_keyspace(cache, b"b" * 16, pages=(4,))
        assert len(reserve(cache, large, keys_of(*range(2 * eviction.SLABS_TRIED)), ONE, 0).parts) == 16
    else:
        cache.hold(cache.find(small, keys_of(*range(0, 8 * eviction.SLABS_TRIED, 8))).hit_rows)
    _, other = make_keyspace(cache, b"c" * 16, pages=(2,))
    for _ in range(2):
        states = reserve(cache, other, keys_of(1, 2, 3), ONE, 0).states.tolist()
    assert N not in states
    cache.tier.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("gone", [1, 8])
def test_a_slab_with_keys_that_were_cleared_while_they_were_copied(policy: str, gone: int) -> None:
    """No policy has them any more, but their slots are in use."""
    cache = make_cache(pages=32, slab_pages=8, policy=policy)
    cleared, small = make_keyspace(cache, b"a" * 16)
    _, other = make_keyspace(cache, b"b" * 16)
    store(cache, small, *range(gone))
    copied = cache.find(small, keys_of(*range(gone))).hit_rows
    cache.hold(copied)
    store(cache, other, *range(32 - gone))
    cache.epochs.advance(cleared.fingerprint)
    for _ in cache.clear(cleared):
        pass
    _, large = make_keyspace(cache, b"c" * 16, pages=(4,))
    for number in range(4):
        store(cache, large, number)
        assert states(cache, large, number) == [H]
    assert cache.eviction.slabs_taken_over > 0
    cache.unhold(copied)
    assert check(cache, 0, 0) == []
    cache.tier.close()


def test_a_slab_is_in_use_until_its_keys_are_committed() -> None:
    """Though what is in it was there first. What an eviction has met while it was written is the newest afterwards."""
    cache = make_cache(pages=32, slab_pages=8, policy="lru")
    _, small = make_keyspace(cache, b"a" * 16)
    waiting = reserve(cache, small, keys_of(*range(8)), ONE, 0)
    store(cache, small, *range(8, 32))
    _, large = make_keyspace(cache, b"b" * 16, pages=(4,))
    store(cache, large, 1, 2)
    assert cache.eviction.slabs_taken_over == 1
    store(cache, small, 32)
    cache.commit(waiting.parts)
    store(cache, large, 3, 4)
    assert cache.eviction.slabs_taken_over == 2
    assert states(cache, small, *range(8)) == [H] * 8
    assert check(cache, 0, 0) == []
    cache.tier.close()


def test_namespaces_do_not_meet_and_empty_ones_are_forgotten(cache: Cache) -> None:
    namespace, keyspace = make_keyspace(cache, b"a" * 16)
    other, other_space = make_keyspace(cache, b"b" * 16)
    store(cache, keyspace, 1)
    assert states(cache, other_space, 1) == [M]
    cache.close_namespace(namespace)
    cache.close_namespace(other)
    assert list(cache.namespaces) == [b"a" * 16]
    again, _ = make_keyspace(cache, b"a" * 16)
    assert states(cache, again.keyspaces[0], 1) == [H]


def test_a_namespace_keeps_its_schema(cache: Cache) -> None:
    namespace, keyspace = make_keyspace(cache)
    with pytest.raises(SchemaError):
        cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 32))
    with pytest.raises(SchemaError):
        cache.set_part_bytes(keyspace, {0: 8192})
    half = cache.declare(namespace, GroupSchema(1, GroupKind.FULL, 16, parts=2))
    cache.set_part_bytes(half, {1: 4096})
    with pytest.raises(SchemaError):
        reserve(cache, half, keys_of(1), BOTH, 0)


def test_keys_are_unpacked_by_width() -> None:
    assert keys_array(b"\x01" * 16, 8).tolist() == [[0x0101010101010101, 0, 0, 0]] * 2
    assert keys_array(bytes(64), 32).shape == (2, 4)
    with pytest.raises(KeyWidthError):
        keys_array(bytes(33), 32)
    assert has_duplicates(keys_of(1, 2, 1))
    assert not has_duplicates(keys_of(1, 2, 3))
    equal_sums = keys_of(0, 0)
    equal_sums[0, 0], equal_sums[1, 1] = 0x9E3779B97F4A7C15, 1
    assert not has_duplicates(equal_sums), "equal sums do not make equal keys"


def test_snapshot_lists_complete_keys(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1, 2)
    reserve(cache, keyspace, keys_of(3), ONE, 0)
    packed, cursor = cache.snapshot(keyspace, 0)
    assert cursor == 0
    assert {row[1] for row in keys_array(packed, 32).tolist()} == {1, 2}


def test_a_key_named_twice_is_held_twice_and_used_once(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1, 2)
    found = cache.find(keyspace, keys_of(2, 1, 2))
    assert keyspace.queue is not None
    touched: list[list[int]] = []

    def touch(rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        touched.append([*rows.tolist(), *positions.tolist()])

    keyspace.queue.policy.touch = touch  # type: ignore[method-assign]
    cache.uses.add([(keyspace, found, 5)])
    cache.uses.settle()
    assert touched == [[*found.rows[1:].tolist(), 6, 7]]
    cache.hold(found.hit_rows)
    assert check(cache, holds=3, reserved=0) == []
    cache.unhold(found.hit_rows)
    assert check(cache, 0, 0) == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_keys_that_eviction_met_in_use_can_go_once_they_are_not(policy: str) -> None:
    cache = make_cache(4, 4, policy=policy)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1, 2, 3, 4)
    rows = cache.find(keyspace, keys_of(1, 2, 3, 4)).hit_rows
    cache.hold(rows)
    assert not len(reserve(cache, keyspace, keys_of(5, 6), ONE, 0).parts)
    assert check(cache, holds=4, reserved=0) == []
    cache.eviction.any_aside = False
    assert check(cache, holds=4, reserved=0) == ["eviction: 4 keys are set aside, and would stay there"]
    cache.eviction.any_aside = True
    cache.unhold(rows)
    cache.abort(reserve(cache, keyspace, keys_of(5, 6), ONE, 0).parts)
    assert cache.find(keyspace, keys_of(1, 2, 3, 4)).hits.sum() == 2


@pytest.mark.parametrize("use", ["commit", "reservation"])
def test_a_slab_with_new_keys_is_not_the_coldest(cache: Cache, use: str) -> None:
    """Otherwise a slab is taken over for what it held before, or while its keys are still being written."""
    (_, small), (_, large) = make_keyspace(cache), make_keyspace(cache, b"l" * 16, pages=(2,))
    first = reserve(cache, small, keys_of(*range(4)), ONE, 0).parts
    first_slab = cache.tier.slabs_of(cache.entries.parts.page[first[:1]]).tolist()
    second = store(cache, large, 10)
    second_slab = cache.tier.slabs_of(cache.entries.parts.page[second]).tolist()
    assert cache.tier.coldest_slabs(4).tolist() == first_slab + second_slab
    if use == "reservation":
        cache.abort(first)
        assert cache.tier.unassign(first_slab[0])
        first = reserve(cache, small, keys_of(*range(4)), ONE, 0).parts
        assert cache.tier.slabs_of(cache.entries.parts.page[first[:1]]).tolist() == first_slab
    else:
        cache.commit(first)
    assert cache.tier.coldest_slabs(4).tolist() == second_slab + first_slab
