"""Replay a trace of real requests (Mooncake's JSONL) through a real daemon, every loaded byte checked.

Each block id of the trace (512 tokens) is a key; what its payload must be is a function of the key. A request pins its
keys, stores those behind the prefix that hits, loads that prefix into other blocks, and compares every byte. Several
workers take the requests in the trace's order: a turn covers `pin` and the admission of the store, so that what is held
or pending at each request is what it was in the trace; copies, waiting and comparing overlap. A reference hits if its
block and all before it in the request are held; it is pending if they are held or being stored, and one is the latter.

Hit rates stand beside those of LRU, of Belady's clairvoyant policy, and of a cache without bounds (ceiling). Exit
status 0 only if no byte was wrong, something was checked, and the daemon's self-audit found nothing; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.model import I64Array
from kvoffloadd.trial.figures import print_grid
from kvoffloadd.trial.output import Live, print_json
from kvoffloadd.trial.process import DaemonError, private_folder
from kvoffloadd.units import format_bytes, parse_bytes
from scripts.harness.daemon import Daemon
from scripts.replay.trace import belady_hits, ceiling_hits, load_trace, lru_hits
from scripts.replay.worker import MODELS, WAIT_S, Tally, Task, Turn, geometry_of, slot_bytes, work

GIB = 1 << 30
SLAB_SLOTS = 256
CORRUPT_EVERY = 10
"""With --plant-corruption: one bit of every so many loads."""


class Workers:
    """All worker processes, joined in a ring."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        rings = [context.Pipe(duplex=False) for _ in range(task.workers)]
        self._reports: list[Connection] = []
        self._done = context.RawArray("q", task.workers)
        self._processes = []
        self._first_turn = rings[0][1]
        for number in range(task.workers):
            turn = Turn(rings[number][0], rings[(number + 1) % task.workers][1])
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(task, number, turn, theirs, self._done), daemon=True)
            process.start()
            theirs.close()
            self._reports.append(mine)
            self._processes.append(process)
        for reader, writer in rings:
            reader.close()
            if writer is not self._first_turn:
                writer.close()

    def begin(self) -> None:
        """Wait until all are ready, and give the first its turn."""
        for number in range(len(self._reports)):
            self._receive(number)
        self._first_turn.send_bytes(b"turn")
        self._first_turn.close()

    @property
    def done(self) -> int:
        """Requests replayed."""
        return sum(self._done)

    def is_busy(self) -> bool:
        """Whether none has reported or ended; waits a moment."""
        return not multiprocessing.connection.wait(self._reports, 0.1)

    def end(self) -> Tally:
        """Everything that they counted."""
        total = Tally()
        for number, process in enumerate(self._processes):
            total.add(self._receive(number))
            process.join()
        return total

    def kill(self) -> None:
        """Whatever still runs."""
        for process in self._processes:
            process.kill()
            process.join()

    def _receive(self, number: int) -> Any:
        try:
            return self._reports[number].recv()
        except EOFError:
            raise DaemonError(f"worker {number} ended early; what it said stands above") from None


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the memory tier, in blocks of the trace. `unbounded`: all of them fit."""

    name: str
    blocks: int
    unbounded: bool


class Replay:
    """The trace, and how it is replayed."""

    def __init__(self, requests: list[I64Array], arguments: argparse.Namespace) -> None:
        self.requests = requests
        self.unique = len(np.unique(np.concatenate(requests)))
        self.references = sum(map(len, requests))
        self.geometry = geometry_of(MODELS[arguments.model], arguments.scale)
        self.slot_bytes = slot_bytes(self.geometry)
        self.block_bytes = len(self.geometry.groups) * self.slot_bytes
        self._ceiling = ceiling_hits(requests)
        self._arguments = arguments

    def capacity(self, text: str) -> Capacity:
        """Of "unbounded", a fraction of the unique blocks, or a size. Raises ValueError."""
        if text == "unbounded":
            return Capacity(text, self.unique, True)
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if 0 < fraction <= 1:
            return Capacity(f"{100 * fraction:g} %", max(1, round(fraction * self.unique)), False)
        try:
            size = parse_bytes(text)
        except ValueError as error:
            raise ValueError(f'--capacity "{text}" {error}; or a fraction, or "unbounded"') from None
        blocks = size // self.block_bytes
        if blocks < 1:
            raise ValueError(f'--capacity "{text}" is less than a block, which takes {self.block_bytes} bytes')
        return Capacity(format_bytes(size), blocks, blocks >= self.unique)

    def run(self, capacity: Capacity, live: Live, before: int) -> dict[str, Any]:
        """Replay at one capacity with a daemon of its own. Raises DaemonError or KvOffloadError."""
        arguments = self._arguments
        settings = {"memory.slab_bytes": str(SLAB_SLOTS * self.slot_bytes)}
        if arguments.policy:
            settings["memory.policy"] = arguments.policy
        planted = [f"corrupt_every={CORRUPT_EVERY}"] * arguments.plant_corruption
        planted += [f"delay_s={arguments.slow_copies}"] * (arguments.slow_copies > 0)
        size = capacity.blocks * self.block_bytes
        with private_folder() as folder, Daemon(Path(folder), size, settings, ",".join(planted)) as daemon:
            tally, seconds = self._replay(daemon, live, before, capacity.name)
            told = daemon.status()
            daemon.observer.drain(WAIT_S, everything=True)
            tally.findings += daemon.verify(payloads=True)
        if daemon.exit_status != 0:
            tally.findings.append(f"the daemon's exit status is {daemon.exit_status}")
        return self._result(capacity, tally, seconds, told)

    def _replay(self, daemon: Daemon, live: Live, before: int, what: str) -> tuple[Tally, float]:
        arguments = self._arguments
        workers = Workers(Task(daemon.socket, self.requests, arguments.workers, self.geometry, arguments.seed))
        try:
            workers.begin()
            begun = time.perf_counter()
            while workers.is_busy():
                live.show(before + workers.done, f"{what}: {workers.done:,} requests")
            tally = workers.end()
        finally:
            workers.kill()
        return tally, time.perf_counter() - begun

    def _result(self, capacity: Capacity, tally: Tally, seconds: float, told: dict[str, Any]) -> dict[str, Any]:
        shortfall = self._ceiling - tally.block_hits
        if capacity.unbounded and shortfall != tally.pending_misses:
            tally.findings.append(f"{shortfall} hits are missing, {tally.pending_misses} of them were pending")
        if tally.verified_loads == 0 and self._ceiling:
            tally.findings.append("no load was verified")
        known = {"lru": lru_hits, "belady": belady_hits}
        rates = {name: self._rate(hits(self.requests, capacity.blocks)) for name, hits in known.items()}
        return {
            "capacity": capacity.name,
            "capacity_blocks": capacity.blocks,
            "capacity_bytes": capacity.blocks * self.block_bytes,
            "hit_rate": self._rate(tally.block_hits),
            "lru_hit_rate": rates["lru"],
            "belady_hit_rate": rates["belady"],
            "ceiling_hit_rate": self._rate(self._ceiling),
            "estimated_ceiling": told["lookups"][0]["ceiling_rate"],
            "shortfall": shortfall,
            "evictions": told["cache"]["keys_evicted"],
            "seconds": round(seconds, 2),
            "requests_per_s": round(len(self.requests) / seconds, 1),
            "gib_per_s": round((tally.stored_bytes + tally.loaded_bytes) / GIB / seconds, 3),
            **{name: getattr(tally, name) for name in tally.__slots__},
        }

    def title(self) -> str:
        """What is replayed."""
        return (
            f"{len(self.requests):,} requests, {self.references:,} references of {self.unique:,} blocks, "
            f"{self.geometry.groups[0].payload_bytes(0):,} bytes each"
        )

    def _rate(self, hits: int) -> float:
        return round(hits / self.references, 5)


SUMMED = ("wrong_bytes", "stores", "loads", "verified_loads", "block_references", "block_hits", "pending_misses")
RATES = ("hit_rate", "lru_hit_rate", "belady_hit_rate", "ceiling_hit_rate")


def summary(results: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Of one capacity its own figures; of several the sums of counts and the means of rates. All under `capacities`."""
    chosen = {name: getattr(arguments, name) for name in ("workers", "model", "policy", "seed")}
    if len(results) == 1:
        top = results[0]
    else:
        top = {name: sum(result[name] for result in results) for name in SUMMED}
        top |= {name: round(sum(result[name] for result in results) / len(results), 5) for name in RATES}
        top["findings"] = [finding for result in results for finding in result["findings"]]
    return {**top, **chosen, "capacities": results}


def show(result: dict[str, Any], title: str) -> None:
    results = result["capacities"]
    print_grid(
        title,
        ("capacity", "blocks", "hit %", "LRU %", "Belady %", "ceiling %", "hits", "pending", "evicted"),
        (
            (
                one["capacity"],
                f"{one['capacity_blocks']:,}",
                *(f"{100 * one[name]:.2f}" for name in RATES),
                *(f"{one[name]:,}" for name in ("block_hits", "pending_misses", "evictions")),
            )
            for one in results
        ),
    )
    print_grid(
        "",
        ("capacity", "stores", "loads", "verified", "wrong bytes", "GiB/s", "requests/s", "seconds"),
        (
            (
                one["capacity"],
                *(f"{one[name]:,}" for name in ("stores", "loads", "verified_loads", "wrong_bytes")),
                f"{one['gib_per_s']:.2f}",
                f"{one['requests_per_s']:,.0f}",
                f"{one['seconds']:.1f}",
            )
            for one in results
        ),
    )
    for one in results:
        print(f"\n{one['capacity']}: the daemon's estimate of the ceiling is {100 * one['estimated_ceiling']:.2f} %")
        if one["capacity"] == "unbounded":
            print(f"\n{one['shortfall']:,} hits fewer than the ceiling's, {one['pending_misses']:,} of them pending")
    for finding in result["findings"]:
        print(f"finding: {finding}")


def parse_arguments() -> argparse.Namespace:
    """The command line; exits with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a JSON object with `hash_ids` on each line")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default: %(default)s)")
    parser.add_argument(
        "--capacity", "--capacities", dest="capacities", metavar="LIST", default="unbounded",
        help='of the memory tier: fractions of the unique blocks, sizes, or "unbounded"; several with commas between',
    )  # fmt: skip
    parser.add_argument("--policy", default="", metavar="NAME", help="eviction policy (default: the daemon's)")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="KV geometry (default: %(default)s)")
    parser.add_argument("--scale", type=float, metavar="F", help="of the rows (default: payloads of 4 KiB)")
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N requests only")
    parser.add_argument("--seed", type=int, default=1, help="of keys, contents and block ids (default: %(default)s)")
    parser.add_argument("--plant-corruption", action="store_true", help="flip bits in loads: they must be noticed")
    parser.add_argument(
        "--slow-copies", type=float, default=0.0, metavar="SECONDS", help="each takes so much longer: more is pending"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    if arguments.workers < 1 or (arguments.limit is not None and arguments.limit < 1):
        parser.error("--workers and --limit are at least 1")
    if arguments.scale is not None and not 0 < arguments.scale <= 1:
        parser.error("--scale is above 0 and at most 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    try:
        requests = load_trace(arguments.trace)[: arguments.limit]
        if not requests:
            raise ValueError(f"{arguments.trace}: no requests")
        replay = Replay(requests, arguments)
        capacities = [replay.capacity(text.strip()) for text in arguments.capacities.split(",")]
    except OSError as error:
        print(f"replay_trace: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"replay_trace: {error}", file=sys.stderr)
        return 2
    results = []
    try:
        with Live("replay_trace", len(requests) * len(capacities)) as live:
            for number, capacity in enumerate(capacities):
                results.append(replay.run(capacity, live, number * len(requests)))
    except (DaemonError, KvOffloadError) as error:
        print(f"replay_trace: {error}", file=sys.stderr)
        return 1
    result = summary(results, arguments)
    if arguments.json:
        print_json(result)
    else:
        show(result, replay.title())
    return 0 if result["wrong_bytes"] == 0 and not result["findings"] else 1


if __name__ == "__main__":
    sys.exit(main())
