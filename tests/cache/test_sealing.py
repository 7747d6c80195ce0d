"""Checksums of what was stored: each engine's in its turns, with a bounded number of tickets, and none too many."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.jobs import sealing
from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.cache.jobs.sealing import SIFT_PARTS, TICKETS_PER_THREAD, Sealing
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.progress import Waits
from kvoffloadd.model import PAGE_BYTES, I64Array, U64Array
from kvoffloadd.scheduling.lanes import TURN_BYTES, Flow, Lane
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.testing.wait import HANG_S

from .fakes import keys_of, make_cache, make_keyspace, num_waiters, store

ENGINE, OTHER = Flow(1001, 1), Flow(1001, 2)


class SealingScene:
    """A cache of 256 slots and a hash lane, whose only thread begins when it is let go. `held`: the thread waits for
    that by now, and what is submitted from then on stays queued.
    """

    def __init__(self) -> None:
        self.lane = Lane("hash", 1, asyncio.get_running_loop())
        self.gate, self.held = threading.Event(), threading.Event()
        self.lane.submit(self._hold, lambda _: None)
        self.cache: Cache = make_cache(256, 16)
        self.keyspace = make_keyspace(self.cache)[1]
        self.sealing = Sealing(self.cache, self.lane)

    def _hold(self) -> None:
        self.held.set()
        self.gate.wait()

    def store(self, *numbers: int, flow: Flow = ENGINE) -> None:
        """Stored, and not sealed yet."""
        parts = store(self.cache, self.keyspace, keys_of(*numbers), seals=False)
        self.sealing.add(flow, parts, self.cache.entries.parts.generation[parts])

    def store_hashed(self, *numbers: int, flow: Flow = ENGINE) -> Iterator[None]:
        """The same, by a copy that found their checksums, which are not those of any bytes. Each step seals some."""
        parts = store(self.cache, self.keyspace, keys_of(*numbers), seals=False)
        digests = np.array([[number, 7] for number in numbers], np.uint64).reshape(-1, 2)
        return self.sealing.seal_hashed(flow, parts, self.cache.entries.parts.generation[parts], digests)

    def digests(self, *numbers: int) -> list[list[int]]:
        """Returns the digests of keys that are sealed."""
        entries = self.cache.entries
        rows = self.cache.find(self.keyspace, keys_of(*numbers)).hit_rows
        parts = entries.parts.run(entries.first[rows], 1).ravel()
        assert (entries.parts.state[parts] == PartState.SEALED).all()
        found: list[list[int]] = entries.parts.digest[parts].tolist()
        return found

    async def until_sealed(self, last: int) -> None:
        self.gate.set()
        assert await Waits().until_past(self.sealing.stores, last, asyncio.get_running_loop().time() + 20)

    def sealed(self) -> int:
        return int((self.cache.entries.parts.state == PartState.SEALED).sum())


class SealedNotes:
    """A tier below that notes which parts were sealed."""

    def __init__(self) -> None:
        self.parts: list[int] = []

    def sealed(self, parts: I64Array) -> None:
        self.parts += parts.tolist()

    def _nothing(self, *_: Any) -> None:
        pass

    open_keyspace = rename_keyspace = close_keyspace = reset = used = lost = found_again = evicted = _nothing


@pytest.fixture
async def scene() -> AsyncIterator[SealingScene]:
    scene = SealingScene()
    assert await asyncio.to_thread(scene.held.wait, 20)
    yield scene
    scene.gate.set()
    await scene.lane.close(5.0)


@pytest.mark.parametrize("checked_by", [ENGINE, OTHER])
async def test_checks_before_loads_do_not_starve_seals(scene: SealingScene, checked_by: Flow) -> None:
    checked: list[object] = []
    loop = asyncio.get_running_loop()

    def check() -> None:
        """The loop has had a turn when it ends."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(HANG_S)

    for _ in range(400):
        scene.lane.submit(check, checked.append, flow=checked_by, urgent=0, cost_bytes=TURN_BYTES)
    for number in range(64):
        scene.store(number)
    await scene.until_sealed(64)
    assert scene.sealed() == 64
    assert len(checked) < 100, "nothing waits until there are no more checks"


async def test_tickets_are_bounded_however_much_waits(scene: SealingScene) -> None:
    theirs = Flow(1002, 3)
    for number in range(200):
        scene.store(number, flow=(ENGINE, theirs)[number % 2])
    assert scene.sealing.unsealed == 200
    assert scene.sealing.by_uid == {ENGINE.uid: 100, theirs.uid: 100}
    assert scene.lane.queued <= 2 * TICKETS_PER_THREAD
    await scene.until_sealed(200)
    assert (scene.sealing.unsealed, scene.sealed()) == (0, 200)


async def test_what_lost_its_slot_is_not_waited_for(scene: SealingScene) -> None:
    """256 slots; twenty times as many payloads are stored while the lane is at something else. All slots but the one to
    spare are in use at the end.
    """
    for number in range(0, 5 * SIFT_PARTS, 128):
        scene.store(*range(number, number + 128))
    assert scene.sealing.unsealed <= 2 * 256 + SIFT_PARTS + 128
    scene.gate.set()
    await scene.until_sealed(scene.sealing.stores.last)
    assert scene.sealing.unsealed == scene.sealing.by_uid.total() == 0
    assert scene.sealed() == 256 - scene.cache.tier.num_free(1) >= 255


async def test_tiers_below_are_told_of_what_was_sealed_alone(scene: SealingScene) -> None:
    """A checksum may come late: the key has gone, and another one has its place, which has its own."""
    notes = SealedNotes()
    scene.cache.attach(notes)
    scene.store(1)
    row = scene.cache.find(scene.keyspace, keys_of(1)).hit_rows
    scene.cache.drop(row)
    store(scene.cache, scene.keyspace, keys_of(2))
    assert scene.cache.find(scene.keyspace, keys_of(2)).hit_rows.tolist() == row.tolist()
    scene.store(3)
    await scene.until_sealed(2)
    entries = scene.cache.entries
    third = scene.cache.find(scene.keyspace, keys_of(3)).hit_rows
    assert notes.parts == entries.parts.run(entries.first[third], 1).ravel().tolist()


async def test_a_large_store_is_sealed_batch_by_batch(scene: SealingScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part by its own generation and address; some of the parts were others before, and some go meanwhile."""
    monkeypatch.setattr(sealing, "BATCH_PARTS", 4)
    monkeypatch.setattr(sealing, "TURN_BYTES", 3 * PAGE_BYTES)
    columns, cache = scene.cache.entries.parts, scene.cache
    scene.store(*range(7))
    cache.drop(cache.find(scene.keyspace, keys_of(*range(7))).hit_rows)
    scene.store(*range(100, 130))
    cache.drop(cache.find(scene.keyspace, keys_of(110, 129)).hit_rows)
    parts = np.flatnonzero(columns.state == PartState.COMMITTED)
    assert len(parts) == 28
    assert len(set(columns.generation[parts].tolist())) == 2
    np.ctypeslib.as_array((ctypes.c_uint8 * cache.tier.capacity_bytes).from_address(cache.tier.address))[:] = (
        np.random.default_rng(1).integers(0, 256, cache.tier.capacity_bytes, np.uint8)
    )
    await scene.until_sealed(scene.sealing.stores.last)
    assert scene.sealing.unsealed == 0
    assert (columns.state[parts] == PartState.SEALED).all()
    addresses = cache.tier.address + columns.page[parts].astype(np.uint64) * np.uint64(PAGE_BYTES)
    assert (columns.digest[parts] == hash_payloads(addresses, np.full(28, PAGE_BYTES, np.int64))).all()


async def test_who_waits_for_seals_does_not_wait_for_later_ones(scene: SealingScene) -> None:
    scene.store(1, 2, 3)
    scene.store(4, flow=OTHER)
    last = scene.sealing.stores.last
    assert not scene.sealing.stores.is_past(last)
    hold = threading.Event()
    waiting = partial(scene.lane.submit, hold.wait, lambda _: None, cost_bytes=TURN_BYTES)
    scene.gate.set()
    await scene.until_sealed(last)
    waiting()
    scene.store(5)
    assert scene.sealing.stores.is_past(last)
    assert not scene.sealing.stores.is_past(scene.sealing.stores.last)
    hold.set()


async def test_a_drain_waits_for_jobs_and_then_for_what_they_stored(scene: SealingScene) -> None:
    nobody: Any = None
    jobs = Jobs(scene.cache, None, scene.lane, nobody, verify_loads=False)
    job = jobs.progress.begin()
    draining = asyncio.ensure_future(jobs.drain(jobs.progress, job, 20.0))
    assert not await jobs.drain(jobs.progress, job, 0.01)
    parts = store(scene.cache, scene.keyspace, keys_of(1, 2), seals=False)
    jobs.sealing.add(ENGINE, parts, scene.cache.entries.parts.generation[parts])
    jobs.progress.end(job)
    assert not await jobs.drain(jobs.progress, job, 0.01)
    assert (draining.done(), scene.sealed()) == (False, 0)
    scene.gate.set()
    assert await draining
    assert scene.sealed() == 2
    assert num_waiters(jobs.progress) == num_waiters(jobs.sealing.stores) == 0


async def test_a_lane_that_closes_ends_it(scene: SealingScene) -> None:
    scene.store(1)
    scene.gate.set()
    await scene.until_sealed(1)
    gate = threading.Event()
    scene.lane.submit(gate.wait, lambda _: None, cost_bytes=0)
    for number in range(2, 60):
        scene.store(number)
    closing = asyncio.ensure_future(scene.lane.close(5.0))
    await asyncio.sleep(0)
    gate.set()
    assert await closing
    assert scene.lane.queued == 0


async def test_a_lane_that_closes_while_a_seal_is_under_way(
    scene: SealingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sealed, what waits behind it is not, and the loop hears of no bug."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: reports.append(about))
    begun, gate = threading.Event(), threading.Event()

    def hash_late(addresses: U64Array, sizes: I64Array) -> U64Array:
        begun.set()
        gate.wait()
        return hash_payloads(addresses, sizes)

    monkeypatch.setattr(sealing, "hash_payloads", hash_late)
    monkeypatch.setattr(sealing, "TURN_BYTES", PAGE_BYTES)
    scene.store(*range(20))
    scene.gate.set()
    assert await asyncio.to_thread(begun.wait, 20)
    closing = asyncio.ensure_future(scene.lane.close(5.0))
    await asyncio.sleep(0)
    gate.set()
    assert await closing
    assert reports == []
    assert (scene.sealed(), scene.lane.queued) == (1, 0)
    scene.store(20)  # as a job would whose end comes late
    assert scene.sealed() == 1


async def test_a_seal_tells_those_alone_whose_stores_are_sealed(scene: SealingScene) -> None:
    """However many wait, and however much is sealed bit by bit."""
    sealed_numbers: list[int] = []
    stores = scene.sealing.stores

    def tell(number: int) -> None:
        assert stores.is_past(number)
        sealed_numbers.append(number)

    for number in range(1, 201):
        scene.store(number, flow=(ENGINE, OTHER)[number % 2])
        stores.join(number, partial(tell, number))
    assert sealed_numbers == []
    await scene.until_sealed(200)
    assert sealed_numbers == list(range(1, 201))
    assert num_waiters(stores) == 0


# --- with checksums from the copy -------------------------------------------------------------------


async def test_what_the_copy_hashed_needs_no_lane(scene: SealingScene) -> None:
    notes = SealedNotes()
    scene.cache.attach(notes)
    steps = scene.store_hashed(3, 1, 2)
    scene.store(9)
    assert (scene.sealing.unsealed, scene.sealed(), scene.lane.queued) == (4, 0, 1)
    assert not scene.sealing.stores.is_past(1), "who drains waits for it"
    assert list(steps) == []
    assert (scene.sealing.unsealed, scene.sealed()) == (1, 3), "the gate of the lane is closed"
    assert scene.digests(1, 2, 3) == [[1, 7], [2, 7], [3, 7]]
    assert len(notes.parts) == 3
    assert scene.sealing.by_uid == {ENGINE.uid: 1}
    assert scene.sealing.stores.is_past(1)
    assert not scene.sealing.stores.is_past(2)
    assert list(scene.store_hashed()) == []


async def test_much_that_the_copy_hashed_is_sealed_in_steps(
    scene: SealingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part gets its own checksum; whatever lost its slot meanwhile is not sealed, and nothing waits for it."""
    monkeypatch.setattr(sealing, "BATCH_PARTS", 10)
    first, other = scene.store_hashed(*range(35)), scene.store_hashed(100, 101, flow=OTHER)
    cache = scene.cache
    cache.drop(cache.find(scene.keyspace, keys_of(5, 34)).hit_rows)
    numbers = [(scene.sealed(), scene.sealing.unsealed, scene.sealing.stores.is_past(1)) for _ in first]
    assert numbers == [(9, 27, False), (19, 17, False), (29, 7, False)], "the last step is the iterator's end"
    assert (scene.sealed(), scene.sealing.unsealed, scene.sealing.stores.is_past(1)) == (33, 2, True)
    assert list(other) == []
    assert scene.sealed() == 35
    kept = [number for number in range(35) if number not in (5, 34)]
    assert scene.digests(*kept, 100, 101) == [[number, 7] for number in [*kept, 100, 101]]
    assert scene.sealing.by_uid.total() == 0
    assert scene.sealing.stores.is_past(scene.sealing.stores.last)


async def test_a_lane_that_closes_ends_what_the_copy_hashed(scene: SealingScene) -> None:
    """The cache is closed next: it must not be written to."""
    steps = scene.store_hashed(1, 2)
    scene.gate.set()
    assert await scene.lane.close(5.0)
    assert (list(steps), scene.sealed()) == ([], 0)
