"""The GPUs' driver in a stress run: the machine's, or tests/softcuda in its place, and what it does wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scripts.harness.copies import COUNTERS, WAYS
from scripts.harness.gpu import gpu_is_usable, software_driver
from scripts.stress.options import StressOptions

_ENDS_THE_DAEMON = {"sticky_after", "hang_after", "hang_device_to_host", "hang_host_to_device", "batch_hangs_after"}
_FAILS_JOBS = {"fail_submit_every", "sticky_after", "query_error", "record_error"}
_REFUSES = {"fail_submit_every", "no_batch", "pitched_error"}
CORRUPT_EVERY_COPIES = 2000
STUCK_S = 2


class NoDriverError(Exception):
    """What was asked for needs another driver than there is."""


@dataclass(frozen=True, slots=True)
class Driver:
    """Variables for the daemon and for workers in addition to the process's; what the driver does wrong.
    `ends_daemon`: something that no daemon survives: it has to exit with status 70, soon; `fails_jobs`: what ends jobs
    as failed. `copies`: the way that the daemon is forced to.
    """

    daemon: Mapping[str, str] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[str] = ()
    copies: str = ""

    @property
    def ends_daemon(self) -> bool:
        return self._does(_ENDS_THE_DAEMON)

    @property
    def fails_jobs(self) -> bool:
        return self._does(_FAILS_JOBS)

    @property
    def settings(self) -> dict[str, str]:
        """Returns settings of the daemon that make it notice soon, and copy as it was asked to."""
        stuck = {"cuda.stuck_s": str(STUCK_S)} if self.ends_daemon else {}
        return {**stuck, **(WAYS[self.copies] if self.copies else {})}

    def unused(self, counted: Mapping[str, int]) -> list[str]:
        """Counters of the ways that it is forced to, which are 0 though nothing was refused."""
        if not self.copies or self._does(_REFUSES):
            return []
        return [name for name in COUNTERS[self.copies] if not counted[name]]

    def _does(self, names: set[str]) -> bool:
        return any(fault.partition("=")[0] in names for fault in self.faults)


def driver_of(options: StressOptions) -> Driver:
    """Raises NoDriverError, with what to do about it."""
    if options.device != "cuda":
        return Driver()
    faults = _faults(options)
    if options.software_driver:
        from tests import softcuda  # which builds it: not for a run on a GPU

        try:
            daemon = softcuda.environment(",".join(faults))
            return Driver(daemon, softcuda.environment(), faults, options.copies)
        except softcuda.SoftCudaError as error:
            raise NoDriverError(f"--software-driver: {error}") from None
    if not gpu_is_usable():
        raise NoDriverError("--device cuda: no GPU, or no driver or cuda-bindings for it; --software-driver needs none")
    if faults and software_driver() is None:
        raise NoDriverError(f"{', '.join(faults)}: a GPU does nothing wrong on purpose; use --software-driver")
    return Driver({"SOFTCUDA_FAULTS": ",".join(faults)} if faults else {}, {}, faults, options.copies)


def _faults(options: StressOptions) -> list[str]:
    faults = []
    if options.plant_corruption == "loads":
        faults.append(f"corrupt_every={CORRUPT_EVERY_COPIES}")
    if options.slow_copies_s:
        faults.append(f"delay_copies_ns={round(options.slow_copies_s * 1e9)}")
    return faults + [fault for fault in options.driver_faults.split(",") if fault]  # of two the last one holds
