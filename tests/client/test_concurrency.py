"""Threads on one Client, tasks on one AsyncClient."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import AsyncClient, Client, KvCache, Outcome
from kvoffloadd.errors import DeadlineError, UsageError
from kvoffloadd.model import U8Array
from kvoffloadd.testing.wait import HANG_S
from tests.client.fake_daemon import FakeDaemon, FakeSession
from tests.client.flavours import NAMESPACE
from tests.client.test_lifetime import eof


def test_threads_share_a_client(fake: FakeDaemon, path: str, caches: KvCache) -> None:
    with Client(path, namespace=NAMESPACE) as client:
        registration = client.register(caches)

        def work(number: int) -> bool:
            keys = np.full((3, 32), number, np.uint8) + np.arange(3, dtype=np.uint8)[:, None] * 50
            for _ in range(10):
                result = client.wait(client.store(registration, {0: (keys, [0, 1, 2])}), 10)
                found = client.lookup({0: keys})
                if result.outcome is not Outcome.DONE or found.states[0].tolist() != [1, 1, 1]:
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
        assert client.open_jobs() == []


def test_a_call_waits_for_the_lock_within_its_deadline(fake: FakeDaemon, path: str, caches: KvCache) -> None:
    fake.manual_completion = True
    with Client(path, namespace=NAMESPACE, deadline_s=0.2) as client:
        job = client.store(client.register(caches), {0: (b"k" * 32, [0])})
        waiter = threading.Thread(target=lambda: client.wait(job, 10.0))
        waiter.start()
        time.sleep(0.05)
        with pytest.raises(DeadlineError, match="other threads"):
            client.ping()
        fake.soon(lambda: fake.complete(fake.peers[0], job.id))
        waiter.join()
        client.ping()


async def test_tasks_share_a_client(fake: FakeDaemon, path: str, caches: KvCache) -> None:
    async with AsyncClient(path, namespace=NAMESPACE) as client:
        registration = await client.register(caches)

        async def work(number: int) -> None:
            keys = np.full((2, 32), number, np.uint8)
            keys[1] += 100
            job = await client.store(registration, {0: (keys, [0, 1])})
            assert (await client.wait(job, 10)).outcome is Outcome.DONE
            assert (await client.lookup({0: keys})).states[0].tolist() == [1, 1]

        await asyncio.gather(*(work(number) for number in range(50)))
        assert client.open_jobs() == []


async def test_tasks_reconnect_once(fake: FakeDaemon, path: str) -> None:
    async with AsyncClient(path, namespace=NAMESPACE) as client:
        eof(fake)
        await asyncio.sleep(0.05)
        await asyncio.gather(*(client.ping() for _ in range(20)))
        assert fake.tags().count("hello") == 2


async def test_completions_come_without_a_call(fake: FakeDaemon, path: str, caches: KvCache, keys: U8Array) -> None:
    fake.manual_completion = True
    async with AsyncClient(path, namespace=NAMESPACE) as client:
        job = await client.store(await client.register(caches), {0: (keys, np.arange(4))})
        fake.soon(lambda: fake.complete(fake.peers[0], job.id))
        woken = asyncio.Event()
        job.add_waker(woken.set)
        async with asyncio.timeout(HANG_S):
            await woken.wait()


async def test_a_cancelled_request_leaves_its_job_open(fake: FakeDaemon, path: str, caches: KvCache) -> None:
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    def say_nothing(_peer: FakeSession, _message: Any) -> bool:
        loop.call_soon_threadsafe(asked.set)
        return True

    fake.on["store"] = say_nothing
    client = AsyncClient(path, namespace=NAMESPACE)
    registration = await client.register(caches)
    task = asyncio.create_task(client.store(registration, {0: (b"k" * 32, [0])}))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (job,) = client.open_jobs()
    assert not job.blocks_free
    await client.ping()
    await client.close()
    assert job.result is not None
    assert job.result.outcome is Outcome.LOST


async def test_a_cancelled_greeting_leaves_nothing(fake: FakeDaemon, path: str) -> None:
    fake.on["hello"] = lambda peer, message: True
    client = AsyncClient(path, namespace=NAMESPACE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.connect()
    del fake.on["hello"]
    await client.ping()
    await client.close()


def test_one_loop_for_each_client(fake: FakeDaemon, path: str) -> None:
    client = AsyncClient(path, namespace=NAMESPACE)
    with asyncio.Runner() as runner:
        runner.run(client.ping())
        with asyncio.Runner() as other, pytest.raises(UsageError, match="event loop"):
            other.run(client.status())
        runner.run(client.close())
