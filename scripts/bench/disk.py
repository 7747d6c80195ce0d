"""Demotion to disk and promotion from disk against fio, in one run on one machine.

A round, for each payload size: fio writes, a worker stores as many bytes in new keys and the daemon demotes them, fio
reads, the daemon is restarted and a `prefetch` brings all of them back. Both sides use O_DIRECT on files of the same
file system that are preallocated and written over in each round, the same size of one operation's payload, and as many
operations at once (`disk.write_threads`, `disk.read_threads`). The daemon also makes and checks checksums, syncs each
segment when it is full, and keeps its catalog.

Demote: bytes written between two looks at the daemon's counters, by the time between them: the last when all is
written, the first when the stores (memory to memory) have ended, or, where then less than 30 % are left to write, when
10 % are written. Promote: from the request to `ready`.
`ratio_to_limit` is the median over the rounds of the daemon's rate divided by fio's in the same round. Lag: how late
the daemon's event loop came to a beat of 5 ms, at worst (`status`, "loop"), and the same of an idle process at the same
time, which shows what the machine itself adds.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from kvoffloadd.bench.disk import DiskBench, disk_bench
from kvoffloadd.bench.rounds import Show, in_rounds
from kvoffloadd.linux.mounts import file_system_of
from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.figures import median_ratio, p50, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import DaemonError, end, module, private_folder, spawn
from kvoffloadd.testing.program import size
from kvoffloadd.testing.wait import within
from kvoffloadd.units import format_bytes, parse_bytes
from scripts.bench.fio import Fio, has_fio
from scripts.harness.figures import Bound, at_least, at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result

MIB = 1 << 20
PAYLOADS = (64 << 10, MIB, 2 * MIB, 8 * MIB)
BOUND_FROM_BYTES = MIB
RATIO_MIN, LAG_MAX_MS = 0.95, 20.0
KEYS_PER_JOB = 256
WARM_UP = 2
WAIT_S = 120.0
BEAT_S = 0.005
BEGUN, LEFT = 0.1, 0.3
"""Share of the bytes that is written before the clock starts, and that must be left when the stores have ended."""

WHATS = ("demote", "promote")


def demote(bench: DiskBench, noise_log: Path) -> dict[str, float]:
    """Store new keys, wait until they are on disk: bytes per second, and lags in ms."""
    await_rest(bench)
    noise = Noise(noise_log)
    before = bench.demoted_bytes()
    started = (time.perf_counter(), before)
    jobs = [bench.work.begin_store() for _ in range(bench.jobs)]
    begun = bench.look(before + BEGUN * bench.bytes)
    for job in jobs:
        bench.work.finish(job)
    stored = bench.look(before)
    last = bench.look(before + bench.bytes)
    first = stored if stored[1] - before <= (1 - LEFT) * bench.bytes else begun
    if first[1] == last[1]:  # too little to be seen under way
        first = started
    return {"bytes_per_s": (last[1] - first[1]) / (last[0] - first[0]), **lags(bench, noise)}


def promote(bench: DiskBench, noise_log: Path) -> dict[str, float]:
    """Bring the keys that were demoted last back into the memory of a daemon that was started anew."""
    await_rest(bench)
    noise = Noise(noise_log)
    keys = bench.work.last_keys(bench.jobs)
    begun = time.perf_counter()
    found = bench.client.wait_ready(bench.client.prefetch({0: keys}), WAIT_S)
    seconds = time.perf_counter() - begun
    if not (found.states[0] == 1).all():
        raise SystemExit(f"{int((found.states[0] != 1).sum())} of {len(keys)} keys did not come back")
    return {"bytes_per_s": bench.bytes / seconds, **lags(bench, noise)}


def await_rest(bench: DiskBench) -> None:
    """A daemon that was started anew, and has forgotten the start's lag."""
    bench.restart()
    within(lambda: bench.daemon.status()["loop"]["recent_lag_s"] <= 2 * BEAT_S, WAIT_S, every_s=0.5)


def lags(bench: DiskBench, noise: Noise) -> dict[str, float]:
    return {"lag_ms": bench.daemon.status()["loop"]["recent_lag_s"] * 1e3, "noise_ms": noise.end()}


class Noise:
    """An idle process that beats as the daemon's loop does."""

    def __init__(self, log: Path) -> None:
        self._child = spawn(module("scripts.bench.disk", "--beat"), log, stdout=subprocess.PIPE)

    def end(self) -> float:
        """Its worst delay, ms."""
        end(self._child, 15, 5.0)
        output = self._child.stdout.read() if self._child.stdout else b""
        return float(output or 0)


async def beat() -> None:
    """Beats until SIGTERM; then prints the worst delay, ms."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(15, stop.set)
    worst = 0.0
    while not stop.is_set():
        due = loop.time() + BEAT_S
        await asyncio.sleep(BEAT_S)
        worst = max(worst, loop.time() - due)
    print(f"{worst * 1e3:.3f}", flush=True)


def run_case(payload_bytes: int, given: argparse.Namespace, show: Show) -> dict[str, Any]:
    """All rounds of one payload size; the first WARM_UP are not counted: files are written for the first time."""
    count = max(1, given.bytes // payload_bytes)
    keys = max(1, min(count, KEYS_PER_JOB, 256 * MIB // payload_bytes))
    jobs = count // keys
    settings = {
        "disk.rewrite_hot": "false",  # what comes back for the second time would be written again
        "disk.read_threads": str(given.read_threads),
        "disk.write_threads": str(given.write_threads),
        "memory.slab_bytes": str(max(64 * MIB, payload_bytes)),  # one that a payload does not divide leaves slots out
    }
    capacity_bytes = 2 * jobs * keys * payload_bytes + 768 * MIB
    with private_folder() as name, disk_folder(given.path) as place:
        folder, root = Path(name), Path(place) / "root"
        with disk_bench(folder, root, payload_bytes, keys, jobs, capacity_bytes, settings) as bench:
            fio = Fio(Path(place) / "fio", bench.bytes, payload_bytes) if has_fio() else None

            def measure() -> dict[str, float]:
                found = {}
                for what, run, direction, threads in (
                    ("demote", demote, "write", given.write_threads),
                    ("promote", promote, "read", given.read_threads),
                ):
                    if fio is not None:
                        found[f"fio {direction}"] = fio.bytes_per_s(direction, threads)
                    found |= {f"{what} {figure}": value for figure, value in run(bench, folder / "noise.log").items()}
                return found

            samples = in_rounds(given.rounds, measure, show, warm_up=WARM_UP)
    case: dict[str, Any] = {"payload_bytes": payload_bytes, "bytes": bench.bytes}
    for what, direction in (("demote", "write"), ("promote", "read")):
        ours = samples[f"{what} bytes_per_s"]
        limit = samples.get(f"fio {direction}")
        case[what] = {
            "mb_per_s": round(p50(ours) / 1e6, 1),
            "fio_mb_per_s": round(p50(limit) / 1e6, 1) if limit else None,
            "ratio_to_limit": round(median_ratio(ours, limit), 3) if limit else None,
            "lag_ms": round(p50(samples[f"{what} lag_ms"]), 1),
            "lag_worst_ms": round(max(samples[f"{what} lag_ms"]), 1),
            "noise_ms": round(p50(samples[f"{what} noise_ms"]), 1),
            "noise_worst_ms": round(max(samples[f"{what} noise_ms"]), 1),
        }
    return case


def summary(cases: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """The cases and the bounds; `ratio_to_limit` is the least of the payloads that a bound is for, None without fio."""
    bounds: list[Bound] = []
    large = [case for case in cases if case["payload_bytes"] >= BOUND_FROM_BYTES]
    for what in WHATS:
        ratios = [case[what]["ratio_to_limit"] for case in large if case[what]["ratio_to_limit"] is not None]
        if ratios:
            bounds.append(at_least(f"{what}, payloads >= 1 MiB: least ratio to fio", min(ratios), RATIO_MIN))
    lag = max(case[what]["lag_ms"] for case in cases for what in WHATS)
    bounds.append(at_most("event loop's worst delay in a round, median, ms", lag, LAG_MAX_MS))
    ratios = [bound.value for bound in bounds if bound.kind == ">="]
    result = {"file_system": where, "cases": cases, "ratio_to_limit": min(ratios, default=None)}
    return judged(result, bounds)


def show(result: dict[str, Any]) -> None:
    if not has_fio():
        print("fio is not installed (Debian: apt install fio): no ratios, no bounds on speed\n")
    print_grid(
        f"demotion and promotion on {result['file_system'] or 'this file system'}, MB/s (fio), ratio",
        ("payload", "demote", "", "promote", ""),
        (
            (format_bytes(case["payload_bytes"]), *(cell for what in WHATS for cell in _speed(case[what])))
            for case in result["cases"]
        ),
    )
    print_grid(
        "\nworst delay of the daemon's event loop (of an idle process beside it), median of rounds, ms",
        ("payload", *WHATS),
        (
            (
                format_bytes(case["payload_bytes"]),
                *(f"{case[what]['lag_ms']:.0f} ({case[what]['noise_ms']:.0f})" for what in WHATS),
            )
            for case in result["cases"]
        ),
    )
    print_bounds(result)


def _speed(figures: dict[str, Any]) -> tuple[str, str]:
    limit, ratio = figures["fio_mb_per_s"], figures["ratio_to_limit"]
    return f"{figures['mb_per_s']:,.0f} ({f'{limit:,.0f}' if limit else '-'})", f"{ratio:.2f}" if ratio else "-"


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--bytes", type=size, default="1GiB", help="of one round (default: %(default)s)")
    parser.add_argument("--payloads", type=_payloads, default=PAYLOADS, help="comma separated (default: 64KiB to 8MiB)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--read-threads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--write-threads", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--path", type=Path, help="a folder on the disk to measure (default: /var/tmp)")
    parser.add_argument("--beat", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.beat:
        asyncio.run(beat())
        return 0
    if arguments.rounds < 1 or min(arguments.read_threads, arguments.write_threads) < 1:
        parser.error("--rounds and the threads must be at least 1")
    cases: list[dict[str, Any]] = []
    with ProgressBar("bench_disk", len(arguments.payloads)) as live:
        for number, payload_bytes in enumerate(arguments.payloads):
            try:
                cases.append(run_case(payload_bytes, arguments, partial(_show, live, number, payload_bytes)))
            except DaemonError as error:
                raise SystemExit(f"bench_disk: {error}") from None
    result = summary(cases, file_system_of(arguments.path or Path("/var/tmp")))
    return show_result(result, arguments, show)


def _show(live: ProgressBar, number: int, payload_bytes: int, done: float, text: str) -> None:
    live.show(number + done, f"{format_bytes(payload_bytes)}: {text}")


def _payloads(text: str) -> tuple[int, ...]:
    sizes = tuple(parse_bytes(one) for one in text.split(","))
    if any(size < 1 for size in sizes):
        raise argparse.ArgumentTypeError("payloads need at least a byte")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
