"""Rows for the kernel, and stages that do not work."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.pinned import PinnedBuffer
from kvoffloadd.device.cuda.staging import LONGEST_BYTES, Stage, Stages, shorten
from kvoffloadd.errors import DeviceError, LimitError, MemoryKindError, ResourceError
from kvoffloadd.model import Direction
from kvoffloadd.sharedmem import Mapping

SIZES = [1, 13, LONGEST_BYTES - 1, LONGEST_BYTES, LONGEST_BYTES + 1, 7, 3 * LONGEST_BYTES, 1000, 20 * LONGEST_BYTES + 5]


def test_long_rows_become_several(seed: int) -> None:
    """Else one row of many MiB would have the kernel look thousands of times at each of the others."""
    size = np.random.default_rng(seed).permutation(np.array(SIZES, np.uint64))
    src = np.cumsum(size) * np.uint64(2)
    dst = np.uint64(1 << 47) - src
    found = shorten(src, dst, size)
    assert int(found[2].max()) == LONGEST_BYTES
    assert int(found[2].min()) > 0
    assert len(found[2]) <= len(size) + int(size.sum()) // LONGEST_BYTES
    expected = [
        (int(begin) + at, int(end) + at, min(int(count) - at, LONGEST_BYTES))
        for begin, end, count in zip(src, dst, size, strict=True)
        for at in range(0, int(count), LONGEST_BYTES)
    ]
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected


def test_short_rows_stay_as_they_are() -> None:
    rows = np.arange(1, 10, dtype=np.uint64).reshape(3, 3)
    assert np.array_equal(np.array(shorten(*rows)), rows)


@pytest.mark.parametrize(
    "error",
    [
        DeviceError("CuPy is not installed"),
        CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY"),
        CudaError("cuMemHostRegister", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ResourceError("no descriptors"),
    ],
    ids=str,
)
def test_a_stage_that_can_not_be_made_is_tried_once(error: Exception) -> None:
    """Whatever the reason: the rows are copied without it, and where the GPU is broken that shows there."""
    tried = []

    def make() -> Stage:
        tried.append(1)
        raise error

    stages, row = Stages(make), np.ones(1, np.uint64)
    assert not stages.move(Direction.LOAD, row, row, row)
    assert (stages.works, stages.chunks, len(tried)) == (False, 0, 1)


class FakeStage:
    """Moves when it may, and fails if it is to. `events`: what has been done, in order."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.entered, self.may_move = threading.Event(), threading.Event()
        self.fails = False
        self._events = events

    def move(self, *_: object) -> None:
        self.entered.set()
        assert self.may_move.wait(60)
        if self.fails:
            raise DeviceError("refused")
        self._events.append(f"{self.name} moved")

    def destroy(self) -> None:
        self._events.append(f"{self.name} destroyed")


def test_what_does_not_work_gives_its_memory_back() -> None:
    """That of a stage which is in use as soon as it is not, in the thread that used it."""
    events: list[str] = []
    made = [FakeStage(name, events) for name in ("idle", "busy", "failing")]
    waiting = iter(made)
    stages = Stages(lambda: next(waiting))  # type: ignore[arg-type, return-value]  # fakes
    row = np.ones(1, np.uint64)
    threads = [threading.Thread(target=stages.move, args=(Direction.LOAD, row, row, row)) for _ in made]
    idle, busy, failing = made
    for thread, stage in zip(threads, made, strict=True):
        thread.start()
        assert stage.entered.wait(60)
    idle.may_move.set()
    threads[0].join(60)
    failing.fails = True
    failing.may_move.set()
    threads[2].join(60)
    assert sorted(events) == ["failing destroyed", "idle destroyed", "idle moved"]
    busy.may_move.set()
    threads[1].join(60)
    assert events[-2:] == ["busy moved", "busy destroyed"]
    assert (stages.works, stages.chunks) == (False, 2)
    stages.destroy()
    assert len(events) == 5


@pytest.mark.parametrize("error", [OSError, LimitError, MemoryKindError])
def test_memory_that_is_not_had_is_a_want_of_resources(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Else the copy would fail, and each one after it, where it could be made without the kernel."""

    def refuse(*_: object) -> Mapping:
        raise error("mmap")

    monkeypatch.setattr(Mapping, "map_fd", refuse)
    with pytest.raises(ResourceError, match="mmap"):
        PinnedBuffer(driver, "kvoffloadd-rows", 4096)
