"""Checks GPUs: the driver, the packages that access it, and namespaces in which memory can be shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvoffloadd.config import Config
from kvoffloadd.cudadriver import CudaDriver
from kvoffloadd.doctor.diagnosis import Diagnosis, note, ok, problem
from kvoffloadd.doctor.host import Host
from kvoffloadd.errors import DeviceError

MakeDriver = Callable[[], Any]

_INSTALL = "in a checkout: pip install '.[cuda13]'"


def check_gpus(config: Config, host: Host, make_driver: MakeDriver = CudaDriver) -> Iterator[Diagnosis]:
    """Checks GPUs without making a context: no GPU is touched."""
    if not config.cuda.enabled:
        yield ok("GPUs", "cuda.enabled = false")
        return
    if not host.has_gpus:
        yield ok("GPUs", "no NVIDIA driver is loaded; KV caches in shared memory need none")
        return
    try:
        driver = make_driver()
        found = _describe(driver)
    except DeviceError as error:
        remedy = f"{_INSTALL}, for a driver from 580 on, or '.[cuda12]'; see nvidia-smi"
        yield problem("GPUs", str(error), remedy)
        return
    if "CUDA_VISIBLE_DEVICES" in host.environment:
        yield note(
            "GPUs", f"{found}; CUDA_VISIBLE_DEVICES hides others", "unset it for the daemon, which serves all GPUs"
        )
    else:
        yield ok("GPUs", found)
    yield from _check_trials(config.server.trials)
    yield from _check_namespaces(host)


def _describe(driver: Any) -> str:
    count, version = int(driver.call("cuDeviceGetCount")), int(driver.call("cuDriverGetVersion"))
    if not count:
        raise DeviceError("the driver sees no GPU")
    return f"{count} found, CUDA {version // 1000}.{version % 1000 // 10}, cuda-bindings {driver.bindings_version}"


def _check_trials(path: Path) -> Iterator[Diagnosis]:
    try:
        ways = ", ".join(line.partition("\t")[0] for line in path.read_text(errors="replace").splitlines())
    except OSError:
        return
    if ways:
        yield note(
            "ways of copying", f"{path} names {ways}: a daemon did not survive it, or tries it now for the first time",
            f"to try it again, remove {path} and restart the daemon; a new driver is tried without that",
        )  # fmt: skip


def _check_namespaces(host: Host) -> Iterator[Diagnosis]:
    own = [kind for kind in ("pid", "ipc") if not host.is_in_namespace_of_the_host(kind)]
    if own:
        yield note(
            "namespaces", f"this process is in a container's {' and '.join(kind.upper() for kind in own)} namespace",
            f"use {' '.join(f'--{kind}=host' for kind in own)} for the containers of the daemon and of the engines: "
            "GPU memory can be shared only within one namespace",
        )  # fmt: skip
    else:
        yield ok("namespaces", "the daemon uses the host's PID and IPC namespaces")
    if not (host.root / "dev/nvidia-uvm").exists():
        yield note("nvidia-uvm", "/dev/nvidia-uvm does not exist, and the service can't load the module",
                   "run nvidia-modprobe -u, or put a line nvidia-uvm into a file in /etc/modules-load.d")  # fmt: skip
