"""Payloads that are checked before they are loaded, and loads under way whose payloads are found wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.jobs import job as job_module
from kvoffloadd.cache.jobs.job import Completion, CopyOptions, Job, Phase
from kvoffloadd.cache.jobs.jobs import Jobs, Verification
from kvoffloadd.cache.jobs.loadplan import NO_PARTS, LoadPlan
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import CacheTornError
from kvoffloadd.device.base import CopyRequest, CopyResult
from kvoffloadd.device.plan import GroupPlan, Tensor
from kvoffloadd.device.work import BlockList, HashedWork
from kvoffloadd.model import NO_BLOCK, PAGE_BYTES, I64Array, Outcome, Ref
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage import hashing
from kvoffloadd.testing.wait import HANG_S

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
    """Ten adopted keys, which are not verified yet."""
    keyspace = make_keyspace(cache)[1]
    parts = store(cache, keyspace, keys_of(*range(10)))
    cache.entries.parts.unverified[parts] = 1
    return LoadPlan(cache.entries.parts.row[parts], parts, [], [])  # no copy is ever made of it


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
    """Its copies end when the test ends them. `hashed_load_bytes`: see `Device`."""

    def __init__(self, hashed_load_bytes: int = 0) -> None:
        self.hashed_load_bytes = hashed_load_bytes
        self.ends: list[Any] = []
        self.work: list[Any] = []
        self.given = asyncio.Event()

    def submit(self, request: CopyRequest, done: Any) -> Any:
        self.work.append(request.work)
        self.given.set()
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
    plan = planned(cache, parts)
    options = CopyOptions(device, asyncio.get_running_loop().time() + 60)  # type: ignore[arg-type]  # a fake
    first, second = (jobs.load(plan, options, results.append) for _ in range(2))
    device.ends[0](CopyResult(Outcome.DONE, 10, 10, 10, 0.0))  # this one was reported before
    jobs.drop(rows[3:5])
    device.ends[1](CopyResult(Outcome.DONE, 10, 10, 10, 0.0))
    assert first.ended.is_set()
    assert second.ended.is_set()
    assert [result.outcome for result in results] == [Outcome.DONE, Outcome.PARTIAL]
    assert results[1].failed[0].tolist() == [3, 4]
    assert not cache.find(keyspace, keys_of(3, 4)).hits.any()
    assert not cache.entries.leases.any()


async def test_what_goes_while_what_was_adopted_is_verified(
    lane: tuple[Lane, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that comes late may end a whole namespace: the sizes of its payloads are unknown from then on."""
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
    """The tables may be half-written then: the loop's handler ends the daemon. Until then, the payload does not
    count as checked.
    """
    loop = asyncio.get_running_loop()
    errors: list[BaseException] = []
    loop.set_exception_handler(lambda _, about: errors.append(about["exception"]))
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
    assert [(type(torn), torn.__cause__) for torn in errors] == [(CacheTornError, error)]
    assert [(result.outcome, result.reason) for result in results] == [
        (Outcome.FAILED, "it met a bug in the daemon; its log has the details")
    ]
    assert np.count_nonzero(cache.entries.parts.unverified) == 10
    await lane.close(5.0)


# --- by the copy ---


def planned(cache: Cache, parts: I64Array, ids: list[int] | None = None) -> LoadPlan:
    """Payloads of a page each, loaded to blocks of a page, or to these."""
    plan = GroupPlan.build([Tensor(0, 64, PAGE_BYTES, PAGE_BYTES)], [Ref(0, 0, PAGE_BYTES)], 1)
    blocks = np.arange(len(parts)) if ids is None else np.array(ids)
    columns, addresses = np.zeros(len(parts), np.int64), cache.entries.payload_addresses(parts)
    one = BlockList((plan,), blocks.astype(np.uint32)[:, None], np.arange(len(parts)), columns, addresses)
    return LoadPlan(cache.entries.parts.row[parts], parts, [one], [NO_PARTS])


class VerificationScene:
    """Ten sealed keys, and loads of them by a device that hashes up to two pages."""

    def __init__(self, verify_loads: bool | str) -> None:
        self.cache, self.device = make_cache(), SlowDevice(2 * PAGE_BYTES)
        self.keyspace = make_keyspace(self.cache)[1]
        self.parts = store(self.cache, self.keyspace, keys_of(*range(10)))
        self.columns = self.cache.entries.parts
        nobody: Any = None  # neither a lane nor signals are asked
        self.jobs = Jobs(self.cache, None, nobody, nobody, verify_loads)
        self.ends: list[Completion] = []

    def load(self, parts: I64Array | None = None) -> Job:
        device: Any = self.device
        options = CopyOptions(device, asyncio.get_running_loop().time() + 60)
        return self.jobs.load(planned(self.cache, self.parts if parts is None else parts), options, self.ends.append)

    def copied(self, *wrong: int, outcome: Outcome = Outcome.DONE) -> None:
        """The device has copied what it was given last, and found these of the ten keys other than they were."""
        digests = self.columns.digest[self.parts].copy()
        digests[list(wrong), 1] ^= np.uint64(1)
        self.device.ends[-1](CopyResult(outcome, 10, 10, 10, 0.0, digests=digests))

    def missing(self) -> list[int]:
        return np.flatnonzero(~self.cache.find(self.keyspace, keys_of(*range(10))).hits).tolist()


@pytest.mark.parametrize(
    ("verify_loads", "hashed_load_bytes", "found"),
    [
        ("auto", 1, Verification.COPIED),
        ("auto", 0, Verification.ADOPTED),
        (True, 1, Verification.COPIED),
        (True, 0, Verification.BEFORE),
        (False, 1, Verification.ADOPTED),
        (False, 0, Verification.ADOPTED),
    ],
)
async def test_which_loads_are_verified(verify_loads: bool | str, hashed_load_bytes: int, found: Verification) -> None:
    device: Any = SlowDevice(hashed_load_bytes)
    assert VerificationScene(verify_loads).jobs.verification(device) is found


@pytest.mark.parametrize("verify_loads", ["auto", True])
async def test_what_a_copy_finds_wrong_is_bad_and_dropped(verify_loads: bool | str) -> None:
    scene = VerificationScene(verify_loads)
    scene.load()
    other = scene.load()
    assert all(isinstance(work, HashedWork) for work in scene.device.work)
    scene.device.ends[0](
        CopyResult(Outcome.DONE, 10, 10, 10, 0.0, digests=scene.columns.digest[scene.parts] + np.uint64(1))
    )
    assert scene.ends[0].failed[0].tolist() == list(range(10))
    assert scene.missing() == list(range(10))
    assert not other.ended.is_set()
    scene.copied()
    assert [end.outcome for end in scene.ends] == [Outcome.PARTIAL] * 2
    assert scene.ends[1].failed[0].tolist() == list(range(10)), "the other load has named it wrong meanwhile"
    assert scene.cache.counters.keys_corrupt == 10
    assert not scene.cache.entries.leases.any()


@pytest.mark.parametrize("half", [0, 1])
async def test_either_half_of_a_checksum_tells(half: int) -> None:
    scene = VerificationScene("auto")
    scene.load()
    digests = scene.columns.digest[scene.parts].copy()
    digests[4, half] ^= np.uint64(1 << 63)
    scene.device.ends[0](CopyResult(Outcome.DONE, 10, 10, 10, 0.0, digests=digests))
    assert (scene.ends[0].failed[0].tolist(), scene.missing()) == ([4], [4])


async def test_what_has_no_checksum_yet_is_not_judged() -> None:
    """Nor what is sealed while it is copied: when it was hashed is not known."""
    scene = VerificationScene("auto")
    late = store(scene.cache, scene.keyspace, keys_of(10), seals=False)
    scene.load(np.concatenate([scene.parts[:9], late]))
    scene.copied(3, 9)
    assert scene.ends[0].failed[0].tolist() == [3]
    scene.load(late)
    assert not isinstance(scene.device.work[-1], HashedWork)


async def test_where_nothing_is_verified_what_was_adopted_is() -> None:
    scene = VerificationScene(False)
    scene.load()
    assert not isinstance(scene.device.work[-1], HashedWork)
    scene.columns.unverified[scene.parts[:4]] = 1
    scene.load()
    scene.copied(2, 7)
    assert scene.ends[0].failed[0].tolist() == [2], "the other one was not due"
    assert not scene.columns.unverified.any()
    scene.load()
    assert not isinstance(scene.device.work[-1], HashedWork), "once is enough"


@pytest.mark.parametrize("ends", [Outcome.CANCELLED, Outcome.EXPIRED, Outcome.FAILED])
async def test_a_copy_that_is_not_done_verifies_nothing(ends: Outcome) -> None:
    scene = VerificationScene(False)
    scene.columns.unverified[scene.parts] = 1
    scene.load()
    scene.copied(1, outcome=ends)
    assert [end.outcome for end in scene.ends] == [ends]
    assert scene.missing() == []
    assert np.count_nonzero(scene.columns.unverified) == 10


async def test_what_is_dropped_before_the_copy_begins_is_left_out(lane: tuple[Lane, threading.Event]) -> None:
    """Payloads that it can't hash are checked before; those found wrong meanwhile have no checksum in its result."""
    scene = VerificationScene("auto")
    scene.jobs.hash_lane = lane[0]
    parts, device = scene.parts, scene.device
    plan = planned(scene.cache, parts, [NO_BLOCK, *range(1, 10)])
    options = CopyOptions(device, asyncio.get_running_loop().time() + 60)  # type: ignore[arg-type]  # a fake
    job = scene.jobs.load(plan, options, scene.ends.append)
    assert job.phase is Phase.VERIFICATION
    scene.jobs.drop(plan.rows[5:6])
    lane[1].set()
    async with asyncio.timeout(HANG_S):
        await device.given.wait()
    (work,) = device.work
    assert np.flatnonzero(~work.found().any(axis=1)).tolist() == list(range(10))
    digests = scene.columns.digest[parts].copy()
    digests[[0, 5]] = 0
    device.ends[0](CopyResult(Outcome.DONE, 8, 8, 8, 0.0, digests=digests))
    assert scene.ends[0].failed[0].tolist() == [5]
    assert scene.missing() == [5]


async def test_very_many_are_judged_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found wrong in between, by others, is bad as well; each payload is judged by its own checksum."""
    monkeypatch.setattr(job_module, "STEP_PARTS", 4)
    scene = VerificationScene("auto")
    job = scene.load()
    async with asyncio.timeout(HANG_S):
        await scene.device.given.wait()
    scene.copied(3, 4, 9)
    assert (scene.ends, scene.missing()) == ([], [3])
    scene.jobs.drop(job.rows[1:2])
    assert await scene.jobs.settle({job}, 60.0)
    assert scene.ends[0].failed[0].tolist() == scene.missing() == [1, 3, 4, 9]
    assert not scene.cache.entries.leases.any()


async def test_a_device_that_does_not_hash_what_it_was_to_serves_nothing() -> None:
    loop, errors = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, about: errors.append(about["exception"]))
    scene = VerificationScene("auto")
    job = scene.load()
    scene.device.ends[0](CopyResult(Outcome.DONE, 10, 10, 10, 0.0))
    assert await scene.jobs.settle({job}, 20.0)
    assert [end.outcome for end in scene.ends] == [Outcome.FAILED]
    assert [str(error) for error in errors] == ["a device was to hash what it loads, and did not"]
