"""The end of a store of very many parts: they are committed, or freed, in steps, with turns for others in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.cache.jobs.job import STEP_PARTS, Completion, CopyOptions
from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.cache.jobs.sealing import BATCH_PARTS
from kvoffloadd.cache.memory import audit, eviction
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.device.base import CopyResult
from kvoffloadd.device.work import BlockList
from kvoffloadd.model import NO_BLOCK, Outcome, U64Array
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.testing.wait import HANG_S

from .fakes import keys_of, make_cache, make_keyspace

KEYS = 2 * STEP_PARTS + 5


class HeldDevice:
    """Its copies end when the test ends them."""

    def __init__(self) -> None:
        self.done: Callable[[CopyResult], None] = lambda _: None

    def submit(self, _: object, done: Callable[[CopyResult], None]) -> HeldDevice:
        self.done = done
        return self

    def cancel(self) -> None: ...


def unwanted(count: int) -> BlockList:
    """Payloads that are never copied."""
    blocks, numbers = np.full((count, 1), NO_BLOCK, np.uint32), np.arange(count)
    return BlockList((), blocks, numbers, np.zeros(count, np.int64), np.zeros(count, np.uint64))


class BigStore:
    """A store of KEYS keys whose copy is under way."""

    def __init__(self) -> None:
        nobody: Any = None
        self.lane = Lane("hash", 1, asyncio.get_running_loop())
        self.cache = make_cache(pages=KEYS + 64, slab_pages=256)
        self.namespace, self.keyspace = make_keyspace(self.cache)
        self.jobs = Jobs(self.cache, None, self.lane, nobody, verify_loads=False)
        self.keys = keys_of(*range(KEYS))
        self.parts = reserve(self.cache, self.keyspace, self.keys, np.zeros(1, np.uint16), 0).parts
        self.device = HeldDevice()
        self.ends: list[Completion] = []
        held = cast(Any, self.device)
        self.job = self.jobs.store(self.parts, [unwanted(KEYS)], CopyOptions(held, 1e9), self.ends.append)

    def end_copy(self, outcome: Outcome, digests: U64Array | None = None) -> None:
        self.device.done(CopyResult(outcome, 0, 0, 0, 0.0, "", digests))

    def audit(self) -> list[str]:
        return audit.check(self.cache, self.jobs.holds, self.jobs.reserved)

    def hits(self) -> int:
        return self.cache.find(self.keyspace, self.keys).num_hits


@pytest.fixture
async def scene() -> Any:
    scene = BigStore()
    yield scene
    assert scene.audit() == []
    assert await scene.lane.close(20.0)
    scene.cache.tier.close()


async def steps(scene: BigStore) -> None:
    for _ in range(0, KEYS, STEP_PARTS):
        assert scene.audit() == [], "what is committed is not counted as reserved any more"
        await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        await scene.job.ended.wait()


async def test_a_big_store_becomes_readable_in_steps_from_its_end_on_and_is_sealed(scene: BigStore) -> None:
    scene.end_copy(Outcome.DONE)
    assert scene.hits() == STEP_PARTS
    assert scene.cache.find(scene.keyspace, scene.keys[-STEP_PARTS:]).hits.all(), "a prompt's beginning comes last"
    assert not scene.ends, "the worker gets its answer when all of it is"
    scene.job.cancel()  # too late: the bytes are there
    await steps(scene)
    assert (scene.ends[0].outcome, scene.hits(), scene.jobs.reserved) == (Outcome.DONE, KEYS, 0)
    assert await scene.jobs.until_sealed(asyncio.get_running_loop().time() + 20)
    assert (scene.cache.entries.parts.state[scene.parts] == PartState.SEALED).all()


@pytest.mark.parametrize("cleared", [False, True])
async def test_each_part_of_a_big_store_is_sealed_with_its_own_digest(scene: BigStore, *, cleared: bool) -> None:
    """The parts are committed from the last on, and some may be gone by then: the copy's digests are of all parts, in
    the order of the request.
    """
    gate, columns = threading.Event(), scene.cache.entries.parts
    scene.lane.submit(gate.wait, lambda _: None)
    digests = np.arange(2 * KEYS, dtype=np.uint64).reshape(-1, 2)
    gone = np.array([3, STEP_PARTS + 7, KEYS - 2]) if cleared else np.zeros(0, int)
    scene.cache.drop(scene.cache.entries.find(scene.keyspace, scene.keys[gone]).astype(np.uint32))
    scene.end_copy(Outcome.DONE, digests)
    await steps(scene)
    assert scene.ends[0].failed[0].tolist() == gone.tolist()
    sealed = [scene.cache.counters.parts_sealed]
    assert sealed[0] < KEYS - STEP_PARTS, "the completion comes first"
    while scene.jobs.sealing.unsealed:  # the hash lane is busy all the time
        await asyncio.sleep(0)
        sealed.append(scene.cache.counters.parts_sealed)
        assert len(sealed) < 1000
    assert np.diff(sealed).max() <= BATCH_PARTS
    kept = np.delete(np.arange(KEYS), gone)
    assert (columns.state[scene.parts[kept]] == PartState.SEALED).all()
    assert (columns.digest[scene.parts[kept]] == digests[kept]).all()
    assert scene.cache.counters.parts_sealed == len(kept)
    gate.set()


async def test_small_stores_are_sealed_when_they_end_however_many_they_are(scene: BigStore) -> None:
    gate = threading.Event()
    scene.lane.submit(gate.wait, lambda _: None)
    scene.end_copy(Outcome.FAILED)
    await steps(scene)
    devices = [HeldDevice() for _ in range(500)]
    for number, device in enumerate(devices):
        parts = reserve(scene.cache, scene.keyspace, keys_of(number), np.zeros(1, np.uint16), 0).parts
        scene.jobs.store(parts, [unwanted(1)], CopyOptions(cast(Any, device), 1e9), scene.ends.append)
    for number, device in enumerate(devices):
        device.done(CopyResult(Outcome.DONE, 0, 0, 0, 0.0, "", np.array([[number, 1]], np.uint64)))
    assert (scene.jobs.unsealed, scene.cache.counters.parts_sealed) == (0, 500)
    assert await scene.jobs.until_sealed(asyncio.get_running_loop().time())
    gate.set()


async def test_a_big_store_that_failed_is_freed_in_steps(scene: BigStore) -> None:
    scene.end_copy(Outcome.FAILED)
    assert scene.jobs.reserved == KEYS - STEP_PARTS
    await steps(scene)
    assert (scene.ends[0].outcome, scene.hits(), scene.jobs.reserved) == (Outcome.FAILED, 0, 0)
    assert len(scene.cache.entries.index) == 0


async def test_a_clear_between_two_steps(scene: BigStore) -> None:
    """All of it goes with the clear, what was committed before as well, and the worker gets this answer: its store had
    not ended.
    """
    scene.end_copy(Outcome.DONE)
    scene.cache.epochs.advance(scene.namespace.fingerprint)
    clearing: Iterator[object] = scene.cache.clear(scene.namespace)
    assert all(step is not None for step in clearing)
    await steps(scene)
    assert scene.ends[0].outcome is Outcome.PARTIAL
    assert len(scene.ends[0].failed[0]) == KEYS
    assert (scene.hits(), scene.jobs.reserved, len(scene.cache.entries.index)) == (0, 0, 0)


@pytest.mark.parametrize(
    "begun_before", [True, False], ids=["begun before the store's end", "begun behind its first step"]
)
async def test_a_clear_that_becomes_known_between_two_steps(scene: BigStore, *, begun_before: bool) -> None:
    """Another daemon recorded it on a disk that came late: all that was stored in this run goes."""
    dropping = scene.cache.drop_older(scene.namespace, scene.cache.epochs.began + 1)
    if begun_before:
        next(dropping)
    scene.end_copy(Outcome.DONE)
    for _ in dropping:
        pass
    await steps(scene)
    assert scene.ends[0].outcome is Outcome.PARTIAL
    assert len(scene.ends[0].failed[0]) == KEYS
    assert (scene.hits(), scene.jobs.reserved, len(scene.cache.entries.index)) == (0, 0, 0)


async def test_an_older_clear_between_two_steps_costs_nothing(scene: BigStore) -> None:
    scene.end_copy(Outcome.DONE)
    for _ in scene.cache.drop_older(scene.namespace, scene.cache.epochs.began - 1):
        pass
    await steps(scene)
    assert (scene.ends[0].outcome, scene.hits()) == (Outcome.DONE, KEYS)


async def test_an_eviction_between_two_steps_does_not_seal_what_took_the_slots(scene: BigStore) -> None:
    scene.end_copy(Outcome.DONE)
    theirs = reserve(scene.cache, scene.keyspace, keys_of(*range(KEYS, KEYS + 100)), np.zeros(1, np.uint16), 0)
    assert len(theirs.parts) == 100
    taken = np.isin(scene.parts, theirs.parts)
    assert taken.any(), "some of the store's keys had to go"
    scene.cache.commit(theirs.parts)
    await scene.job.ended.wait()
    assert await scene.jobs.until_sealed(asyncio.get_running_loop().time() + 20)
    states = scene.cache.entries.parts.state
    assert (states[theirs.parts] == PartState.COMMITTED).all(), "their own store has them sealed"
    spare = min(eviction.SPARE_MAX, (KEYS + 64) // eviction.SPARE_SHARE)
    assert (states[scene.parts[~taken]] == PartState.SEALED).sum() == KEYS - (100 - 64) - spare
