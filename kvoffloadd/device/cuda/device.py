"""One GPU: its context, its memory lane, a stream each way.

Ownership: the event loop alone. The copy lanes' threads run `CopyStream.move`, the memory lane's thread runs whatever
else needs the driver; both with the GPU's context current.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from kvoffloadd.config import CudaConfig
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.base import Allocation, CopyResult, Work
from kvoffloadd.device.chunked import PIECE_DESCRIPTORS, ChunkedCopy, Chunks, Turn, lane_gauges
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, Driver, device_side, host_side
from kvoffloadd.device.cuda.kernel import RowKernel
from kvoffloadd.device.cuda.memory import SharedMemory, VmmAllocation
from kvoffloadd.device.cuda.pinning import Pinning, cut, cut_at
from kvoffloadd.device.cuda.staging import ROWS_MAX, SLACK_BYTES, Stage, Stages
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies, split
from kvoffloadd.errors import DeviceError, UsageError
from kvoffloadd.lanes import DAEMON, Flow, Lane, Patience
from kvoffloadd.model import Direction, U64Array

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 2
"""Chunks in flight each way: what is urgent waits for no more."""

WATCH_S = 0.5
_PRIORITIES = {Direction.STORE: 0, Direction.LOAD: -1}
"""Of the streams; lower goes first. A load is waited for, a store is not."""


class CudaDevice:
    """A GPU in use, from `open` to `close`. `fatal(reason)` ends the process: for a GPU that can't be used any more."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        driver: Driver,
        uuid: bytes,
        ordinal: int,
        chunk_bytes: int,
        config: CudaConfig,
        fatal: Callable[[str], None],
    ) -> None:
        self.kind = f"cuda:{uuid.hex()}"
        self._loop = loop
        self._driver = driver
        self._ordinal = ordinal
        self._chunk_bytes = chunk_bytes
        self._config = config
        self._fatal = fatal
        self._context = 0
        self._memory: SharedMemory
        self._pinning: Pinning
        self._streams: dict[Direction, CopyStream] = {}
        self._stages = {direction: Stages(partial(self._make_stage, direction)) for direction in Direction}
        self._kernel: RowKernel | None = None
        self._kernel_lock = threading.Lock()
        self._memory_lane = Lane("gpu-memory", 1, loop)
        self._lanes = {direction: Lane(f"gpu-{direction.value}", THREADS, loop) for direction in Direction}
        self._copies: set[ChunkedCopy] = set()
        self._mapped: set[Allocation] = set()
        self._mapped_ends = np.zeros(0, np.uint64)  # replaced, never changed: the copy lanes read it
        self._closed = False
        self._copying, self._calling = Patience(WATCH_S), Patience(WATCH_S)
        self._watch: asyncio.TimerHandle | None = None

    async def open(self, pinning: Pinning) -> None:
        """Makes the context and the streams. `pinning`: the arena's, begun once there is a context.

        Raises:
            DeviceError: the GPU can't be used.
        """
        self._pinning = pinning
        deadline_s = self._patience_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._memory_lane.perform(self._make)
        except TimeoutError:
            raise DeviceError(f"its context is not there after {deadline_s:g} s") from None
        self._pinning.start(self._context)
        self._watch = self._loop.call_later(WATCH_S, self._check_stuck)

    @property
    def _patience_s(self) -> float:
        """How long a call to the driver may take: a new context is given all that is pinned, and may keep other calls
        waiting meanwhile.
        """
        return self._config.stuck_s + self._pinning.mapping_s

    def _make(self) -> None:
        driver = self._driver
        device = driver.call("cuDeviceGet", self._ordinal)
        self._context = int(driver.call("cuDevicePrimaryCtxRetain", device))
        driver.check("cuCtxSetCurrent", driver.set_current(self._context))
        self._memory = SharedMemory(driver, self._ordinal)
        self._streams = {direction: self._make_stream(direction) for direction in Direction}

    def _make_stream(self, direction: Direction) -> CopyStream:
        return CopyStream(
            self._driver,
            self._context,
            _PRIORITIES[direction],
            batch=self._config.batch,
            on_broken=self._report_broken,
            batch_descriptors=self._config.batch_descriptors,
            # A slot is complete before it is loaded. What a store copies may be a kernel's that runs before it.
            sources_final=direction is Direction.LOAD,
        )

    def _make_stage(self, direction: Direction) -> Stage:
        """In a lane's thread, when the first small rows come."""
        driver, config = self._driver, self._config
        driver.check("cuCtxSetCurrent", driver.set_current(self._context))
        with self._kernel_lock:
            self._kernel = self._kernel or RowKernel(driver, self._ordinal)
        make_stream, ends = partial(self._make_stream, direction), self._pinning.ends
        return Stage(driver, make_stream, self._kernel, config.staging_bytes, ends)

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
            raise UsageError("not mapped, or no longer")
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
        """In the memory lane's thread; `_check_stuck` sees to the deadline, since others may be before it."""
        try:
            return await self._memory_lane.perform(work)
        except CudaError as error:
            if error.sticky and not await self._memory_lane.perform(self._driver.context_works):
                self._broken(str(error))
            raise

    # --- copies ---

    def submit(
        self,
        direction: Direction,
        work: Work,
        *,
        deadline_s: float,
        urgent: bool,
        done: Callable[[CopyResult], None],
        flow: Flow = DAEMON,
    ) -> ChunkedCopy:
        """See `Device.submit`. Copies to and from memory that is not yet pinned wait until it is."""
        if self._closed:
            raise UsageError(f"{self.kind}: closed")
        chunks = Chunks(work, direction, partial(self._cut, direction), self._chunk_bytes)
        turn = Turn(self._loop, self._lanes[direction], THREADS, urgent, flow)
        copy = ChunkedCopy(chunks, partial(self._move, direction), turn, deadline_s, done, self._copies)
        if self._pinning.covers(work.payload_end):
            copy.start()
        else:
            self._pinning.when(work.payload_end, copy.start)
        return copy

    def _cut(self, direction: Direction, copies: Copies) -> list[Copies]:
        """Chunks of copies that the driver takes: none reaches from one piece of the arena, or from one mapping, into
        the next.
        """
        copies = cut(copies, direction, self._pinning.ends)
        copies = cut_at(copies, device_side(direction, copies.src, copies.dst), self._mapped_ends)
        config, chunk_bytes = self._config, self._chunk_bytes
        if self._takes_kernel(direction, copies):
            chunk_bytes = min(chunk_bytes, config.staging_bytes)
            return split(copies, 1, 1, chunk_bytes=chunk_bytes, chunk_descriptors=ROWS_MAX)
        runs, most = self._runs(direction, copies), config.batch_descriptors
        if runs is not None and len(copies):  # a run takes the driver about as long as a single copy
            most = min(most * len(copies) // max(len(runs) + len(runs.rest), 1), PIECE_DESCRIPTORS)
        return split(copies, 1, 1, chunk_bytes=chunk_bytes, chunk_descriptors=most)

    def _takes_kernel(self, direction: Direction, copies: Copies) -> bool:
        """Whether the kernel is to move these rows: they are small, and together worth a kernel."""
        most = self._config.kernel_row_bytes
        if not most or not self._stages[direction].works:
            return False
        return self._config.kernel_chunk_bytes <= copies.total_bytes <= most * len(copies)

    def _runs(self, direction: Direction, copies: Copies) -> Pitched | None:
        """The copies in pitched form. None: they are to be made one by one, since rows are large or the driver does
        not take runs.
        """
        most = self._config.pitched_row_bytes
        if not most or not self._streams[direction].pitched or copies.total_bytes > most * len(copies):
            return None
        host, device = self._pinning.ends, self._mapped_ends
        src_ends, dst_ends = (device, host) if direction is Direction.STORE else (host, device)
        return pitch(copies, src_ends, dst_ends, pitch_max_bytes=PITCH_MAX_BYTES)

    def _move(self, direction: Direction, src: U64Array, dst: U64Array, size: U64Array) -> None:
        if self._pinning.failure and (host_side(direction, src, dst) + size).max() > self._pinning.pinned_to:
            raise DeviceError(self._pinning.failure)
        copies = Copies(src, dst, size, len(size))
        if self._takes_kernel(direction, copies):
            fits = len(size) <= ROWS_MAX and copies.total_bytes <= self._config.staging_bytes + SLACK_BYTES
            if fits and self._stages[direction].move(direction, src, dst, size):
                return
        runs = self._runs(direction, copies)
        self._streams[direction].move(src, dst, size, runs)

    def busy_s(self, now: float) -> float:
        """See `Device.busy_s`."""
        return max(lane.oldest_running_s(now) for lane in self._lanes.values())

    def gauges(self) -> dict[str, int | float]:
        """As the host device's, and `pinned_bytes`, `batch_failures`, `pitched_copies`, `kernel_chunks`."""
        gauges: dict[str, int | float] = {
            "copies": len(self._copies),
            "mapped_bytes": sum(allocation.size_bytes for allocation in self._mapped),
            "pinned_bytes": self._pinning.pinned_bytes,
            "batch_failures": sum(stream.batch_failures for stream in self._streams.values()),
            "pitched_copies": sum(stream.pitched_copies for stream in self._streams.values()),
            "kernel_chunks": sum(stages.chunks for stages in self._stages.values()),
        }
        return gauges | lane_gauges(self._lanes)

    def lanes(self) -> list[Lane]:
        """See `Device.lanes`."""
        return [*self._lanes.values()]

    # --- the end ---

    def _check_stuck(self) -> None:
        """A chunk and a call to the driver take milliseconds. One that has not ended long after never will, and its
        blocks, or its mapping, can't be released.
        """
        now, stuck_s, patience_s = time.monotonic(), self._config.stuck_s, self._patience_s
        if self._copying.end(self.busy_s(now), now, stuck_s):
            self._broken(f"a copy has not ended after {stuck_s} s")
        if self._calling.end(self._memory_lane.oldest_running_s(now), now, patience_s):
            self._broken(f"a call to the driver has not ended after {patience_s:g} s")
        self._watch = self._loop.call_later(WATCH_S, self._check_stuck)

    def _report_broken(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._broken, reason)

    def _broken(self, reason: str) -> None:
        self._fatal(f"{self.kind} can't be used any more: {reason}")

    async def close(self, deadline_s: float) -> bool:
        """See `Device.close`."""
        self._closed = True
        for copy in self._copies:
            copy.cancel()
        lanes = [*self._lanes.values()]
        if not all(await asyncio.gather(*(lane.close(deadline_s) for lane in lanes))):
            return False
        if self._streams:
            await self._perform(self._destroy)
        if self._watch is not None:
            self._watch.cancel()
        return await self._memory_lane.close(deadline_s)

    def _destroy(self) -> None:
        for stages in self._stages.values():
            stages.destroy()
        for stream in self._streams.values():
            stream.destroy()
        self._memory.close()
