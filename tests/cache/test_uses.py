"""Uses of keys wait to be counted: no order of eviction shows that they did."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.memory import deferredtouches as uses
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.lookup import GroupHits, restorable_boundaries
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, I64Array, KeyState, U32Array

from .fakes import keys_of, make_cache, make_keyspace, store

NUMBERS = st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), NUMBERS),
        st.tuples(st.just("use"), NUMBERS),
        st.tuples(st.just("pin"), NUMBERS),
        st.tuples(st.just("unpin"), NUMBERS),
        st.tuples(st.just("drop"), NUMBERS),
        st.tuples(st.just("clear"), NUMBERS),
    ),
    max_size=40,
)


class Side:
    """A cache of sixteen keys, in which uses are counted at once, or wait until something has to know."""

    def __init__(self, policy: str, *, waits: bool) -> None:
        self.cache = make_cache(pages=16, slab_pages=4, policy=policy)
        self.namespace, _ = make_keyspace(self.cache)
        self.waits = waits
        self.pinned: list[U32Array] = []

    @property
    def keyspace(self) -> Keyspace:
        return self.namespace.keyspaces[0]

    def step(self, what: str, numbers: list[int]) -> list[int]:
        """Carry out one step. Returns which keys are held then."""
        cache, keys = self.cache, keys_of(*numbers)
        if what == "store":
            store(cache, self.keyspace, keys)
        elif what in ("use", "pin"):
            found = cache.find(self.keyspace, keys)
            cache.uses.add([(self.keyspace, found, 0)])
            if not self.waits:
                cache.uses.settle()
            if what == "pin":
                cache.hold(found.hit_rows)
                self.pinned.append(found.hit_rows)
        elif what == "unpin" and self.pinned:
            cache.unhold(self.pinned.pop(numbers[0] % len(self.pinned)))
        elif what == "drop":
            cache.drop(cache.find(self.keyspace, keys[:1]).hit_rows)
        elif what == "clear" and numbers[0] % 4 == 0:
            cache.epochs.advance(self.namespace.fingerprint)
            for _ in cache.clear(self.namespace):
                pass
        held: list[int] = np.flatnonzero(cache.find(self.keyspace, keys_of(*range(31))).hits).tolist()
        return held


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_the_same_keys_are_held_as_if_each_use_had_counted_at_once(steps: list[tuple[str, list[int]]]) -> None:
    """LRU has no counts: uses that wait together count once."""
    sides = [Side("lru", waits=False), Side("lru", waits=True)]
    for what, numbers in steps:
        at_once, waited = (side.step(what, numbers) for side in sides)
        assert waited == at_once, f"after {what} {numbers}"
    for side in sides:
        holds = sum(map(len, side.pinned))
        assert check(side.cache, holds, 0) == []
        side.cache.tier.close()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=50, deadline=None)
@given(steps=STEPS)
def test_no_policy_is_told_of_keys_that_are_gone(policy: str, steps: list[tuple[str, list[int]]]) -> None:
    side = Side(policy, waits=True)
    for what, numbers in steps:
        side.step(what, numbers)
    side.cache.uses.settle()
    assert check(side.cache, sum(map(len, side.pinned)), 0) == []
    side.cache.tier.close()


Told = list[tuple[list[int], list[int], list[int] | None]]


@pytest.fixture
def told() -> Iterator[tuple[Cache, Namespace, Keyspace, Told]]:
    """A cache with keys 0 to 9, and what its policy receives of uses: rows, places, and where prompts begin."""
    cache = make_cache()
    namespace, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(10)))
    heard: Told = []

    def touch(rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        heard.append((rows.tolist(), positions.tolist(), None if begins is None else begins.tolist()))

    if keyspace.queue is None:
        raise LookupError("a keyspace without a queue")
    keyspace.queue.policy.touch = touch  # type: ignore[method-assign]
    yield cache, namespace, keyspace, heard
    cache.tier.close()


def use(cache: Cache, keyspace: Keyspace, *numbers: int, first: int = 0) -> list[int]:
    found = cache.find(keyspace, keys_of(*numbers))
    cache.uses.add([(keyspace, found, first)])
    rows: list[int] = found.rows.tolist()
    return rows


def test_uses_of_several_requests_are_told_together(told: tuple[Cache, Namespace, Keyspace, Told]) -> None:
    cache, _, keyspace, heard = told
    rows = use(cache, keyspace, 1, 2, first=3) + use(cache, keyspace, 5, 99, 6)
    assert not heard
    cache.uses.settle()
    assert heard == [([*rows[:3], rows[4]], [3, 4, 0, 2], [0, 2])]
    cache.uses.settle()
    assert len(heard) == 1


def test_what_requests_have_in_common_counts_for_the_last(told: tuple[Cache, Namespace, Keyspace, Told]) -> None:
    cache, _, keyspace, heard = told
    one, two = use(cache, keyspace, 1, 2, 3), use(cache, keyspace, 1, 2, 4)
    use(cache, keyspace, 3)
    again = use(cache, keyspace, 3)
    cache.uses.settle()
    assert heard == [([*two, *again], [0, 1, 2, 0], [0, 3])], "nothing is left of the first, nor of the third"
    assert one[:2] == two[:2]


def test_many_keys_do_not_wait(told: tuple[Cache, Namespace, Keyspace, Told], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, keyspace, heard = told
    monkeypatch.setattr(uses, "KEYS_MAX", 5)
    use(cache, keyspace, 1, 2, 3)
    assert not heard
    use(cache, keyspace, 4, 5, 6)
    assert len(heard) == 1
    assert not cache.uses.waiting


@pytest.mark.parametrize("step_keys", [1, 3])
def test_very_many_keys_are_counted_in_steps_from_the_last_to_the_first(
    told: tuple[Cache, Namespace, Keyspace, Told], step_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece at least in each step."""
    cache, _, keyspace, heard = told
    monkeypatch.setattr(uses, "PIECE_KEYS", 3)
    monkeypatch.setattr(uses, "STEP_KEYS", step_keys)
    rows = use(cache, keyspace, 1, 2, 3, 4, 5, 6, 7, first=10) + use(cache, keyspace, 8, 9)
    seen = []
    left = True
    while left:
        left = cache.uses.settle_due()
        seen.append(heard.pop())
        assert not heard
        assert left == cache.uses.waiting
    assert seen == [
        (rows[6:7], [16], None),
        (rows[3:6], [13, 14, 15], None),
        (rows[:3], [10, 11, 12], None),
        (rows[7:], [0, 1], None),
    ]
    use(cache, keyspace, 1, 2, 3, 4)
    cache.uses.settle()
    assert heard == [([rows[3], *rows[:3]], [3, 0, 1, 2], [0, 1])], "all at once, where the order matters"


def test_who_counts_is_woken_once_until_none_is_left(
    told: tuple[Cache, Namespace, Keyspace, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _, keyspace, heard = told
    monkeypatch.setattr(uses, "STEP_KEYS", 3)
    woken: list[None] = []
    cache.uses.wake = lambda: woken.append(None)
    for _ in range(2):
        use(cache, keyspace, 1, 2, 3)
        use(cache, keyspace, 4, 5)
        assert len(woken) == 1
        assert cache.uses.settle_due()
        use(cache, keyspace, 6)
        cache.uses.settle()
        use(cache, keyspace, 7)
        assert len(woken) == 1, "it is to call again"
        assert not cache.uses.settle_due()
        assert heard.pop() == ([use(cache, keyspace, 7)[0]], [0], None)
        assert len(woken) == 2
        assert not cache.uses.settle_due()
        woken.clear()


def test_only_as_many_wait_as_may(
    told: tuple[Cache, Namespace, Keyspace, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _, keyspace, heard = told
    monkeypatch.setattr(uses, "PIECE_KEYS", 2)
    monkeypatch.setattr(uses, "STEP_KEYS", 2)
    monkeypatch.setattr(uses, "KEYS_MAX", 4)
    rows = use(cache, keyspace, 1, 2, 3, 4, 5)
    assert heard == [([rows[4]], [4], None)], "one piece is enough, and the rest may wait"
    use(cache, keyspace, 6)
    assert [rows for rows, _, _ in heard] == [[rows[4]], rows[2:4]]
    cache.uses.settle()
    assert not cache.uses.waiting


def test_a_step_counts_few_keys(told: tuple[Cache, Namespace, Keyspace, Told], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, keyspace, heard = told
    monkeypatch.setattr(uses, "STEP_KEYS", 4)
    rows = [use(cache, keyspace, 2 * number, 2 * number + 1) for number in range(5)]
    for pair in ([rows[0], rows[1]], [rows[2], rows[3]], [rows[4]]):
        cache.uses.settle_due()
        assert [touched for touched, _, _ in heard] == [[row for rows in pair for row in rows]]
        heard.clear()
    assert not cache.uses.waiting


@pytest.mark.parametrize("how", ["reserve", "drop", "clear", "victims", "readmit", "make room"])
def test_they_are_told_before_the_order_matters(told: tuple[Cache, Namespace, Keyspace, Told], how: str) -> None:
    cache, namespace, keyspace, heard = told
    rows = np.array(use(cache, keyspace, 1, 2), np.uint32)
    if how == "reserve":
        reserve(cache, keyspace, keys_of(50), np.zeros(1, np.uint16), 0)
    elif how == "drop":
        cache.drop(rows)
    elif how == "clear":
        cache.epochs.advance(namespace.fingerprint)
        for _ in cache.clear(namespace):
            pass
    elif how == "victims" and keyspace.queue is not None:
        cache.eviction.victims([keyspace.queue], 1)
    elif how == "readmit":
        cache.eviction.readmit(rows)
    else:
        cache.eviction.make_room(1, 60)
    assert len(heard) == 1, how
    assert heard[0][0] == rows.tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_lost_its_head_goes_first_until_the_head_is_back(policy: str) -> None:
    cache = make_cache(pages=16, slab_pages=4, policy=policy)
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(20, 28)))
    store(cache, keyspace, keys_of(*range(8)))
    cache.drop(cache.find(keyspace, keys_of(2)).hit_rows)

    def ask() -> list[int]:
        found = cache.find(keyspace, keys_of(*range(8)))
        cache.uses.add_prompt([(keyspace, found, 0)], 16 * int(found.hits.argmin()))
        store(cache, keyspace, keys_of(30, 31))
        return [number for number in range(8) if cache.find(keyspace, keys_of(number)).num_hits]

    assert ask() == [0, 1, 3, 4, 5, 6], "the end of what can't be restored"
    assert ask() == [0, 1, 3, 4, 5, 6], "nothing was evicted"
    store(cache, keyspace, keys_of(*range(8)))  # names those that were lost
    assert not cache.entries.lost.any()
    assert cache.find(keyspace, keys_of(*range(8))).num_hits == 8
    assert check(cache, 0, 0) == []
    cache.tier.close()


def test_what_waits_for_a_store_under_way_is_not_lost() -> None:
    cache = make_cache(pages=16, slab_pages=4, policy="lru")
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(0, 2, 3))
    made = reserve(cache, keyspace, keys_of(1), np.zeros(1, np.uint16), 1)
    cache.uses.add_prompt([(keyspace, cache.find(keyspace, keys_of(*range(4))), 0)], 16)
    cache.uses.settle()
    assert not cache.entries.lost.any()
    cache.abort(made.parts)
    cache.uses.add_prompt([(keyspace, cache.find(keyspace, keys_of(*range(4))), 0)], 16)
    cache.uses.settle()
    assert cache.entries.lost.sum() == 2
    cache.tier.close()


def test_keys_that_a_state_is_missing_for_are_lost() -> None:
    """A prompt's keys of full attention: its state can restore only two of them, then none."""
    cache = make_cache(pages=16, slab_pages=4, policy="hit-density")
    namespace, full = make_keyspace(cache)
    state = cache.declare(namespace, GroupSchema(1, GroupKind.MAMBA, 16))
    cache.set_part_bytes(state, {0: PAGE_BYTES})
    store(cache, full, keys_of(*range(4)))
    store(cache, state, keys_of(11))
    keys = [(full, keys_of(*range(4))), (state, keys_of(10, 11, 12, 13))]

    def ask() -> int:
        found = cache.find_all(keys)
        groups = [GroupHits(space.schema, 0, one.hits) for (space, _), one in zip(keys, found, strict=True)]
        reach = restorable_boundaries(groups)
        used = [(space, one, 0) for (space, _), one in zip(keys, found, strict=True)]
        cache.uses.add_prompt(used, int(reach[0]) if len(reach) else 0)
        cache.uses.settle()
        return int(cache.entries.lost.sum())

    made = reserve(cache, state, keys_of(13), np.zeros(1, np.uint16), 1)
    assert ask() == 0, "the state at the end is being stored"
    cache.abort(made.parts)
    assert ask() == 2
    cache.drop(cache.find(state, keys_of(11)).hit_rows)
    assert ask() == 4
    cache.tier.close()


def test_what_is_there_and_does_not_hit_now_is_not_gone() -> None:
    """It is in doubt for a while, or its user may not hold it: it hits again without being stored."""
    cache = make_cache(pages=16, slab_pages=4, policy="lru")
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(*range(4), 5))
    for count, lost in ((4, 0), (6, 1)):  # the fifth key is gone: what is lost is behind it
        found = cache.find(keyspace, keys_of(*range(count)))
        found.hits[1] = False
        found.states[1] = KeyState.MISS
        cache.uses.add_prompt([(keyspace, found, 0)], 16)
        cache.uses.settle()
        assert cache.entries.lost.sum() == lost
    cache.tier.close()


def test_what_slid_out_of_a_window_is_not_gone() -> None:
    """A group that needs the last keys alone never has the others. What is behind the reach is in doubt, not lost."""
    cache = make_cache(pages=32, slab_pages=4, policy="lru")
    namespace, full = make_keyspace(cache)
    window = cache.declare(namespace, GroupSchema(1, GroupKind.SLIDING, 16, window_keys=2))
    cache.set_part_bytes(window, {0: PAGE_BYTES})
    store(cache, full, keys_of(*range(10)))
    store(cache, window, keys_of(*range(13, 20)))
    used = []
    for keyspace, begin in ((full, 0), (window, 10)):
        found = cache.find(keyspace, keys_of(*range(begin, begin + 10)))
        found.hits[5] = False
        found.states[5] = KeyState.MISS
        used.append((keyspace, found, 0))
    cache.uses.add_prompt(used, 80)
    cache.uses.settle()
    assert not cache.entries.lost.any()
    cache.tier.close()


def test_a_store_finds_again_what_a_request_that_waits_has_lost() -> None:
    """The loss came first. What is used meanwhile is used once."""
    cache = make_cache(pages=16, slab_pages=4, policy="lru")
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(0, 2, 3))
    cache.uses.add_prompt([(keyspace, cache.find(keyspace, keys_of(*range(4))), 0)], 16)
    store(cache, keyspace, keys_of(*range(4)))
    cache.uses.settle()
    assert not cache.entries.lost.any()
    cache.tier.close()


def test_losses_and_uses_are_counted_in_their_order() -> None:
    cache = make_cache(pages=16, slab_pages=4, policy="lru")
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(0, 2, 3))
    whole, alone = cache.find(keyspace, keys_of(*range(4))), cache.find(keyspace, keys_of(2))
    cache.uses.add_prompt([(keyspace, whole, 0)], 16)
    cache.uses.add([(keyspace, alone, 2)])
    cache.uses.settle()
    assert cache.entries.lost[alone.hit_rows].tolist() == [False]
    assert cache.entries.lost.sum() == 1
    cache.uses.add([(keyspace, alone, 2)])
    cache.uses.add_prompt([(keyspace, whole, 0)], 16)
    cache.uses.settle()
    assert cache.entries.lost.sum() == 2
    cache.tier.close()
