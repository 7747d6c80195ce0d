"""Finds GPUs and opens them. No part of CUDA is loaded, and no context made, before a worker names a GPU."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvoffloadd.config import CudaConfig
from kvoffloadd.cudadriver import CudaError, holds_gil
from kvoffloadd.device.base import Device
from kvoffloadd.device.cuda.device import CudaDevice
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.pinning import Arena, Pinning
from kvoffloadd.device.cuda.trials import Trials
from kvoffloadd.errors import DeviceError, MemoryKindError
from kvoffloadd.scheduling.lanes import Lane

log = logging.getLogger(__name__)

_NO_ACCESS = " (may the daemon open /dev/nvidia*? see DevicePolicy= of its unit, or the container's devices)"
_HINTS = {
    "CUDA_ERROR_NO_DEVICE": _NO_ACCESS,
    "CUDA_ERROR_OPERATING_SYSTEM": _NO_ACCESS,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        " (its compute mode may be EXCLUSIVE_PROCESS, which keeps all but one process out: nvidia-smi -c DEFAULT)"
    ),
}
"""What to check, by the error with which opening a GPU fails."""


class _Gpu(NamedTuple):
    """A GPU that this process sees. `cpus`: those on its NUMA node; none: any."""

    ordinal: int
    cpus: frozenset[int]


_Loaded = tuple[Driver, dict[bytes, _Gpu], Trials]


class CudaGpus:
    """See `Gpus`. `arena`: the memory tier's, pinned when the first GPU is opened. `near`: returns the CPUs on the NUMA
    node of a GPU, by its PCI address; none: any. `trials`: the path of the file of `Trials`; None: there is none. Event
    loop only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        arena: Arena,
        chunk_bytes: int,
        config: CudaConfig,
        fatal: Callable[[str], None],
        near: Callable[[str], frozenset[int]] = lambda _: frozenset(),
        trials: Path | None = None,
    ) -> None:
        self._loop = loop
        self._arena = arena
        self._chunk_bytes = chunk_bytes
        self._config = config
        self._fatal = fatal
        self._near = near
        self._trials_path = trials
        self._trials: Trials | None = None
        self._loading: asyncio.Task[_Loaded] | None = None
        self._opening: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._driver: Driver | None = None
        self._gpus: dict[bytes, _Gpu] = {}
        self._pinning: Pinning | None = None
        self._devices: dict[bytes, CudaDevice] = {}
        self._hung: dict[bytes, CudaDevice] = {}  # each keeps a thread for as long as the driver does not return

    async def device(self, uuid: bytes) -> CudaDevice:
        """See `Gpus.device`. The first call for a GPU takes as long as its context does. GPUs are opened in parallel,
        since the ranks of an engine name them at the same time.
        """
        if not self._config.enabled:
            raise MemoryKindError("CUDA is disabled in this daemon: its config has cuda.enabled = false")
        try:
            driver, gpu = await self._find(uuid)
            async with self._opening[uuid]:
                found = self._devices.get(uuid)
                return found if found is not None else await self._open(uuid, driver, gpu)
        except DeviceError as error:
            hint = _HINTS.get(error.name, "") if isinstance(error, CudaError) else ""
            log.warning("a GPU can't be used: %s%s", error, hint)
            raise MemoryKindError(f"the daemon can't use this GPU: {error}{hint}") from error

    def devices(self) -> list[Device]:
        """See `Gpus.devices`."""
        return list(self._devices.values())

    async def _find(self, uuid: bytes) -> tuple[Driver, _Gpu]:
        driver = self._driver or await self._load()
        gpu = self._gpus.get(uuid)
        if gpu is None:
            raise MemoryKindError(
                f"the daemon sees no GPU with UUID {uuid.hex()}, but {len(self._gpus)} others: start it with "
                "all GPUs visible; parts of a GPU (MIG) can't be shared between processes"
            )
        return driver, gpu

    async def _open(self, uuid: bytes, driver: Driver, gpu: _Gpu) -> CudaDevice:
        hung = self._hung.get(uuid)
        if hung is not None and hung.is_called:
            raise DeviceError("its context, which was asked for before, has not been created yet")
        device = CudaDevice(
            self._loop, driver, uuid, gpu.ordinal, self._chunk_bytes, self._config, self._fatal, gpu.cpus
        )
        try:
            await device.open(self._pin(driver), self._trials)
        except BaseException:
            if not await device.close(self._config.stuck_s):
                self._hung[uuid] = device
            raise
        self._devices[uuid] = device
        near = f", with copy threads on the {len(gpu.cpus)} CPUs of its NUMA node" if gpu.cpus else ""
        log.info("using GPU %d, %s%s", gpu.ordinal, uuid.hex(), near)
        return device

    async def _load(self) -> Driver:
        """Loads the driver in a separate thread, which a driver that hangs keeps for good: later calls wait for the
        same thread.
        """
        if self._loading is None or _has_failed(self._loading):
            lane = Lane("gpu-driver", 1, self._loop)
            self._loading = self._loop.create_task(lane.perform(partial(_load, self._near, self._trials_path)))
            self._loading.add_done_callback(lambda loading: _on_loaded(lane, loading))
        try:
            async with asyncio.timeout(self._config.stuck_s):
                found = await asyncio.shield(self._loading)
        except TimeoutError:
            raise DeviceError(f"the driver did not answer within {self._config.stuck_s} s") from None
        if self._driver is not None:  # another call has waited for the same thread
            return self._driver
        driver, self._gpus, self._trials = found
        if holds_gil(driver.bindings_version):
            log.warning(
                "cuda-bindings %s blocks the whole daemon during each driver call; install 12.9.2 or newer",
                driver.bindings_version,
            )
        self._driver = driver
        return driver

    def _pin(self, driver: Driver) -> Pinning:
        if self._pinning is None:
            self._pinning = Pinning(driver, self._arena, self._config.pin_bytes)
        return self._pinning

    async def close(self, deadline_s: float) -> bool:
        """Ends pinning; the devices are closed. Returns False if the driver does not return in time."""
        if self._pinning is None:
            return True
        try:
            async with asyncio.timeout(deadline_s):
                await self._loop.run_in_executor(None, self._pinning.stop)
        except TimeoutError:
            return False
        return True


def _load(near: Callable[[str], frozenset[int]], trials: Path | None) -> _Loaded:
    """Returns the driver, the GPUs by UUID, and the trials. Blocks."""
    driver = Driver()
    count = int(driver.call("cuDeviceGetCount"))
    gpus = {driver.uuid(ordinal): _Gpu(ordinal, _cpus(driver, ordinal, near)) for ordinal in range(count)}
    return driver, gpus, Trials(trials)


def _has_failed(loading: asyncio.Task[_Loaded]) -> bool:
    return loading.done() and (loading.cancelled() or loading.exception() is not None)


def _on_loaded(lane: Lane, loading: asyncio.Task[_Loaded]) -> None:
    """Ends the lane. The failure, if any, was reported to those who still waited."""
    lane.dismiss()
    if not loading.cancelled():
        loading.exception()


def _cpus(driver: Driver, ordinal: int, near: Callable[[str], frozenset[int]]) -> frozenset[int]:
    try:
        return near(driver.pci_address(ordinal))
    except DeviceError:
        return frozenset()  # a GPU of unknown location can be used all the same
