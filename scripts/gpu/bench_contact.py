#!/usr/bin/env python3
"""What the machine and its driver say, step by step, each in a process of its own: first of all, and never fatal.

Versions, what the driver has, what contexts and pinned memory take of the GPU and of the host, and with which errors it
refuses memory of other processes. A step that fails is a line with its error.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffloadd.client.memory.gpu import IpcMemory, VmmMemory, driver, gpu_allocation
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.memory import SharedMemory
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.units import format_bytes
from scripts.gpu.bench import GIB, KIB, MIB, done, parse, parser, table, tell
from scripts.harness.gpu import CHUNK_BYTES, Gpu, GpuBuffer, software_driver
from scripts.harness.gpumemory import Pinned
from scripts.harness.process import module

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_S = 15.0
PIN_BYTES, QUICK_PIN_BYTES = (4 * KIB, GIB, 8 * GIB), (4 * KIB, 8 * MIB)
ATTRIBUTES = {20: "compute mode", 40: "copy engines", 41: "one address space", 102: "virtual memory management",
              103: "handles that are descriptors", 122: "64-bit stream memory operations"}  # fmt: skip
_CHILD = "import sys; from _gpu import Gpu; Gpu(); print('there', flush=True); sys.stdin.read()"


def versions(_quick: bool) -> dict[str, Any]:
    """Of what the rest depends on."""
    bindings = __import__("cuda.bindings", fromlist=["bindings"])
    systemd = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False)
    return {
        "kernel": platform.release(),
        "systemd": systemd.stdout.partition("\n")[0],
        "cuda-bindings": bindings.__version__,
        "driver": int(driver().call("cuDriverGetVersion")),
        "batched copies": Driver().batches,
        "cuMemcpyBatchAsync of 13.0": driver().entry("cuMemcpyBatchAsync", 13000) is not None,
    }


def attributes(_quick: bool) -> dict[str, Any]:
    """Of the GPU."""
    found: dict[str, Any] = {}
    for number, name in ATTRIBUTES.items():
        try:
            found[name] = int(driver().call("cuDeviceGetAttribute", driver().api.CUdevice_attribute(number), 0))
        except (CudaError, ValueError) as error:
            found[name] = str(error)
    return found


def context(_quick: bool) -> dict[str, Any]:
    """What another process's context takes."""
    begun = time.perf_counter()
    gpu = Gpu()
    found: dict[str, Any] = {"own, s": round(time.perf_counter() - begun, 3)}
    before = gpu.free_bytes()
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    found["another's, MiB"] = (before - gpu.free_bytes()) // MIB
    child.communicate()
    return found


def pinning(quick: bool) -> dict[str, Any]:
    """What registered memory takes, beside itself: of the GPU for its page tables, of the host for the kernel's."""
    gpu = Gpu()
    found: dict[str, Any] = {}
    for size in QUICK_PIN_BYTES if quick else PIN_BYTES:
        free, available = gpu.free_bytes(), _available_bytes()
        if available < 2 * size:
            break
        begun = time.perf_counter()
        memory = Pinned(size)
        found[format_bytes(size)] = {
            "s, pages and pinning": round(time.perf_counter() - begun, 3),
            "GPU, MiB": round((free - gpu.free_bytes()) / MIB, 1),
            "host, MiB": round((available - _available_bytes() - size) / MIB, 1),
        }
        memory.close()
    return found


def _available_bytes() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * KIB if found else 0


def sharing(_quick: bool) -> dict[str, Any]:
    """Memory of another process: opened, opened again, and with which error it is refused."""
    gpu = Gpu()
    memory = SharedMemory(Driver(), gpu.ordinal)
    command = module("scripts.gpu.bench_contact", "export")
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    told = json.loads(child.stdout.readline())
    handle = bytes.fromhex(told["handle"])
    found: dict[str, Any] = {"virtual memory": told["chunks"]}

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            value = work()
        except KvOffloadError as error:
            found[name] = str(error.__cause__ or error)
            return None
        found[name] = f"works, {(time.perf_counter() - begun) * 1e3:.1f} ms"
        return value

    opened = attempt("open", lambda: memory.open_handle(handle))
    if opened is not None:
        attempt("close", lambda: memory.unmap(opened))
    attempt("garbage", lambda: memory.open_handle(bytes(64)))
    child.send_signal(signal.SIGKILL)
    child.wait()
    attempt("after its process's death", lambda: memory.open_handle(handle))
    if software_driver() is None:  # where it is a misuse
        own = gpu_allocation(GpuBuffer(gpu, MIB).address, MIB)
        attempt("own process's", lambda: memory.open_handle(own.handle if isinstance(own, IpcMemory) else b""))
    found["context works after all"] = driver().context_works()
    return found


def export() -> None:
    """What `sharing` opens; until it is killed."""
    gpu = Gpu()
    whole, chunks = GpuBuffer(gpu, 64 * KIB), GpuBuffer(gpu, 4 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
    found = gpu_allocation(whole.address, 64 * KIB)
    try:
        mapped = gpu_allocation(chunks.address, 4 * CHUNK_BYTES)
        told = f"{len(mapped.chunks)} chunks" if isinstance(mapped, VmmMemory) else "IPC"
    except KvOffloadError as error:
        told = str(error)
    handle = found.handle.hex() if isinstance(found, IpcMemory) else ""
    print(json.dumps({"handle": handle, "bytes": found.size_bytes, "chunks": told}), flush=True)
    sys.stdin.read()


STEPS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "versions": versions, "attributes": attributes, "context": context, "pinning": pinning, "sharing": sharing,
}  # fmt: skip


def run_step(name: str, quick: bool) -> dict[str, Any]:
    """In a process of its own; what it found, or how it failed."""
    command = module("scripts.gpu.bench_contact", name, *(["quick"] if quick else []))
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)
        found: dict[str, Any] = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {STEP_S:.0f} s"}
    except ValueError:
        sys.stderr.write(ended.stderr)
        last = ended.stderr.strip().splitlines()[-1:] or [""]
        return {"failed": f"exit status {ended.returncode}: {last[0]}"}
    return found


def main() -> int:
    if sys.argv[1:2] == ["export"]:
        export()
        return 0
    if sys.argv[1:] and sys.argv[1] in STEPS:
        print(json.dumps(STEPS[sys.argv[1]](sys.argv[2:] == ["quick"])))
        return 0
    arguments = parse(parser(__doc__ or ""))
    cases: list[dict[str, Any]] = []
    for name in STEPS:
        done({"step": name, **run_step(name, arguments.quick)}, cases)
    lines = [[case["step"], name, value] for case in cases for name, value in case.items() if name != "step"]
    facts = table(f"as uid {os.getuid()}", ("step", "what", ""), lines)
    return tell(arguments, {"cases": cases, "tables": [facts]}, [])


if __name__ == "__main__":
    sys.exit(main())
