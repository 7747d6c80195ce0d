"""Listeners who follow the tiers believe what a snapshot of each names, and others what a snapshot names in all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from kvoffloadd.cache.disk import catalog as catalog_module
from kvoffloadd.cache.memory import cache as cache_module
from kvoffloadd.cache.memory import keytable
from kvoffloadd.cache.memory.events import Event, WaitingEvents
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.model import PAGE_BYTES, Tier
from kvoffloadd.storage.disk.health import RootState

from .conftest import Open
from .disktier import Shape
from .disktier import Tier as Tiers
from .fakes import keys_of

MEMORY, DISK = Tier.MEMORY, Tier.DISK


def numbers_in(packed: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(packed, np.uint64).reshape(-1, 4)[:, 1].tolist()
    return numbers


def snapshot(tiers: Tiers, keyspace: Keyspace, tier: Tier | None) -> set[int]:
    """What is listed, page by page."""
    found, cursor = set[int](), 0
    for _ in range(1000):
        packed, cursor = tiers.cache.snapshot(keyspace, cursor, tier)
        found.update(numbers_in(packed))
        if not cursor:
            return found
    raise AssertionError("it does not end")


class Follower:
    """Believes what it is told of a namespace's tiers, and of the namespace as a whole; lists anew after a loss."""

    def __init__(self, tiers: Tiers, keyspace: Keyspace) -> None:
        self.tiers = tiers
        self.namespace = keyspace.namespace
        self.namespace.listeners, self.namespace.tier_listeners = 2, 1
        self.believed: dict[Tier | None, set[int]] = {where: set() for where in (MEMORY, DISK, None)}
        self.losses = 0
        self.list_all()

    def list_all(self) -> None:
        for where in self.believed:
            self.believed[where] = snapshot(self.tiers, self.namespace.keyspaces[0], where)

    def events(self) -> Iterator[Event]:
        waiting = self.tiers.cache.entries.events.waiting
        if waiting.take_loss(self.namespace):
            self.losses += 1
            self.list_all()
        yield from iter(partial(waiting.take, self.namespace), None)

    def hear(self) -> list[tuple[Tier | None, list[int], list[int]]]:
        heard = []
        for event in self.events():
            added, removed = numbers_in(event.added), numbers_in(event.removed)
            self.believed[event.tier] = (self.believed[event.tier] | set(added)) - set(removed)
            heard.append((event.tier, added, removed))
        return heard

    def check(self) -> None:
        self.hear()
        keyspace = self.namespace.keyspaces[0]
        assert self.believed == {where: snapshot(self.tiers, keyspace, where) for where in self.believed}


async def test_a_key_comes_to_each_tier_and_goes_from_each(open_tier: Open) -> None:
    tiers = await open_tier()
    keyspace = tiers.keyspace()
    follower = Follower(tiers, keyspace)
    tiers.store(keyspace, 1, 2)
    await tiers.quiet()
    assert follower.hear() == [(MEMORY, [1, 2], []), (None, [1, 2], []), (DISK, [1, 2], [])]
    tiers.evict(keyspace, 1, 2)
    assert follower.hear() == [(MEMORY, [], [1, 2])], "on disk only"
    assert await tiers.fetch(keyspace, 2) == [2]
    assert follower.hear() == [(MEMORY, [2], [])]
    tiers.flip(keyspace, 1, PAGE_BYTES)
    assert await tiers.fetch(keyspace, 1) == []
    assert follower.hear() == [(DISK, [], [1]), (None, [], [1])]
    follower.check()


async def test_only_listeners_of_the_kind_that_there_is_are_told(open_tier: Open) -> None:
    tiers = await open_tier()
    keyspace = tiers.keyspace()
    follower = Follower(tiers, keyspace)
    for listeners, tier_listeners, heard in ((1, 1, [MEMORY, DISK]), (1, 0, [None]), (0, 0, [])):
        keyspace.namespace.listeners, keyspace.namespace.tier_listeners = listeners, tier_listeners
        tiers.store(keyspace, 10 + 3 * listeners + tier_listeners)
        await tiers.quiet()
        assert [where for where, _, _ in follower.hear()] == heard


async def test_what_was_stored_again_amid_a_clear_is_there(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clear drops its keys in steps; by then newer ones may have their names, in either tier."""
    monkeypatch.setattr(keytable, "STEP_ROWS", 2)
    monkeypatch.setattr(catalog_module, "STEP_RECORDS", 2)
    tiers = await open_tier()
    keyspace = tiers.keyspace()
    follower = Follower(tiers, keyspace)
    await tiers.store_away(keyspace, *range(10))
    tiers.store(keyspace, *range(10, 20))
    await tiers.quiet()
    namespace = keyspace.namespace
    tiers.cache.epochs.advance(namespace.fingerprint)
    old = tiers.disk.clears.begin({namespace.fingerprint})
    walk = tiers.cache.clear(namespace)
    next(walk)
    current = tiers.keyspace()
    assert current is not keyspace
    tiers.store(current, 0, 15)
    for _ in walk:
        pass
    await tiers.disk.clears.finish(old)
    await tiers.quiet()
    follower.check()
    assert follower.believed == {MEMORY: {0, 15}, DISK: {0, 15}, None: {0, 15}}
    assert follower.losses == 0


async def test_a_root_that_goes_and_comes_is_told_in_steps(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys it has, no event has more than one step makes."""
    monkeypatch.setattr("kvoffloadd.cache.disk.reclaim.STEP_RECORDS", 4)
    monkeypatch.setattr("kvoffloadd.cache.disk.rootlifecycle.STEP_RECORDS", 4)
    tiers = await open_tier()
    keyspace = tiers.keyspace()
    follower = Follower(tiers, keyspace)
    await tiers.store_away(keyspace, *range(20))
    tiers.store(keyspace, 20)
    await tiers.quiet()
    follower.check()
    tiers.root.path.rename(tiers.folder / "elsewhere")
    await tiers.until(lambda: not (tiers.root.accepted or tiers.disk.catalog.records))
    heard = follower.hear()
    assert sorted(number for where, _, gone in heard if where is DISK for number in gone) == list(range(21))
    assert sorted(number for where, _, gone in heard if where is None for number in gone) == list(range(20))
    assert max(len(gone) for _, _, gone in heard) <= 4
    (tiers.folder / "elsewhere").rename(tiers.root.path)
    await tiers.until(lambda: tiers.root.state == RootState.OK)
    await tiers.quiet()
    heard = follower.hear()
    assert max(len(came) for _, came, _ in heard) <= 4
    follower.check()
    assert follower.believed[DISK] == set(range(21))
    assert follower.losses == 0


async def test_keys_on_disk_of_a_group_that_becomes_known_are_a_loss(open_tier: Open) -> None:
    """There may be millions of them: who listens lists them."""
    tiers = await open_tier()
    await tiers.store_away(tiers.keyspace(), *range(5))
    await tiers.close()
    again = await open_tier()
    namespace = again.cache.open_namespace(b"n" * 16, 0, "test", 32)
    namespace.listeners = namespace.tier_listeners = 1
    waiting = again.cache.entries.events.waiting
    keyspace = again.keyspace()
    assert waiting.take_loss(namespace)
    assert waiting.take(namespace) is None
    assert snapshot(again, keyspace, DISK) == set(range(5))
    assert snapshot(again, keyspace, MEMORY) == set()


def test_a_loss_leaves_nothing_that_was_before_it() -> None:
    """An older event, delivered after the loss, would be believed for good."""
    waiting, namespace = WaitingEvents(), Namespace(b"n" * 16, 0, "m", 32, epoch=0)
    waiting.put(Event(namespace, 0, b"a" * 32, b"", DISK))
    waiting.put(Event(namespace, 0, b"", b"b" * 32, DISK))
    waiting.lose(namespace)
    assert waiting.lost == 3
    waiting.put(Event(namespace, 0, b"c" * 32, b"", DISK))
    assert waiting.take_loss(namespace)
    assert [event.added for event in iter(partial(waiting.take, namespace), None)] == [b"c" * 32]
    assert not waiting.take_loss(namespace)
    assert not waiting.waits(namespace)
    assert waiting._bytes == 0


@pytest.mark.parametrize("waiting_bytes", [1 << 20, 4096])
async def test_whatever_happens_what_is_believed_is_what_is_there(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, seed: int, waiting_bytes: int
) -> None:
    """Also with so little room for events that some are lost."""
    monkeypatch.setattr(keytable, "STEP_ROWS", 8)
    monkeypatch.setattr(cache_module, "SCAN_ROWS", 8)
    tiers = await open_tier(Shape(pages=48))
    tiers.cache.entries.events.waiting._bytes_max = waiting_bytes
    rng = random.Random(seed)
    follower = Follower(tiers, tiers.keyspace())
    for _ in range(60):
        keyspace = tiers.keyspace()
        some = sorted({rng.randrange(40) for _ in range(rng.randint(1, 8))})
        match rng.randrange(8):
            case 0 | 1 | 2:
                tiers.store(keyspace, *some)
            case 3:
                rows = tiers.cache.find(keyspace, keys_of(*some)).hit_rows
                tiers.cache.eviction.drop(rows[tiers.cache.entries.evictable(rows)])
            case 4:
                await tiers.fetch(keyspace, *some)
            case 5:
                await tiers.quiet()
            case 6:
                follower.check()
            case 7:
                if not rng.randrange(3):
                    await tiers.clear(keyspace.namespace)
    follower.check()
    await tiers.quiet()
    follower.check()
    assert (follower.losses > 0) == (waiting_bytes == 4096)
