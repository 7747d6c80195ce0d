"""What copies that do not end hold of memory, counted: neither twice, nor after their end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvoffloadd.cache.jobs.job import CopyOptions, Job
from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.model import PAGE_BYTES, Direction, I64Array
from kvoffloadd.server.peers.quarantine import Quarantine
from tests.cache.fakes import keys_of, make_cache, make_keyspace, store

PAGES, UID = 64, 1234
STUCK_S = 0.01


class Stuck:
    """A copy that a thread has been at for ever."""

    def cancel(self) -> None: ...

    def busy_s(self, now: float) -> float:
        return now


class QuarantineScene:
    """A memory of PAGES pages, some of them held by a user's jobs."""

    def __init__(self) -> None:
        nobody: Any = None
        self.exits: list[str] = []
        self.cache = make_cache(PAGES)
        self.space = make_keyspace(self.cache)[1]
        self.jobs = Jobs(self.cache, None, nobody, nobody, False)
        self.quarantine = Quarantine(self.jobs, (0,), self.exits.append)
        self._options = CopyOptions(nobody, 0.0)

    def stored(self, *numbers: int) -> I64Array:
        """Parts of a page each."""
        return store(self.cache, self.space, keys_of(*numbers))

    def job(self, parts: I64Array) -> Job:
        return Job(self.jobs, Direction.LOAD, self._options, lambda _: None, parts, copy=Stuck())

    async def put_aside(self, *jobs: Job) -> asyncio.Task[None]:
        """Puts copies aside as the end of their session does."""
        assert not await self.quarantine.end(UID, set(jobs), STUCK_S, "session 1")
        return asyncio.ensure_future(self.quarantine.until_ended(set(jobs)))

    @property
    def held(self) -> tuple[int, float]:
        return len(self.quarantine), self.quarantine.held_bytes / PAGE_BYTES


@pytest.fixture
async def scene() -> QuarantineScene:
    return QuarantineScene()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_many_jobs_hold_is_held_once(scene: QuarantineScene) -> None:
    """One user holds no more than a user may, however many jobs name it, and so can't end the process."""
    parts = scene.stored(*range(PAGES // 4))
    jobs = [scene.job(parts) for _ in range(8)]
    waiting = await scene.put_aside(*jobs)
    assert scene.held == (8, PAGES // 4)
    assert scene.exits == []
    for left, job in enumerate(jobs, 1):
        job.ended.set()
        await turns()
        assert scene.held == (8 - left, 0 if left == 8 else PAGES // 4)
    await waiting


async def test_a_job_that_names_a_key_twice(scene: QuarantineScene) -> None:
    parts = scene.stored(1, 2)[[0, 1, 0]]
    job = scene.job(parts)
    waiting = await scene.put_aside(job)
    assert scene.held == (1, 2)
    job.ended.set()
    await waiting
    assert scene.held == (0, 0)


async def test_what_has_ended_is_held_no_more_though_others_have_not(scene: QuarantineScene) -> None:
    """Whichever of a session's jobs ends first: otherwise its slots, which are free, would count for ever."""
    parts = scene.stored(*range(12))
    jobs = [scene.job(parts[at : at + 1]) for at in range(12)]
    waiting = await scene.put_aside(*jobs)
    for left, job in enumerate(reversed(jobs), 1):
        assert not waiting.done()
        job.ended.set()
        await turns()
        assert scene.held == (12 - left, 12 - left)
    await waiting


async def test_jobs_whose_registration_ends_before_their_session(scene: QuarantineScene) -> None:
    job = scene.job(scene.stored(1, 2))
    both = [await scene.put_aside(job), await scene.put_aside(job)]
    assert scene.held == (1, 2)
    job.ended.set()
    await asyncio.gather(*both)
    assert scene.held == (0, 0)


async def test_a_job_that_ends_before_anybody_waits_for_it(scene: QuarantineScene) -> None:
    job = scene.job(scene.stored(1))
    assert not await scene.quarantine.end(UID, {job}, STUCK_S, "session 1")
    job.ended.set()
    await scene.quarantine.until_ended({job})
    assert scene.held == (0, 0)


async def test_more_than_half_of_memory_ends_the_process(scene: QuarantineScene) -> None:
    await scene.put_aside(scene.job(scene.stored(*range(PAGES // 2))))
    assert scene.exits == []
    await scene.put_aside(scene.job(scene.stored(100)))
    assert len(scene.exits) == 1
