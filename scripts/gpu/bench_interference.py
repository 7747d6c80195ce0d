"""What copies take from an engine's kernels, and what kernels take from copies.

Kernels run in a separate process: bfloat16 matrix products of 8,192 (`matmul`), copies within the GPU's memory
(`memory`). Meanwhile the daemon stores, loads, or both, job after job, by each path of bench_paths.py. Speeds are
relative to those alone, by round. Without torch there is one kind, which fills memory by the driver (`fill`).
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvoffloadd.testing.figures import median_ratio
from kvoffloadd.testing.process import private_folder
from kvoffloadd.testing.worker import WorkerProcess
from scripts.gpu.bench import (
    KIB,
    BenchRun,
    GpuWorkload,
    KvShape,
    await_pinned,
    cut_short,
    daemon,
    gb_per_s,
    parser,
    table,
)
from scripts.gpu.bench_paths import PATHS
from scripts.harness.gpu import Gpu, software_driver

START_S, ANSWER_S = 90.0, 30.0
SLICE_S, QUICK_SLICE_S = 0.25, 0.1
CASES = (
    (4 * KIB, "batches of 1,024"), (4 * KIB, "pitched"), (64 * KIB, "batches of 1,024"),
)  # fmt: skip


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


def measure(
    kernels: WorkerProcess, kinds: Sequence[str], worker: GpuWorkload, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Every kind of kernels with every kind of jobs: relative speeds, medians over the rounds."""
    jobs = {"store": worker.store_s, "load": worker.load_s, "both": worker.both_s}
    found = []
    for kind in kinds:
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
                    "jobs_gb_per_s_alone": gb_per_s(worker.bytes, [1 / per_s for per_s in taken["free"]]),
                }
            )
    return found


def main() -> int:
    run = BenchRun(parser(__doc__ or "", "256MiB", 3))
    given = run.given
    seconds = QUICK_SLICE_S if given.quick else SLICE_S
    gpu = Gpu()
    with cut_short(), private_folder() as folder:
        options = {"cpu": software_driver() is not None}
        kernels = WorkerProcess("scripts.gpu.kernels", options, Path(folder) / "kernels.log")
        kinds = kernels.answer(START_S)["kinds"]
        for row_bytes, path in run.in_time(CASES[:2] if given.quick else CASES):
            with daemon(given.bytes, PATHS[path]) as socket:
                worker = GpuWorkload(gpu, socket, KvShape(row_bytes), given.bytes)
                await_pinned(socket)
                worker.store()
                for one in measure(kernels, kinds, worker, given.rounds, seconds):
                    run.done({"rows": f"{row_bytes // KIB} KiB", "path": path, **one})
                worker.close()
        kernels.end()
    columns = ("rows", "path", "kernels", "jobs", "kernels' speed", "jobs' speed", "jobs alone, GB/s")
    return run.tell([table("relative to alone", columns, [list(one.values()) for one in run.cases])])


if __name__ == "__main__":
    sys.exit(main())
