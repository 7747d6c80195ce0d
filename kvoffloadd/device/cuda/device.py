"""One GPU: its context, its memory lane, a stream each way.

Ownership: the event loop alone. The copy lanes' threads run `CopyStream.move`, the memory lane's thread runs whatever
else needs the driver; both with the GPU's context current.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import numpy as np

from kvoffloadd.config import CudaConfig
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.base import Allocation, CopyResult, Work
from kvoffloadd.device.chunked import ChunkedCopy, Chunks, Turn, lane_gauges
from kvoffloadd.device.cuda.calibration import Calibrations, find_limits
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.kernel import RowKernel
from kvoffloadd.device.cuda.memory import SharedMemory, VmmAllocation
from kvoffloadd.device.cuda.pinning import Pinning
from kvoffloadd.device.cuda.rows import RowCopier
from kvoffloadd.device.cuda.staging import Stage, Stages
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.errors import DeviceError, UsageError
from kvoffloadd.lanes import DAEMON, Flow, Lane
from kvoffloadd.model import Direction
from kvoffloadd.patience import Patience

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 2
"""Chunks in flight each way: what is urgent waits for no more."""

WATCH_S = 0.5

PREPARE_S = 3.0
"""How long the first who registers waits for what small rows need: CuPy alone may take seconds to import. A client
waits 10 s for its answer, which takes a context, too.
"""
_LATE_S = 0.2
"""The same, while another GPU's is late: GPUs are opened one after the other, and a host may have eight."""
_PRIORITIES = {Direction.STORE: 0, Direction.LOAD: -1}
"""Of the streams; lower goes first. A load is waited for, a store is not."""


class CudaDevice:
    """A GPU in use, from `open` to `close`. `fatal(reason)` ends the process: for a GPU that can't be used any more.
    `cpus`: those that the copy lanes run on; none: any.
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
        self._context = 0
        self._memory: SharedMemory
        self._pinning: Pinning
        self._copiers: dict[Direction, RowCopier] = {}
        self._kernel: RowKernel | None = None
        self._prepare_lane: Lane | None = None
        self._memory_lane = Lane("gpu-memory", 1, loop)
        self._lanes = {direction: Lane(f"gpu-{direction.value}", THREADS, loop, cpus) for direction in Direction}
        self._copies: set[ChunkedCopy] = set()
        self._mapped: set[Allocation] = set()
        self._mapped_ends = np.zeros(0, np.uint64)  # replaced, never changed: the copy lanes read it
        self._closed = False
        self._copying, self._calling = Patience(WATCH_S), Patience(WATCH_S)
        self._watch: asyncio.TimerHandle | None = None

    async def open(
        self, pinning: Pinning, calibrations: Calibrations | None = None, *, others_late: bool = False
    ) -> None:
        """Makes the context and the streams, and sees how small rows are best copied. `pinning`: the arena's, begun
        after that. `calibrations`: what is known of this daemon's GPUs. `others_late`: one of these `is_late`.

        Raises:
            DeviceError: the GPU can't be used.
        """
        self._pinning = pinning
        deadline_s = self._patience_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._memory_lane.perform(self._make)
        except TimeoutError:
            raise DeviceError(f"its context was not created within {deadline_s:g} s") from None
        await self._prepare({} if calibrations is None else calibrations, _LATE_S if others_late else PREPARE_S)
        self._pinning.start(self._context)
        self._watch = self._loop.call_later(WATCH_S, self._check_stuck)

    @property
    def is_late(self) -> bool:
        """Whether what small rows need is still under way, though nobody waits for it any more."""
        return self._prepare_lane is not None and self._prepare_lane.running > 0

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
        self._copiers = {direction: self._make_copier(direction) for direction in Direction}

    def _make_copier(self, direction: Direction) -> RowCopier:
        stream, stages = self._make_stream(direction), Stages(partial(self._make_stage, direction))
        ends, config, chunk_bytes = lambda: self._mapped_ends, self._config, self._chunk_bytes
        return RowCopier(direction, stream, stages, self._pinning, ends, config, chunk_bytes)

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
        if self._kernel is None:
            raise DeviceError("the kernel is not loaded")
        driver.check("cuCtxSetCurrent", driver.set_current(self._context))
        make_stream, ends = partial(self._make_stream, direction), self._pinning.ends
        return Stage(driver, make_stream, self._kernel, config.staging_bytes, ends)

    async def _prepare(self, calibrations: Calibrations, wait_s: float) -> None:
        """In a thread of its own, so that nothing else waits for it. What it finds is used once it is there."""
        if not (self._config.pitched_row_bytes or self._config.kernel_row_bytes):
            return
        self._prepare_lane = Lane("gpu-prepare", 1, self._loop)
        try:
            async with asyncio.timeout(wait_s):
                await self._prepare_lane.perform(partial(self._find_limits, calibrations))
        except TimeoutError:
            log.warning("small rows are copied one by one for now: CuPy or the GPU took more than %g s", wait_s)
        finally:
            await self._prepare_lane.close(0.0)  # its thread ends with its work

    def _find_limits(self, calibrations: Calibrations) -> None:
        """Whatever fails here fails no registration: then small rows are copied one by one."""
        driver, config = self._driver, self._config
        try:
            driver.check("cuCtxSetCurrent", driver.set_current(self._context))
            if config.kernel_row_bytes:
                self._load_kernel()
            found = find_limits(driver, self._ordinal, self._make_stream, self._kernel, config, calibrations)
        except Exception:
            log.exception("small rows are copied one by one: no other way could be prepared")
            return
        for direction, copier in self._copiers.items():
            copier.limits = found[direction]

    def _load_kernel(self) -> None:
        try:
            self._kernel = RowKernel(self._driver, self._ordinal)
        except DeviceError as error:
            log.warning("the kernel for small rows does not work: copying without it: %s", error)

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
        """See `Device.submit`."""
        if self._closed:
            raise UsageError(f"{self.kind}: closed")
        copier = self._copiers[direction]
        chunks = Chunks(work, direction, copier.cut, self._chunk_bytes, at_once=copier.cuts_quickly(work))
        turn = Turn(self._loop, self._lanes[direction], THREADS, urgent, flow)
        copy = ChunkedCopy(chunks, copier.move, turn, deadline_s, done, self._copies)
        copy.start()
        return copy

    def busy_s(self, now: float) -> float:
        """See `Device.busy_s`."""
        return max(lane.oldest_running_s(now) for lane in self._lanes.values())

    def gauges(self) -> dict[str, int | float | str]:
        """As the host device's, and `pinned_bytes`, `pinning_failure`, `unpinned_copies`, `batch_failures`,
        `pitched_copies`, `kernel_chunks`, and of each direction `pitched_row_bytes` and `kernel_row_bytes`.
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
            "kernel_chunks": sum(copier.stages.chunks for copier in copiers),
        }
        for direction, copier in self._copiers.items():
            gauges |= {f"{direction.value}_{name}": value for name, value in copier.limits._asdict().items()}
        return gauges | lane_gauges([self._lanes])

    def lanes(self) -> list[Lane]:
        """See `Device.lanes`."""
        return [*self._lanes.values()]

    def watched_lanes(self) -> list[Lane]:
        """See `Device.watched_lanes`."""
        return self.lanes()

    # --- the end ---

    def _check_stuck(self) -> None:
        """A chunk and a call to the driver take milliseconds. One that has not ended long after never will, and its
        blocks, or its mapping, can't be released.
        """
        self._pinning.start(self._context)  # again, if there was no thread for it
        now, stuck_s, patience_s = time.monotonic(), self._config.stuck_s, self._patience_s
        if self._copying.is_over(self.busy_s(now), now, stuck_s):
            self._broken(f"a copy has not ended after {stuck_s} s")
        if self._calling.is_over(self._memory_lane.oldest_running_s(now), now, patience_s):
            self._broken(f"a call to the driver has not ended after {patience_s:g} s")
        self._watch = self._loop.call_later(WATCH_S, self._check_stuck)

    def _report_broken(self, reason: str) -> NoReturn:
        """The thread that calls this keeps the memory that it copies: it never returns to say that it has ended."""
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
        preparing = [] if self._prepare_lane is None else [self._prepare_lane.close(deadline_s)]
        ended = await asyncio.gather(*(lane.close(deadline_s) for lane in self._lanes.values()), *preparing)
        if not all(ended[: len(self._lanes)]):
            return False
        if not all(ended):  # it uses no memory but its own
            log.warning("the measurement of small rows has not ended yet; not waiting any longer")
        if self._copiers:
            await self._perform(self._destroy)
        if self._watch is not None:
            self._watch.cancel()
        return await self._memory_lane.close(deadline_s)

    def _destroy(self) -> None:
        for copier in self._copiers.values():
            copier.stages.destroy()
            copier.stream.destroy()
        self._memory.close()
