"""Stores and loads through the daemon against memcpy of the same rows by as many threads, in one run on one machine.

Each case moves the same bytes (256 MiB by default) as one job, for one size of rows in the worker's tensors. A round
measures memcpy row by row, stores back to back (the arena is full: each store evicts), stores with a `drain` before
each, loads, and memcpy again. Times are the client's: from `store` or `load` to the end of `wait`. `ratio_to_limit` is
the median over the rounds of (memcpy's time) / (the job's time). Then another process pings the daemon while nothing is
copied, and while stores and loads are.

With `--unverified`, each load is compared with one of a second daemon, which has `memory.verify_loads = false`:
`ratio_to_unverified` is the median over the rounds of (its time) / (the load's time).
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from kvoffloadd.bench.memory import CopyCase, KvMemory, copy_worker
from kvoffloadd.bench.rounds import Samples, in_rounds
from kvoffloadd.client import SharedTensor
from kvoffloadd.model import I64Array
from kvoffloadd.testing.daemon import OwnDaemon
from kvoffloadd.testing.figures import median_ratio, p50, p99, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import private_folder
from kvoffloadd.testing.program import size
from kvoffloadd.testing.worker import WorkerProcess
from kvoffloadd.testing.workload import WAIT_S, Workload
from kvoffloadd.units import format_bytes
from scripts.bench import layouts
from scripts.harness.figures import at_least, at_most, judged, print_bounds
from scripts.harness.models import NAMES
from scripts.harness.places import HostPlace
from scripts.harness.planned import LAYOUTS, NoSuchLayoutError
from scripts.harness.program import benchmark_line, show_result

GIB = 1 << 30
REFS = (1, 16, 64)
"""Rows of a key, each in its own tensor."""
ROW_BYTES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)
LARGE_ROW_BYTES = 16 << 10
LARGE_RATIO_MIN, SMALL_RATIO_MIN = 0.85, 0.60
UNVERIFIED_RATIO_MIN = 0.90
PING_RATIO_MAX = 10.0
"""The highest ratio of another session's p99 during jobs to the one without jobs."""
LAG = ("p99_us", "max_us")
BUSY = ("stores", "loads")
KINDS = ("store", "store, drained", "load")

CASES = (
    *(CopyCase.of_rows(row_bytes, refs) for row_bytes in ROW_BYTES for refs in REFS),
    CopyCase.of_rows(ROW_BYTES[0], 1, scattered=False),
    CopyCase.of_rows(LARGE_ROW_BYTES, REFS[-1], scattered=False),
)


def layout_case(model: str, layout: str) -> CopyCase:
    """A model's KV cache in a layout, at its true sizes. Raises NoSuchLayoutError for one that the model can't have."""
    case = layouts.LayoutCase(model, layout)
    planned = case.planned

    def memory(keys: int) -> KvMemory:
        arrangement = case.arrangement(keys)
        place = HostPlace(arrangement.layouts, "kv_cache")
        return layouts.in_order(place.tensors, arrangement), arrangement.groups

    return CopyCase(
        name=f"{model}, {layout}",
        memory=memory,
        payload_bytes=sum(planned.payloads),
        row_bytes=sum(planned.payloads) // sum(planned.descriptors),
        tensors=len(planned.plan.canonical.rows),
        groups=planned.num_groups,
        slab_bytes=layouts.SLAB_BYTES,  # groups' payloads may be of several sizes, and each has its own slabs
    )


class RowMemcpy:
    """memcpy of the rows of a job by threads, in the order of block ids."""

    def __init__(self, case: CopyCase, job_bytes: int, threads: int, pool: ThreadPoolExecutor) -> None:
        rows = job_bytes // case.row_bytes
        source, target = (SharedTensor.allocate(1, job_bytes).array[0] for _ in range(2))
        for array in (source, target):
            array[:] = 1  # the kernel provides the pages now
        whole = rows * case.row_bytes
        self._source, self._target = (array[:whole].reshape(-1, case.row_bytes) for array in (source, target))
        self._shares = [share for share in np.array_split(np.arange(rows), threads) if len(share)]
        self._scattered, self._pool = case.scattered, pool
        self._rng = np.random.default_rng(1)

    def seconds(self) -> float:
        """How long the threads take."""
        rows = len(self._source)
        order = self._rng.permutation(rows) if self._scattered else np.arange(rows)
        begun = time.perf_counter()
        copies = [self._pool.submit(self._copy, order[share], slice(share[0], share[-1] + 1)) for share in self._shares]
        for copy in copies:
            copy.result()
        return time.perf_counter() - begun

    def _copy(self, rows: I64Array, to: slice) -> None:
        """One memcpy for each row, without Python's lock."""
        np.take(self._source, rows, axis=0, out=self._target[to], mode="clip")


def measure_round(work: Workload, unverified: Workload | None, memcpy: RowMemcpy, jobs: int) -> dict[str, float]:
    """Mean seconds of a job of each kind, since jobs back to back are one stretch of work; the daemon's own times under
    "daemon ...". memcpy is measured before and behind.
    """
    work.drain()
    copies = [memcpy.seconds() for _ in range(jobs)]
    found = means("store", [work.store() for _ in range(jobs)])
    found |= means("store, drained", [drained(work) for _ in range(jobs)])
    work.drain()
    found |= means("load", [work.load() for _ in range(jobs)])
    found["memcpy"] = mean([*copies, *(memcpy.seconds() for _ in range(jobs))])
    if unverified is not None:
        work.drain()
        verified, others = zip(*((work.load(), unverified.load()) for _ in range(jobs)), strict=True)
        found |= means("load beside unverified", verified) | means("unverified", others)
    return found


def drained(work: Workload) -> tuple[float, float]:
    """A store into a daemon at rest."""
    work.drain()
    return work.store()


def means(what: str, seconds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """`seconds`: the client's and the daemon's, of each job."""
    names = what, f"daemon {what}"
    return {name: mean(values) for name, values in zip(names, zip(*seconds, strict=True), strict=True)}


# --- lag: how long others wait meanwhile ---------------------------------------------------------------


def measure_lag(work: Workload, daemon: OwnDaemon, jobs: int) -> dict[str, Any]:
    """Round trips of another session, microseconds: idle, during stores, during loads."""
    log = daemon.log_path.with_name("ping.log")
    pinger = WorkerProcess("scripts.bench.ping", {"socket": str(daemon.socket)}, log)

    def pings() -> list[float]:
        pinger.ask({})
        seconds: list[float] = pinger.answer(WAIT_S)["seconds"]
        return seconds

    def during(act: Callable[[], object]) -> dict[str, float]:
        pings()
        act()
        seconds = pings()
        figures = {"p50_us": p50(seconds), "p99_us": p99(seconds), "max_us": max(seconds)}
        return {"pings": len(seconds), **{name: round(value * 1e6, 1) for name, value in figures.items()}}

    pings()  # it has started
    lag = {
        "idle": during(lambda: time.sleep(0.5)),
        "stores": during(lambda: [work.store() for _ in range(jobs)]),
        "loads": during(lambda: [work.load() for _ in range(jobs)]),
    }
    pinger.end()
    return lag


# --- running, showing ----------------------------------------------------------------------------------


def run_case(case: CopyCase, given: argparse.Namespace) -> dict[str, Any]:
    """Measures one case with a separate daemon."""
    with contextlib.ExitStack() as stack:

        def begin(**more: str) -> tuple[OwnDaemon, Workload]:
            folder = Path(stack.enter_context(private_folder()))
            settings = {"copy.threads": str(given.threads), **more}
            return stack.enter_context(copy_worker(folder, case, given.bytes, settings))

        daemon, work = begin()
        unverified = begin(**{"memory.verify_loads": "false"})[1] if given.unverified else None
        memcpy = RowMemcpy(case, work.bytes, given.threads, stack.enter_context(ThreadPoolExecutor(given.threads)))
        samples = in_rounds(given.rounds, lambda: measure_round(work, unverified, memcpy, given.jobs))
        lag = measure_lag(work, daemon, 2 * given.jobs)
    return {
        "name": case.name,
        "row_bytes": case.row_bytes,
        "tensors": case.tensors,
        "contiguous": not case.scattered,
        "job_bytes": work.bytes,
        "ratio_to_limit": {what: ratio(samples, "memcpy", what) for what in KINDS},
        "daemon_ratio": {what: ratio(samples, "memcpy", f"daemon {what}") for what in KINDS},
        "gib_per_s": {what: round(work.bytes / GIB / p50(seconds), 2) for what, seconds in samples.items()},
        "ping": lag,
        **({"ratio_to_unverified": ratio(samples, "unverified", "load beside unverified")} if given.unverified else {}),
    }


def ratio(samples: Samples[float], limit: str, what: str) -> float:
    """The limit's time by that of what is measured."""
    return round(median_ratio(samples[limit], samples[what]), 3)


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The cases and the bounds; `ratio_to_limit` is the least of all cases."""
    bounds = []
    for label, minimum, subset in (
        ("rows >= 16 KiB", LARGE_RATIO_MIN, [case for case in cases if case["row_bytes"] >= LARGE_ROW_BYTES]),
        ("rows of 4 KiB", SMALL_RATIO_MIN, [case for case in cases if case["row_bytes"] < LARGE_ROW_BYTES]),
    ):
        for what in ("store", "load"):
            if subset:
                least = min(case["ratio_to_limit"][what] for case in subset)
                bounds.append(at_least(f"{what}, {label}: least ratio to memcpy", least, minimum))
    ratio_to_limit = min(bound.value for bound in bounds)
    if unverified := [case["ratio_to_unverified"] for case in cases if "ratio_to_unverified" in case]:
        what = "load: least ratio to one that is not verified"
        bounds.append(at_least(what, min(unverified), UNVERIFIED_RATIO_MIN))
    most = max(case["ping"][what]["p99_us"] / case["ping"]["idle"]["p99_us"] for case in cases for what in BUSY)
    bounds.append(at_most("ping beside jobs, p99: greatest ratio to the idle one", most, PING_RATIO_MAX))
    return judged({"cases": cases, "ratio_to_limit": ratio_to_limit}, bounds)


def show(result: dict[str, Any]) -> None:
    print_grid(
        f"copies through the daemon: ratio to memcpy of {format_bytes(result['cases'][0]['job_bytes'])} (GiB/s)",
        ("rows x tensors", *KINDS, "memcpy"),
        (
            (
                case["name"],
                *(f"{case['ratio_to_limit'][kind]:.2f} ({case['gib_per_s'][kind]:.1f})" for kind in KINDS),
                f"{case['gib_per_s']['memcpy']:.1f}",
            )
            for case in result["cases"]
        ),
    )
    if any("ratio_to_unverified" in case for case in result["cases"]):
        print_grid(
            "\nloads that verify what they copy: ratio to loads that do not",
            ("rows x tensors", "load"),
            ((case["name"], f"{case['ratio_to_unverified']:.2f}") for case in result["cases"]),
        )
    print_grid(
        "\nround trip of another session's ping meanwhile, p99 / longest, ms",
        ("rows x tensors", "idle", "stores", "loads"),
        (
            (case["name"], *(" / ".join(f"{lag[name] / 1e3:.1f}" for name in LAG) for lag in case["ping"].values()))
            for case in result["cases"]
        ),
    )
    print_bounds(result)


def add_layout(parser: argparse.ArgumentParser) -> None:
    """`--layout` and `--model`."""
    add = parser.add_argument
    add("--layout", choices=LAYOUTS, help="a model's KV cache in this layout, in place of rows")
    add("--model", choices=NAMES, default=layouts.MODELS[0], metavar="NAME",
        help="whose, at its true sizes (default: %(default)s)")  # fmt: skip


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--bytes", type=size, default="256MiB", help="of one job (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each kind in a round (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="copy_threads (default: %(default)s)")
    parser.add_argument("--rows", type=size, nargs="*", help="rows of these bytes only")
    parser.add_argument("--unverified", action="store_true", help="also loads of a second daemon that verifies none")
    add_layout(parser)
    arguments = parser.parse_args()
    cases: list[CopyCase] = [case for case in CASES if not arguments.rows or case.row_bytes in arguments.rows]
    try:
        if arguments.layout:
            cases = [layout_case(arguments.model, arguments.layout)]
    except NoSuchLayoutError as error:
        parser.error(f"--layout: {error}")
    if not cases:
        parser.error(f"--rows: there are cases for {', '.join(map(format_bytes, ROW_BYTES))}")
    if min(arguments.rounds, arguments.jobs, arguments.threads, arguments.bytes) < 1:
        parser.error("--bytes, --rounds, --jobs and --threads are at least 1")
    results = []
    with ProgressBar("bench_copy", len(cases)) as live:
        for number, case in enumerate(cases):
            live.show(number, case.name)
            results.append(run_case(case, arguments))
    return show_result(summary(results), arguments, show)
