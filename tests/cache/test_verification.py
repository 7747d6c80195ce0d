"""Payloads that are checked before they are loaded, and loads under way whose payloads are found wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.job import Completion, CopyOptions, Phase
from kvoffloadd.cache.jobs import Jobs, LoadPlan
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.device.base import CopyResult
from kvoffloadd.lanes import Lane
from kvoffloadd.model import Direction, Outcome
from kvoffloadd.storage import hashing

from .fakes import keys_of, make_cache, make_keyspace, store

GPU: Any = SimpleNamespace(hashed_load_bytes=0)
"""A device that hashes nothing while it copies; nor is it asked to copy."""


@pytest.fixture
async def lane() -> AsyncIterator[tuple[Lane, threading.Event]]:
    """Its only thread is at something else until the event is set."""
    made, gate = Lane("hash", 1, asyncio.get_running_loop()), threading.Event()
    made.submit(gate.wait, lambda _: None)
    yield made, gate
    gate.set()
    await made.close(5.0)


def adopted(cache: Cache) -> LoadPlan:
    """Ten keys of which nobody knows whether they are still right."""
    keyspace = make_keyspace(cache)[1]
    parts = store(cache, keyspace, keys_of(*range(10)))
    cache.entries.parts.unverified[parts] = 1
    return LoadPlan(cache.entries.parts.row[parts], parts, [])  # no copy is ever made of it


@pytest.mark.parametrize("ends", [Outcome.CANCELLED, Outcome.EXPIRED])
async def test_a_load_that_is_given_up_waits_for_nobody(lane: tuple[Lane, threading.Event], ends: Outcome) -> None:
    cache = make_cache()
    plan = adopted(cache)
    nobody: Any = None  # no signal is waited for
    jobs = Jobs(cache, None, lane[0], nobody, False)
    results: list[Completion] = []
    deadline_s = asyncio.get_running_loop().time() + (0.05 if ends is Outcome.EXPIRED else 60.0)
    options = CopyOptions(GPU, deadline_s)
    running = [jobs.load(plan, options, results.append) for _ in range(20)]
    assert {job.phase for job in running} == {Phase.VERIFICATION}
    if ends is Outcome.CANCELLED:
        for job in running:
            job.cancel()
    assert await jobs.settle(set(running), 5.0)
    assert [result.outcome for result in results] == [ends] * 20
    assert not cache.entries.leases.any()
    assert np.count_nonzero(cache.entries.parts.unverified) == 10


class SlowDevice:
    """Its copies end when the test says so. `hashed_load_bytes`: see `Device`."""

    def __init__(self, hashed_load_bytes: int = 0) -> None:
        self.hashed_load_bytes = hashed_load_bytes
        self.ends: list[Any] = []
        self.work: list[Any] = []

    def submit(self, direction: Direction, work: Any, *, done: Any, **options: Any) -> Any:
        self.work.append(work)
        self.ends.append(done)
        return SimpleNamespace(cancel=lambda: None)


async def test_what_is_found_wrong_while_a_copy_is_queued_or_under_way_is_not_valid() -> None:
    """A copy waits for its turn in the lane, for seconds; what it copies then is known to be wrong."""
    cache, device, nobody = make_cache(), SlowDevice(), Any
    keyspace = make_keyspace(cache)[1]
    parts = store(cache, keyspace, keys_of(*range(10)))
    rows = cache.entries.parts.row[parts]
    jobs = Jobs(cache, None, nobody, nobody, False)  # type: ignore[arg-type]  # neither lane nor signals are asked
    results: list[Completion] = []
    plan = LoadPlan(rows, parts, [])
    options = CopyOptions(device, asyncio.get_running_loop().time() + 60)  # type: ignore[arg-type]  # a fake
    first, second = (jobs.load(plan, options, results.append) for _ in range(2))
    device.ends[0](CopyResult(Outcome.DONE, 10, 10, 10, 0.0))  # this one was told before
    jobs.drop(rows[3:5])
    device.ends[1](CopyResult(Outcome.DONE, 10, 10, 10, 0.0))
    assert first.ended.is_set()
    assert second.ended.is_set()
    assert [result.outcome for result in results] == [Outcome.DONE, Outcome.PARTIAL]
    assert np.flatnonzero(results[1].bad).tolist() == [3, 4]
    assert not cache.find(keyspace, keys_of(3, 4)).hits.any()
    assert not cache.entries.leases.any()


async def test_what_goes_while_what_was_adopted_is_verified(
    lane: tuple[Lane, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that comes late may end a whole namespace: nobody knows the sizes of its payloads any more."""
    monkeypatch.setattr(hashing, "TURN_BYTES", 1)
    cache = make_cache()
    keyspaces = [make_keyspace(cache, bytes([n]) * 16)[1] for n in range(2)]
    for keyspace in keyspaces:
        cache.entries.parts.unverified[store(cache, keyspace, keys_of(1))] = 1
    nobody: Any = None
    verified = asyncio.ensure_future(Jobs(cache, None, lane[0], nobody, False).verify_adopted())
    await asyncio.sleep(0)
    cache.entries.retire(cache.find(keyspaces[1], keys_of(1)).hit_rows)
    cache.close_namespace(keyspaces[1].namespace)
    lane[1].set()
    await verified
    assert not cache.entries.parts.unverified.any()
    assert len(cache.find(keyspaces[0], keys_of(1)).hit_rows) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("changed size during iteration"), ValueError()])
async def test_a_bug_while_what_is_wrong_is_dropped_is_no_lack_of_memory(error: Exception) -> None:
    """The tables may be half-written then: the loop's handler ends the daemon. Until then nobody takes the payload for
    one that was checked.
    """
    loop = asyncio.get_running_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _, about: told.append(about["exception"]))
    cache, nobody = make_cache(), None
    plan = adopted(cache)
    lane = Lane("hash", 1, loop)
    jobs = Jobs(cache, None, lane, nobody, False)  # type: ignore[arg-type]  # signals are not asked

    def drop(rows: object) -> None:
        raise error

    cache.drop = drop  # type: ignore[method-assign]
    cache.entries.parts.digest[plan.parts[3]] += np.uint64(1)
    results: list[Completion] = []
    options = CopyOptions(GPU, loop.time() + 60)
    job = jobs.load(plan, options, results.append)
    assert await jobs.settle({job}, 20.0)
    assert told == [error]
    assert [(result.outcome, result.reason) for result in results] == [
        (Outcome.FAILED, "it met a bug in the daemon; its log has the details")
    ]
    assert np.count_nonzero(cache.entries.parts.unverified) == 10
    await lane.close(5.0)
