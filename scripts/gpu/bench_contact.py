"""What the machine and its driver answer, step by step, each in its own process: first of all, and never fatal.

Versions, what the driver has, what contexts and pinned memory take of the GPU and of the host, and with which results
it gives or refuses memory of other processes. A step that fails is a line with its error.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd, populate, reserve_array
from kvoffloadd.testing.process import module
from kvoffloadd.units import format_bytes
from scripts.gpu.bench import GIB, KIB, MIB, BenchRun, cut_short, parser, table
from scripts.gpu.machine import available_bytes, meminfo, output_of
from scripts.gpu.rules import during_capture, large_chunks, null_streams, unregistered
from scripts.gpu.sharing import opened
from scripts.harness.gpu import Gpu

STEP_S = 30.0
PIN_BYTES, QUICK_PIN_BYTES = (4 * KIB, GIB, 8 * GIB), (4 * KIB, 8 * MIB)
TOUCH_GIB, LEFT_BYTES = 24, 2 * GIB
NOBODY, OTHER = 65534, 65533
ATTRIBUTES = (
    "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT", "COMPUTE_MODE",
    "ASYNC_ENGINE_COUNT", "MAX_PITCH", "UNIFIED_ADDRESSING", "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "HOST_REGISTER_SUPPORTED", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "HANDLE_TYPE_FABRIC_SUPPORTED", "CAN_USE_64_BIT_STREAM_MEM_OPS",
    "PAGEABLE_MEMORY_ACCESS", "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES", "GPU_DIRECT_RDMA_SUPPORTED",
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
)  # fmt: skip
COMPUTE_MODES: dict[int, int | str] = {0: "0, default", 2: "2, prohibited", 3: "3, exclusive process"}
ENTRIES = (
    ("cuMemcpyAsync", 4000), ("cuMemcpy2DAsync", 3020), ("cuMemcpyBatchAsync", 12080), ("cuMemcpyBatchAsync", 13000),
    ("cuMemcpy3DBatchAsync", 12080), ("cuMemcpy3DBatchAsync", 13000), ("cuStreamWriteValue64", 11070),
    ("cuStreamWaitValue64", 11070),
)  # fmt: skip

# Another process, without CUDA: looks at the memory until a 1 is there.
_READER = """
import mmap, sys, time
page = mmap.mmap(int(sys.argv[1]), 4096)
print("looking", flush=True)
while page[0] != 1:
    pass
print(time.perf_counter())
"""


def memory(quick: bool) -> dict[str, Any]:
    """Measures the memory of the host. A virtual machine may begin with little and get more as it is used: so some is
    used first.
    """
    found: dict[str, Any] = {"at first": meminfo()}
    if quick:
        return {**found, "touched": "skipped: sizes are small"}
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # of all processes this one, if it is too much
    held: list[Any] = []
    begun = time.perf_counter()
    while len(held) < TOUCH_GIB and available_bytes() > LEFT_BYTES + GIB:
        held.append(reserve_array((GIB,), np.uint8))
        populate(held[-1].ctypes.data, GIB, 8, nice=0)
    found["touched"] = f"{len(held)} GiB in {time.perf_counter() - begun:.1f} s"
    held.clear()
    return {**found, "afterwards": meminfo()}


def versions(_quick: bool) -> dict[str, Any]:
    """Returns the versions of what the rest depends on."""
    bindings = __import__("cuda.bindings", fromlist=["bindings"])
    kernel_module = Path("/proc/driver/nvidia/version")
    return {
        "kernel": platform.release(),
        "systemd": output_of("systemctl", "--version").partition("\n")[0],
        "python": sys.version.partition(" ")[0],
        "cuda-bindings": f"{bindings.__version__}, {Path(bindings.__path__[0])}",
        "driver of the kernel": kernel_module.read_text().partition("\n")[0] if kernel_module.exists() else "-",
        "CUDA of the driver": int(driver().call("cuDriverGetVersion")),
    }


def attributes(_quick: bool) -> dict[str, Any]:
    """Returns the attributes of the GPU."""
    return {name.lower(): _attribute(name) for name in ATTRIBUTES}


def _attribute(name: str) -> int | str:
    which = getattr(driver().api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if which is None:
        return "not known to these bindings"
    try:
        value = int(driver().call("cuDeviceGetAttribute", which, 0))
    except CudaError as error:
        return error.name
    return COMPUTE_MODES.get(value, value) if name == "COMPUTE_MODE" else value


def entries(_quick: bool) -> dict[str, Any]:
    """What the driver offers of what copies could use, by the version of CUDA whose form it is."""
    return {
        f"{name}, {version}": "there" if driver().entry(name, version) is not None else "not there"
        for name, version in ENTRIES
    }


def context(_quick: bool) -> dict[str, Any]:
    """What contexts take."""
    begun = time.perf_counter()
    gpu = Gpu()
    found: dict[str, Any] = {"own, s": round(time.perf_counter() - begun, 3)}
    before, begun = gpu.free_bytes(), time.perf_counter()
    child = subprocess.Popen(module("scripts.gpu.bench_contact", "hold"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    is_there = child.stdout.readline()
    found["another process's, s with Python's start"] = round(time.perf_counter() - begun, 3)
    found["another process's, MiB of the GPU"] = (before - gpu.free_bytes()) // MIB if is_there else "it failed"
    child.communicate()
    return found


def hold() -> None:
    """A context, until the input ends."""
    Gpu()
    print("there", flush=True)
    sys.stdin.read()


def signals(_quick: bool) -> dict[str, Any]:
    """A value that a stream writes to shared memory, as workers signal: seen by a process without CUDA."""
    gpu, fd = Gpu(), create_memfd("gpu-check", 4096)
    page = Pinned(4096, fd)
    command = [sys.executable, "-c", _READER, str(fd)]
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        begun = time.perf_counter()
        driver().call("cuStreamWriteValue64", gpu.stream, page.device_address, 1, 0)
        written = time.perf_counter()
        seen = float(reader.stdout.readline())
    page.close()
    os.close(fd)
    return {
        "cuStreamWriteValue64, us within the first call": round((written - begun) * 1e6),
        "seen by another process, us after the call began": round((seen - begun) * 1e6),
    }


def pinning(quick: bool) -> dict[str, Any]:
    """What registered memory takes besides itself: of the GPU for its page tables, of the host for the kernel's."""
    gpu = Gpu()
    found: dict[str, Any] = {}
    for size in QUICK_PIN_BYTES if quick else PIN_BYTES:
        if available_bytes() < 2 * size:
            found[format_bytes(size)] = f"skipped: only {format_bytes(available_bytes())} are available"
            continue
        fd = create_memfd("gpu-check", size)
        mapping = Mapping.map_fd(fd, size)
        populate(mapping.address, size, 8, nice=0)
        free, available, begun = gpu.free_bytes(), available_bytes(), time.perf_counter()
        driver().call("cuMemHostRegister", mapping.address, size, 3)
        found[format_bytes(size)] = (
            f"{time.perf_counter() - begun:.4f} s, {(free - gpu.free_bytes()) / MIB:.1f} MiB of the GPU, "
            f"{(available - available_bytes()) / MIB:.1f} MiB of the host beside the memory itself"
        )
        driver().call("cuMemHostUnregister", mapping.address)
        mapping.close()
        os.close(fd)
    return found


def sharing(exporter_uid: int, importer_uid: int, _quick: bool) -> dict[str, Any]:
    """Memory of another process."""
    return opened(exporter_uid, importer_uid)


STEPS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "memory": memory,
    "versions": versions,
    "attributes": attributes,
    "entries": entries,
    "context": context,
    "signals": signals,
    "sharing": partial(sharing, 0, 0),
    "sharing, exporter of another user": partial(sharing, NOBODY, 0),
    "sharing, importer of another user": partial(sharing, 0, NOBODY),
    "sharing, two other users": partial(sharing, NOBODY, OTHER),
    "pinning": pinning,
    "memory that is not registered": unregistered,
    "signals on NULL streams": null_streams,
    "large chunks": large_chunks,
    "calls during a capture": during_capture,
}


def run_step(name: str, quick: bool) -> dict[str, Any]:
    """Runs a step in a separate process. Returns what it found, or how it failed."""
    command = module("scripts.gpu.bench_contact", "step", name, *(["quick"] if quick else []))
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {STEP_S:.0f} s"}
    sys.stderr.write(ended.stderr)
    try:
        found: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        last = ended.stderr.strip().splitlines()[-1:] or [""]
        return {"failed": f"exit status {ended.returncode}: {last[0]}"}
    return found


def main() -> int:
    if sys.argv[1:] == ["hold"]:
        hold()
        return 0
    if sys.argv[1:2] == ["step"]:
        print(json.dumps(STEPS[sys.argv[2]](sys.argv[3:] == ["quick"])))
        return 0
    made = parser(__doc__ or "")
    made.add_argument("--steps", nargs="*", choices=STEPS, default=[*STEPS], help="these alone")
    run = BenchRun(made, needs_gpu=False)
    with cut_short():
        for name in run.given.steps:
            run.done({"step": name, **run_step(name, run.given.quick)})
    tables = [
        table(f"{case['step']}, as uid {os.getuid()}", ("what", ""), [one for one in case.items() if one[0] != "step"])
        for case in run.cases
    ]
    return run.tell(tables)


if __name__ == "__main__":
    sys.exit(main())
