"""Ways of copying small rows that the daemon is to measure itself: whichever it takes, the bytes are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffloadd.config import CudaConfig
from kvoffloadd.trial.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e import gpu_rank
from tests.e2e.small_rows import roundtrip
from tests.e2e.test_cuda_pitched import MIXED

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]

AUTO = ("cuda.pitched_row_bytes=auto", "cuda.kernel_row_bytes=auto", "cuda.kernel_chunk_bytes=1B")
WAYS = [f"{direction}_{way}_row_bytes" for direction in ("load", "store") for way in ("pitched", "kernel")]


@pytest.fixture(autouse=True)
def needs_software() -> None:
    gpu_rank.needs_soft("faults, and the kernel's stand-in for CuPy")


def limits(daemon: Daemon) -> list[int]:
    return [int(daemon.gpus()[0][name]) for name in WAYS]


def test_what_a_gpu_has_shown(start_daemon: Start, seed: int) -> None:
    """Measured once, said in a line for each direction, and shown."""
    daemon = start_daemon(*AUTO, driver={"faults": "packed,jitter_ns=1000", "cupy": True})
    for round_ in range(2):
        roundtrip(daemon, MIXED, seed + round_)
    assert all(limit == 0 or 2048 <= limit <= 65_536 for limit in limits(daemon))
    assert all(daemon.says(f"{name}s of GPU 0: rows of up to") for name in ("load", "store"))
    assert daemon.log().count(" of GPU 0: rows of up to") == 2


@pytest.mark.parametrize(
    ("faults", "off", "told"),
    [
        ("pitched_error=801", ["load_pitched_row_bytes", "store_pitched_row_bytes"], "pitched copies are not used"),
        ("launch_error=1", ["load_kernel_row_bytes", "store_kernel_row_bytes"], "the kernel is not used"),
    ],
)
def test_a_way_that_does_not_work_is_not_used(
    start_daemon: Start, seed: int, faults: str, off: list[str], told: str
) -> None:
    daemon = start_daemon(*AUTO, driver={"faults": faults, "cupy": True})
    for round_ in range(2):
        roundtrip(daemon, MIXED, seed + round_)
    assert [int(daemon.gpus()[0][name]) for name in off] == [0, 0]
    until(lambda: daemon.log().count(told) >= 1, "it is told")
    assert daemon.log().count(told) == 1
    assert daemon.gpus()[0]["kernel_chunks" if "launch" in faults else "pitched_copies"] == 0


def test_nothing_is_measured_unless_asked(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon(driver={"faults": "", "cupy": True})
    roundtrip(daemon, MIXED, seed)
    pitched = CudaConfig().pitched_row_bytes
    assert limits(daemon) == [pitched, 0, pitched, 0]
    assert "rows of up to" not in daemon.log()
