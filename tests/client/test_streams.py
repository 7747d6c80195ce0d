"""A stream's points in time: written by the stream itself, or, where it can't, by a thread that waits for it."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from kvoffloadd.client import Timeline
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.client.memory.streamwatch import StreamWatch
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.errors import DeviceError
from kvoffloadd.testing.wait import until
from scripts.harness.gpu import Gpu
from tests import softcuda
from tests.client import streams
from tests.softcuda.running import run

BY_THREAD = "a thread waits for the stream and signals the daemon, since the stream can't: "
WAYS = {
    "jitter_ns=1": "",
    "host_offset=1073741824": "",
    "register_error_after=1": f"{BY_THREAD}cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY\n",
    "no_stream_writes": f"{BY_THREAD}cuStreamWriteValue64: CUDA_ERROR_NOT_SUPPORTED\n",
}
"""What the driver is like, and what the worker's log says then."""


def ended_well(program: Callable[[], object], faults: str) -> tuple[str, str]:
    """Runs the program, and returns its output and its log."""
    ended = run(program, faults)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip(), ended.stderr


@pytest.mark.parametrize("faults", WAYS)
def test_points_are_reached_behind_the_streams_work(faults: str) -> None:
    registrations = 0 if WAYS[faults] else 1
    assert ended_well(streams.points, faults) == (f"[{registrations}, 0]", WAYS[faults])


@pytest.mark.parametrize("faults", WAYS)
def test_points_of_a_timeline_that_is_gone(faults: str) -> None:
    assert ended_well(streams.points_of_a_timeline_that_is_gone, faults) == ("written", WAYS[faults])


@pytest.mark.parametrize("faults", WAYS)
def test_points_of_many_threads(faults: str) -> None:
    assert ended_well(streams.points_of_threads, faults) == ("all", WAYS[faults])


@pytest.mark.parametrize("faults", WAYS)
def test_a_context_that_breaks(faults: str) -> None:
    _, log = ended_well(streams.points_of_a_broken_context, f"sticky_after=1,{faults}")
    ends = re.findall("a stream's signals have ended, .*: cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS\n", log)
    assert log == WAYS[faults] + "".join(ends)
    assert len(ends) <= bool(WAYS[faults])


def test_signals_that_have_ended_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The driver refuses to wait once: after that no caller may wait for a point that never comes."""
    softcuda.load()
    gpu, cell, call = Gpu(), ctypes.c_uint64(), driver().call

    def refuse(name: str, *arguments: object) -> Any:
        if name == "cuEventSynchronize":
            raise CudaError(name, "CUDA_ERROR_UNKNOWN")
        return call(name, *arguments)

    monkeypatch.setattr(driver(), "call", refuse)
    watch = StreamWatch(gpu.stream, cell)
    watch.signal(1)
    until(lambda: "a stream's signals have ended" in caplog.text, "the log says so")
    with pytest.raises(DeviceError, match="this stream's signals have ended: cuEventSynchronize: CUDA_ERROR_UNKNOWN"):
        watch.signal(2)
    assert cell.value == 0


def test_a_broken_context_is_no_reason_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    softcuda.load()
    gpu, call = Gpu(), driver().call

    def refuse(name: str, *arguments: object) -> Any:
        if name == "cuMemHostRegister":
            raise CudaError(name, "CUDA_ERROR_ILLEGAL_ADDRESS")
        return call(name, *arguments)

    monkeypatch.setattr(driver(), "call", refuse)
    with pytest.raises(DeviceError, match="cuMemHostRegister: CUDA_ERROR_ILLEGAL_ADDRESS"):
        Timeline(gpu.stream)


def test_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    softcuda.load()
    gpu = Gpu()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(DeviceError, match="no thread can be started for a stream's signals: can't start new thread"):
        StreamWatch(gpu.stream, ctypes.c_uint64())
