"""Small rows by way of a staging buffer in the GPU's memory: one copy for each payload instead of one for each row.

    load    DMA: payloads -> buffer,  kernel: buffer -> rows
    store   kernel: rows -> buffer,   DMA: buffer -> payloads

A kernel moves 64 MiB within the GPU's memory in some 50 us (reckoned, not measured), where the DMA of so many bytes
takes over a millisecond: the engine, whose kernels wait meanwhile, loses little. Each buffer has a stream of its own,
so that the kernel of one chunk and the DMA of another overlap, and nothing waits for a worker.

Ownership: a `Stage` is one lane thread's while it moves a chunk; `Stages` hands them out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvoffloadd.cudadriver import SUCCESS
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.pinned import PinnedBuffer
from kvoffloadd.device.cuda.pinning import cut
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.plan import Copies, coalesce
from kvoffloadd.errors import DeviceError, ResourceError
from kvoffloadd.model import Direction, U64Array

log = logging.getLogger(__name__)

ROWS_MAX = 32_768
"""Of a chunk. A row takes 24 bytes of the GPU's memory and of pinned memory."""
SLACK_BYTES = 64 << 10
"""Chunks may be larger than asked for by less than this, see `plan.split`."""
LONGEST_BYTES = 64 << 10
"""Of a row for the kernel, which has as many warps for each row as the longest needs; longer ones become several."""
_ROW_WORDS = 3
_ROW_BYTES = 8 * _ROW_WORDS


class Kernel(Protocol):
    """See `RowKernel`."""

    def launch(self, rows_address: int, count: int, longest_bytes: int, stream: int) -> None:
        """See `RowKernel.launch`."""


class Stage:
    """A staging buffer, rows for the kernel, and a stream. The context must be current."""

    def __init__(
        self, driver: Driver, make_stream: Callable[[], CopyStream], kernel: Kernel, buffer_bytes: int, ends: U64Array
    ) -> None:
        """Takes `buffer_bytes` and less than 2 MiB of the GPU's memory. `ends`: of the pieces of pinned memory.

        Raises:
            DeviceError: there is not so much.
            ResourceError: this process can't have memory for the rows.
        """
        self._driver = driver
        self._kernel = kernel
        self._ends = ends
        rows_max = ROWS_MAX + (buffer_bytes + SLACK_BYTES) // LONGEST_BYTES
        rows_bytes = rows_max * _ROW_BYTES
        self._pinned = PinnedBuffer(driver, "kvoffloadd-rows", rows_bytes)
        self._rows = self._pinned.array.view(np.uint64).reshape(rows_max, _ROW_WORDS)
        self._device_rows = self._buffer = 0
        try:
            self._device_rows = int(driver.call("cuMemAlloc", rows_bytes))
            self._buffer = int(driver.call("cuMemAlloc", buffer_bytes + SLACK_BYTES))
            self._stream = make_stream()
        except DeviceError:
            self._free()
            raise

    def move(self, direction: Direction, src: U64Array, dst: U64Array, size: U64Array) -> None:
        """Copies a chunk of at most `ROWS_MAX` rows that fits the buffer: returns when it has ended. Blocks.

        Raises:
            CudaError: see `CopyStream.move`.
            DeviceError: the kernel was refused; what was submitted has ended.
        """
        staged = np.cumsum(size, dtype=np.uint64) - size + np.uint64(self._buffer)
        load = direction is Direction.LOAD
        dma = Copies(*(coalesce(src, staged, size) if load else coalesce(staged, dst, size)), len(size))
        dma = cut(dma, direction, self._ends)  # again: rows that end and begin there have become one copy
        begins, ends, lengths = shorten(staged, dst, size) if load else shorten(src, staged, size)
        count, longest_bytes = len(lengths), int(lengths.max())
        rows = self._rows[:count]
        rows[:, 0], rows[:, 1], rows[:, 2] = begins, ends, lengths

        def run_kernel(stream: int) -> int:
            status = self._driver.copy(self._pinned.address, self._device_rows, count * _ROW_BYTES, stream)
            if status == SUCCESS:
                self._kernel.launch(self._device_rows, count, longest_bytes, stream)
            return status

        def run_dma(stream: int) -> int:
            return self._stream.submit(dma.src, dma.dst, dma.size, stream)

        def submit(stream: int) -> int:
            status = SUCCESS
            for step in (run_dma, run_kernel) if load else (run_kernel, run_dma):
                status = status or step(stream)
            return status

        self._stream.run(int(size.sum()), submit)

    def destroy(self) -> None:
        """Blocks; the context must be current, and no thread in `move`."""
        self._stream.destroy()
        self._free()

    def _free(self) -> None:
        for address in (self._buffer, self._device_rows):
            if address:
                self._driver.call("cuMemFree", address)
        self._pinned.free()


def shorten(src: U64Array, dst: U64Array, size: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """The same bytes in rows of at most `LONGEST_BYTES`: source, destination and size of each, u64."""
    if int(size.max()) <= LONGEST_BYTES:
        return src, dst, size
    longest = np.uint64(LONGEST_BYTES)
    parts = ((size + longest - np.uint64(1)) // longest).astype(np.int64)
    row = np.repeat(np.arange(len(size)), parts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = nth.astype(np.uint64) * longest
    return src[row] + begin, dst[row] + begin, np.minimum(size[row] - begin, longest)


class Stages:
    """The stages of one GPU and direction, made as threads first need them. `move` may be called by any lane thread."""

    def __init__(self, make: Callable[[], Stage]) -> None:
        """`make`: blocks; called in a lane's thread, the context current."""
        self.works = True
        self.chunks = 0
        self._make = make
        self._lock = threading.Lock()
        self._idle: list[Stage] = []

    def move(self, direction: Direction, src: U64Array, dst: U64Array, size: U64Array) -> bool:
        """As `Stage.move`, without errors. False: it did not work, and is not tried again; its copies have ended, and
        may be made anew.
        """
        with self._lock:
            stage = self._idle.pop() if self._idle else None
        try:
            stage = stage or self._make()
            stage.move(direction, src, dst, size)
        except (DeviceError, ResourceError) as error:
            with self._lock:
                first, self.works = self.works, False
            if first:
                log.warning("the kernel for small rows does not work: copying without it from now on: %s", error)
            return False
        else:
            with self._lock:
                self.chunks += 1
            return True
        finally:
            self._put_back(stage)

    def _put_back(self, stage: Stage | None) -> None:
        """For the next chunk; where none is to come, the memory of all that are idle is given back."""
        with self._lock:
            if stage is not None:
                self._idle.append(stage)
            if self.works:
                return
        try:
            self.destroy()
        except DeviceError as error:
            log.warning("staging memory could not be freed: %s", error)

    def destroy(self) -> None:
        """Destroys those that are idle. Blocks; the context must be current.

        Raises:
            CudaError: the GPU can't be used any more.
        """
        while True:
            with self._lock:
                if not self._idle:
                    return
                stage = self._idle.pop()
            stage.destroy()
