"""What stands still while memory is registered, by the size of the pieces; and what kinds of memory are worth.

Stalls: memory is registered in pieces, and meanwhile threads of this process copy 4 KiB and ask for the end, and map
and unmap 1 MiB; another process asks how much of the GPU is free, and fills 1 MiB of it. Milliseconds of each: median,
99th percentile, longest. Kinds: seconds for each GiB until it can be copied, and GB/s of one copy, and of pieces of
64 KiB scattered over all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd, populate
from kvoffloadd.testing.figures import p50, p99
from kvoffloadd.testing.process import module
from kvoffloadd.units import format_bytes
from scripts.gpu.bench import GIB, KIB, MIB, BenchRun, cut_short, gb_per_s, parser, table
from scripts.gpu.machine import available_bytes
from scripts.harness.gpu import Gpu, GpuBuffer, one_copy

PORTABLE_AND_MAPPED = 3
PIECES = (1, 16, 128)
"""Of the memory: one of 16 GiB, 16 of 1 GiB, 128 of 128 MiB."""
POOL_PART = 8
WINDOW_BYTES = 256 * MIB
SCATTERED_BYTES = 64 * KIB
PAUSE_S, QUIET_S = 5e-4, 0.5
_MADV_HUGEPAGE = 14
ROLLUP = Path("/proc/self/smaps_rollup")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Loops:
    """Does things again and again, each in its own thread, and remembers how long each time took."""

    def __init__(self, gpu: Gpu, work: dict[str, Callable[[], object]]) -> None:
        self._seconds: dict[str, list[float]] = {name: [] for name in work}
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(gpu, name, do)) for name, do in work.items()]
        for thread in self._threads:
            thread.start()

    def _run(self, gpu: Gpu, name: str, do: Callable[[], object]) -> None:
        gpu.use()
        ended = False
        while not ended:
            begun = time.perf_counter()
            do()
            self._seconds[name].append(time.perf_counter() - begun)
            ended = self._end.wait(PAUSE_S)

    def end(self) -> dict[str, str]:
        """Milliseconds of each."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        return {name: _figures(seconds) for name, seconds in self._seconds.items()}


def _figures(seconds: list[float]) -> str:
    return " / ".join(f"{1e3 * one:.2f}" for one in (p50(seconds), p99(seconds), max(seconds)))


def copies_and_maps(gpu: Gpu, mapping: Mapping) -> dict[str, Callable[[], object]]:
    """What goes on in the process that registers. `mapping`: registered, a page at least."""
    device, event = GpuBuffer(gpu, 4 * KIB), driver().call("cuEventCreate", 2)
    stream, entry = int(driver().call("cuStreamCreate", 1)), Driver()

    def copy() -> None:
        entry.copy_each(*one_copy(mapping.address, device.address, 4 * KIB), stream)
        entry.record(int(event), stream)
        while entry.query(int(event)):
            pass

    def remap() -> None:
        with mmap.mmap(-1, MIB) as made:
            made[0] = 1

    return {"copy": copy, "map and unmap": remap}


def other() -> None:
    """Another process: a line begins the loops, the next ends them."""
    gpu = Gpu()
    memory = GpuBuffer(gpu, MIB)

    def fill() -> None:
        memory.set_later(0, MIB, 1)
        gpu.synchronize()

    while sys.stdin.readline():
        loops = Loops(gpu, {"free memory": gpu.free_bytes, "fill": fill})
        print("begun", flush=True)
        sys.stdin.readline()
        print(json.dumps(loops.end()), flush=True)


def stalls(gpu: Gpu, total_bytes: int, run: BenchRun) -> None:
    """Measures stalls with nothing registered, and for each size of pieces."""
    with _mapped(MIB) as small, _mapped(total_bytes) as large:
        populate(large.address, total_bytes, 8, nice=0)
        driver().call("cuMemHostRegister", small.address, MIB, PORTABLE_AND_MAPPED)
        command = module("scripts.gpu.bench_pinning", "other")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            for pieces in (0, *PIECES):
                run.done(_stall(gpu, child, small, large, pieces))
            child.communicate()
        driver().call("cuMemHostUnregister", small.address)


def _stall(gpu: Gpu, child: subprocess.Popen[str], small: Mapping, large: Mapping, pieces: int) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    child.stdout.readline()
    loops = Loops(gpu, copies_and_maps(gpu, small))
    time.sleep(QUIET_S if not pieces else 0)
    registered, begun = [], time.perf_counter()
    piece_bytes = large.size_bytes // max(pieces, 1)
    for number in range(pieces):
        registered.append(large.address + number * piece_bytes)
        driver().call("cuMemHostRegister", registered[-1], piece_bytes, PORTABLE_AND_MAPPED)
    seconds = time.perf_counter() - begun
    found = loops.end()
    child.stdin.write("\n")
    child.stdin.flush()
    found |= {f"another process: {name}": figures for name, figures in json.loads(child.stdout.readline()).items()}
    for address in registered:
        driver().call("cuMemHostUnregister", address)
    what = f"{pieces} x {format_bytes(piece_bytes)}" if pieces else "nothing"
    return {"registered": what, "s": round(seconds, 3) if pieces else "-", **found}


@contextlib.contextmanager
def _mapped(size_bytes: int, flags: int = 0) -> Iterator[Mapping]:
    if flags:
        fd = os.memfd_create("gpu-check", os.MFD_CLOEXEC | flags)
        os.ftruncate(fd, size_bytes)
    else:
        fd = create_memfd("gpu-check", size_bytes)
    try:
        mapping = Mapping.map_fd(fd, size_bytes)
    finally:
        os.close(fd)
    try:
        yield mapping
    finally:
        mapping.close()


@contextlib.contextmanager
def registered(size_bytes: int, flags: int = 0, *, advise: bool = False, fresh: bool = False) -> Iterator[int]:
    """The address of shared memory that the driver knows."""
    with _mapped(size_bytes, flags) as mapping:
        if advise:
            at, size = ctypes.c_void_p(mapping.address), ctypes.c_size_t(size_bytes)
            ctypes.CDLL(None).madvise(at, size, _MADV_HUGEPAGE)
        if not fresh:
            populate(mapping.address, size_bytes, 8, nice=0)
        driver().call("cuMemHostRegister", mapping.address, size_bytes, PORTABLE_AND_MAPPED)
        try:
            yield mapping.address
        finally:
            driver().call("cuMemHostUnregister", mapping.address)


@contextlib.contextmanager
def allocated(size_bytes: int) -> Iterator[int]:
    """The address of memory of the driver's own."""
    address = int(driver().call("cuMemHostAlloc", size_bytes, PORTABLE_AND_MAPPED))
    try:
        yield address
    finally:
        driver().call("cuMemFreeHost", address)


def kinds(size_bytes: int) -> dict[str, contextlib.AbstractContextManager[int]]:
    """Returns the kinds of memory that an arena could be."""
    return {
        "memfd": registered(size_bytes),
        "memfd, no page there before": registered(size_bytes, fresh=True),
        "memfd, MADV_HUGEPAGE": registered(size_bytes, advise=True),
        "memfd, MFD_HUGETLB": registered(size_bytes, os.MFD_HUGETLB),
        "cuMemHostAlloc": allocated(size_bytes),
    }


def pool(gpu: Gpu, name: str, memory: contextlib.AbstractContextManager[int], size_bytes: int) -> dict[str, Any]:
    """How long it takes to have this kind, and how fast it is copied from and to."""
    begun = time.perf_counter()
    with memory as address:
        seconds = time.perf_counter() - begun
        found: dict[str, Any] = {
            "pool": name,
            "s per GiB": round(seconds / size_bytes * GIB, 3),
            "huge pages, MiB": _huge_mib(),
        }
        window = GpuBuffer(gpu, min(size_bytes, WINDOW_BYTES))
        for way in ("store", "load"):
            found[f"{way}, one copy"] = gb_per_s(window.size_bytes, [_one(gpu, way, address, window) for _ in range(4)])
            found[f"{way}, scattered"] = gb_per_s(
                window.size_bytes, [_scattered(gpu, way, address, size_bytes, window) for _ in range(4)]
            )
        window.free()
    return found


def _one(gpu: Gpu, way: str, host: int, window: GpuBuffer) -> float:
    src, dst = (window.address, host) if way == "store" else (host, window.address)
    begun = time.perf_counter()
    driver().call("cuMemcpyAsync", dst, src, window.size_bytes, gpu.stream)
    gpu.synchronize()
    return time.perf_counter() - begun


def _scattered(gpu: Gpu, way: str, host: int, size_bytes: int, window: GpuBuffer) -> float:
    entry, count = Driver(), window.size_bytes // SCATTERED_BYTES
    at = np.random.default_rng(1).permutation(size_bytes // SCATTERED_BYTES)[:count].astype(np.uint64)
    step = np.uint64(SCATTERED_BYTES)
    there, here = at * step + np.uint64(host), np.arange(count, dtype=np.uint64) * step + np.uint64(window.address)
    src, dst = (here, there) if way == "store" else (there, here)
    submit = entry.copy_batch if entry.batches else entry.copy_each
    begun = time.perf_counter()
    driver().check("copies", submit(src, dst, np.full(count, step), gpu.stream))
    gpu.synchronize()
    return time.perf_counter() - begun


def _huge_mib() -> int | str:
    """Returns the shared memory of this process that is in huge pages."""
    if not ROLLUP.exists():
        return "not known"
    found = re.findall(
        r"^(?:ShmemPmdMapped|FilePmdMapped|Shared_Hugetlb|Private_Hugetlb): +(\d+) kB$",
        ROLLUP.read_text(), re.MULTILINE,
    )  # fmt: skip
    return sum(map(int, found)) * KIB // MIB


def main() -> int:
    if sys.argv[1:] == ["other"]:
        other()
        return 0
    run = BenchRun(parser(__doc__ or "", "16GiB", 1), 64 * MIB)
    gpu = Gpu()
    total_bytes = min(run.given.bytes, available_bytes() // 3) // (PIECES[-1] * 4 * KIB) * PIECES[-1] * 4 * KIB
    pool_bytes = total_bytes // POOL_PART // SCATTERED_BYTES * SCATTERED_BYTES
    with cut_short():
        stalls(gpu, total_bytes, run)
        for name, memory in kinds(pool_bytes).items():
            try:
                run.done(pool(gpu, name, memory, pool_bytes))
            except (KvOffloadError, OSError) as error:
                run.skipped.append(f"{name}: {error}")
    tables = [
        table(title, list(cases[0]), [list(case.values()) for case in cases])
        for title, key in (
            ("while memory is registered, ms: median / 99 % / longest", "registered"),
            (f"kinds of {format_bytes(pool_bytes)}; GB/s; huge pages of shared memory: {_shmem_huge()}", "pool"),
        )
        if (cases := [case for case in run.cases if key in case])
    ]
    return run.tell(tables)


def _shmem_huge() -> str:
    return SHMEM_HUGE.read_text().strip() if SHMEM_HUGE.exists() else "the kernel has none"


if __name__ == "__main__":
    sys.exit(main())
