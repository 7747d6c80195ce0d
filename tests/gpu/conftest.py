"""Where the GPU tests run: on a real GPU, else on the software driver, which can do all but torch. See README.md.

KVOFFLOADD_SOFT_GPU=1: on the software driver anyway. KVOFFLOADD_SOFT_GPU=0: on a real GPU or not at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.process import search_path
from kvoffloadd.testing.wait import until
from scripts.gpu import SOFT_VARIABLE
from scripts.gpu.workerprocess import GpuWorker
from scripts.harness.daemon import Daemon
from tests import softcuda
from tests.e2e.gpu_rank import DEVICE_VARIABLE

PROBE_S = 60.0
_GPU = "import sys; from scripts.harness import gpu; sys.exit(not gpu.gpu_is_usable())"
_TORCH = "import torch, sys; sys.exit(not torch.cuda.is_available())"

StartWorker = Callable[..., GpuWorker]
Record = Callable[[str, object], None]
"""`record_property`: what comes into the report beside the test's outcome."""


def _succeeds(program: str) -> bool:
    """Here, without touching a GPU in this process."""
    environment = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=PROBE_S)
    return done.returncode == 0


@pytest.fixture(scope="session")
def real() -> bool:
    """Whether there is a GPU, and it should be used."""
    return os.environ.get(SOFT_VARIABLE) != "1" and _succeeds(_GPU)


@pytest.fixture(scope="session")
def driver_variables(real: bool) -> dict[str, str]:
    """The environment that processes of these tests need."""
    if real:
        return {}
    if os.environ.get(SOFT_VARIABLE) == "0":
        pytest.skip("no usable CUDA driver or GPU")
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    try:
        return softcuda.environment()
    except softcuda.SoftCudaError as error:
        pytest.skip(f"no GPU, and no software driver either: {error}")


@pytest.fixture(autouse=True)
def environment(driver_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons and workers that a test starts have it."""
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)  # it would give daemons the software driver
    for name, value in driver_variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def torch_cuda(real: bool) -> None:
    """Skips where torch can't use a GPU."""
    if not (real and _succeeds(_TORCH)):
        pytest.skip("needs torch with CUDA, and a real GPU")


@pytest.fixture
def gpu_daemon(standing: Callable[..., Daemon]) -> Iterator[Daemon]:
    """A daemon that tests share, empty; at the end no GPU memory is mapped any more."""
    daemon = standing("memory.slab_bytes=4MiB", memory="256MiB")
    yield daemon
    daemon.leave_guests()
    until(lambda: mapped_bytes(daemon) == 0, "all GPU memory is unmapped")


@pytest.fixture
def start_worker(tmp_path: Path) -> StartWorker:
    """`start_worker(daemon, variables={}, uid=0)` -> a worker, which is killed before the daemon is looked at last."""

    def start(daemon: Daemon, **options: Any) -> GpuWorker:
        log = tmp_path / f"worker-{len(daemon.guests)}.log"
        return daemon.welcome(GpuWorker(daemon.socket, log, **options))

    return start


def gauges(daemon: Daemon) -> dict[str, Any]:
    """Returns the gauges of the daemon's only GPU; empty while it uses none."""
    devices: dict[str, dict[str, Any]] = daemon.status()["devices"]
    return next((found for name, found in devices.items() if name.startswith("cuda:")), {})


def mapped_bytes(daemon: Daemon) -> int:
    """Returns the mapped bytes of workers' GPU memory."""
    return int(gauges(daemon).get("mapped_bytes", 0))
