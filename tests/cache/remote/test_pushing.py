"""Pushes that meet evictions, clears, failures and a store that is away: what is put is right, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from kvoffloadd.cache.clearing import clear_here
from kvoffloadd.cache.memory.composition import Composition
from kvoffloadd.storage.remote.transfers import RemoteStatus
from kvoffloadd.testing.wait import HANG_S

from ..clears import clear
from ..fakes import keys_of
from .fakeremote import Call
from .test_fetching import NAME, SIZES, RemoteScene

Make = Callable[..., Awaitable[RemoteScene]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """`make(pages=..., push=...)`: a scene that is audited at the end: nothing waits, and nothing is held."""
    made: list[RemoteScene] = []

    async def make(pages: int = 4096, push: str = "seal") -> RemoteScene:
        made.append(await RemoteScene(pages, push=push).start())
        return made[0]

    yield make
    (scene,) = made
    await scene.finish_all()
    scene.audit()
    assert (scene.remote.holds, scene.remote.pushing.backlog.bytes) == (0, 0)
    await scene.close()


def puts(scene: RemoteScene) -> list[Call]:
    """Those that are under way."""
    return [call for call in scene.store.calls if call.end.__qualname__.startswith("FakeRemote.put")]


async def a_put(scene: RemoteScene) -> Call:
    """The first one that is under way, soon."""
    async with asyncio.timeout(HANG_S):
        while not puts(scene):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return puts(scene)[0]


def is_waiting(scene: RemoteScene) -> bool:
    """Whether a key waits to be put, or is being put."""
    return bool(scene.remote.pushing.backlog.bytes or scene.remote.holds)


async def calm(scene: RemoteScene) -> None:
    """What is to begin has begun."""
    for _ in range(20):
        await asyncio.sleep(0)


def store(scene: RemoteScene, *numbers: int) -> None:
    """Keys whose checksums are known."""
    scene.store_here(*numbers)
    entries, found = scene.cache.entries, scene.cache.find(scene.keyspace, keys_of(*numbers))
    scene.cache.sealed(entries.parts.run(entries.first[found.hit_rows], len(SIZES)).ravel())


def use(scene: RemoteScene, *numbers: int) -> None:
    """Uses keys as a pin does."""
    found = scene.cache.find(scene.keyspace, keys_of(*numbers))
    scene.cache.uses.add([(scene.keyspace, found, 0)])
    scene.cache.uses.settle()


@pytest.mark.slow
async def test_what_is_put_stays_where_it_is_until_the_end(make: Make) -> None:
    """The store's client reads the slots meanwhile; memory needs all of them for others."""
    scene = await make(pages=1024)
    store(scene, 1, 2, 3)
    put = await a_put(scene)
    assert scene.remote.holds == 3
    for number in range(10, 500):
        scene.store_here(number)
    assert scene.served(1, 2, 3) == [1, 2, 3]
    scene.store.finish(put)
    assert scene.remote.pushing.counters.keys == 3
    for number in range(500, 1000):
        scene.store_here(number)
    assert scene.served(1, 2, 3) == [], "they may be evicted again"


async def test_what_is_renamed_while_it_is_put_is_not_there_by_its_new_name(make: Make) -> None:
    """More is known of the bytes of its group by the end of the put."""
    scene = await make()
    store(scene, 1, 2)
    put = await a_put(scene)
    known = Composition("bfloat16", b"layers 0")
    scene.cache.set_part_bytes(scene.keyspace, dict(enumerate(SIZES)), dict.fromkeys(range(len(SIZES)), known))
    scene.store.finish(put)
    contents, rows = scene.remote._contents, scene.cache.find(scene.keyspace, keys_of(1, 2)).hit_rows
    place = contents.place(scene.keyspace)
    assert place is not None
    assert not contents.believed(rows, place).any()


@pytest.mark.parametrize("far", [False, True])
async def test_what_is_cleared_before_its_turn_is_not_put(make: Make, far: bool) -> None:
    """Here, or by another host. Its name would be of the era that is over."""
    scene = await make()
    scene.store.writable = False
    store(scene, 1, 2)
    await calm(scene)
    assert scene.remote.holds == 2
    if far:
        await clear_here(scene.cache, None, NAME, scene.cache.epochs.of(NAME) + 1)
        scene.remote.eras.begin_clear([NAME])
    else:
        await clear(scene.cache, None, {NAME}, scene.remote)
    scene.store.writable = True
    scene.store.changes.notify_all()
    await calm(scene)
    assert not puts(scene)
    assert scene.remote.pushing.counters.not_pushed["cleared"] == 2
    assert scene.remote.holds == 0


async def test_a_put_that_fails_is_made_again_when_the_key_is_used(make: Make) -> None:
    scene = await make(push="second-use")
    store(scene, 1)
    use(scene, 1)
    scene.store.put_status = RemoteStatus.FAILED
    scene.store.finish(await a_put(scene))
    assert scene.remote.pushing.counters.not_pushed["failed"] == 1
    scene.store.put_status = RemoteStatus.OK
    use(scene, 1)
    scene.store.finish(await a_put(scene))
    assert scene.remote.pushing.counters.keys == 1
    use(scene, 1)
    await calm(scene)
    assert not puts(scene), "it is there"


async def test_puts_take_less_while_a_slow_link_breaks_them_off(make: Make) -> None:
    """And more again, little by little, so that most of them end."""
    scene = await make(push="second-use")
    backlog, numbers = scene.remote.pushing.backlog, iter(range(1, 100))
    most = backlog.batch_bytes

    async def end(status: RemoteStatus) -> int:
        """A put ends so. What the next ones take."""
        scene.store.put_status, number = status, next(numbers)
        store(scene, number)
        use(scene, number)
        scene.store.finish(await a_put(scene))
        return backlog.batch_bytes

    assert [await end(RemoteStatus.FAILED) for _ in range(2)] == [most // 2, most // 4]
    assert await end(RemoteStatus.OK) == most // 4 + most // 16
    assert [await end(RemoteStatus.FAILED) for _ in range(5)][-1] == most // 16
    assert [await end(RemoteStatus.OK) for _ in range(17)][-2:] == [most, most]


async def test_uses_are_counted_behind_the_reply(make: Make) -> None:
    """A pin does not wait for it."""
    scene = await make(push="second-use")
    store(scene, 1)
    use(scene, 1)
    assert not is_waiting(scene)
    await scene.turn(1)
    assert is_waiting(scene)
    scene.store.finish(await a_put(scene))


async def test_rows_that_are_gone_when_their_use_is_counted(make: Make) -> None:
    scene = await make(push="second-use")
    store(scene, 1, 2)
    use(scene, 1, 2)
    await clear(scene.cache, None, {NAME}, scene.remote)
    await calm(scene)
    assert not puts(scene)


@pytest.mark.parametrize("how", ["evicted", "dropped"])
async def test_a_use_is_not_that_of_the_next_key_in_its_row(make: Make, how: str) -> None:
    """It is counted behind the reply, and by then the key may have gone, and another one have its place."""
    scene = await make(push="second-use")
    store(scene, 1)
    (row,) = scene.cache.find(scene.keyspace, keys_of(1)).hit_rows.tolist()
    use(scene, 1)
    if how == "evicted":
        scene.cache.eviction.drop(np.array([row], np.uint32))
    else:
        scene.cache.drop(np.array([row], np.uint32))
    store(scene, 2)
    assert scene.cache.find(scene.keyspace, keys_of(2)).hit_rows.tolist() == [row]
    await calm(scene)
    assert not puts(scene), "it was never used"
    assert scene.remote.pushing.counters.not_pushed["evicted"] == (how == "evicted"), "that was to be put"
    store(scene, 1)
    scene.store.finish(await a_put(scene))


async def test_a_store_without_room_is_left_alone_for_a_while(make: Make) -> None:
    scene = await make()
    scene.remote.pushing._pause_s = pause_s = 0.5
    scene.store.put_status = RemoteStatus.NO_SPACE
    store(scene, 1)
    put = await a_put(scene)
    full_s = scene.loop.time()
    scene.store.finish(put)
    assert scene.remote.pushing.counters.not_pushed["no_space"] == 1
    scene.store.put_status = RemoteStatus.OK
    store(scene, 2)
    scene.store.finish(await a_put(scene))
    assert scene.loop.time() - full_s >= pause_s


async def test_what_an_earlier_run_left_is_put_only_when_it_is_verified(make: Make) -> None:
    scene = await make(push="second-use")
    store(scene, 1)
    entries = scene.cache.entries
    row = int(scene.cache.find(scene.keyspace, keys_of(1)).hit_rows[0])
    records = entries.parts.run(entries.first[np.array([row])], 2).ravel()
    entries.parts.unverified[records[1]] = 1
    use(scene, 1)
    await calm(scene)
    assert not puts(scene)
    entries.parts.unverified[records[1]] = 0
    use(scene, 1)
    scene.store.finish(await a_put(scene))


async def test_in_a_new_era_keys_are_put_again(make: Make) -> None:
    """The store has lost the marker, and with it all that it had."""
    scene = await make(push="second-use")
    store(scene, 1)
    use(scene, 1)
    scene.store.finish(await a_put(scene))
    known = scene.remote.eras.of(NAME)
    assert known is not None
    scene.store.values.clear()
    scene.remote.eras.lost(NAME, known.number)
    await scene.era_is_known()
    use(scene, 1)
    scene.store.finish(await a_put(scene))
    assert scene.remote.pushing.counters.keys == 2


@pytest.mark.slow
async def test_a_key_in_the_place_of_another_one_is_put(make: Make) -> None:
    """What was known of the key that memory has evicted does not hold for it."""
    scene = await make(pages=1024)
    first, second = range(1, 101), range(5000, 5120)
    store(scene, *first)
    await pushed(scene, len(first))
    for number in range(100, 1600):
        scene.store_here(number)
    for number in second:
        store(scene, number)
        await scene.finish_all(2)
    await pushed(scene, len(first) + len(second))


async def pushed(scene: RemoteScene, count: int) -> None:
    """Wait until `count` keys have been pushed in total."""
    async with asyncio.timeout(HANG_S):
        while scene.remote.pushing.counters.keys < count:
            await scene.finish_all(1)
