"""One GPU: its context, its memory lane, a stream each way.

Ownership: the event loop alone. The copy lanes' threads run `CopyStream.move`, the memory lane's thread runs all other
driver calls; both with the GPU's context current.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np

from kvoffloadd.config import CudaConfig
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.base import Allocation, CopyRequest, CopyResult
from kvoffloadd.device.chunked import ChunkedCopy, Chunks, Turn, lane_gauges
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.memory import SharedMemory, VmmAllocation
from kvoffloadd.device.cuda.pinning import Pinning
from kvoffloadd.device.cuda.rows import RowCopier
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.cuda.trials import Trials
from kvoffloadd.errors import DeviceError, UsageError
from kvoffloadd.model import Direction
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.scheduling.stuckdetector import StuckDetector

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 2
"""Chunks in flight each way: urgent copies wait for no more than these."""

WATCH_S = 0.5

_NEEDED = {
    "UNIFIED_ADDRESSING": "one address space with the host",
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": "registered memory has the same address for the GPU as for the host",
}
"""The required attributes of a GPU. Batched copies address the host's memory by its own address."""
_PRIORITIES = {Direction.STORE: 0, Direction.LOAD: -1}
"""The priorities of the streams; lower goes first. A load is waited for, a store is not."""


class CudaDevice:
    """A GPU in use, from `open` to `close`. `fatal(reason)` ends the process: it is called when the GPU can't be used
    any more. `cpus`: those that the copy lanes run on; none: any.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        driver: Driver,
        uuid: bytes,
        ordinal: int,
        chunk_bytes: int,
        config: CudaConfig,
        fatal: Callable[[str], None],
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        self.kind, self.hashed_load_bytes = f"cuda:{uuid.hex()}", 0
        self._loop = loop
        self._driver = driver
        self._ordinal = ordinal
        self._chunk_bytes = chunk_bytes
        self._config = config
        self._fatal = fatal
        self._trials = Trials()
        self._context = 0
        self._memory: SharedMemory
        self._pinning: Pinning
        self._copiers: dict[Direction, RowCopier] = {}
        self._memory_lane = Lane("gpu-memory", 1, loop)
        self._lanes = {direction: Lane(f"gpu-{direction.value}", THREADS, loop, cpus) for direction in Direction}
        self._copies: set[ChunkedCopy] = set()
        self._mapped: set[Allocation] = set()
        self._mapped_ends = np.zeros(0, np.uint64)  # replaced, never changed: the copy lanes read it
        self._closed = False
        self._copying, self._calling = StuckDetector(WATCH_S), StuckDetector(WATCH_S)
        self._watch: asyncio.TimerHandle | None = None

    async def open(self, pinning: Pinning, trials: Trials | None = None) -> None:
        """Makes the context and the streams. `pinning`: the arena's, started after that. `trials`: None: no trial is
        recorded.

        Raises:
            DeviceError: the GPU can't be used.
        """
        self._pinning = pinning
        self._trials = trials or self._trials
        deadline_s = self._patience_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._memory_lane.perform(self._make)
        except TimeoutError:
            raise DeviceError(f"its context was not created within {deadline_s:g} s") from None
        self._pinning.start(self._context)
        self._watch = self._loop.call_later(WATCH_S, self._check_stuck)

    @property
    def is_called(self) -> bool:
        """Returns whether the driver has not returned yet from a call for memory or for the context."""
        return self._memory_lane.running > 0

    @property
    def _patience_s(self) -> float:
        """Returns how long a call to the driver may take: the driver gives a new context all that is pinned, and may
        delay other calls meanwhile.
        """
        return self._config.stuck_s + self._pinning.mapping_s

    def _make(self) -> None:
        driver = self._driver
        device = driver.call("cuDeviceGet", self._ordinal)
        self._check_attributes(device)
        self._context = int(driver.call("cuDevicePrimaryCtxRetain", device))
        driver.check("cuCtxSetCurrent", driver.set_current(self._context))
        self._memory = SharedMemory(driver, self._ordinal)
        self._copiers = {direction: self._make_copier(direction) for direction in Direction}

    def _check_attributes(self, device: object) -> None:
        """Raises DeviceError if an attribute is missing that all copies rely on. A driver may then accept copies and do
        nothing.
        """
        names = self._driver.api.CUdevice_attribute
        for name, meaning in _NEEDED.items():
            which = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
            if not int(self._driver.call("cuDeviceGetAttribute", which, device)):
                raise DeviceError(f"it lacks {name} ({meaning}), as under WSL2 and some virtual machines")

    def _make_copier(self, direction: Direction) -> RowCopier:
        stream, ends = self._make_stream(direction), lambda: self._mapped_ends
        return RowCopier(direction, stream, self._pinning, ends, self._config, self._chunk_bytes)

    def _make_stream(self, direction: Direction) -> CopyStream:
        return CopyStream(
            self._driver,
            self._context,
            _PRIORITIES[direction],
            batch=self._config.batch,
            on_broken=self._report_broken,
            batch_descriptors=self._config.batch_descriptors,
            # A slot is complete before it is loaded. The source of a store may still be written by a kernel that runs
            # before it.
            sources_final=direction is Direction.LOAD,
            trials=self._trials,
        )

    # --- memory ---

    async def open_handle(self, handle: bytes) -> Allocation:
        """See `GpuMemory.open_handle`."""
        return await self._add(lambda: self._memory.open_handle(handle))

    async def reserve_chunks(self, total_bytes: int) -> Allocation:
        """See `GpuMemory.reserve_chunks`."""
        return await self._add(lambda: self._memory.reserve(total_bytes))

    async def add_chunks(self, allocation: Allocation, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """See `GpuMemory.add_chunks`."""
        if not isinstance(allocation, VmmAllocation) or allocation not in self._mapped:
            raise UsageError("not an allocation in chunks of this GPU")
        await self._perform(lambda: self._memory.add_chunks(allocation, fds, sizes))

    async def unmap(self, allocation: Allocation) -> None:
        """See `Device.unmap`."""
        if allocation not in self._mapped:
            raise UsageError("not mapped, or already unmapped")
        self._mapped.remove(allocation)
        self._update_ends()
        await self._perform(lambda: self._memory.unmap(allocation))

    async def _add(self, work: Callable[[], Allocation]) -> Allocation:
        allocation = await self._perform(work)
        self._mapped.add(allocation)
        self._update_ends()
        return allocation

    def _update_ends(self) -> None:
        ends = {allocation.base_address + allocation.charged_bytes for allocation in self._mapped}
        self._mapped_ends = np.array(sorted(ends), np.uint64)

    async def _perform(self, work: Callable[[], T]) -> T:
        """Runs in the memory lane's thread; `_check_stuck` enforces the deadline, since other work may run first."""
        try:
            return await self._memory_lane.perform(work)
        except CudaError as error:
            if error.sticky and not await self._memory_lane.perform(self._driver.context_works):
                self._broken(str(error))
            raise

    # --- copies ---

    def submit(self, request: CopyRequest, done: Callable[[CopyResult], None]) -> ChunkedCopy:
        """See `Device.submit`."""
        if self._closed:
            raise UsageError(f"{self.kind}: closed")
        direction, work = request.direction, request.work
        copier = self._copiers[direction]
        chunks = Chunks(work, direction, copier.cut, self._chunk_bytes, at_once=copier.cuts_quickly(work))
        turn = Turn(self._loop, self._lanes[direction], THREADS, request.urgent, request.flow)
        copy = ChunkedCopy(chunks, copier.move, turn, request.deadline_s, done, self._copies)
        copy.start()
        return copy

    def busy_s(self, now: float) -> float:
        """See `Device.busy_s`."""
        return max(lane.oldest_running_s(now) for lane in self._lanes.values())

    def gauges(self) -> dict[str, int | float | str]:
        """Returns the gauges of the host device, and `pinned_bytes`, `pinning_failure`, `unpinned_copies`,
        `batch_failures`, `pitched_copies` and `left_out`.
        """
        copiers = self._copiers.values()
        gauges: dict[str, int | float | str] = {
            "copies": len(self._copies),
            "mapped_bytes": sum(allocation.size_bytes for allocation in self._mapped),
            "pinned_bytes": self._pinning.pinned_bytes,
            "pinning_failure": self._pinning.failure,
            "unpinned_copies": sum(copier.stream.unpinned_copies for copier in copiers),
            "batch_failures": sum(copier.stream.batch_failures for copier in copiers),
            "pitched_copies": sum(copier.stream.pitched_copies for copier in copiers),
            "left_out": ", ".join(sorted(self._trials.left_out)),
        }
        return gauges | lane_gauges([self._lanes])

    def lanes(self) -> list[Lane]:
        """See `Device.lanes`."""
        return [*self._lanes.values()]

    def watched_lanes(self) -> list[Lane]:
        """See `Device.watched_lanes`."""
        return self.lanes()

    # --- the end ---

    def _check_stuck(self) -> None:
        """Ends the process if the driver hangs. A chunk and a call to the driver take milliseconds. One that has not
        ended long after that never will, and its blocks, or its mapping, can't be released.
        """
        self._pinning.start(self._context)  # again, if no thread could be made for it before
        now, stuck_s, patience_s = time.monotonic(), self._config.stuck_s, self._patience_s
        if self._copying.is_over(self.busy_s(now), now, stuck_s):
            self._blame(now, stuck_s / 2)
            self._broken(f"a copy has not ended after {stuck_s} s")
        if self._calling.is_over(self._memory_lane.oldest_running_s(now), now, patience_s):
            self._broken(f"a call to the driver has not ended after {patience_s:g} s")
        self._watch = self._loop.call_later(WATCH_S, self._check_stuck)

    def _blame(self, now: float, least_s: float) -> None:
        """Records how the directions copy in which the oldest chunk has been under way for more than `least_s`."""
        stuck = [self._copiers[way] for way, lane in self._lanes.items() if lane.oldest_running_s(now) > least_s]
        self._trials.blame({way for copier in stuck for way in copier.stream.ways})

    def _report_broken(self, reason: str) -> NoReturn:
        """Reports that copies may never end. The calling thread keeps the memory that it copies: it never returns to
        report an end.
        """
        with contextlib.suppress(Exception):  # the loop is closed: the process ends; else `_check_stuck` ends it
            self._loop.call_soon_threadsafe(self._broken, reason)
        while True:
            time.sleep(WATCH_S)

    def _broken(self, reason: str) -> None:
        self._fatal(f"{self.kind} can't be used any more: {reason}")

    async def close(self, deadline_s: float) -> bool:
        """See `Device.close`."""
        self._closed = True
        for copy in self._copies:
            copy.cancel()
        if not all(await asyncio.gather(*(lane.close(deadline_s) for lane in self._lanes.values()))):
            return False
        if self._copiers:
            await self._perform(self._destroy)
        if self._watch is not None:
            self._watch.cancel()
        return await self._memory_lane.close(deadline_s)

    def _destroy(self) -> None:
        for copier in self._copiers.values():
            copier.stream.destroy()
        self._memory.close()
