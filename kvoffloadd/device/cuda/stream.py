"""One CUDA stream, which carries one direction's chunks of a GPU. Its lane's threads submit them and wait for their
end.

Each thread has one chunk in flight: two threads keep the stream busy while the end of a chunk is being noticed. Ends
are polled for, since a call that waits for them could not be aborted. The sleep between two polls is bounded by the
time that has passed, not by the time that the chunk should take: so a wrong estimate costs polls or a part of a chunk's
time, and is never confirmed by a sleep that it caused.

No error proves that DMA has stopped. After any failure once something may have been submitted, the stream is polled
until it has drained, before the end of the copies is reported.

Ownership: `_lock` guards submission, so that an event follows only its chunk, and the estimate of how long chunks take
(`_rate`, `_in_flight_bytes`, `_last_end_s`), and `_ways`. `_idle_events` changes by single operations.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from kvoffloadd.cudadriver import NOT_READY, SUCCESS, CudaError
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.trials import Trials, Way
from kvoffloadd.device.pitched import Pitched
from kvoffloadd.device.plan import CHUNK_DESCRIPTORS
from kvoffloadd.model import U64Array

log = logging.getLogger(__name__)

POLL_MIN_S, POLL_MAX_S = 20e-6, 1e-3
"""The pause between two polls of a chunk that should have ended; it grows with the delay."""
STEP_S, STEP_SHARE = 250e-6, 1 / 8
"""The pause before that: at most this long, or this share of the time since the chunk began."""
_EARLY = 0.8
"""The share of a chunk's expected time that is slept through; the rest is polled."""
_ASKS = 8
"""How many times in a row the driver may fail to report whether a stream has drained."""
_DISABLE_EVENT_TIMING, _NON_BLOCKING = 2, 1


class Rate:
    """Estimates the recent bytes per busy second: over about the last `_WINDOW_S`, so that long chunks count for more,
    and an end that is noticed late is compensated by the next one. Starts too high, since early polls cost little.
    """

    _WINDOW_S = 5e-3
    _START_BYTES_PER_S, _START_S = 100e9, 1e-3

    def __init__(self) -> None:
        self._seconds = self._START_S
        self._bytes = self._START_S * self._START_BYTES_PER_S

    @property
    def bytes_per_s(self) -> float:
        """Returns the estimated rate, greater than 0."""
        return self._bytes / self._seconds

    def add_sample(self, moved_bytes: int, seconds: float) -> None:
        """Records that this number of bytes, at least one, took this long."""
        self._bytes += moved_bytes
        self._seconds += max(seconds, 0.0)
        kept = min(self._WINDOW_S / self._seconds, 1.0)
        self._bytes *= kept
        self._seconds *= kept


class CopyStream:
    """`move` and `run` are for its lane's threads; the other methods are for its owner. `on_broken(reason)`: called
    from a lane's thread, and never returns, when it can't be known whether copies have ended: their memory can't be
    used any more.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        priority: int,
        *,
        batch: bool,
        on_broken: Callable[[str], NoReturn],
        batch_descriptors: int = CHUNK_DESCRIPTORS,
        sources_final: bool = False,
        trials: Trials | None = None,
    ) -> None:
        """Blocks for a moment; the context must be current. `batch_descriptors`: how many copies a batch has at most.
        `sources_final`: nothing writes a source any more when its copy is asked for. `trials`: None: no trial is
        recorded.
        """
        self._sources_final = sources_final
        self._trials = trials or Trials()
        self.batch = batch and driver.batches and Way.BATCH not in self._trials.left_out
        self.pitched_batch = batch and driver.pitched_batches
        self._batch_descriptors = batch_descriptors
        self.pitched = driver.pitches and Way.RUNS not in self._trials.left_out
        self._ways: list[Way] = []
        self.pitched_copies = 0
        self.batch_failures = 0
        self.unpinned_copies = 0
        self._driver = driver
        self._context = context
        self._on_broken = on_broken
        self._stream = int(driver.call("cuStreamCreateWithPriority", _NON_BLOCKING, priority))
        self._lock = threading.Lock()
        self._idle_events: list[int] = []
        self._rate = Rate()
        self._in_flight_bytes = 0
        self._last_end_s = 0.0

    def move(self, src: U64Array, dst: U64Array, size: U64Array, runs: Pitched | None = None) -> None:
        """Copies one chunk, see `copy_runs`: returns when it has ended, however long that takes. Blocks, without the
        GIL. `runs`: the same bytes, used instead as long as the driver accepts runs.

        Raises:
            CudaError: a call failed; submitted copies have ended.
        """
        used: list[Way] = []
        try:
            self.run(int(size.sum()), lambda stream: self._submit(src, dst, size, stream, runs, used))
        finally:
            self._leave(used)

    def move_each(self, src: U64Array, dst: U64Array, size: U64Array) -> None:
        """Does what `move` does, for memory that is not pinned: in single copies, which the driver may pass through its
        own buffers, slowly. Other submissions to this stream wait meanwhile.
        """
        self.unpinned_copies += len(size)
        self.run(int(size.sum()), lambda stream: self._driver.copy_each(src, dst, size, stream))

    def run(self, total_bytes: int, submit: Callable[[int], int]) -> None:
        """Calls `submit` with the stream, to submit work that moves this number of bytes, and waits for the end of that
        work, however long it takes and whatever `submit` raises. `submit` returns a CUresult. Blocks, without the GIL.

        Raises:
            CudaError: as `move`.
        """
        driver = self._driver
        try:
            driver.check("cuCtxSetCurrent", driver.set_current(self._context))
            event = self._idle_events.pop() if self._idle_events else self._new_event()
        except CudaError as error:  # nothing is submitted; but a GPU that is lost would fail every job from now on
            if error.sticky:
                self._drain(error)
            raise
        try:
            with self._lock:
                began_s = time.monotonic()
                status = submit(self._stream)
                driver.check("cuEventRecord", driver.record(event, self._stream))
                self._in_flight_bytes += total_bytes
                due_s = began_s + _EARLY * self._in_flight_bytes / self._rate.bytes_per_s
            self._await(event, began_s, due_s)
        except BaseException as error:
            self._drain(error)
            raise
        finally:
            self._idle_events.append(event)
        self._measure(total_bytes, began_s)
        driver.check("cuMemcpyAsync", status)

    @property
    def ways(self) -> set[Way]:
        """Returns the ways in which copies are made now, other than one by one."""
        return set(self._ways.copy())

    def _use(self, way: Way, used: list[Way]) -> None:
        self._trials.begin(way)
        used.append(way)
        self._ways.append(way)

    def _leave(self, used: list[Way]) -> None:
        """Records that the copies made in these ways have ended."""
        with self._lock:
            for way in used:
                self._ways.remove(way)
        for way in used:
            self._trials.end(way)

    def _submit(
        self, src: U64Array, dst: U64Array, size: U64Array, stream: int, runs: Pitched | None, used: list[Way]
    ) -> int:
        """Submits copies, as `move`, to the stream that `run` gives. Returns the CUresult of the last way tried: a
        submission that the driver refuses is repeated in the next way, since copying twice does no harm. `used`:
        collects the ways.
        """
        driver = self._driver
        if runs is not None and self.pitched and len(runs):
            self._use(Way.RUNS, used)
            if self._submit_runs(runs, stream):
                self.pitched_copies += len(runs)
                src, dst, size = runs.rest.src, runs.rest.dst, runs.rest.size
        if not len(size):
            return SUCCESS
        src, dst, size = np.ascontiguousarray(src), np.ascontiguousarray(dst), np.ascontiguousarray(size)
        if self.batch:
            self._use(Way.BATCH, used)
            status = self._submit_batches(src, dst, size, stream)
            if status != SUCCESS and self._sources_final:
                self._sources_final = False
                status = self._submit_batches(src, dst, size, stream)
            if status == SUCCESS:
                return status
            self.batch_failures += 1
            if self.batch_failures == 1:
                log.warning("cuMemcpyBatchAsync failed with %d: copying one by one", status)
        return driver.copy_each(src, dst, size, stream)

    def _submit_runs(self, runs: Pitched, stream: int) -> bool:
        """Submits the runs in one call, or one by one. Returns False if the driver accepts neither, and then does not
        try again.
        """
        driver, most, final = self._driver, self._batch_descriptors, self._sources_final
        if self.pitched_batch:
            status = driver.copy_pitched_batch(runs, most, stream, sources_final=final)
            if status != SUCCESS and final:
                status = driver.copy_pitched_batch(runs, most, stream)
                self._sources_final = status != SUCCESS
            if status == SUCCESS:
                return True
            self.pitched_batch = False
            log.warning("cuMemcpy3DBatchAsync failed with %d: making pitched copies one by one from now on", status)
        status = driver.copy_pitched(runs, stream)
        if status == SUCCESS:
            return True
        self.pitched = False
        log.warning("cuMemcpy2DAsync failed with %d: copying row by row from now on", status)
        return False

    def _submit_batches(self, src: U64Array, dst: U64Array, size: U64Array, stream: int) -> int:
        """Submits batches until one is refused. Returns the last CUresult."""
        for begin in range(0, len(size), self._batch_descriptors):
            batch = slice(begin, begin + self._batch_descriptors)
            status = self._driver.copy_batch(
                src[batch], dst[batch], size[batch], stream, sources_final=self._sources_final
            )
            if status != SUCCESS:
                return status
        return SUCCESS

    def _await(self, event: int, began_s: float, due_s: float) -> None:
        while (status := self._driver.query(event)) == NOT_READY:
            now = time.monotonic()
            if now < due_s:
                pause_s = min(due_s - now, max(STEP_S, STEP_SHARE * (now - began_s)))
            else:
                pause_s = min((now - due_s) / 16, POLL_MAX_S)
            time.sleep(max(pause_s, POLL_MIN_S))
        self._driver.check("cuEventQuery", status)

    def _drain(self, error: BaseException) -> None:
        """Waits until the stream has drained; no other thread submits to it meanwhile."""
        refused = 0
        with self._lock:
            while (status := self._driver.query_stream(self._stream)) != SUCCESS:
                refused = 0 if status == NOT_READY else refused + 1
                if refused == _ASKS:
                    self._on_broken(f"copies may still be running ({self._why(error, status)})")
                time.sleep(POLL_MAX_S)
            self._in_flight_bytes = 0

    def _why(self, error: BaseException, status: int) -> str:
        try:
            return f"{type(error).__name__}: {error}; then cuStreamQuery: {self._driver.name_of(status)}"
        except MemoryError:
            return "no memory to say why"

    def _measure(self, total_bytes: int, began_s: float) -> None:
        now = time.monotonic()
        with self._lock:
            took_s = now - max(began_s, self._last_end_s)
            self._in_flight_bytes = max(self._in_flight_bytes - total_bytes, 0)  # a drained stream has none
            self._last_end_s = now
            self._rate.add_sample(total_bytes, took_s)

    def _new_event(self) -> int:
        return int(self._driver.call("cuEventCreate", _DISABLE_EVENT_TIMING))

    def destroy(self) -> None:
        """Destroys the stream, and ignores the driver's errors: no copy runs, and the process ends. Blocks; the context
        must be current, and no thread in `move`.
        """
        for event in self._idle_events:
            with contextlib.suppress(CudaError):
                self._driver.call("cuEventDestroy", event)
        with contextlib.suppress(CudaError):
            self._driver.call("cuStreamDestroy", self._stream)
