"""Which way small rows take: what is clearly the fastest, of those that move the right bytes. Time is what copies are
said to cost, so that no result depends on this machine.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest

from kvoffloadd.config import CudaConfig
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda import calibration
from kvoffloadd.device.cuda.calibration import Calibration, Calibrations, Timing, calibrate, choose, find_limits
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.rows import RowLimits
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.pitched import Pitched
from kvoffloadd.errors import DeviceError
from kvoffloadd.model import Direction, U64Array
from scripts.harness.gpu import Gpu
from tests import softcuda

KIB = 1024
US = 1e-6
NEVER = math.inf


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        ([], (0, 0)),
        ([Timing(2, 10.0, 5.0, 4.0), Timing(4, 10.0, 8.9, 8.0)], (4, 4)),
        ([Timing(2, 10.0, 9.1, NEVER)], (0, 0)),  # not clearly
        ([Timing(2, 10.0, 9.0, 10.0)], (2, 0)),
        ([Timing(2, 10.0, 5.0, 4.9)], (2, 0)),  # the kernel: no better than runs
        ([Timing(2, 10.0, 9.5, 8.5), Timing(4, 10.0, NEVER, 8.9)], (0, 4)),
        ([Timing(2, 10.0, 12.0, 5.0), Timing(4, 10.0, 2.0, 20.0)], (0, 2)),  # a larger size counts after smaller ones
        ([Timing(2, 10.0), Timing(4, 10.0)], (0, 0)),
        ([Timing(2, 8.0, 1.0, 0.5), Timing(4, 4.0, 3.7, 1.0), Timing(8, 2.0, NEVER, 1.0)], (2, 8)),
    ],
)
def test_what_is_clearly_faster_up_to_some_size(timings: list[Timing], expected: tuple[int, int]) -> None:
    assert choose(timings) == expected


class Costly(Driver):
    """Copies cost what they are said to: a single one, a run, a byte in a run. `clock`: what all have cost."""

    def __init__(self, single_s: float = US, run_s: float = US, run_byte_s: float = 0.0) -> None:
        super().__init__()
        self.spent_s = 0.0
        self._costs = single_s, run_s, run_byte_s

    def clock(self) -> float:
        return self.spent_s

    def copy_batch(self, src: U64Array, dst: U64Array, size: U64Array, stream: int, **order: bool) -> int:
        self.spent_s += self._costs[0] * len(size)
        return super().copy_batch(src, dst, size, stream, **order)

    def copy_pitched_batch(self, runs: Pitched, most: int, stream: int, *, sources_final: bool = False) -> int:
        self.spent_s += self._costs[1] * len(runs) + self._costs[2] * int((runs.width * runs.height).sum())
        return super().copy_pitched_batch(runs, most, stream, sources_final=sources_final)


class Kernel:
    """The software driver's, which costs so much a launch."""

    def __init__(self, driver: Costly, launch_s: float = 0.0) -> None:
        self._driver = driver
        self._launch_s = launch_s
        self._move = ctypes.CDLL("libcuda.so.1").softcuda_move_rows
        self._move.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]

    def launch(self, rows_address: int, count: int, longest_bytes: int, stream: int) -> None:
        self._driver.spent_s += self._launch_s
        assert self._move(stream, rows_address, count, -(-longest_bytes // 4096)) == 0


def end_process(reason: str) -> NoReturn:
    raise AssertionError(reason)


def streams(driver: Driver) -> Callable[[Direction], CopyStream]:
    context = int(driver.call("cuCtxGetCurrent"))

    def make(direction: Direction) -> CopyStream:
        final = direction is Direction.LOAD
        return CopyStream(driver, context, 0, batch=True, on_broken=end_process, sources_final=final)

    return make


def run(driver: Costly, kernel: Any = None) -> Calibration:
    return calibrate(driver, streams(driver), kernel, pitched=True, clock=driver.clock)


def live(extras: softcuda.SoftCuda) -> list[int]:
    gc.collect()  # what earlier tests have left goes now, and not between two counts
    counters = extras.counters()
    return [counters.live_allocations, counters.live_registrations, counters.live_streams, counters.live_events]


def test_each_way_up_to_where_it_is_faster(gpu: Gpu, extras: softcuda.SoftCuda) -> None:
    """4 MiB in rows of 16 KiB: 256 us as single copies, 158 in runs, 122 by the kernel; of 32 KiB: 128, 154, 122."""
    before = live(extras)
    driver = Costly(run_byte_s=150 * US / (4 << 20))
    found = run(driver, Kernel(driver, 120 * US))
    assert found == (dict.fromkeys(Direction, RowLimits(16 * KIB, 16 * KIB)), frozenset())
    assert live(extras) == before, "all is given back"


def test_what_was_not_tried_is_not_taken(gpu: Gpu) -> None:
    driver = Costly()
    assert run(driver).limits == dict.fromkeys(Direction, RowLimits(64 * KIB, 0))
    kernel = Kernel(driver)
    alone = calibrate(driver, streams(driver), kernel, pitched=False, clock=driver.clock)
    assert alone.limits == dict.fromkeys(Direction, RowLimits(0, 64 * KIB))


def test_no_size_is_begun_when_the_time_is_up(gpu: Gpu) -> None:
    assert run(Costly(single_s=1e-3)).limits == dict.fromkeys(Direction, RowLimits(2 * KIB, 0))


class Misplacing(Costly):
    """Runs end up in each other's places, in one direction or in both."""

    def copy_pitched_batch(self, runs: Pitched, most: int, stream: int, *, sources_final: bool = False) -> int:
        return super().copy_pitched_batch(replace(runs, dst=np.roll(runs.dst, 1)), most, stream)


class Refusing(Costly):
    """Takes no runs."""

    def copy_pitched_batch(self, runs: Pitched, most: int, stream: int, *, sources_final: bool = False) -> int:
        return 1

    def copy_pitched(self, runs: Pitched, stream: int) -> int:
        return 801


@pytest.mark.parametrize("kind", [Misplacing, Refusing])
def test_runs_that_do_not_work_are_not_used(
    gpu: Gpu, extras: softcuda.SoftCuda, caplog: pytest.LogCaptureFixture, kind: type[Costly]
) -> None:
    """However fast; and nothing is said twice."""
    before, driver = live(extras), kind(run_s=0.0)
    found = run(driver, Kernel(driver))
    assert found == (dict.fromkeys(Direction, RowLimits(0, 64 * KIB)), frozenset(["pitched"]))
    assert caplog.text.count("pitched copies are not used") == 1
    assert live(extras) == before


class Idle(Kernel):
    """Moves nothing."""

    def launch(self, rows_address: int, count: int, longest_bytes: int, stream: int) -> None:
        pass


class Failing(Kernel):
    """Is refused."""

    def launch(self, rows_address: int, count: int, longest_bytes: int, stream: int) -> None:
        raise DeviceError("CuPy does not launch move_rows")


@pytest.mark.parametrize("kind", [Idle, Failing])
def test_a_kernel_that_does_not_work_is_not_used(
    gpu: Gpu, extras: softcuda.SoftCuda, caplog: pytest.LogCaptureFixture, kind: type[Kernel]
) -> None:
    before, driver = live(extras), Costly()
    found = run(driver, kind(driver))
    assert found == (dict.fromkeys(Direction, RowLimits(64 * KIB, 0)), frozenset(["kernel"]))
    assert caplog.text.count("the kernel is not used") == 1
    assert live(extras) == before


def limits_with(config: CudaConfig, known: Calibrations, driver: Driver, kernel: Any = None) -> set[RowLimits]:
    return set(find_limits(driver, 0, streams(driver), kernel, config, known).values())


def test_what_the_config_names_holds(gpu: Gpu, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a measurement where it names all."""
    monkeypatch.setattr(calibration, "calibrate", None)
    kernel = Kernel(Costly())
    assert limits_with(CudaConfig(pitched_row_bytes=5, kernel_row_bytes=7), {}, driver, kernel) == {RowLimits(5, 7)}
    assert limits_with(CudaConfig(pitched_row_bytes=5, kernel_row_bytes="auto"), {}, driver) == {RowLimits(5, 0)}


def test_equal_gpus_are_measured_once(
    gpu: Gpu, driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Calibration(dict.fromkeys(Direction, RowLimits(11, 13)), frozenset())
    asked: list[bool] = []

    def measure(*_: object, pitched: bool) -> Calibration:
        asked.append(pitched)
        return shown

    monkeypatch.setattr(calibration, "calibrate", measure)
    caplog.set_level(logging.INFO)
    known: Calibrations = {}
    kernel, config = Kernel(Costly()), CudaConfig(pitched_row_bytes="auto", kernel_row_bytes=7)
    for _ in range(2):
        assert limits_with(config, known, driver, kernel) == {RowLimits(11, 7)}
    assert asked == [True]
    assert "loads of GPU 0: rows of up to 11 B in runs, 7 B by the kernel" in caplog.text
    known[next(iter(known))] = shown._replace(broken=frozenset(["kernel"]))
    assert limits_with(config, known, driver, kernel) == {RowLimits(11, 0)}, "what is broken is not used even if named"


class Full(Driver):
    """A GPU without room."""

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuMemAlloc":
            raise CudaError(name, "CUDA_ERROR_OUT_OF_MEMORY")
        return super().call(name, *arguments)


def test_without_room_nothing_is_measured(
    gpu: Gpu, extras: softcuda.SoftCuda, caplog: pytest.LogCaptureFixture
) -> None:
    before, known = live(extras), Calibrations()
    config = CudaConfig(pitched_row_bytes="auto", kernel_row_bytes=7)
    assert limits_with(config, known, Full(), Kernel(Costly())) == {RowLimits(0, 7)}
    assert known == {}
    assert caplog.text.count("could not be measured: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY") == 1
    assert live(extras) == before


TAKEN = ("cuMemHostRegister", "cuMemAlloc", "cuStreamCreateWithPriority", "cuEventCreate")


class Once(Costly):
    """Refuses one of the calls that take something, the `at`th. `refused`: it has been asked for."""

    def __init__(self, at: int) -> None:
        self.left = at
        super().__init__()

    @property
    def refused(self) -> bool:
        return self.left < 0

    def call(self, name: str, *arguments: Any) -> Any:
        if name in TAKEN:
            self.left -= 1
            if self.left == -1:
                raise CudaError(name, "CUDA_ERROR_OUT_OF_MEMORY")
        return super().call(name, *arguments)


def test_whatever_is_refused_on_the_way_all_is_given_back(gpu: Gpu, extras: softcuda.SoftCuda) -> None:
    """At each step in turn, and nothing is raised."""
    config, before = CudaConfig(pitched_row_bytes="auto", kernel_row_bytes="auto"), live(extras)
    for at in range(100):
        driver = Once(at)
        limits_with(config, {}, driver, Kernel(driver))
        assert live(extras) == before, at
        if not driver.refused:
            break
    assert 10 < at < 100
