"""A host without its daemon: an arena, a hash lane, and a remote store whose agent is a real process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.agentwire.names import Space
from kvoffloadd.config import RemoteConfig
from kvoffloadd.errors import RemoteStoreError
from kvoffloadd.model import PAGE_BYTES, U8Array, U64Array, slot_pages
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.storage.remote.inflight import RemoteTransfer
from kvoffloadd.storage.remote.questions import ExistsResult
from kvoffloadd.storage.remote.store import START_S, RemoteState, RemoteStore
from kvoffloadd.storage.remote.transfers import GetResult, Names
from kvoffloadd.storage.remote.values import NotRead

FOREVER_S = 60.0
"""For hangs alone."""

SPACE = Space(bytes(range(16)), bytes(range(16, 32)), 7, b"era-era-", 3, 32)
PARTS = (PAGE_BYTES + 100, 512)


def names_of(count: int, space: Space = SPACE, first: int = 0) -> Names:
    """`count` keys, which begin with their number."""
    keys = np.zeros((count, 4), np.uint64)
    keys[:, 0] = np.arange(first, first + count) + 1
    return Names(space, keys)


async def value_of(store: RemoteStore, name: str, until_s: float) -> bytes | None:
    """The only small object that is of interest. Raises RemoteStoreError if it can't be read."""
    (value,) = await store.read_values([name], until_s)
    if isinstance(value, NotRead):
        raise RemoteStoreError(value.reason)
    return value


def soon() -> float:
    return time.monotonic() + FOREVER_S


async def until(predicate: Callable[[], bool]) -> None:
    """Raises AssertionError if it does not come about."""
    limit = time.monotonic() + FOREVER_S
    while not predicate():
        assert time.monotonic() < limit
        await asyncio.sleep(0.002)


class FaultyEngine:
    """What agents speak to: the store's directory, and the switch of its faults."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "objects"
        self.directory.mkdir(exist_ok=True)
        self._switch = folder / "faults"

    def plant(self, *lines: str) -> None:
        """These faults, and no others, from the next call on."""
        aside = self._switch.with_suffix(".new")
        aside.write_text("\n".join(lines))
        aside.rename(self._switch)

    def settings(self, **more: Any) -> dict[str, Any]:
        return {"directory": str(self.directory), "faults": str(self._switch), **more}

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if not path.name.startswith("."))


class StoreHost:
    """`slots`: addresses (n, parts) of slots in the arena for keys of PARTS."""

    def __init__(
        self,
        engine: FaultyEngine,
        *,
        engine_name: str = "memory",
        slots: int = 64,
        reserved: bool = False,
        start_s: float = START_S,
        **settings: Any,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        pages = sum(map(slot_pages, PARTS))
        capacity_bytes = slots * pages * PAGE_BYTES
        self.pool = ArenaFile.make(capacity_bytes, capacity_bytes, reserved=reserved)
        fcntl.flock(self.pool.fd, fcntl.LOCK_EX)  # the daemon locks a pool file that has a path
        self.lane = Lane("hash", 1, self.loop)
        self.boot_id = os.urandom(16)
        self.config = RemoteConfig(engine_name, **{"stuck_s": FOREVER_S} | settings)
        self.store = RemoteStore(
            self.pool, self.config, engine.settings(), self.loop, self.lane, self.boot_id, start_s=start_s
        )
        first = self.pool.address + np.arange(slots, dtype=np.uint64) * np.uint64(pages * PAGE_BYTES)
        offsets = np.cumsum([0, *(slot_pages(size) * PAGE_BYTES for size in PARTS[:-1])])
        self.slots: U64Array = first[:, None] + offsets.astype(np.uint64)
        self.closed = False

    async def start(self) -> StoreHost:
        self.store.start()
        await until(lambda: self.store.state is RemoteState.OK)
        return self

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            assert await self.store.close(FOREVER_S)
            assert self.store.check() == []
            assert await self.lane.close(FOREVER_S)
            self.pool.close()

    def set_stuck_s(self, stuck_s: float) -> None:
        """Sets the time from now on. It is short only while a call shall get stuck: a busy machine is slow."""
        self.store._calls._stop_looking()
        self.store._calls._stuck_s = stuck_s

    @property
    def pid(self) -> int:
        return int(self.store.figures()["agent"]["pid"])

    # --- memory ---

    def bytes_at(self, addresses: Sequence[int] | U64Array, sizes: Sequence[int] = PARTS) -> list[bytes]:
        return [
            self.pool.arena[int(at) - self.pool.address :][:size].tobytes()
            for at, size in zip(addresses, sizes, strict=True)
        ]

    def fill(self, slots: U64Array, seed: int) -> list[list[bytes]]:
        """Random payloads; returns them."""
        rng = np.random.default_rng(seed)
        for addresses in slots:
            for address, size in zip(addresses.tolist(), PARTS, strict=True):
                begin = address - self.pool.address
                self.pool.arena[begin : begin + size] = rng.integers(0, 256, size, np.uint8)
        return self.payloads(slots)

    def payloads(self, slots: U64Array) -> list[list[bytes]]:
        return [self.bytes_at(addresses) for addresses in slots]

    def digests(self, slots: U64Array) -> U64Array:
        sizes = np.tile(np.array(PARTS, np.int64), len(slots))
        return hash_payloads(slots.ravel(), sizes).reshape(len(slots), len(PARTS), 2)

    # --- calls ---

    async def exists(self, names: Names, until_s: float | None = None) -> ExistsResult | None:
        ended: asyncio.Future[ExistsResult | None] = self.loop.create_future()
        self.store.exists(names, until_s or soon(), ended.set_result)
        return await asyncio.wait_for(ended, FOREVER_S)

    def begin_get(
        self, names: Names, slots: U64Array, until_s: float | None = None
    ) -> tuple[RemoteTransfer, asyncio.Future[GetResult]]:
        ended: asyncio.Future[GetResult] = self.loop.create_future()
        return self.store.get(names, slots, PARTS, until_s or soon(), ended.set_result), ended

    async def get(self, names: Names, slots: U64Array) -> GetResult:
        return await asyncio.wait_for(self.begin_get(names, slots)[1], FOREVER_S)

    def begin_put(
        self, names: Names, slots: U64Array, until_s: float | None = None
    ) -> tuple[RemoteTransfer, asyncio.Future[U8Array]]:
        ended: asyncio.Future[U8Array] = self.loop.create_future()
        digests = self.digests(slots)
        return self.store.put(names, slots, PARTS, digests, until_s or soon(), ended.set_result), ended

    async def put(self, names: Names, slots: U64Array) -> list[int]:
        status = await asyncio.wait_for(self.begin_put(names, slots)[1], FOREVER_S)
        return [int(each) for each in status]


async def start(engine: FaultyEngine, **settings: Any) -> StoreHost:
    """A host whose agent is not awaited."""
    host = StoreHost(engine, **settings)
    host.store.start()
    return host
