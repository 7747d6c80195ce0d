"""Pins and prefetches that wait for the tiers below memory: what they are charged, and when it is given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.lowertiers import GroupLookup
from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.cache.memory.lookup import TOKENS_MAX
from kvoffloadd.errors import LeaseError, LimitError
from kvoffloadd.model import PAGE_BYTES, BoolArray, GroupKind, GroupSchema, KeyState, U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.session.pins import find_all, tokens_of
from kvoffloadd.server.session.session import Session
from tests.cache.fakes import keys_of, store
from tests.server.test_lease_ends import KEYS, LeaseScene, asked


@dataclass
class Below:
    """Tiers that may have all keys that memory has not, but for some. The test ends each fetch."""

    disk: Any = None
    remote: Any = None
    lacks: set[int] = field(default_factory=set)
    ends: list[Callable[[], None]] = field(default_factory=list)
    cancelled: int = 0

    def find(self, groups: Any, lookups: Any, *, ask: bool) -> list[GroupLookup]:
        absent = keys_of(*self.lacks)
        return [
            GroupLookup(keyspace, first, keys, lookup, ~lookup.hits & ~_among(keys, absent))
            for (keyspace, first, keys), lookup in zip(groups, lookups, strict=True)
        ]

    def fetch(self, groups: Any, urgent: int, ready: Callable[[], None], flow: Any) -> Any:
        self.ends.append(ready)
        return SimpleNamespace(cancel=self.cancel, keep=lambda rows: None)

    def cancel(self) -> None:
        self.cancelled += 1


def _among(keys: U64Array, others: U64Array) -> BoolArray:
    among: BoolArray = (keys[:, None] == others[None]).all(axis=2).any(axis=1)
    return among


@pytest.fixture
async def scene() -> LeaseScene:
    made = LeaseScene()
    made.context.lower = Below()  # type: ignore[assignment]
    return made


def below(scene: LeaseScene) -> Below:
    lower: Any = scene.context.lower
    assert isinstance(lower, Below)
    return lower


def ask(session: Session, kind: type[m.Message], *numbers: int) -> m.Found:
    found = session.handle(kind(seq=1, groups=[asked(*numbers)]), [])
    assert isinstance(found, m.Found)
    return found


def used(scene: LeaseScene) -> dict[str, int]:
    """All but the descriptors of the scene's registration."""
    account = scene.context.accounts.of(scene.uid)
    return {name: amount for name, amount in account.used.items() if amount and name != "descriptors"}


@pytest.mark.parametrize("kind", [m.Pin, m.Prefetch])
@pytest.mark.parametrize("numbers", [(KEYS, KEYS + 1), (0, 1, KEYS)], ids=["none is there", "some are"])
@pytest.mark.parametrize("ending", ["ready", "closed"])
async def test_what_waits_is_charged_until_it_ends(
    scene: LeaseScene, kind: type[m.Message], numbers: tuple[int, ...], ending: str
) -> None:
    found = ask(scene.first, kind, *numbers)
    assert found.promoting == sum(number >= KEYS for number in numbers)
    assert scene.charged() == LEASE_KEYS + len(numbers)
    assert used(scene)["outbox_bytes"] > 0
    if ending == "ready":
        (end,) = below(scene).ends
        end()
        hits = sum(number < KEYS for number in numbers)
        assert scene.charged() == (LEASE_KEYS + hits if found.lease else 0)
        if found.lease:
            scene.release(scene.first, found.lease)
        assert used(scene) == {}
    await scene.close()
    assert below(scene).cancelled == 1


@pytest.mark.parametrize(
    ("kind", "numbers", "ends", "counted"),
    [
        (m.Pin, (0, 1), False, (32, 32)),
        (m.Pin, (0, KEYS), False, (0, 0)),
        (m.Pin, (0, KEYS), True, (32, 16)),  # the tiers below bring nothing
        (m.Prefetch, (0, KEYS), True, (0, 0)),
        (m.Prefetch, (0, 1), False, (0, 0)),
    ],
)
async def test_tokens_of_a_pin_count_once_when_all_tiers_have_answered(
    scene: LeaseScene, kind: type[m.Message], numbers: tuple[int, ...], ends: bool, counted: tuple[int, int]
) -> None:
    found = ask(scene.first, kind, *numbers)
    if ends:
        (end,) = below(scene).ends
        end()
    rows = scene.context.cache.lookups.figures()
    assert (sum(row["asked_tokens"] for row in rows), sum(row["hit_tokens"] for row in rows)) == counted
    if found.lease:
        scene.release(scene.first, found.lease)
    await scene.close()


def test_a_prompt_begins_behind_what_the_engine_has_and_ends_with_its_last_key() -> None:
    """A group of a window may begin later, and one without keys begins nowhere."""

    def group(first: int, keys: int, tokens_per_key: int) -> Any:
        schema = SimpleNamespace(tokens_per_key=tokens_per_key)
        return SimpleNamespace(first=first, keys=np.zeros((keys, 4)), keyspace=SimpleNamespace(schema=schema))

    assert tokens_of([group(2, 3, 16)]) == (32, 80)
    assert tokens_of([group(2, 3, 16), group(2, 1, 32)]) == (32, 96)
    assert tokens_of([group(2, 3, 16), group(0, 0, 16)]) == (32, 80)
    assert tokens_of([group(0, 0, 16)]) == (0, 0)
    assert tokens_of([group(0, 1, 1 << 40)]) == (0, TOKENS_MAX)


@pytest.mark.parametrize("kind", [m.Pin, m.Prefetch])
@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (0, 1, KEYS, KEYS + 1)], ids=["memory", "below"])
async def test_what_is_beyond_its_users_leases_is_refused_whole(
    scene: LeaseScene, kind: type[m.Message], numbers: tuple[int, ...]
) -> None:
    """Keys that may join the lease later count, too. A prefetch of what is all in memory holds nothing."""
    scene.context.accounts.change({"leases": LEASE_KEYS + 3})
    if kind is m.Prefetch and max(numbers) < KEYS:
        assert not ask(scene.first, kind, *numbers).promoting
    else:
        with pytest.raises(LimitError):
            ask(scene.first, kind, *numbers)
    assert used(scene) == {}
    assert not below(scene).ends
    assert ask(scene.first, m.Pin, *numbers[:3]).lease
    assert np.all(np.frombuffer(ask(scene.first, m.Lookup, *numbers[:2]).states[0], np.uint8) == 1)
    await scene.close()


@pytest.mark.parametrize("ending", ["ready", "closed"])
async def test_a_lease_that_waits_for_nothing_more_covers_its_own_keys_alone(scene: LeaseScene, ending: str) -> None:
    other = scene.session(b"0" * 16)
    (namespace,) = scene.cache.namespaces.values()
    found, lookups = ask(scene.first, m.Pin, 0, KEYS), scene.cache.find_all([(namespace.keyspaces[0], keys_of(1))])
    jobs: Any = other._jobs
    jobs._check_lease(found.lease, lookups)  # key 1 may be among those that are to join
    if ending == "ready":
        (end,) = below(scene).ends
        end()
    else:
        await scene.first.close()
    with pytest.raises(LeaseError):
        jobs._check_lease(found.lease, lookups)
    await scene.close()


async def test_what_comes_for_a_lease_that_has_ended_is_not_held(scene: LeaseScene) -> None:
    found = ask(scene.first, m.Pin, 0, KEYS)
    scene.release(scene.first, found.lease)
    (namespace,) = scene.cache.namespaces.values()
    store(scene.cache, namespace.keyspaces[0], keys_of(KEYS))
    (end,) = below(scene).ends
    end()
    assert used(scene) == {}
    assert set(scene.leases().values()) == {0}
    assert scene.cache.entries.leases.sum() == 0
    await scene.close()


async def test_what_its_user_may_not_hold_is_a_miss_of_the_pin(scene: LeaseScene) -> None:
    """Users who are neither root nor the daemon's own leave memory for others: the lease has the prefix that fits. Keys
    that others hold cost the same. A prefetch, which gives no lease, is refused.
    """
    held = scene.cache.entries.held
    held.trusted = ()
    may = scene.cache.tier.num_pages * 3 // 4 // 2
    assert may < KEYS
    most = ask(scene.first, m.Pin, *range(KEYS))
    assert np.frombuffer(most.states[0], np.uint8).tolist() == [KeyState.HIT] * may + [KeyState.MISS] * (KEYS - may)
    assert np.frombuffer(most.boundaries, "<u4").max() == 16 * may
    assert (held.pages(scene.uid), scene.charged()) == (may, LEASE_KEYS + may)
    before = used(scene)
    assert not ask(scene.first, m.Pin, may).lease
    with pytest.raises(LimitError, match="release leases"):
        ask(scene.first, m.Prefetch, may, KEYS)
    assert used(scene) == before
    assert not below(scene).ends
    again = ask(scene.first, m.Pin, 0, 1)
    for found in (most, again):
        assert found.lease
        scene.release(scene.first, found.lease)
    assert held.pages(scene.uid) == 0
    assert ask(scene.first, m.Pin, may).lease
    await scene.close()


async def test_the_prefix_that_fits_is_one_of_all_groups(scene: LeaseScene) -> None:
    """Half of the keys of each group are worth something, all of one group and none of the other are worth nothing."""
    held = scene.cache.entries.held
    held.trusted = ()
    may = scene.cache.tier.num_pages * 3 // 4 // 2
    (namespace,) = scene.cache.namespaces.values()
    wide = scene.cache.declare(namespace, GroupSchema(1, GroupKind.FULL, 32))
    scene.cache.set_part_bytes(wide, {0: PAGE_BYTES})
    store(scene.cache, wide, keys_of(*range(KEYS // 2)))
    session, count = scene.first, KEYS // 2
    pins: Any = session._pins
    answered = find_all(
        scene.cache,
        None,
        [
            (keyspace, 0, keys_of(*range(length)))
            for keyspace, length in ((namespace.keyspaces[0], KEYS), (wide, count))
        ],
    )
    found = pins.pin(1, answered, tell_tiers=False)
    narrow_hits, wide_hits = (
        int(np.count_nonzero(np.frombuffer(states, np.uint8) == KeyState.HIT)) for states in found.states
    )
    assert narrow_hits + wide_hits == held.pages(scene.uid) == may
    assert abs(narrow_hits - 2 * wide_hits) <= 2
    assert np.frombuffer(found.boundaries, "<u4").max() == 32 * wide_hits
    scene.release(session, found.lease)
    await scene.close()


async def test_what_comes_later_joins_its_lease_as_far_as_its_user_may_hold_it(scene: LeaseScene) -> None:
    """Keys that others have stored while the tiers below were asked, in prompt order; a `ready` promises no others."""
    held = scene.cache.entries.held
    held.trusted = ()
    may = scene.cache.tier.num_pages * 3 // 4 // 2
    pushed = list[Any]()
    session, wanted = scene.first, range(KEYS, 2 * KEYS)
    pins: Any = session._pins
    pins.push = pushed.append
    found = ask(session, m.Pin, *wanted)
    keyspace = next(iter(scene.cache.namespaces.values())).keyspaces[0]
    for number in wanted:
        store(scene.cache, keyspace, keys_of(number))
    (end,) = below(scene).ends
    end()
    (ready,) = pushed
    states = np.frombuffer(ready.states[0], np.uint8)
    assert may < KEYS
    assert states.tolist() == [KeyState.HIT] * may + [KeyState.MISS] * (KEYS - may)
    assert held.pages(scene.uid) == may
    assert scene.charged() == LEASE_KEYS + may
    scene.release(session, found.lease)
    await scene.close()


@pytest.mark.parametrize("kind", [m.Pin, m.Prefetch])
@pytest.mark.parametrize("gone", [KEYS + 1, KEYS + 5], ids=["before what comes", "behind it"])
async def test_what_comes_behind_a_key_that_no_tier_has_is_lost(
    scene: LeaseScene, kind: type[m.Message], gone: int
) -> None:
    """It is known when all tiers are through. Of a prefetch what was in memory is not judged: that was no use."""
    keyspace = next(iter(scene.cache.namespaces.values())).keyspaces[0]
    below(scene).lacks = {gone}
    found = ask(scene.first, kind, 0, 1, *range(KEYS, KEYS + 6), 2)
    scene.cache.uses.settle()
    assert not scene.cache.entries.lost.any()
    came = [number for number in range(KEYS, KEYS + 6) if number != gone]
    store(scene.cache, keyspace, keys_of(*came))
    (end,) = below(scene).ends
    end()
    scene.cache.uses.settle()
    lost = scene.cache.entries.index.keys[np.flatnonzero(scene.cache.entries.lost)]
    behind = [number for number in came if number > gone] + ([2] if kind is m.Pin else [])
    assert sorted(lost.tolist()) == sorted(keys_of(*behind).tolist())
    if found.lease:
        scene.release(scene.first, found.lease)
    await scene.close()


@pytest.mark.parametrize("kind", [m.Pin, m.Prefetch])
async def test_behind_what_may_come_another_time_nothing_is_lost(scene: LeaseScene, kind: type[m.Message]) -> None:
    """A disk found no room for a key, or the deadline was over: the key is not gone."""
    keyspace = next(iter(scene.cache.namespaces.values())).keyspaces[0]
    found = ask(scene.first, kind, 0, KEYS, KEYS + 1, KEYS + 2, 1)
    store(scene.cache, keyspace, keys_of(KEYS, KEYS + 2))
    (end,) = below(scene).ends
    end()
    scene.cache.uses.settle()
    assert not scene.cache.entries.lost.any()
    if found.lease:
        scene.release(scene.first, found.lease)
    await scene.close()


async def test_a_pin_is_one_use_of_each_key(scene: LeaseScene) -> None:
    """What hits at once, what comes later, and what others store meanwhile."""
    keyspace = next(iter(scene.cache.namespaces.values())).keyspaces[0]
    assert keyspace.queue is not None
    touched = list[int]()
    touch = keyspace.queue.policy.touch

    def noting(rows: Any, *places: Any) -> None:
        touched.extend(scene.cache.entries.index.keys[rows].tolist())
        touch(rows, *places)

    keyspace.queue.policy.touch = noting  # type: ignore[assignment,method-assign]
    found = ask(scene.first, m.Pin, 0, 1, KEYS, KEYS + 1)
    scene.cache.uses.settle()
    store(scene.cache, keyspace, keys_of(KEYS, KEYS + 1))
    (end,) = below(scene).ends
    end()
    scene.cache.uses.settle()
    assert sorted(touched) == sorted(keys_of(0, 1, KEYS, KEYS + 1).tolist())
    scene.release(scene.first, found.lease)
    await scene.close()


@pytest.mark.parametrize(
    ("full", "in_window", "lost"),
    [((0, 1, KEYS, 2, 3), (), [2, 3]), (range(10), range(4, 10), [])],
    ids=["a gap", "what slid out of a window"],
)
async def test_a_pin_without_tiers_below_loses_what_it_can_not_reach(
    scene: LeaseScene, full: Sequence[int], in_window: Sequence[int], lost: list[int]
) -> None:
    (namespace,) = scene.cache.namespaces.values()
    groups = [(namespace.keyspaces[0], 0, keys_of(*full))]
    if in_window:
        window = scene.cache.declare(namespace, GroupSchema(1, GroupKind.SLIDING, 16, window_keys=2))
        scene.cache.set_part_bytes(window, {0: PAGE_BYTES})
        store(scene.cache, window, keys_of(*in_window))
        groups.append((window, 0, keys_of(*full)))
    pins: Any = scene.first._pins
    found = pins.pin(1, find_all(scene.cache, None, groups), tell_tiers=False)
    scene.cache.uses.settle()
    marked = scene.cache.entries.index.keys[np.flatnonzero(scene.cache.entries.lost)]
    assert sorted(marked.tolist()) == sorted(keys_of(*lost).tolist())
    scene.release(scene.first, found.lease)
    await scene.close()
