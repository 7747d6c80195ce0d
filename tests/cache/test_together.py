"""Several groups of one request, all at once, are what they are one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keys import keys_array, spans
from kvoffloadd.cache.memory.keytable import begins_of, numbers_of
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import Reservation, Wanted, reserve_all
from kvoffloadd.model import GroupKind, GroupSchema, KeyState, U64Array

from .fakes import keys_of, make_cache, make_keyspace

PAGE = 4096
GROUPS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([PAGE, PAGE, 2 * PAGE]), st.lists(st.integers(1, 9), unique=True)),
    min_size=1,
    max_size=5,
)
"""Of each its parts, the bytes of one, and keys."""
Asked = list[tuple[Keyspace, U64Array]]


def spaces_of(cache: Cache, groups: list[tuple[int, int, list[int]]]) -> Asked:
    namespace = cache.open_namespace(b"n" * 16, 0, "n", 32)
    asked = []
    for number, (parts, size, numbers) in enumerate(groups):
        keyspace = cache.declare(namespace, GroupSchema(number, GroupKind.FULL, 16, parts=parts))
        cache.set_part_bytes(keyspace, dict.fromkeys(range(parts), size))
        asked.append((keyspace, keys_of(*numbers)))
    return asked


def wanted_of(keyspace: Keyspace, keys: U64Array, first: int = 0) -> Wanted:
    return Wanted.from_first(keyspace, keys, np.arange(keyspace.schema.parts, dtype=np.uint16), first)


def told(made: Reservation) -> list[list[int]]:
    return [made.states.tolist(), made.keys.tolist(), made.columns.tolist()]


@pytest.mark.slow
@given(GROUPS, GROUPS, st.data())
@settings(max_examples=150, deadline=None)
def test_groups_are_reserved_and_found_as_one_by_one(
    before: list[tuple[int, int, list[int]]], groups: list[tuple[int, int, list[int]]], data: st.DataObject
) -> None:
    caches = [make_cache(1024), make_cache(1024)]  # with room for all
    answers = []
    complete = [data.draw(st.booleans()) for _ in before]
    for number, cache in enumerate(caches):
        asked = spaces_of(cache, groups)
        for (_, _, numbers), (keyspace, _), done in zip(before, asked, complete, strict=False):
            parts = reserve_all(cache, [wanted_of(keyspace, keys_of(*numbers))])[0].parts
            if done:
                cache.commit(parts)
        if number:
            founds = cache.find_all(asked)
            made = reserve_all(cache, [wanted_of(keyspace, keys) for keyspace, keys in asked])
        else:
            founds = [cache.find(keyspace, keys) for keyspace, keys in asked]
            made = [reserve_all(cache, [wanted_of(keyspace, keys)])[0] for keyspace, keys in asked]
        for (keyspace, keys), one in zip(asked, made, strict=True):
            rows = cache.find(keyspace, keys).rows[one.keys]
            assert (cache.entries.parts.row[one.parts] == rows).all(), "each part is of the key that it is listed for"
        reserved = int((cache.entries.parts.state[: cache.entries.parts.runs.used] == 1).sum())
        assert check(cache, 0, reserved) == []
        answers.append(
            (
                [(found.states.tolist(), found.hits.tolist(), (found.rows >= 0).tolist()) for found in founds],
                [told(one) for one in made],
                [cache.find(keyspace, keys).states.tolist() for keyspace, keys in asked],
                [(keyspace.rows, keyspace.keys, keyspace.bytes) for keyspace, _ in asked],
            )
        )
    assert answers[0] == answers[1]


def test_what_finds_no_room_is_at_the_end_of_all_groups() -> None:
    cache = make_cache(pages=16)
    asked = spaces_of(cache, [(1, PAGE, list(range(1, 7)))] * 4)
    made = reserve_all(cache, [wanted_of(keyspace, keys) for keyspace, keys in asked])
    states = np.concatenate([one.states for one in made]).tolist()
    served = states.count(KeyState.RESERVED)
    assert 0 < served < len(states)
    assert states == [KeyState.RESERVED] * served + [KeyState.NO_SPACE] * (len(states) - served)
    assert check(cache, 0, served) == []


def test_a_group_that_was_cleared_has_nothing() -> None:
    cache = make_cache()
    asked = spaces_of(cache, [(1, PAGE, [1, 2]), (1, PAGE, [1, 2])])
    for made in reserve_all(cache, [wanted_of(keyspace, keys) for keyspace, keys in asked]):
        cache.commit(made.parts)
    cache.entries.keyspaces.retire(asked[0][0])
    assert [found.hits.tolist() for found in cache.find_all(asked)] == [[False] * 2, [True] * 2]


@pytest.mark.parametrize("counts", [[], [3], [0, 2, 0, 1]])
def test_places(counts: list[int]) -> None:
    assert [at.stop - at.start for at in spans(counts)] == counts
    cache = make_cache()
    keyspaces = [keyspace for keyspace, _ in spaces_of(cache, [(1, PAGE, [])] * len(counts))]
    if counts:
        several = list(zip(keyspaces, counts, strict=True))
        numbers, begins = numbers_of(several), begins_of(several)
        if isinstance(numbers, int):
            assert (numbers, begins) == (keyspaces[0].id, None)
        else:
            assert numbers.tolist() == [keyspaces[1].id] * 2 + [keyspaces[3].id]
            assert begins is not None
            assert begins.tolist() == [0, 2]


def test_keys_with_few_of_their_parts_make_room_exactly() -> None:
    """They free fewer slots than their queue expects of a key; what is evicted is still no more than is needed."""
    cache = make_cache(pages=64)
    namespace = cache.open_namespace(b"n" * 16, 0, "n", 32)
    many = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16, parts=16))
    cache.set_part_bytes(many, dict.fromkeys(range(16), PAGE))
    one = cache.declare(namespace, GroupSchema(1, GroupKind.FULL, 16))
    cache.set_part_bytes(one, {0: PAGE})
    made = reserve_all(cache, [Wanted.from_first(many, keys_of(*range(1, 65)), np.zeros(1, np.uint16), 0)])[0]
    cache.commit(made.parts)
    assert cache.tier.num_free(1) == 0
    reserved = reserve_all(cache, [wanted_of(one, keys_of(*range(1, 41)))])[0]
    assert reserved.states.tolist() == [KeyState.RESERVED] * 40
    assert cache.eviction.keys_evicted == 40
    assert check(cache, 0, 40) == []


@pytest.mark.parametrize("key_bytes", [20, 32])
@pytest.mark.parametrize("counts", [[0, 1, 1], [0, 0, 1], [1, 0], [0], [1, 1], [0, 3, 0]])
def test_groups_without_keys_or_with_one(counts: list[int], key_bytes: int) -> None:
    """Frames bring them like this: numpy joins arrays of such shapes column by column."""
    cache = make_cache()
    keyspaces = [make_keyspace(cache, group=group)[1] for group in range(len(counts))]
    keys = [keys_array(bytes(range(key_bytes * n)), key_bytes) for n in counts]
    wanted = [Wanted.from_first(s, k, np.zeros(1, np.uint16), 0) for s, k in zip(keyspaces, keys, strict=True)]
    made = reserve_all(cache, wanted)
    assert [len(one.parts) for one in made] == counts
    parts = np.concatenate([one.parts for one in made])
    cache.commit(parts)
    asked = list(zip(keyspaces, keys, strict=True))
    assert [found.hits.tolist() for found in cache.find_all(asked)] == [[True] * n for n in counts]
