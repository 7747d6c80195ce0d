"""The asyncio client. It uses a non-blocking socket and the loop's readers, since asyncio's transports drop
descriptors.

Ownership: everything belongs to the event loop of the first call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

from kvoffloadd.client import calls
from kvoffloadd.client.arguments import seconds
from kvoffloadd.client.base import BaseClient
from kvoffloadd.client.calls import Call, First, Groups, Transfers
from kvoffloadd.client.events import Event
from kvoffloadd.client.jobs import Job, JobResult
from kvoffloadd.client.memory.kvcache import KvCache, Registration
from kvoffloadd.client.memory.timeline import Ready
from kvoffloadd.client.results import Audit, Cleared, Deleted, Drained, Found, PrefetchedClaims, Reserved, Retained
from kvoffloadd.client.transport import Poller
from kvoffloadd.client.waiting import Gen, Wait
from kvoffloadd.errors import UsageError
from kvoffloadd.model import Direction, Tier, U8Array
from kvoffloadd.protocol.messages import ClaimFigures, KeepHow

R = TypeVar("R")


class _LoopPoll:
    """Implements `transport.Poller` on the running loop, and carries out waits there."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: set[int] = set()
        self._writable: set[int] = set()

    def loop(self) -> asyncio.AbstractEventLoop:
        """Returns the client's loop. Raises UsageError if another one runs."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise UsageError("an AsyncClient can be used only on the event loop of its first call")
        return running

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._watched.add(fd)
        self.loop().add_reader(fd, ready)

    def watch_writable(self, fd: int, ready: Callable[[], None]) -> None:
        self._writable.add(fd)
        self.loop().add_writer(fd, ready)

    def unwatch_writable(self, fd: int) -> None:
        if fd in self._writable:
            self._writable.discard(fd)
            self.loop().remove_writer(fd)

    def unwatch(self, fd: int) -> None:
        self.unwatch_writable(fd)
        if fd in self._watched:
            self._watched.discard(fd)
            self.loop().remove_reader(fd)

    async def carry_out(self, wait: Wait) -> None:
        """Lets the loop run, one turn at least, until a target is done or the time has passed."""
        if any(target.done for target in wait.targets):
            return
        loop = self.loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        timer = loop.call_later(max(wait.until - monotonic(), 0.0), wake)
        for target in wait.targets:
            target.add_waker(wake)
        try:
            await future
        finally:
            timer.cancel()
            for target in wait.targets:
                target.discard_waker(wake)


class AsyncClient(BaseClient):
    """Keeps a session with the daemon, for asyncio and uvloop. The calls, their arguments and errors are `Client`'s.

    It can be constructed without a running loop. Several tasks may have calls under way at once. Messages of the daemon
    are received as they arrive, also while no call waits. A cancelled call leaves its job, if it made one, among
    `open_jobs`.
    """

    def _make_poller(self) -> Poller:
        self._poll = _LoopPoll()
        return self._poll

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """See `Client.connect`."""
        await self._run(self._core.connect(self._until()))

    async def close(self, deadline_s: float | None = None, *, force: bool = False) -> None:
        """See `Client.close`."""
        if not self._is_forked:
            await self._run(self._core.close(self._until(deadline_s), force=force))

    async def ping(self) -> None:
        """See `Client.ping`."""
        await self._call(calls.ping())

    async def register(self, caches: KvCache) -> Registration:
        """See `Client.register`."""
        return await self._run(self._core.register(caches, self._until(self._register_s(caches))))

    async def unregister(self, registration: Registration) -> None:
        """See `Client.unregister`."""
        await self._run(self._core.unregister(registration, self._until()))

    async def lookup(self, groups: Groups, first: First = 0, *, local: bool = False) -> Found:
        """See `Client.lookup`."""
        return await self._call(calls.lookup(groups, first, self._core.key_bytes, self._core.asks("local", local)))

    async def pin(self, groups: Groups, first: First = 0) -> Found:
        """See `Client.pin`."""
        return await self._call(calls.pin(groups, first, self._core.key_bytes, self._core.asks("tiers")))

    async def prefetch(self, groups: Groups, first: First = 0, *, local: bool = False) -> Found:
        """See `Client.prefetch`."""
        return await self._call(calls.prefetch(groups, first, self._core.key_bytes, self._core.asks("local", local)))

    async def wait_ready(self, found: Found, deadline_s: float) -> Found:
        """See `Client.wait_ready`."""
        return await self._run(self._core.wait_ready(found, self._after(deadline_s)))

    async def touch(self, groups: Groups, first: First = 0) -> None:
        """See `Client.touch`."""
        await self._call(calls.touch(groups, first, self._core.key_bytes))

    async def keep(self, groups: Groups, how: KeepHow, first: First = 0) -> None:
        """See `Client.keep`."""
        await self._run(self._core.keep(groups, how, first, self._until()))

    async def retain(
        self,
        groups: Groups,
        seconds: float,
        *,
        priority: int | None = None,
        name: str = "",
        number: int = 0,
        first: First = 0,
    ) -> Retained:
        """See `Client.retain`."""
        call = calls.retain(groups, seconds, priority, name, number, first, self._core.key_bytes if groups else 0)
        return await self._run(self._core.call_feature("retain", call, self._until()))

    async def forget(self, name: str = "", number: int = 0) -> Retained:
        """See `Client.forget`."""
        return await self._run(self._core.call_feature("retain", calls.forget(name, number), self._until()))

    async def prefetch_claims(self, name: str = "", number: int = 0, deadline_s: float = 600.0) -> PrefetchedClaims:
        """See `Client.prefetch_claims`."""
        return await self._run(self._core.prefetch_claims(name, number, self._until(deadline_s)))

    async def prefetch_claims_page(
        self, name: str = "", number: int = 0, cursor: int = 0
    ) -> tuple[PrefetchedClaims, int]:
        """See `Client.prefetch_claims_page`."""
        call = calls.prefetch_claims(name, number, cursor)
        return await self._run(self._core.call_feature("prefetch_claims", call, self._until()))

    async def claims(self) -> list[ClaimFigures]:
        """See `Client.claims`."""
        return await self._run(self._core.claims(self._until()))

    async def release(self, lease: int) -> None:
        """See `Client.release`."""
        await self._run(self._core.release(lease, self._until()))

    async def reserve(self, groups: Groups, parts: Sequence[int] | None = None, first: First = 0) -> Reserved:
        """See `Client.reserve`."""
        return await self._call(calls.reserve(groups, first, parts, self._core.key_bytes))

    async def clear(
        self,
        *,
        everything: bool = False,
        namespaces: str | None = None,
        uid: int | None = None,
        wait_s: float = 10.0,
        token: bytes | None = None,
    ) -> Cleared:
        """See `Client.clear`."""
        limit_s = seconds(wait_s, "wait_s")
        until = self._until(limit_s + self._deadline_s)
        return await self._run(self._core.clear(everything, namespaces, uid, limit_s, token, until))

    async def delete(self, groups: Groups, *, wait_s: float = 10.0) -> Deleted:
        """See `Client.delete`."""
        limit_s = seconds(wait_s, "wait_s")
        call, until = calls.delete(groups, limit_s, self._core.key_bytes), self._until(limit_s + self._deadline_s)
        return await self._run(self._core.call_feature("delete", call, until))

    async def snapshot(self, group: int, *, tier: Tier | None = None) -> U8Array:
        """See `Client.snapshot`."""
        return await self._run(self._core.snapshot(group, tier, self._until()))

    async def snapshot_page(self, group: int, cursor: int = 0, *, tier: Tier | None = None) -> tuple[U8Array, int]:
        """See `Client.snapshot_page`."""
        return await self._run(self._core.snapshot_page(group, cursor, tier, self._until()))

    async def store(
        self,
        registration: Registration,
        groups: Transfers,
        *,
        lease: int = 0,
        first: First = 0,
        deadline_s: float = 60.0,
        ready: Ready | None = None,
    ) -> Job:
        """See `Client.store`."""
        options = calls.JobOptions(first, lease, deadline_s, ready)
        spec = calls.transfer(Direction.STORE, registration, groups, self._core.key_bytes, options)
        return await self._run(self._core.submit(spec, self._until()))

    async def load(
        self,
        registration: Registration,
        groups: Transfers,
        *,
        lease: int = 0,
        first: First = 0,
        deadline_s: float = 60.0,
        ready: Ready | None = None,
        expedited: bool = False,
        local: bool = False,
    ) -> Job:
        """See `Client.load`."""
        options = calls.JobOptions(first, lease, deadline_s, ready, expedited, local)
        spec = calls.transfer(Direction.LOAD, registration, groups, self._core.key_bytes, options)
        return await self._run(self._core.submit(spec, self._until()))

    async def wait(self, job: Job, deadline_s: float) -> JobResult:
        """See `Client.wait`."""
        return await self._run(self._core.wait(job, self._after(deadline_s)))

    async def wait_any(self, jobs: Sequence[Job], deadline_s: float) -> list[Job]:
        """See `Client.wait_any`."""
        return await self._run(self._core.wait_any(jobs, self._after(deadline_s)))

    async def cancel(self, job: Job) -> None:
        """See `Client.cancel`."""
        await self._run(self._core.cancel(job, self._until()))

    async def drain(self, deadline_s: float, *, everything: bool = False) -> Drained:
        """See `Client.drain`."""
        call = calls.drain(everything, deadline_s)
        return await self._run(self._core.call(call, self._until(deadline_s + self._deadline_s)))

    async def status(self) -> dict[str, Any]:
        """See `Client.status`."""
        return await self._call(calls.status())

    async def verify(
        self, *, payloads: bool = False, disk: bool = False, repair: bool = False, deadline_s: float | None = None
    ) -> Audit:
        """See `Client.verify`."""
        call = calls.verify(payloads, disk, repair)
        return await self._run(self._core.call(call, self._until(deadline_s)))

    async def subscribe(self, *, tiers: bool = False) -> None:
        """See `Client.subscribe`."""
        await self._run(self._core.subscribe(tiers, self._until()))

    async def events(self, deadline_s: float = 0.0) -> list[Event]:
        """See `Client.events`."""
        return await self._run(self._core.events(self._after(deadline_s)))

    # --- helpers ---------------------------------------------------------------------------------

    def _until(self, deadline_s: float | None = None) -> float:
        return self._after(self._deadline_s if deadline_s is None else deadline_s)

    @staticmethod
    def _after(deadline_s: float) -> float:
        return monotonic() + seconds(deadline_s)

    async def _call(self, call: Call[R]) -> R:
        return await self._run(self._core.call(call, self._until()))

    async def _run(self, steps: Gen[R]) -> R:
        self._check_process()
        try:
            while True:
                await self._poll.carry_out(next(steps))
        except StopIteration as end:
            value: R = end.value
            return value
        finally:
            steps.close()
