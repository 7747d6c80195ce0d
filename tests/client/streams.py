"""Holds programs that signal by a stream, each in a separate process on the software driver."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest

from kvoffloadd.client import Timeline
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.errors import DeviceError
from kvoffloadd.testing.wait import until
from scripts.harness.gpu import Gpu
from tests import softcuda

POINTS = 300


class StreamGate:
    """Holds a stream until it is opened."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._word = ctypes.c_uint64()
        self._last = 0

    def shut(self) -> None:
        """Shut it once more, for what the stream is given from here on."""
        self._last += 1
        softcuda.load().spin_until(self._gpu.stream, ctypes.addressof(self._word), self._last)

    def open(self) -> None:
        """Open the first that is still shut."""
        self._word.value += 1


def points() -> str:
    """Points are reached behind the stream's work, in order, and all of them. Returns how many registrations there are,
    and how often the driver was misused.
    """
    gpu = Gpu()
    timeline, gate = Timeline(gpu.stream), StreamGate(gpu)
    gate.shut()
    first = timeline.signal()
    gate.shut()
    rest = [timeline.signal() for _ in range(POINTS)]
    assert not first.reached
    gate.open()
    until(lambda: first.reached, "the first point")
    assert not rest[0].reached
    gate.open()
    seen = [1]

    def look() -> bool:
        seen.append(timeline.cell.value)
        return rest[-1].reached

    until(look, "the last point", every_s=0)
    assert seen == sorted(seen)
    until(lambda: softcuda.load().counters().live_events == 0, "no event is left")
    counters = softcuda.load().counters()
    return str([counters.live_registrations, counters.misuses])


def points_of_a_timeline_that_is_gone() -> str:
    """Its memory stays for what is still to be written."""
    gpu = Gpu()
    timeline, gate = Timeline(gpu.stream), StreamGate(gpu)
    cell = timeline.cell
    gate.shut()
    last = [timeline.signal().value for _ in range(POINTS)][-1]
    del timeline
    gc.collect()
    gate.open()
    until(lambda: cell.value == last, "the last point")
    return "written"


def points_of_threads() -> str:
    """Signal from many threads. The context is current in each of them."""
    gpu = Gpu()
    timeline = Timeline(gpu.stream)

    def signal() -> None:
        gpu.use()
        for _ in range(POINTS):
            timeline.signal()

    threads = [threading.Thread(target=signal) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: timeline.cell.value == 4 * POINTS, "all points")
    return "all"


def points_of_a_broken_context() -> None:
    """sticky_after=1: what can't be reached is not, and further points are refused by name."""
    gpu = Gpu()
    timeline, gate = Timeline(gpu.stream), StreamGate(gpu)
    gate.shut()
    ready = timeline.signal()
    host = ctypes.create_string_buffer(4096)
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        driver().call("cuMemcpyDtoH", ctypes.addressof(host), driver().call("cuMemAlloc", 4096), 4096)
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        timeline.signal()
    gate.open()
    assert not ready.reached
