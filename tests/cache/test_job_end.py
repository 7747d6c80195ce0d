"""How long the end of copies is waited for: as long as it takes, unless a thread is stuck at one chunk of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.cache.jobs.job import Completion, CopyOptions, Job
from kvoffloadd.cache.jobs.jobs import STUCK_LOOKS, Jobs
from kvoffloadd.cache.jobs.loadplan import NO_PARTS, LoadPlan, LoadRequest
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import NO_ROWS
from kvoffloadd.cache.memory.changing import CacheTornError
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.device.base import CopyResult
from kvoffloadd.device.signals import ReadySignal
from kvoffloadd.device.work import BlockList
from kvoffloadd.model import Direction, I64Array, Outcome
from kvoffloadd.testing.wait import HANG_S

from .fakes import keys_of, make_cache, make_keyspace, store

STUCK_S = 0.05


class FakeCopy:
    """`busy`: for how long a thread has been at its chunk, each time that it is asked."""

    def __init__(self, busy: Callable[[], float]) -> None:
        self.asked = 0
        self._busy = busy
        self._asked = asyncio.Event()

    def cancel(self) -> None: ...

    async def until_asked(self, times: int) -> None:
        while self.asked < times:
            self._asked.clear()
            await self._asked.wait()

    def busy_s(self, now: float) -> float:
        self.asked += 1
        self._asked.set()
        return self._busy()


def running(copy: FakeCopy | None) -> tuple[Jobs, Job]:
    nobody: Any = None
    jobs = Jobs(make_cache(), None, nobody, nobody, False)
    return jobs, Job(jobs, Direction.STORE, CopyOptions(nobody, 0.0), lambda _: None, copy=copy)


async def test_a_copy_that_is_stuck() -> None:
    copy = FakeCopy(lambda: 1e6)
    jobs, job = running(copy)
    async with asyncio.timeout(HANG_S):
        assert not await jobs.end({job}, STUCK_S)
    assert copy.asked == STUCK_LOOKS, "time alone is no reason: the process may not have run"


@pytest.mark.parametrize("busy_s", [0.0, STUCK_S / STUCK_LOOKS / 4, STUCK_S - 1e-3])
async def test_a_copy_that_is_queued_or_goes_on(busy_s: float) -> None:
    """No thread is at it: it waits for its turn, or its end for the loop. Or its chunks end, and others begin, though
    at each look a thread has been at one for long.
    """
    copy = FakeCopy(lambda: busy_s)
    jobs, job = running(copy)
    ending = asyncio.ensure_future(jobs.end({job}, STUCK_S))
    async with asyncio.timeout(HANG_S):
        await copy.until_asked(3 * STUCK_LOOKS)
        job.ended.set()
        assert await ending


async def test_a_job_without_a_copy_yet() -> None:
    jobs, job = running(None)
    ending = asyncio.ensure_future(jobs.end({job}, STUCK_S))
    await asyncio.sleep(3 * STUCK_S)
    job.ended.set()
    async with asyncio.timeout(HANG_S):
        assert await ending


async def test_a_chunk_that_ends_at_last() -> None:
    looks = iter([1e6] * (STUCK_LOOKS - 1) + [0.0] + [1e6] * (STUCK_LOOKS - 1))
    copy = FakeCopy(lambda: next(looks, 0.0))
    jobs, job = running(copy)
    ending = asyncio.ensure_future(jobs.end({job}, STUCK_S))
    async with asyncio.timeout(HANG_S):
        await copy.until_asked(3 * STUCK_LOOKS)
        job.ended.set()
        assert await ending


@pytest.mark.parametrize("also", [Outcome.EXPIRED, Outcome.FAILED])
@pytest.mark.parametrize("is_first", [False, True])
async def test_a_job_that_its_worker_has_cancelled_ends_as_cancelled(also: Outcome, is_first: bool) -> None:
    """Whatever stops it besides, before or after."""
    _, job = running(None)
    for outcome in (Outcome.CANCELLED, also) if is_first else (also, Outcome.CANCELLED):
        job.stop(outcome)
    assert job.stopped is Outcome.CANCELLED


def reserved(jobs: Jobs) -> I64Array:
    """A part that has been reserved for a store."""
    parts = reserve(jobs.cache, make_keyspace(jobs.cache)[1], keys_of(1), np.zeros(1, np.uint16), 0).parts
    assert len(parts) == 1
    return parts


class Short:
    """A device, and signals, that are short of something."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def submit(self, *_: Any, **__: Any) -> Any:
        raise self._error

    wait = submit


async def test_a_load_whose_work_can_t_be_made_ends() -> None:
    """Memory may be missing, for example: nothing of it is held for ever."""
    nobody: Any = None
    lane: Any = SimpleNamespace(loop=asyncio.get_running_loop())
    cache = make_cache()
    parts = store(cache, make_keyspace(cache)[1], keys_of(1))
    jobs = Jobs(cache, None, lane, nobody, False)
    ended: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    class TooMany:
        keys = np.arange(1)

        @property
        def blocks(self) -> Any:
            raise MemoryError

    lists: Any = [TooMany()]
    plan = LoadPlan(cache.entries.parts.row[parts], parts, lists, [NO_PARTS])
    device: Any = SimpleNamespace(submit=None)
    jobs.load(plan, CopyOptions(device, 1e9), ended.set_result)
    async with asyncio.timeout(HANG_S):
        assert (await ended).outcome is Outcome.FAILED
    assert not jobs.running
    assert not cache.entries.leases.any()


async def test_a_job_that_meets_a_bug_ends() -> None:
    """It fails, behind its reply, names all its keys, and holds nothing; the loop's handler hears of the bug, as of one
    in a callback.
    """
    nobody: Any = None
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, about: reports.append(about))
    cache = make_cache()
    lane: Any = SimpleNamespace(loop=loop)
    jobs = Jobs(cache, None, lane, nobody, False)
    bug = KeyError("a bug")

    class Broken:
        @property
        def keyspace(self) -> Any:
            raise bug

    ends: list[Completion] = []
    broken: Any = Broken()
    parts = store(cache, make_keyspace(cache)[1], keys_of(1))
    one = BlockList((), np.zeros((1, 1), np.uint32), np.array([2]), np.zeros(1, np.int64), np.zeros(1, np.uint64))
    plan = LoadPlan(cache.entries.parts.row[parts], parts, [one], [np.array([0, 1])])
    job = jobs.load(plan, CopyOptions(nobody, 1e9), ends.append, LoadRequest([broken], []))
    assert ends == []
    assert await jobs.settle({job}, 20)
    assert [(end.outcome, end.reason) for end in ends] == [
        (Outcome.FAILED, "it met a bug in the daemon; its log has the details")
    ]
    assert [indices.tolist() for end in ends for indices in end.failed] == [[0, 1, 2]]
    assert [about["exception"] for about in reports] == [bug]
    assert not jobs.running
    assert not cache.entries.leases.any()


def told_to(loop: asyncio.AbstractEventLoop) -> list[BaseException]:
    """What the loop's handler hears of."""
    errors: list[BaseException] = []
    loop.set_exception_handler(lambda _, about: errors.append(about["exception"]))
    return errors


async def test_a_bug_of_a_device_leaves_the_cache_whole() -> None:
    """A device is called between changes: its error costs the job, whose slots are free."""
    loop = asyncio.get_running_loop()
    errors, bug = told_to(loop), KeyError("a bug")
    lane: Any = SimpleNamespace(loop=loop, closing=True)
    device: Any = Short(bug)
    cache = make_cache()
    _, keyspace = make_keyspace(cache)
    parts = reserve(cache, keyspace, keys_of(1, 2), np.zeros(1, np.uint16), 0).parts
    jobs = Jobs(cache, None, lane, device, False)
    ends: list[Completion] = []
    job = jobs.store(parts, [], CopyOptions(device, 1e9), ends.append)
    assert await jobs.settle({job}, 20)
    assert [end.outcome for end in ends] == [Outcome.FAILED]
    assert errors == [bug]
    assert check(cache, 0, 0) == []
    assert cache.tier.num_free(1) == 64


@pytest.mark.parametrize("broken", ["commit", "seal"])
async def test_a_bug_while_a_store_is_made_readable_tears_the_cache(broken: str) -> None:
    loop = asyncio.get_running_loop()
    errors = told_to(loop)
    lane: Any = SimpleNamespace(loop=loop, closing=False)
    copied: list[Callable[[CopyResult], None]] = []
    device: Any = SimpleNamespace(submit=lambda _, done: copied.append(done), hashed_load_bytes=0)
    cache = make_cache()
    _, keyspace = make_keyspace(cache)
    parts = reserve(cache, keyspace, keys_of(1), np.zeros(1, np.uint16), 0).parts
    jobs = Jobs(cache, None, lane, device, False)
    jobs.store(parts, [], CopyOptions(device, 1e9), lambda _: None)
    setattr(cache, broken, lambda *_: [][7])
    result = CopyResult(Outcome.DONE, 4096, 1, 1, 0.0, digests=np.zeros((1, 2), np.uint64))
    loop.call_soon(copied[-1], result)
    await asyncio.sleep(0)
    assert [(type(torn), type(torn.__cause__)) for torn in errors] == [(CacheTornError, IndexError)]


@pytest.mark.parametrize("direction", Direction)
async def test_a_job_that_fails_before_it_begins_tears_the_cache(direction: Direction) -> None:
    """Nothing else gives back the slots that were reserved for it, or the keys that it holds."""
    lane: Any = SimpleNamespace(loop=asyncio.get_running_loop())
    device: Any = SimpleNamespace(hashed_load_bytes=0)
    jobs = Jobs(make_cache(), None, lane, device, False)
    parts = reserved(jobs)

    def fail(*_: object) -> None:
        raise MemoryError

    jobs.running = cast(Any, SimpleNamespace(add=fail))
    options = CopyOptions(device, 1e9)
    with pytest.raises(CacheTornError):
        if direction is Direction.STORE:
            jobs.store(parts, [], options, lambda _: None)
        else:
            jobs.load(LoadPlan(NO_ROWS, NO_PARTS, [], []), options, lambda _: None)


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "ENOMEM"), RuntimeError("can't start new thread")])
@pytest.mark.parametrize("ready", [None, ReadySignal(8, 1)])
async def test_a_job_that_the_device_can_t_begin_ends(error: Exception, ready: ReadySignal | None) -> None:
    lane: Any = SimpleNamespace(loop=asyncio.get_running_loop())
    short: Any = Short(error)
    jobs = Jobs(make_cache(), None, lane, short, False)
    ended: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    options = CopyOptions(short, 1e9, ready=ready)
    jobs.store(reserved(jobs), [], options, ended.set_result)
    assert not ended.done(), "never within the call"
    async with asyncio.timeout(HANG_S):
        result = await ended
    assert result.outcome is Outcome.FAILED
    assert "could not start" in result.reason
    assert not jobs.running


class Waiting:
    """Signals, a lane and a device that call back when the test makes them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: list[Callable[[Any], None]] = []
        self.dropped = True

    def wait(self, ready: Any, done: Callable[[Any], None], uid: int) -> Any:
        self.done.append(done)
        return done

    def submit(self, work: Any, done: Callable[[Any], None], **_: Any) -> Any:
        self.done.append(done)
        return SimpleNamespace(cancel=lambda: False)

    def cancel(self, _: Any) -> bool:
        return self.dropped


@pytest.mark.parametrize("dropped", [False, True])
async def test_a_job_that_is_cancelled_before_its_signal_says_so(dropped: bool) -> None:
    """Whether or not the signal is being looked at in that moment."""
    nobody: Any = None
    signals: Any = Waiting()
    signals.dropped = dropped
    jobs = Jobs(make_cache(), None, nobody, signals, False)
    ends: list[Completion] = []
    options = CopyOptions(nobody, 1e9, ready=ReadySignal(8, 1))
    job = jobs.store(reserved(jobs), [], options, ends.append)
    job.cancel()
    if not dropped:
        assert ends == []
        signals.done[0](Outcome.CANCELLED)
    assert [(end.outcome, end.reason) for end in ends] == [(Outcome.CANCELLED, "the worker's signal had not come")]
    assert not jobs.running


async def test_the_loop_keeps_the_deadline_of_a_signal() -> None:
    """Whatever the thread does that looks at it."""
    nobody: Any = None
    signals: Any = Waiting()
    jobs = Jobs(make_cache(), None, nobody, signals, False)
    end: asyncio.Future[Completion] = signals.loop.create_future()
    options = CopyOptions(nobody, signals.loop.time() + 0.01, ready=ReadySignal(8, 1))
    jobs.store(reserved(jobs), [], options, end.set_result)
    async with asyncio.timeout(HANG_S):
        assert (await end).outcome is Outcome.EXPIRED


async def test_what_the_worker_asks_for_counts_more_than_the_deadline() -> None:
    """A load whose payloads are hashed when its deadline passes, and which is cancelled then, is cancelled."""
    nobody: Any = None
    lane: Any = Waiting()
    cache = make_cache()
    parts = store(cache, make_keyspace(cache)[1], keys_of(1))
    cache.entries.parts.unverified[parts] = 1
    jobs = Jobs(cache, None, lane, nobody, False)
    plan = LoadPlan(cache.entries.parts.row[parts], parts, [], [])
    ends: list[Completion] = []
    device: Any = SimpleNamespace(hashed_load_bytes=0)
    job = jobs.load(plan, CopyOptions(device, 1e9), ends.append)
    job.stop(Outcome.EXPIRED)
    job.cancel()
    assert ends == []
    lane.done[0](cache.entries.parts.digest[parts])
    assert [end.outcome for end in ends] == [Outcome.CANCELLED]
    assert not cache.entries.leases.any()
