"""Known bytes for a GPU to move as rows, and whether they have arrived."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.pinned import PinnedBuffer
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import DeviceError
from kvoffloadd.model import Direction, U64Array

SAMPLE_BYTES = 4 << 20
"""Moved at a time: little, in favour of single copies, which have the least overhead of each chunk."""
RUN_ROWS = 32
"""Rows of a block: a model's layers, more or less."""
_ODD = np.uint64(0x9E3779B97F4A7C15)  # its multiples, modulo 2^64, are all different

Move = Callable[[Copies], None]


class Sample:
    """Known bytes in pinned memory, as much room for those that come back, and as much of the GPU's memory. On the GPU
    the rows of a block lie evenly apart, as those of its layers do; in pinned memory they lie side by side.
    """

    def __init__(self, driver: Driver) -> None:
        """Takes three times `SAMPLE_BYTES`, two of them pinned.

        Raises:
            DeviceError: the driver refuses it.
            ResourceError: this process can't have so much.
        """
        self._driver = driver
        self._pinned = PinnedBuffer(driver, "kvoffloadd-sample", 2 * SAMPLE_BYTES)
        try:
            self._device = int(driver.call("cuMemAlloc", SAMPLE_BYTES))
        except DeviceError:
            self._pinned.free()
            raise
        self._source, self._target = self._pinned.array.view(np.uint64).reshape(2, -1)
        self._source[:] = np.arange(1, len(self._source) + 1, dtype=np.uint64) * _ODD

    @property
    def host_ends(self) -> U64Array:
        """Where pinned memory ends: u64 `(1,)`."""
        return np.array([self._pinned.address + 2 * SAMPLE_BYTES], np.uint64)

    def ends(self, direction: Direction) -> tuple[U64Array, U64Array]:
        """Where the memories of sources and of destinations end."""
        device = np.array([self._device + SAMPLE_BYTES], np.uint64)
        return (self.host_ends, device) if direction is Direction.LOAD else (device, self.host_ends)

    def rows(self, direction: Direction, row_bytes: int) -> Copies:
        """All of it as rows of this size."""
        number = np.arange(SAMPLE_BYTES // row_bytes, dtype=np.uint64)
        layer, block = number % np.uint64(RUN_ROWS), number // np.uint64(RUN_ROWS)
        host = number * np.uint64(row_bytes) + np.uint64(self._host_address(direction))
        device = block * np.uint64(row_bytes) + layer * np.uint64(SAMPLE_BYTES // RUN_ROWS) + np.uint64(self._device)
        src, dst = (host, device) if direction is Direction.LOAD else (device, host)
        return Copies(src, dst, np.full(len(number), row_bytes, np.uint64), len(number))

    def wipe(self, direction: Direction, move: Move) -> None:
        """Makes the sources right, and the destinations wrong."""
        self._target[:] = 0
        host = self._pinned.address if direction is Direction.STORE else self._pinned.address + SAMPLE_BYTES
        move(_whole(host, self._device))

    def is_right(self, direction: Direction, row_bytes: int, move: Move) -> bool:
        """Whether the rows have arrived, each in its place."""
        words = row_bytes // self._source.itemsize
        if direction is Direction.LOAD:
            move(_whole(self._device, self._pinned.address + SAMPLE_BYTES))
            host, device = self._source, self._target
        else:
            host, device = self._target, self._source
        blocks = device.reshape(RUN_ROWS, -1, words).transpose(1, 0, 2)
        return np.array_equal(blocks, host.reshape(-1, RUN_ROWS, words))

    def _host_address(self, direction: Direction) -> int:
        return self._pinned.address + (0 if direction is Direction.LOAD else SAMPLE_BYTES)

    def close(self) -> None:
        """Raises CudaError: the GPU can't be used any more."""
        self._driver.call("cuMemFree", self._device)
        self._pinned.free()


def _whole(src: int, dst: int) -> Copies:
    begin, end, size = np.array([[src], [dst], [SAMPLE_BYTES]], np.uint64)
    return Copies(begin, end, size, 1)
