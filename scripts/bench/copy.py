"""Stores and loads through the daemon, beside memcpy of the same rows by as many threads, in one run on one machine.

Each case moves the same bytes (256 MiB by default) as one job, for one size of rows in the worker's tensors. A round
measures memcpy row by row, stores back to back (the arena is full: each store evicts), stores with a `drain` before
each, loads, and memcpy again. Times are the client's: from `store` or `load` to the end of `wait`. `ratio_to_limit` is
the median over the rounds of (memcpy's time) / (the job's time). Then another process pings the daemon while nothing is
copied, and while stores and loads are.

With `--unverified`, each load is beside one of a second daemon, which has `memory.verify_loads = false`:
`ratio_to_unverified` is the median over the rounds of (its time) / (the load's time).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import numpy as np

from kvoffloadd.client import Client, Group, NamespaceSpec, SharedTensor
from kvoffloadd.client.memory.tensor import CanonicalTensor
from kvoffloadd.model import I64Array
from kvoffloadd.trial.figures import KEY_BYTES, median_ratio, p50, p99, print_grid
from kvoffloadd.trial.output import Live
from kvoffloadd.trial.process import private_folder
from kvoffloadd.trial.program import size
from kvoffloadd.trial.worker import WorkerProcess
from kvoffloadd.trial.workload import WAIT_S, Workload
from kvoffloadd.units import format_bytes
from scripts.bench import layouts
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_least, at_most, judged, print_bounds
from scripts.harness.models import NAMES, named
from scripts.harness.places import HostPlace
from scripts.harness.planned import LAYOUTS, NoSuchLayoutError, planned_geometries
from scripts.harness.program import benchmark_line, show_result

GIB = 1 << 30
REFS = (1, 16, 64)
"""Rows of a key, each in a tensor of its own."""
ROW_BYTES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)
LARGE_ROW_BYTES = 16 << 10
LARGE_RATIO_MIN, SMALL_RATIO_MIN = 0.85, 0.60
UNVERIFIED_RATIO_MIN = 0.90
PING_RATIO_MAX = 10.0
"""Of another session's p99 beside jobs, to the one without."""
SETS = 3
"""How often the bytes of one job fit into the arena."""
LAG = ("p99_us", "max_us")
BUSY = ("stores", "loads")


@dataclass(frozen=True, slots=True)
class Case:
    """`tensors` rows of `row_bytes` for each key; block ids at random, or one after the other."""

    row_bytes: int
    tensors: int
    contiguous: bool
    groups: ClassVar[int] = 1

    @property
    def name(self) -> str:
        ids = ", contiguous" if self.contiguous else ""
        return f"{format_bytes(self.row_bytes)} x {self.tensors}{ids}"

    def keys_in(self, job_bytes: int) -> int:
        """Keys of a job of about that many bytes."""
        return max(1, job_bytes // (self.row_bytes * self.tensors))

    @property
    def slab_bytes(self) -> int:
        """As much as a job has: a slab takes whole slots, and nothing is left over."""
        return sys.maxsize

    def job_bytes(self, job_bytes: int) -> int:
        """What such a job moves."""
        return self.keys_in(job_bytes) * self.row_bytes * self.tensors

    def memory(self, keys: int) -> tuple[list[CanonicalTensor], Sequence[Group]]:
        """Tensors for so many keys, of one group."""
        return [SharedTensor.allocate(keys, self.row_bytes) for _ in range(self.tensors)], ()


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A model's KV cache in a layout, at its true sizes; block ids at random."""

    planned: layouts.Case

    @classmethod
    def of(cls, model: str, layout: str) -> LayoutCase:
        """Raises NoSuchLayoutError for one that the model can't have."""
        planned_geometries(model, named(model), 0, layouts=(layout,))
        return cls(layouts.Case(model, layout))

    @property
    def name(self) -> str:
        return f"{self.planned.model}, {self.planned.layout}"

    @property
    def slab_bytes(self) -> int:
        """Small ones: groups' payloads may be of several sizes, and each has slabs of its own."""
        return layouts.SLAB_BYTES

    @property
    def groups(self) -> int:
        return self.planned.planned.num_groups

    @property
    def tensors(self) -> int:
        return len(self.planned.planned.plan.canonical.rows)

    @property
    def contiguous(self) -> bool:
        return False

    @property
    def row_bytes(self) -> int:
        """Of a descriptor, the mean."""
        planned = self.planned.planned
        return sum(planned.payloads) // sum(planned.descriptors)

    def keys_in(self, job_bytes: int) -> int:
        """Keys of each group in a job of about that many bytes."""
        return self.planned.keys_in(job_bytes)

    def job_bytes(self, job_bytes: int) -> int:
        """What such a job moves."""
        return self.keys_in(job_bytes) * sum(self.planned.planned.payloads)

    def memory(self, keys: int) -> tuple[list[CanonicalTensor], Sequence[Group]]:
        """For so many keys of each group."""
        arrangement = self.planned.arrangement(keys)
        place = HostPlace(arrangement.layouts, "kv_cache")
        return layouts.in_order(place.tensors, arrangement), arrangement.groups


CASES = (
    *(Case(size, refs, False) for size in ROW_BYTES for refs in REFS),
    Case(ROW_BYTES[0], 1, True),
    Case(LARGE_ROW_BYTES, REFS[-1], True),
)


class Bench(Workload):
    """A worker with a KV cache of as many blocks as a job has keys, and memory for memcpy."""

    def __init__(self, client: Client, case: Case | LayoutCase, job_bytes: int, threads: int) -> None:
        keys = case.keys_in(job_bytes)
        tensors, groups = case.memory(keys)
        super().__init__(client, tensors, keys, scattered=not case.contiguous, groups=groups)
        self.threads = threads
        source, target = (SharedTensor.allocate(1, self.bytes).array[0] for _ in range(2))
        for array in (source, target):
            array[:] = 1  # the kernel provides the pages now
        whole = self.bytes // case.row_bytes * case.row_bytes
        self._source, self._target = (array[:whole].reshape(-1, case.row_bytes) for array in (source, target))

    def memcpy(self, pool: ThreadPoolExecutor) -> float:
        """Seconds of the threads for the bytes of a job, row by row, in the order of block ids."""
        rows = len(self._source)
        order = self._rng.permutation(rows) if self.scattered else np.arange(rows)
        shares = np.array_split(np.arange(rows), self.threads)
        begun = time.perf_counter()
        copies = [
            pool.submit(self._copy, order[share], slice(share[0], share[-1] + 1)) for share in shares if len(share)
        ]
        for copy in copies:
            copy.result()
        return time.perf_counter() - begun

    def _copy(self, rows: I64Array, to: slice) -> None:
        """One memcpy for each row, without Python's lock."""
        np.take(self._source, rows, axis=0, out=self._target[to], mode="clip")


Samples = dict[str, list[float]]
"""What was measured -> mean seconds of one job, by round; the daemon's own under "daemon ..."."""


def measure(bench: Bench, unverified: Bench | None, rounds: int, jobs: int) -> Samples:
    """Rounds of `jobs` jobs of each kind; the first warms up, after every page of the arena has been written."""
    samples: Samples = {}
    for each in filter(None, (bench, unverified)):
        for _ in range(SETS + 1):
            each.store()
        each.drain()
    with ThreadPoolExecutor(bench.threads) as pool:
        for number in range(-1, rounds):
            kept = samples if number >= 0 else {}
            measure_round(bench, kept, jobs, pool)
            if unverified is not None:
                measure_pairs(bench, unverified, kept, jobs)
    return samples


def measure_pairs(bench: Bench, unverified: Bench, kept: Samples, jobs: int) -> None:
    """Loads of both daemons by turns."""
    bench.drain()
    pairs = [(bench.load(), unverified.load()) for _ in range(jobs)]
    for what, times in zip(("load beside unverified", "unverified"), zip(*pairs, strict=True), strict=True):
        note(kept, what, list(times))


def measure_round(bench: Bench, kept: Samples, jobs: int, pool: ThreadPoolExecutor) -> None:
    """Of all kinds, memcpy before and behind."""
    bench.drain()
    memcpy = [bench.memcpy(pool) for _ in range(jobs)]
    note(kept, "store", [bench.store() for _ in range(jobs)])
    note(kept, "store, drained", [drained(bench) for _ in range(jobs)])
    bench.drain()
    note(kept, "load", [bench.load() for _ in range(jobs)])
    memcpy += [bench.memcpy(pool) for _ in range(jobs)]
    kept.setdefault("memcpy", []).append(mean(memcpy))


def drained(bench: Bench) -> tuple[float, float]:
    """A store into a daemon at rest."""
    bench.drain()
    return bench.store()


def note(samples: Samples, what: str, seconds: list[tuple[float, float]]) -> None:
    """Means, since jobs back to back are one stretch of work."""
    for name, values in zip((what, f"daemon {what}"), zip(*seconds, strict=True), strict=True):
        samples.setdefault(name, []).append(mean(values))


# --- lag: how long others wait meanwhile ---------------------------------------------------------------


def measure_lag(bench: Bench, daemon: Daemon, log: Path, jobs: int) -> dict[str, Any]:
    """Round trips of another session, microseconds: idle, during stores, during loads."""
    pinger = WorkerProcess("scripts.bench.ping", {"socket": str(daemon.socket)}, log)

    def told() -> list[float]:
        pinger.ask({})
        seconds: list[float] = pinger.answer(WAIT_S)["seconds"]
        return seconds

    def during(work: Callable[[], object]) -> dict[str, float]:
        told()
        work()
        seconds = told()
        figures = {"p50_us": p50(seconds), "p99_us": p99(seconds), "max_us": max(seconds)}
        return {"pings": len(seconds), **{name: round(value * 1e6, 1) for name, value in figures.items()}}

    told()  # it has started
    lag = {
        "idle": during(lambda: time.sleep(0.5)),
        "stores": during(lambda: [bench.store() for _ in range(jobs)]),
        "loads": during(lambda: [bench.load() for _ in range(jobs)]),
    }
    pinger.end()
    return lag


# --- running, showing ----------------------------------------------------------------------------------


def run_case(case: Case | LayoutCase, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case with a daemon of its own."""
    job_bytes = case.job_bytes(arguments.bytes)
    settings = {
        "memory.slab_bytes": str(min(case.slab_bytes, job_bytes)),
        "copy.threads": str(arguments.threads),
        "limits.keys_per_request": str(case.groups * case.keys_in(arguments.bytes)),
    }
    namespace = NamespaceSpec(model="bench_copy", key_bytes=KEY_BYTES)
    with contextlib.ExitStack() as stack:

        def begin(more: dict[str, str]) -> tuple[Bench, Daemon, Path]:
            folder = Path(stack.enter_context(private_folder()))
            daemon = stack.enter_context(Daemon(folder, SETS * job_bytes, settings | more))
            client = stack.enter_context(Client(daemon.socket, namespace=namespace, deadline_s=WAIT_S))
            return Bench(client, case, arguments.bytes, arguments.threads), daemon, folder

        bench, daemon, folder = begin({})
        unverified = begin({"memory.verify_loads": "false"})[0] if arguments.unverified else None
        samples = measure(bench, unverified, arguments.rounds, arguments.jobs)
        lag = measure_lag(bench, daemon, folder / "ping.log", 2 * arguments.jobs)
    return {
        "name": case.name,
        "row_bytes": case.row_bytes,
        "tensors": case.tensors,
        "contiguous": case.contiguous,
        "job_bytes": job_bytes,
        "ratio_to_limit": {what: ratio(samples, what) for what in ("store", "store, drained", "load")},
        "daemon_ratio": {what: ratio(samples, f"daemon {what}") for what in ("store", "store, drained", "load")},
        "gib_per_s": {what: round(job_bytes / GIB / p50(seconds), 2) for what, seconds in samples.items()},
        "ping": lag,
        **({"ratio_to_unverified": ratio_to_unverified(samples)} if arguments.unverified else {}),
    }


def ratio(samples: Samples, what: str) -> float:
    """To memcpy."""
    return round(median_ratio(samples["memcpy"], samples[what]), 3)


def ratio_to_unverified(samples: Samples) -> float:
    """Of a load."""
    return round(median_ratio(samples["unverified"], samples["load beside unverified"]), 3)


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The cases and the bounds; `ratio_to_limit` is the least of all cases."""
    bounds = []
    for label, minimum, mine in (
        ("rows >= 16 KiB", LARGE_RATIO_MIN, [case for case in cases if case["row_bytes"] >= LARGE_ROW_BYTES]),
        ("rows of 4 KiB", SMALL_RATIO_MIN, [case for case in cases if case["row_bytes"] < LARGE_ROW_BYTES]),
    ):
        for what in ("store", "load"):
            if mine:
                least = min(case["ratio_to_limit"][what] for case in mine)
                bounds.append(at_least(f"{what}, {label}: least ratio to memcpy", least, minimum))
    ratio_to_limit = min(bound.value for bound in bounds)
    if unverified := [case["ratio_to_unverified"] for case in cases if "ratio_to_unverified" in case]:
        what = "load: least ratio to one that is not verified"
        bounds.append(at_least(what, min(unverified), UNVERIFIED_RATIO_MIN))
    most = max(case["ping"][what]["p99_us"] / case["ping"]["idle"]["p99_us"] for case in cases for what in BUSY)
    bounds.append(at_most("ping beside jobs, p99: greatest ratio to the idle one", most, PING_RATIO_MAX))
    return judged({"cases": cases, "ratio_to_limit": ratio_to_limit}, bounds)


def show(result: dict[str, Any]) -> None:
    kinds = ("store", "store, drained", "load")
    print_grid(
        f"copies through the daemon: ratio to memcpy of {format_bytes(result['cases'][0]['job_bytes'])} (GiB/s)",
        ("rows x tensors", *kinds, "memcpy"),
        (
            (
                case["name"],
                *(f"{case['ratio_to_limit'][kind]:.2f} ({case['gib_per_s'][kind]:.1f})" for kind in kinds),
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
    rows = [case for case in CASES if not arguments.rows or case.row_bytes in arguments.rows]
    wanted: Sequence[Case | LayoutCase]
    try:
        wanted = [LayoutCase.of(arguments.model, arguments.layout)] if arguments.layout else rows
    except NoSuchLayoutError as error:
        parser.error(f"--layout: {error}")
    if not wanted:
        parser.error(f"--rows: there are cases for {', '.join(map(format_bytes, ROW_BYTES))}")
    if min(arguments.rounds, arguments.jobs, arguments.threads, arguments.bytes) < 1:
        parser.error("--bytes, --rounds, --jobs and --threads are at least 1")
    results = []
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(Live("bench_copy", len(wanted)))
        for number, case in enumerate(wanted):
            live.show(number, case.name)
            results.append(run_case(case, arguments))
    result = summary(results)
    return show_result(result, arguments, show)
