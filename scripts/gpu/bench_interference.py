#!/usr/bin/env python3
"""What copies take from an engine's kernels, and what kernels take from copies.

Kernels run in a process of their own: bfloat16 matrix products of 8,192 (`matmul`), copies within the GPU's memory
(`memory`). Beside them the daemon stores, loads, or both, job after job. Speeds are relative to those alone, by round.
Needs torch with CUDA.
"""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.gpu.bench import KIB, GpuWorkload, Shape, await_pinned, daemon, done, in_time, parse, parser, table, tell
from scripts.harness.figures import median_ratio
from scripts.harness.gpu import Gpu, software_driver
from scripts.harness.process import private_folder
from scripts.harness.worker import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

START_S, ANSWER_S = 90.0, 30.0
SLICE_S, QUICK_SLICE_S = 0.25, 0.1
ROW_BYTES = (64 * KIB, 4 * KIB)
KINDS = ("matmul", "memory")


def alone(work: Callable[[], float], seconds: float) -> float:
    """Jobs per second."""
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        work()
        count += 1
    return count / (time.perf_counter() - begun)


def beside(kernels: WorkerProcess, kind: str, seconds: float, work: Callable[[], float] | None) -> tuple[float, float]:
    """Kernels per second, and jobs per second meanwhile."""
    kernels.ask({"kind": kind, "seconds": seconds})
    begun, count = time.perf_counter(), 0
    while work is not None and not select.select([kernels], [], [], 0)[0]:
        work()
        count += 1
    rate = count / (time.perf_counter() - begun)
    return float(kernels.answer(ANSWER_S)["per_s"]), rate


def measure(kernels: WorkerProcess, worker: GpuWorkload, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Every kind of kernels with every kind of jobs: relative speeds, medians over the rounds."""
    jobs = {"store": worker.store_s, "load": worker.load_s, "both": worker.both_s}
    found = []
    for kind in KINDS:
        free_kernels: list[float] = []
        speeds: dict[str, dict[str, list[float]]] = {name: {"k": [], "j": [], "free": []} for name in jobs}
        for _ in range(rounds):
            free_kernels.append(beside(kernels, kind, seconds, None)[0])
            for name, work in jobs.items():
                speeds[name]["free"].append(alone(work, seconds))
                kernels_per_s, jobs_per_s = beside(kernels, kind, seconds, work)
                speeds[name]["k"].append(kernels_per_s)
                speeds[name]["j"].append(jobs_per_s)
        for name, taken in speeds.items():
            found.append(
                {
                    "kernels": kind,
                    "jobs": name,
                    "kernels_speed": round(median_ratio(taken["k"], free_kernels), 3),
                    "jobs_speed": round(median_ratio(taken["j"], taken["free"]), 3),
                }
            )
    return found


def main() -> int:
    arguments = parse(parser(__doc__ or "", "256MiB", 5))
    seconds = QUICK_SLICE_S if arguments.quick else SLICE_S
    gpu = Gpu()
    cases: list[dict[str, Any]] = []
    left_out: list[str] = []
    with private_folder() as folder, daemon(arguments.bytes) as socket:
        options = {"cpu": software_driver() is not None}
        kernels = WorkerProcess("scripts.gpu.kernels", options, Path(folder) / "kernels.log")
        kernels.answer(START_S)
        for row_bytes in in_time(ROW_BYTES, arguments.seconds, left_out):
            worker = GpuWorkload(gpu, socket, Shape(row_bytes), arguments.bytes)
            await_pinned(socket)
            worker.store()
            found = measure(kernels, worker, arguments.rounds, seconds)
            for one in found:
                done({"row_bytes": row_bytes, **one}, cases)
            worker.close()
        kernels.end()
    lines = [[f"{one['row_bytes'] // KIB} KiB", *list(one.values())[1:]] for one in cases]
    columns = ("rows", "kernels", "jobs", "kernels' speed", "jobs' speed")
    return tell(
        arguments, {"cases": cases, "left_out": left_out, "tables": [table("relative to alone", columns, lines)]}, []
    )


if __name__ == "__main__":
    sys.exit(main())
