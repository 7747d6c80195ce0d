"""Two hosts, one store, and agents that fail in any way at any time: what comes is right, and what ended has ended."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from kvoffloadd.model import U64Array
from kvoffloadd.storage.remote import agent as agent_module
from kvoffloadd.storage.remote import breaker as breaker_module
from kvoffloadd.storage.remote.transfers import CORRUPT, GetResult, RemoteStatus
from tests.storage.remote.conftest import Open
from tests.storage.remote.host import FOREVER_S, PARTS, FaultyEngine, StoreHost, names_of, until

pytestmark = pytest.mark.slow

T = TypeVar("T")

STEPS = 120
OPEN_MAX = 8
FAULTS = (
    "", "", "", "get=late", "get=hang", "get=crash", "get=FAILED", "get=flip", "get=swap", "get=LEASE_OVER",
    "get=raise", "put=hang", "put=FAILED", "put=crash", "put=lost", "exists=hang", "get=stop", "get_delay_s=0.05",
)  # fmt: skip
OK = int(RemoteStatus.OK)


def payloads_of(key: int) -> list[bytes]:
    return [np.random.default_rng([key, part]).bytes(size) for part, size in enumerate(PARTS)]


class User:
    """Puts and gets on one host. `left`: slots whose calls have ended, and what they held then."""

    def __init__(self, host: StoreHost, rng: random.Random) -> None:
        self.host = host
        self.rng = rng
        self.free = list(range(len(host.slots)))
        self.left: list[tuple[int, list[bytes]]] = []
        self.under_way = 0

    def take(self, count: int) -> tuple[list[int], U64Array]:
        rows = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count)]
        self.left = [each for each in self.left if each[0] not in rows]
        return rows, self.host.slots[rows]

    def give(self, rows: list[int]) -> None:
        """What is in them now stays: nothing but this process writes there."""
        self.free += rows
        self.left += [(row, self.host.bytes_at(self.host.slots[row])) for row in rows]
        self.under_way -= 1

    def check(self) -> None:
        assert self.host.store.check() == []
        for row, held in self.left:
            assert self.host.bytes_at(self.host.slots[row]) == held

    def put(self, first: int, count: int, until_s: float) -> None:
        rows, slots = self.take(count)
        for number, addresses in enumerate(slots):
            for address, payload in zip(addresses.tolist(), payloads_of(first + number), strict=True):
                begin = address - self.host.pool.address
                self.host.pool.arena[begin : begin + len(payload)] = np.frombuffer(payload, np.uint8)
        _, ended = self.host.begin_put(names_of(count, first=first), slots, until_s)
        self.begin(rows, ended, lambda status: None)

    def get(self, first: int, count: int, until_s: float) -> None:
        rows, slots = self.take(count)
        transfer, ended = self.host.begin_get(names_of(count, first=first), slots, until_s)

        def verify(result: GetResult) -> None:
            for number, each in enumerate(result.status.tolist()):
                if each == OK:
                    assert self.host.bytes_at(slots[number]) == payloads_of(first + number)

        self.begin(rows, ended, verify)
        if self.rng.random() < 0.2 and transfer.cancel():
            ended.cancel()

    def begin(self, rows: list[int], ended: asyncio.Future[T], verify: Callable[[T], None]) -> None:
        self.under_way += 1

        def settle(future: asyncio.Future[T]) -> None:
            if not future.cancelled():
                verify(future.result())
            self.give(rows)

        ended.add_done_callback(settle)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens waits, which are up to a minute after many failures."""
    monkeypatch.setattr(agent_module, "BACKOFF_S_MAX", 0.5)
    monkeypatch.setattr(breaker_module, "DELAY_S_MAX", 1.0)


def one_step(user: User, engine: FaultyEngine, rng: random.Random) -> None:
    if rng.random() < 0.15:
        engine.plant(rng.choice(FAULTS))
    if rng.random() < 0.03 and user.host.pid:
        os.kill(user.host.pid, rng.choice((signal.SIGKILL, signal.SIGSTOP)))
    if user.under_way < OPEN_MAX:
        act = rng.choice((user.put, user.get, user.get))
        act(rng.randrange(20), rng.randint(1, 3), time.monotonic() + rng.choice((0.05, 1.0, FOREVER_S)))


async def test_any_ends_in_any_order(open_host: Open, engine: FaultyEngine, rng: random.Random) -> None:
    loop = asyncio.get_running_loop()
    problems: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    hosts = [await open_host(get_threads=2), await open_host(get_threads=1, engine_name="memory-stops")]
    for host in hosts:
        host.store._agent._start_s = 3.0  # one may be stopped while it starts
    users = [User(host, rng) for host in hosts]
    for host in hosts:
        host.set_stuck_s(0.3)
    for _ in range(STEPS):
        one_step(rng.choice(users), engine, rng)
        await asyncio.sleep(rng.choice((0, 0, 0.01, 0.05)))
        for each in users:
            each.check()
    engine.plant()
    for user in users:
        if user.host.pid:  # it may be stopped, with no call that waits for it
            os.kill(user.host.pid, signal.SIGCONT)
        await until(lambda user=user: user.under_way == 0)  # type: ignore[misc]
        user.host.set_stuck_s(FOREVER_S)
    assert problems == []
    for user in users:
        await all_is_well(user)


async def all_is_well(user: User) -> None:
    """Whatever there is in the store is right, or found out."""
    user.check()
    store = user.host.store
    await until(lambda: store.can_read() and store.can_write())
    for key in range(22):
        status = (await user.host.get(names_of(1, first=key), user.host.slots[:1])).status[0]
        assert status in (OK, RemoteStatus.MISS, *CORRUPT), (key, store.figures())
        if status == OK:
            assert user.host.bytes_at(user.host.slots[0]) == payloads_of(key)
    assert await user.host.put(names_of(2, first=100), user.host.slots[:2]) == [OK, OK]
    assert (await user.host.get(names_of(2, first=100), user.host.slots[2:4])).status.tolist() == [OK, OK]
