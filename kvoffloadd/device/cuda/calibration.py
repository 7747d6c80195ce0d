"""Which way of copying small rows a GPU is fastest in: found out once, before its first copies, in about 0.1 s.

Known bytes are moved as rows of some sizes in each way, both to the GPU and back, and what has arrived is compared. A
way that is refused, or that moves other bytes, is not used. Of the others, `choose` takes what was clearly faster.

All of it blocks, in one thread in which the GPU's context is current. The memory that it takes is given back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvoffloadd.config import AUTO, CudaConfig
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, Driver
from kvoffloadd.device.cuda.rows import RowLimits
from kvoffloadd.device.cuda.sample import SAMPLE_BYTES, Sample
from kvoffloadd.device.cuda.staging import Kernel, Stage
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.pitched import pitch
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import DeviceError, ResourceError
from kvoffloadd.model import Direction
from kvoffloadd.units import format_bytes

log = logging.getLogger(__name__)

WAYS = ("pitched", "kernel")
"""Besides single copies: as runs, by the kernel. As the fields of `RowLimits`."""
ROW_SIZES = tuple(1 << power for power in range(11, 17))
"""2 KiB, where all cost is in the rows, to 64 KiB, where little is."""
BUDGET_S = 0.1
"""No size is begun after this, but for the smallest."""
_ROUNDS = 2
_CLEARLY = 0.9
"""Of the time that the next best way takes."""
_NAMES = {"pitched": "pitched copies are", "kernel": "the kernel is"}


class Timing(NamedTuple):
    """How long rows of one size took, as single copies, in runs and by the kernel. Infinite: not measured."""

    row_bytes: int
    single_s: float
    pitched_s: float = math.inf
    kernel_s: float = math.inf


def choose(timings: Sequence[Timing]) -> RowLimits:
    """The largest rows up to which each way was clearly the fastest. `timings`: by size, ascending.

    A copier takes the kernel where it may, so the kernel has to be faster than runs as well.
    """
    return RowLimits(
        _largest(timings, lambda one: one.pitched_s <= _CLEARLY * one.single_s),
        _largest(timings, lambda one: one.kernel_s <= _CLEARLY * min(one.single_s, one.pitched_s)),
    )


def _largest(timings: Iterable[Timing], wins: Callable[[Timing], bool]) -> int:
    return max((one.row_bytes for one in itertools.takewhile(wins, timings)), default=0)


class Calibration(NamedTuple):
    """What was found out. `broken`: those of `WAYS` that don't work."""

    limits: dict[Direction, RowLimits]
    broken: frozenset[str]


Calibrations = dict[bytes, Calibration]
"""By the GPU's name: what one has shown holds for all like it. Any thread may add one."""


def find_limits(
    driver: Driver,
    ordinal: int,
    make_stream: Callable[[Direction], CopyStream],
    kernel: Kernel | None,
    config: CudaConfig,
    known: Calibrations,
) -> dict[Direction, RowLimits]:
    """The limits that the config names, and where it leaves them to the GPU ("auto"), what that has shown, or another
    one like it. 0 for what does not work. `kernel`: None if there is none.

    Raises:
        DeviceError: the driver does not know the GPU.
    """
    asked = config.pitched_row_bytes, config.kernel_row_bytes if kernel is not None else 0
    named = RowLimits(*(0 if limit == AUTO else int(limit) for limit in asked))
    if AUTO not in asked:
        return dict.fromkeys(Direction, named)
    name = driver.call("cuDeviceGetName", 256, driver.call("cuDeviceGet", ordinal))
    if name not in known:
        try:
            known[name] = calibrate(driver, make_stream, kernel, pitched=bool(asked[0]))
        except (DeviceError, ResourceError) as error:
            log.warning("small rows are copied one by one: the other ways could not be measured: %s", error)
            return dict.fromkeys(Direction, named)
    shown, found = known[name], {}
    for direction, best in shown.limits.items():
        limits = (at if limit == AUTO else int(limit) for limit, at in zip(asked, best, strict=True))
        found[direction] = RowLimits(*(0 if way in shown.broken else at for way, at in zip(WAYS, limits, strict=True)))
        pitched, by_kernel = map(format_bytes, found[direction])
        log.info(
            "%ss of GPU %d: rows of up to %s in runs, %s by the kernel", direction.value, ordinal, pitched, by_kernel
        )
    return found


def calibrate(
    driver: Driver,
    make_stream: Callable[[Direction], CopyStream],
    kernel: Kernel | None,
    *,
    pitched: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Calibration:
    """Measures single copies, runs (`pitched`) and the kernel (None: not measured).

    Raises:
        DeviceError: there is no memory for it, or not even single copies work.
        ResourceError: this process can't have memory for it.
    """
    began_s = clock()
    broken: set[str] = set()
    limits = {}
    tried = [way for way, wanted in zip(WAYS, (pitched, kernel is not None), strict=True) if wanted]
    with contextlib.closing(Sample(driver)) as sample:
        for number, direction in enumerate((Direction.LOAD, Direction.STORE), 1):
            until_s = began_s + number * BUDGET_S / len(Direction)
            with contextlib.closing(_Ways(driver, make_stream, kernel, direction, sample)) as ways:
                limits[direction] = choose(ways.measure(tried, broken, clock, until_s))
    return Calibration(limits, frozenset(broken))


class _Ways:
    """The ways in which one direction's copies can be made, with streams of their own until `close`."""

    def __init__(
        self,
        driver: Driver,
        make_stream: Callable[[Direction], CopyStream],
        kernel: Kernel | None,
        direction: Direction,
        sample: Sample,
    ) -> None:
        self._driver = driver
        self._make_stream = make_stream
        self._kernel = kernel
        self._direction = direction
        self._sample = sample
        self._stream = make_stream(direction)
        self._stage: Stage | None = None

    def measure(
        self, tried: Sequence[str], broken: set[str], clock: Callable[[], float], until_s: float
    ) -> list[Timing]:
        """By size, for as long as there is time and one of the ways that are `tried` may still be taken. `broken`:
        gets those that don't work, and says which not to try.

        Raises:
            DeviceError: not even single copies work.
        """
        timings: list[Timing] = []
        left = [way for way in tried if way not in broken]
        for row_bytes in ROW_SIZES:
            if not left or (timings and clock() >= until_s):
                break
            rows = self._sample.rows(self._direction, row_bytes)
            took_s = {"single": self._seconds("single", rows, clock)}
            for way in left:
                self._sample.wipe(self._direction, self._move_single)
                try:
                    took_s[way] = self._seconds(way, rows, clock)
                    if not self._sample.is_right(self._direction, row_bytes, self._move_single):
                        raise DeviceError("wrong bytes have arrived")
                except (DeviceError, ResourceError) as error:
                    took_s[way] = math.inf
                    broken.add(way)
                    log.warning("small rows: %s not used: %s", _NAMES[way], error)
            timings.append(Timing(row_bytes, *(took_s.get(way, math.inf) for way in ("single", *WAYS))))
            best = dict(zip(WAYS, choose(timings), strict=True))
            left = [way for way in left if best[way] == row_bytes]
        return timings

    def _seconds(self, way: str, rows: Copies, clock: Callable[[], float]) -> float:
        move = {"single": self._move_single, "pitched": self._move_pitched, "kernel": self._move_by_kernel}[way]
        best_s = math.inf
        for _ in range(_ROUNDS):
            began_s = clock()
            move(rows)
            best_s = min(best_s, clock() - began_s)
        return best_s

    def _move_single(self, rows: Copies) -> None:
        self._stream.move(rows.src, rows.dst, rows.size)

    def _move_pitched(self, rows: Copies) -> None:
        runs = pitch(rows, *self._sample.ends(self._direction), pitch_max_bytes=PITCH_MAX_BYTES)
        self._stream.move(rows.src, rows.dst, rows.size, runs)
        if not self._stream.pitched:
            raise DeviceError("the driver rejects them")

    def _move_by_kernel(self, rows: Copies) -> None:
        if self._kernel is None:
            raise DeviceError("the kernel is not loaded")
        if self._stage is None:
            ends = self._sample.host_ends
            self._stage = Stage(
                self._driver, lambda: self._make_stream(self._direction), self._kernel, SAMPLE_BYTES, ends
            )
        self._stage.move(self._direction, rows.src, rows.dst, rows.size)

    def close(self) -> None:
        """Raises CudaError: the GPU can't be used any more."""
        if self._stage is not None:
            self._stage.destroy()
        self._stream.destroy()
