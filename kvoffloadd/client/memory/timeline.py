"""Signals when the blocks of a worker's jobs are final: a number in shared memory that only grows.

Each job names a number; the daemon touches the job's blocks when the timeline has reached it. On a GPU the stream that
computes the blocks writes the number behind its work, so that neither the worker nor the GPU waits for anything. Where
it can't, a thread of the worker does (`streamwatch`), a moment later.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from typing import Any

from kvoffloadd.client.memory.allocation import Allocation
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.client.memory.streamwatch import StreamWatch
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.errors import UsageError
from kvoffloadd.model import PAGE_BYTES

log = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
_of_streams: list[Timeline] = []
"""Keeps timelines until the process ends: their memory must outlast the driver's registration, or the thread that
writes to it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A point of a timeline, for `store(..., ready=)` and `load(..., ready=)`."""

    timeline: Timeline
    value: int

    def reach(self) -> None:
        """Signals from this process that the blocks of jobs up to this point are final. For timelines without a stream.

        Any thread may call it; points must be reached in order. On processors that reorder writes (ARM) this thread's
        last writes to the blocks may be seen after the point: let a lock or a queue lie between, as between two
        threads.
        """
        if self.timeline.stream is not None:
            raise UsageError("this timeline belongs to a stream, and only the stream can advance it")
        self.timeline.cell.value = max(self.timeline.cell.value, self.value)

    @property
    def reached(self) -> bool:
        """Returns whether the point was reached."""
        return bool(self.timeline.cell.value >= self.value)


class Timeline:
    """One stream's points in time, or one thread's. Named in `KvCache(..., timelines=)` before jobs can use it."""

    def __init__(self, stream: Any = None) -> None:
        """Creates the timeline. `stream`: a CUDA stream's handle as a number, or a torch or CuPy stream; None: there is
        none, and `reach` signals when a point is reached. With a stream its context must be current in this thread, as
        for any launch.

        Raises UsageError unless it is a stream, DeviceError where the driver refuses.
        """
        self.allocation, memory = Allocation.create("kvoffloadd-timeline", PAGE_BYTES)
        self.cell = ctypes.c_uint64.from_address(memory.ctypes.data)
        self.stream = None if stream is None else _handle(stream)
        self._memory = memory
        self._lock = threading.Lock()
        self._last = 0
        self._watch: StreamWatch | None = None
        self._device_address = 0
        if self.stream is not None:
            self._connect(self.stream)

    def _connect(self, stream: int) -> None:
        """Has the stream write the cell, or a thread if the stream can't."""
        device = driver().call("cuCtxGetDevice")
        _of_streams.append(self)
        try:
            _check_writes(device)
            driver().call("cuMemHostRegister", self.allocation.address, PAGE_BYTES, _PORTABLE_AND_MAPPED)
            self._device_address = int(driver().call("cuMemHostGetDevicePointer", self.allocation.address, 0))
        except CudaError as error:
            if error.sticky:
                raise
            log.warning("a thread waits for the stream and signals the daemon, since the stream can't: %s", error)
            self._watch = StreamWatch(stream, self.cell)

    def signal(self) -> Ready:
        """Returns the next point: of a stream, when all that was queued on it until now has been done. Returns at once.

        Any thread in which the stream's context is current may call it. Raises DeviceError where the driver refuses.
        """
        with self._lock:  # numbers reach the stream in order
            self._last += 1
            if self._watch is not None:
                self._watch.signal(self._last)
            elif self.stream is not None:
                driver().call("cuStreamWriteValue64", self.stream, self._device_address, self._last, 0)
            return Ready(self, self._last)


def _check_writes(device: Any) -> None:
    """Raises CudaError where the GPU's streams write no numbers of 64 bits."""
    which = driver().api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    if not driver().call("cuDeviceGetAttribute", which, device):
        raise CudaError("cuStreamWriteValue64", "CUDA_ERROR_NOT_SUPPORTED")


def _handle(stream: Any) -> int:
    found = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    try:
        return int(found)
    except (TypeError, ValueError):
        raise UsageError(f"{stream!r} is not a CUDA stream") from None
