"""Small rows by way of a staging buffer in the GPU's memory: one copy for each payload instead of one for each row.

    load    DMA: payloads -> buffer,  kernel: buffer -> rows
    store   kernel: rows -> buffer,   DMA: buffer -> payloads

A kernel moves 64 MiB within the GPU's memory in some 50 us, where the DMA of so many bytes takes over a millisecond:
the engine, whose kernels wait meanwhile, loses little. Each buffer has a stream of its own, so that the kernel of one
chunk and the DMA of another overlap, and nothing waits for a worker.

Ownership: a `Stage` is one lane thread's while it moves a chunk; `Stages` hands them out.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvoffloadd.cudadriver import SUCCESS, CudaError
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.plan import coalesce
from kvoffloadd.errors import DeviceError
from kvoffloadd.model import Direction, U64Array
from kvoffloadd.sharedmem import Mapping, create_memfd

log = logging.getLogger(__name__)

ROWS_MAX = 32_768
"""Of a chunk. A row takes 24 bytes of the GPU's memory and of pinned memory."""
SLACK_BYTES = 64 << 10
"""Chunks may be larger than asked for by less than this, see `plan.split`."""
_ROW_WORDS = 3
_ROW_BYTES = 8 * _ROW_WORDS


class Kernel(Protocol):
    """See `RowKernel`."""

    def launch(self, rows_address: int, count: int, longest_bytes: int, stream: int) -> None:
        """See `RowKernel.launch`."""


class Stage:
    """A staging buffer, rows for the kernel, and a stream. The context must be current."""

    def __init__(
        self, driver: Driver, make_stream: Callable[[], CopyStream], kernel: Kernel, buffer_bytes: int, batch: bool
    ) -> None:
        """Takes `buffer_bytes` and less than 1 MiB of the GPU's memory.

        Raises:
            CudaError: there is not so much.
        """
        self._driver = driver
        self._kernel = kernel
        self._batch = batch and driver.batches
        fd = create_memfd("kvoffloadd-rows", ROWS_MAX * _ROW_BYTES)
        try:
            self._mapping = Mapping.map_fd(fd, ROWS_MAX * _ROW_BYTES)
        finally:
            os.close(fd)
        self._rows = self._mapping.array().view(np.uint64).reshape(ROWS_MAX, _ROW_WORDS)
        self._device_rows = self._buffer = 0
        self._pinned = False
        try:
            driver.call("cuMemHostRegister", self._mapping.address, ROWS_MAX * _ROW_BYTES, 0)
            self._pinned = True
            self._device_rows = int(driver.call("cuMemAlloc", ROWS_MAX * _ROW_BYTES))
            self._buffer = int(driver.call("cuMemAlloc", buffer_bytes + SLACK_BYTES))
            self._stream = make_stream()
        except CudaError:
            self._free()
            raise

    def move(self, direction: Direction, src: U64Array, dst: U64Array, size: U64Array) -> None:
        """Copies a chunk of at most `ROWS_MAX` rows that fits the buffer: returns when it has ended. Blocks.

        Raises:
            CudaError: see `CopyStream.move`.
            DeviceError: the kernel was refused; what was submitted has ended.
        """
        count = len(size)
        staged = np.cumsum(size, dtype=np.uint64) - size + np.uint64(self._buffer)
        rows = self._rows[:count]
        rows[:, 2] = size
        load = direction is Direction.LOAD
        rows[:, 0], rows[:, 1] = (staged, dst) if load else (src, staged)
        dma = coalesce(src, staged, size) if load else coalesce(staged, dst, size)
        longest_bytes = int(size.max())
        refused: list[DeviceError] = []

        def run_kernel(stream: int) -> int:
            status = self._driver.copy(self._mapping.address, self._device_rows, count * _ROW_BYTES, stream)
            if status == SUCCESS:
                self._kernel.launch(self._device_rows, count, longest_bytes, stream)
            return status

        def run_dma(stream: int) -> int:
            copy = self._driver.copy_batch if self._batch else self._driver.copy_each
            return copy(*dma, stream)

        def submit(stream: int) -> int:
            status = SUCCESS
            try:
                for step in (run_dma, run_kernel) if load else (run_kernel, run_dma):
                    status = status or step(stream)
            except DeviceError as error:  # raised again below, when what was submitted before has ended
                refused.append(error)
            return status

        self._stream.run(int(size.sum()), submit)
        if refused:
            raise refused[0]

    def destroy(self) -> None:
        """Blocks; the context must be current, and no thread in `move`."""
        self._stream.destroy()
        self._free()

    def _free(self) -> None:
        for address in (self._buffer, self._device_rows):
            if address:
                self._driver.call("cuMemFree", address)
        if self._pinned:
            self._driver.call("cuMemHostUnregister", self._mapping.address)
        self._mapping.close()


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
        """As `Stage.move`. False: it did not work, and is not tried again; what it has copied may be copied anew.

        Raises:
            CudaError: one that is sticky, which ends the process.
        """
        with self._lock:
            stage = self._idle.pop() if self._idle else None
        try:
            stage = stage or self._make()
            stage.move(direction, src, dst, size)
        except DeviceError as error:
            if isinstance(error, CudaError) and error.sticky:
                raise
            if self.works:
                log.warning("the kernel for small rows does not work: copying without it from now on: %s", error)
            self.works = False
            return False
        finally:
            if stage is not None:
                with self._lock:
                    self._idle.append(stage)
        self.chunks += 1
        return True

    def destroy(self) -> None:
        """Blocks; the context must be current, and no thread in `move`."""
        for stage in self._idle:
            stage.destroy()
        self._idle.clear()
