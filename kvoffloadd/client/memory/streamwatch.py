"""Points of a stream's timeline where the stream can't write them itself: a thread waits for its events and writes.

A stream writes numbers to host memory that the driver has registered. Where it registers none, or the GPU's streams
write no numbers (virtual machines, containers and MPS differ in what they allow), the engine must start all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
from typing import Any

from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.errors import DeviceError

log = logging.getLogger(__name__)

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_EVENT_FLAGS = 3  # CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: the thread sleeps, and looks at no clock


class StreamWatch:
    """Sets `cell` behind a stream's work. Its thread ends with the process: the cell's memory must last as long."""

    def __init__(self, stream: int, cell: ctypes.c_uint64) -> None:
        """Starts the thread. The stream's context must be current. Raises DeviceError: no thread, or the driver
        refuses.
        """
        self._stream = stream
        self._cell = cell
        self._context = driver().call("cuCtxGetCurrent")
        self._queue: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()
        self._failure = ""
        try:
            threading.Thread(target=self._run, name="kvo-timeline", daemon=True).start()
        except RuntimeError as error:
            raise DeviceError(f"no thread can be started for a stream's signals: {error}") from error

    def signal(self, value: int) -> None:
        """Has the cell become `value`, greater than those before, when all that was queued until now has been done.

        Raises DeviceError where the driver refuses, or has refused to wait for an earlier one.
        """
        if self._failure:
            raise DeviceError(f"this stream's signals have ended: {self._failure}")
        event = driver().call("cuEventCreate", _EVENT_FLAGS)
        try:
            driver().call("cuEventRecord", event, self._stream)
        except DeviceError:
            with contextlib.suppress(DeviceError):
                driver().call("cuEventDestroy", event)
            raise
        self._queue.put((event, value))

    def _run(self) -> None:
        try:
            driver().call("cuCtxSetCurrent", self._context)
            _ignore_captures()
            while True:
                event, value = self._queue.get()
                driver().call("cuEventSynchronize", event)
                self._cell.value = value
                driver().call("cuEventDestroy", event)
        except DeviceError as error:
            self._failure = str(error)
            log.error("a stream's signals have ended, so what it computes is not stored any more: %s", error)


def _ignore_captures() -> None:
    """Exempts this thread from graph captures: a thread that captures forbids some calls to all that do not opt out."""
    with contextlib.suppress(DeviceError):  # it is a precaution
        driver().call("cuThreadExchangeStreamCaptureMode", driver().api.CUstreamCaptureMode(_RELAXED))
