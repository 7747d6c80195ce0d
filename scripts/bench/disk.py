"""Demotion to disk and promotion from disk, beside fio, in one run on one machine.

A round, for each payload size: fio writes, a worker stores as many bytes in new keys and the daemon demotes them, fio
reads, the daemon is restarted and a `prefetch` brings all of them back. Both sides use O_DIRECT on files of the same
file system that are preallocated and written over in each round, the same size of one operation's payload, and as many
operations at once (`disk.write_threads`, `disk.read_threads`). The daemon also makes and checks checksums, syncs each
segment when it is full, and keeps its catalog.

Demote: bytes written between two looks at the daemon's counters, by the time between them: the last when all is
written, the first when the stores (memory to memory) have ended, or, where then less than 30 % are left to write, when
10 % are written. Promote: from the request to `ready`.
`ratio_to_limit` is the median over the rounds of ours by fio's of the same round. Lag: how late the daemon's event loop
came to a beat of 5 ms, at worst (`status`, "loop"), and the same of an idle process beside it, which tells what the
machine itself adds.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Outcome, Ref, Registration, SharedTensor
from kvoffloadd.trial.disk import disk_folder, file_system
from kvoffloadd.trial.figures import KEY_BYTES, keys_of, median_ratio, p50, print_grid
from kvoffloadd.trial.output import Live
from kvoffloadd.trial.process import end, module, private_folder, spawn, status_bytes
from kvoffloadd.trial.program import size
from kvoffloadd.trial.wait import within
from kvoffloadd.units import format_bytes, parse_bytes
from scripts.bench.fio import Fio, has_fio
from scripts.harness.daemon import Daemon
from scripts.harness.figures import Bound, at_least, at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result

MIB = 1 << 20
PAYLOADS = (64 << 10, MIB, 2 * MIB, 8 * MIB)
BOUND_FROM_BYTES = MIB
RATIO_MIN, LAG_MAX_MS = 0.95, 20.0
KEYS_PER_JOB = 256
WARM_UP = 2
WAIT_S = 120.0
LOOK_EVERY_S = 0.002
BEAT_S = 0.005
BEGUN, LEFT = 0.1, 0.3
"""Share of the bytes that is written before the clock starts, and that must be left when the stores have ended."""

WHATS = ("demote", "promote")
NAMESPACE = NamespaceSpec(model="bench_disk", key_bytes=KEY_BYTES)


class Bench:
    """One payload size: a root that stays over all rounds, and a daemon that is started again and again."""

    def __init__(self, folder: Path, root: Path, payload_bytes: int, arguments: argparse.Namespace) -> None:
        self.count = max(1, arguments.bytes // payload_bytes)
        self.bytes = self.count * payload_bytes
        # A slab that a payload does not divide would leave slots out.
        settings = {
            "disk.roots": f'[{{ path = "{root}", capacity = {2 * self.bytes + 768 * MIB} }}]',
            "disk.rewrite_hot": "false",  # what comes back for the second time would be written again
            "disk.min_free_bytes": "0",
            "disk.backlog_bytes": str(2 * self.bytes),
            "disk.read_threads": str(arguments.read_threads),
            "disk.write_threads": str(arguments.write_threads),
            "memory.slab_bytes": str(max(64 * MIB, payload_bytes)),
        }
        self._memory_bytes = 2 * self.bytes + 128 * MIB
        self._daemon = Daemon(folder, self._memory_bytes, settings)
        self._noise_log = folder / "noise.log"
        blocks = max(1, min(self.count, KEYS_PER_JOB, 256 * MIB // payload_bytes))
        self._tensor = SharedTensor.allocate(blocks, payload_bytes)
        self._tensor.array[:] = np.random.default_rng(1).integers(0, 256, self._tensor.array.shape, np.uint8)
        self._group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, payload_bytes)])
        self._stored = 0

    def demote(self) -> dict[str, float]:
        """Store new keys, wait until they are on disk: bytes per second, and lags in ms."""
        self._start()
        try:
            with self._client() as client, self._client() as watcher:
                registration = client.register(KvCache([self._tensor], [self._group]))
                noise = Noise(self._noise_log)
                before = watcher.status()["disk"]["demoted"]["bytes"]
                started = (time.perf_counter(), 0)
                jobs = self._store(client, registration)
                begun = self._look(watcher, before, BEGUN * self.bytes)
                for job in jobs:
                    if client.wait(job, WAIT_S).outcome is not Outcome.DONE:
                        raise SystemExit(f"{job} failed")
                stored = self._look(watcher, before, 0)
                last = self._look(watcher, before, self.bytes)
                first = stored if stored[1] <= (1 - LEFT) * self.bytes else begun
                if first[1] == self.bytes:  # too little to be seen under way
                    first = started
                rate = (last[1] - first[1]) / (last[0] - first[0])
                return {"bytes_per_s": rate, **self._lags(watcher, noise)}
        finally:
            self._stop()

    def promote(self) -> dict[str, float]:
        """Bring the keys that were demoted last back into the memory of a daemon that was started anew."""
        self._start()
        try:
            with self._client() as client:
                client.register(KvCache([self._tensor], [self._group]))
                noise = Noise(self._noise_log)
                keys = keys_of(np.arange(self._stored - self.count, self._stored))
                begun = time.perf_counter()
                found = client.wait_ready(client.prefetch({0: keys}), WAIT_S)
                seconds = time.perf_counter() - begun
                if not (found.states[0] == 1).all():
                    raise SystemExit(f"{int((found.states[0] != 1).sum())} of {self.count} keys did not come back")
                return {"bytes_per_s": self.bytes / seconds, **self._lags(client, noise)}
        finally:
            self._stop()

    def _store(self, client: Client, registration: Registration) -> list[Any]:
        step = len(self._tensor.array)
        jobs = []
        for at in range(self._stored, self._stored + self.count, step):
            keys = keys_of(np.arange(at, min(at + step, self._stored + self.count)))
            jobs.append(client.store(registration, {0: (keys, np.arange(len(keys)))}, deadline_s=WAIT_S))
        self._stored += self.count
        return jobs

    def _look(self, watcher: Client, before: int, least: float) -> tuple[float, int]:
        """(seconds, bytes) as soon as at least so many bytes are on disk."""
        until = time.perf_counter() + WAIT_S
        while True:
            written = watcher.status()["disk"]["demoted"]["bytes"] - before
            now = time.perf_counter()
            if written >= least:
                return now, written
            if now > until:
                raise SystemExit(f"only {written} of {self.bytes} bytes were demoted: {watcher.status()['disk']}")
            time.sleep(LOOK_EVERY_S)

    def _lags(self, client: Client, noise: Noise) -> dict[str, float]:
        return {"lag_ms": client.status()["loop"]["recent_lag_s"] * 1e3, "noise_ms": noise.end()}

    def _client(self) -> Client:
        return Client(self._daemon.socket, namespace=NAMESPACE, deadline_s=WAIT_S)

    def _start(self) -> None:
        """Until the arena's pages are there, so that nothing else is going on, and the start's lag is forgotten."""
        self._daemon.start()
        daemon, bytes_min = self._daemon, 0.99 * self._memory_bytes
        within(lambda: status_bytes(daemon.pid, "RssShmem") >= bytes_min, WAIT_S, every_s=0.05)
        within(lambda: daemon.status()["loop"]["recent_lag_s"] <= 2 * BEAT_S, WAIT_S, every_s=0.5)

    def _stop(self) -> None:
        if self._daemon.stop() != 0:
            raise SystemExit(f"the daemon did not end in order; its log is {self._daemon.log_path}")


class Noise:
    """An idle process that beats as the daemon's loop does."""

    def __init__(self, log: Path) -> None:
        self._child = spawn(module("scripts.bench.disk", "--beat"), log, stdout=subprocess.PIPE)

    def end(self) -> float:
        """Its worst delay, ms."""
        end(self._child, 15, 5.0)
        said = self._child.stdout.read() if self._child.stdout else b""
        return float(said or 0)


async def beat() -> None:
    """Until SIGTERM; then print the worst delay, ms."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(15, stop.set)
    worst = 0.0
    while not stop.is_set():
        due = loop.time() + BEAT_S
        await asyncio.sleep(BEAT_S)
        worst = max(worst, loop.time() - due)
    print(f"{worst * 1e3:.3f}", flush=True)


def run_case(payload_bytes: int, arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All rounds of one payload size; the first WARM_UP are not counted: files are written for the first time."""
    samples: dict[str, list[float]] = {}
    with private_folder() as name, disk_folder(arguments.path) as place:
        bench = Bench(Path(name), Path(place) / "root", payload_bytes, arguments)
        fio = Fio(Path(place) / "fio", bench.bytes, payload_bytes) if has_fio() else None
        for number in range(-WARM_UP, arguments.rounds):
            kept = samples if number >= 0 else {}
            for what, run, direction, threads in (
                ("demote", bench.demote, "write", arguments.write_threads),
                ("promote", bench.promote, "read", arguments.read_threads),
            ):
                say(f"{format_bytes(payload_bytes)}: {what}, round {number + 1} of {arguments.rounds}")
                if fio is not None:
                    kept.setdefault(f"fio {direction}", []).append(fio.bytes_per_s(direction, threads))
                for figure, value in run().items():
                    kept.setdefault(f"{what} {figure}", []).append(value)
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
    with Live("bench_disk", len(arguments.payloads)) as live:
        for payload_bytes in arguments.payloads:
            cases.append(run_case(payload_bytes, arguments, partial(live.show, len(cases))))
    result = summary(cases, file_system(arguments.path or Path("/var/tmp")))
    return show_result(result, arguments, show)


def _payloads(text: str) -> tuple[int, ...]:
    sizes = tuple(parse_bytes(one) for one in text.split(","))
    if any(size < 1 for size in sizes):
        raise argparse.ArgumentTypeError("payloads need at least a byte")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
