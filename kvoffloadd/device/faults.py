"""Injects faults into a device (wrong, late or failed copies), for tests and for `serve --faults`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypedDict

import numpy as np

from kvoffloadd.device.base import Allocation, Copy, CopyRequest, CopyResult, HostMemory
from kvoffloadd.device.chunked import Mover
from kvoffloadd.device.copyruns import copy_runs
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import ConfigError, DeviceError
from kvoffloadd.model import Direction, Outcome, U64Array
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.units import parse_seconds

_HOLD_POLL_S = 0.001


class Faults(TypedDict, total=False):
    """The keyword arguments of `FaultyDevice`."""

    delay_s: float
    hold: Path
    hold_uid: int
    corrupt_every: int
    fail_every: int


class MovingDevice(HostMemory, Protocol):
    """A device that copies chunks with a replaceable function."""

    mover: Mover


class FaultyDevice:
    """Adds faults to `inner`, and takes over its `mover`. 0 plants none of a kind.

    `delay_s`: every chunk takes this much longer, in its lane's thread and before its first byte moves: the blocks
    really are in use that long. `hold`: every chunk waits in the same place for as long as this file exists, so that a
    test controls when copies continue. `hold_uid`: only chunks of this user wait. `corrupt_every`: of every Nth load
    that is DONE one bit is flipped in its destination, before `done`. `fail_every`: every Nth copy that is DONE is
    reported as FAILED instead.
    """

    def __init__(
        self,
        inner: MovingDevice,
        *,
        delay_s: float = 0.0,
        hold: Path | None = None,
        hold_uid: int | None = None,
        corrupt_every: int = 0,
        fail_every: int = 0,
    ) -> None:
        self.kind, self.hashed_load_bytes = inner.kind, inner.hashed_load_bytes
        self.planted = 0
        self._inner = inner
        self._delay_s = delay_s
        self._hold = hold
        self._hold_uid = hold_uid
        self._corrupt_every = corrupt_every
        self._fail_every = fail_every
        self._loads = 0
        self._copies = 0
        self._move = inner.mover

    @property
    def others_late(self) -> bool:
        """See `HostMemory`."""
        return self._inner.others_late

    def admit(self, uid: int) -> None:
        """See `HostMemory.admit`."""
        self._inner.admit(uid)

    def measure(self, fd: int, peer_uid: int) -> int:
        """See `HostMemory.measure`."""
        return self._inner.measure(fd, peer_uid)

    async def map(self, fd: int, size_bytes: int, peer_uid: int) -> Allocation:
        """See `HostMemory.map`."""
        return await self._inner.map(fd, size_bytes, peer_uid)

    async def unmap(self, allocation: Allocation) -> None:
        """See `Device.unmap`."""
        await self._inner.unmap(allocation)

    def submit(self, request: CopyRequest, done: Callable[[CopyResult], None]) -> Copy:
        """See `Device.submit`."""

        def on_end(result: CopyResult) -> None:
            done(self._plant(request, result) if result.outcome is Outcome.DONE else result)

        if self._delay_s > 0 or self._hold is not None:  # the copy takes it with it
            self._inner.mover = partial(self._move_late, self._hold_uid in (None, request.flow.uid))
        return self._inner.submit(request, on_end)

    def busy_s(self, now: float) -> float:
        """See `Device.busy_s`."""
        return self._inner.busy_s(now)

    def gauges(self) -> dict[str, int | float | str]:
        """Returns the gauges of the inner device, and `faults_planted`: bytes flipped and copies failed."""
        return {**self._inner.gauges(), "faults_planted": self.planted}

    def lanes(self) -> list[Lane]:
        """See `Device.lanes`."""
        return self._inner.lanes()

    def watched_lanes(self) -> list[Lane]:
        """See `Device.watched_lanes`."""
        return self._inner.watched_lanes()

    async def close(self, deadline_s: float) -> bool:
        """See `Device.close`."""
        return await self._inner.close(deadline_s)

    def _move_late(self, holds: bool, chunk: Copies) -> None:
        time.sleep(self._delay_s)
        while holds and self._hold is not None and os.path.exists(self._hold):
            time.sleep(_HOLD_POLL_S)
        self._move(chunk)

    def _plant(self, request: CopyRequest, result: CopyResult) -> CopyResult:
        self._copies += 1
        if _is_nth(self._copies, self._fail_every):
            self.planted += 1
            return replace(result, outcome=Outcome.FAILED, reason="planted fault")
        direction, work = request.direction, request.work
        if direction is Direction.LOAD and work.total_bytes > 0:
            self._loads += 1
            if _is_nth(self._loads, self._corrupt_every):
                self.planted += 1
                made = (work.make(direction, piece) for piece in work.pieces(1, 1))
                _flip(next(copies for copies in made if len(copies)).dst[:1])
        return result


def _flip(address: U64Array) -> None:
    """Flips one bit of a worker's memory, which may be gone by now."""
    byte, one = np.zeros(1, np.uint8), np.ones(1, np.uint64)
    here = np.array([byte.ctypes.data], np.uint64)
    with contextlib.suppress(DeviceError):
        copy_runs(address, here, one)
        byte ^= 1
        copy_runs(here, address, one)


def _is_nth(count: int, every: int) -> bool:
    return every > 0 and count % every == 0


def parse_faults(text: str) -> Faults:
    """Parses text like "delay_s=0.5,corrupt_every=100"; empty text: no faults. Paths may not have commas.

    Raises:
        ConfigError: an unknown, repeated or ill-typed fault.
    """
    faults: Faults = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name in faults:
            raise ConfigError(f"faults: {name} is given twice")
        try:
            if name == "delay_s":
                faults["delay_s"] = parse_seconds(value)
            elif name == "hold":
                faults["hold"] = _parse_path(value)
            elif name == "hold_uid":
                faults["hold_uid"] = _parse_count(value)
            elif name == "corrupt_every":
                faults["corrupt_every"] = _parse_count(value)
            elif name == "fail_every":
                faults["fail_every"] = _parse_count(value)
            else:
                raise ConfigError(f'faults: unknown "{name}"; known are {", ".join(Faults.__annotations__)}')
        except ValueError as error:
            raise ConfigError(f"faults: {name}={value}: {error}") from None
    return faults


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("must be a path")
    return Path(text)


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError('must be a whole number, like "100"')
    return int(text)
