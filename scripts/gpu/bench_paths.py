"""Stores and loads by each path of the daemon: in batches, one by one, pitched; and mixed sizes.

Each path has its own daemon, whose settings allow no other, in a layout of one allocation whose layers are evenly
apart. Times are the client's; ratios are to one plain copy of as many bytes in the same rounds. `by`: how many pitched
copies the daemon counts. `mixed`: jobs of 2 MiB rows, each behind one of small rows, and
the same without; `upwards` and `downwards`: jobs of each size, one behind the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvoffloadd.client import Client
from kvoffloadd.testing.figures import p50
from scripts.gpu.bench import (
    KIB,
    MIB,
    BenchRun,
    GpuWorkload,
    KvShape,
    against_ceiling,
    await_pinned,
    cut_short,
    daemon,
    gb_per_s,
    parser,
    table,
)
from scripts.harness.gpu import Gpu

ROW_BYTES = (4 * KIB, 16 * KIB, 64 * KIB)
ALWAYS = "1GiB"
NO_RUNS = {"cuda.pitched_row_bytes": "0"}
PATHS: dict[str, dict[str, str]] = {
    "batches of 1,024": NO_RUNS,
    "pitched": {"cuda.pitched_row_bytes": ALWAYS},
    "one by one": {**NO_RUNS, "cuda.batch": "false"},
    "batches of 256": {**NO_RUNS, "cuda.batch_descriptors": "256"},
    "batches of 4,096": {**NO_RUNS, "cuda.batch_descriptors": "4096"},
}
QUICK_PATHS = 3
KINDS = ("store", "load")
LARGE, SMALL = KvShape(2 * MIB, layers=2), KvShape(4 * KIB)
SMALL_PART = 16
"""The job of small rows has so small a part of the large one's bytes."""
COUNTED = ("pitched_copies", "batch_failures")


def counters(socket: Path) -> dict[str, int]:
    """Returns the counters of the daemon's GPU."""
    with Client(socket, namespace=None, role="observer") as observer:
        devices = observer.status()["devices"]
    gpu: dict[str, Any] = next((found for name, found in devices.items() if name.startswith("cuda:")), {})
    return {name: int(gpu.get(name, 0)) for name in COUNTED}


def by_path(run: BenchRun, gpu: Gpu) -> None:
    """Every size by every path."""
    given = run.given
    names = list(PATHS)[: QUICK_PATHS if given.quick else None]
    for name in run.in_time(names, 0.7):
        with daemon(given.bytes, PATHS[name]) as socket:
            before = counters(socket)
            for row_bytes in ROW_BYTES[:1] if given.quick else ROW_BYTES:
                found = against_ceiling(gpu, socket, KvShape(row_bytes), given.bytes, given.rounds, KINDS)
                after = counters(socket)
                by = {what: after[what] - before[what] for what in COUNTED if after[what] > before[what]}
                run.done({"path": name, **found, "by": by})
                before = after


def job_s(worker: GpuWorkload, kind: str) -> float:
    """Seconds of a job of this kind."""
    return worker.store_s() if kind == "store" else worker.load_s()


def mixed(run: BenchRun, gpu: Gpu) -> None:
    """Large jobs alone, and each behind a small one."""
    given = run.given
    with daemon(given.bytes) as socket:
        large = GpuWorkload(gpu, socket, LARGE, given.bytes)
        small = GpuWorkload(gpu, socket, SMALL, max(given.bytes // SMALL_PART, SMALL.payload_bytes))
        await_pinned(socket)
        seconds: dict[tuple[str, str], list[float]] = {
            (kind, name): [] for kind in KINDS for name in ("alone", "mixed")
        }
        small.store()
        large.store()
        for name in ("alone", "mixed"):
            for _ in range(3 * given.rounds):
                for kind in KINDS:
                    if name == "mixed":
                        job_s(small, kind)
                    seconds[kind, name].append(job_s(large, kind))
        for (kind, name), taken in seconds.items():
            run.done({"mixed": f"{kind}, {name}", "gb_per_s": gb_per_s(large.bytes, taken)})
        small.close()
        large.close()


def ladder(run: BenchRun, gpu: Gpu) -> None:
    """Loads of jobs of 64 KiB to `bytes`, upwards and downwards, by one daemon."""
    given = run.given
    shape = KvShape(64 * KIB, layers=1)
    sizes = [64 * KIB]
    while sizes[-1] * 4 <= given.bytes:
        sizes.append(sizes[-1] * 4)
    with daemon(given.bytes) as socket:
        workers = [GpuWorkload(gpu, socket, shape, size) for size in sizes]
        await_pinned(socket)
        for worker in workers:
            worker.store()
        for name, order in (("upwards", workers), ("downwards", workers[::-1])):
            us = {worker.bytes: round(p50([worker.load_s() for _ in range(given.rounds)]) * 1e6) for worker in order}
            run.done({"loads": name, "us": {str(size): us[size] for size in sizes}})
        for worker in workers:
            worker.close()


def tables_of(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes tables for people to read."""
    paths, mixes, ladders = ([case for case in cases if key in case] for key in ("path", "mixed", "loads"))
    lines = [
        [f"{case['row_bytes'] // KIB} KiB", case["path"]]
        + [f"{case['gb_per_s'][kind]:.1f} ({case['ratio_to_limit'][kind]:.2f})" for kind in KINDS]
        + [case["wrong_bytes"], ", ".join(f"{count} {what}" for what, count in case["by"].items())]
        for case in sorted(paths, key=lambda case: int(case["row_bytes"]))
    ]
    found = [table("GB/s (ratio to the plain copy)", ("rows", "path", *KINDS, "wrong bytes", "by"), lines)]
    if mixes:
        lines = [[one["mixed"], one["gb_per_s"]] for one in mixes]
        found.append(table("jobs of 2 MiB rows, alone and behind small rows, GB/s", ("jobs", "GB/s"), lines))
    if ladders:
        sizes = list(ladders[0]["us"])
        columns = ("loads", *(f"{int(size) // KIB:,} KiB" for size in sizes))
        lines = [[one["loads"], *one["us"].values()] for one in ladders]
        found.append(table("loads by size of the job, microseconds", columns, lines))
    return found


def main() -> int:
    run = BenchRun(parser(__doc__ or "", "64MiB", 5), 8 * MIB)
    gpu = Gpu()
    with cut_short():
        by_path(run, gpu)
        mixed(run, gpu)
        ladder(run, gpu)
    return run.tell(tables_of(run.cases))


if __name__ == "__main__":
    sys.exit(main())
