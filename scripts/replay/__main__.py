"""Replay a trace of real requests (Mooncake's JSONL), or a workload, through a real daemon, every loaded byte checked.

Each block id of the trace (512 tokens) is a key; what its payload must be is a function of the key. A request pins its
keys, stores those behind the prefix that hits, loads that prefix into other blocks, and compares every byte. Workers
take the requests in the trace's order. Several workers overlap: a turn covers `pin` and the admission of the store, so
that what is held or pending at each request is what it was in the trace, and copies, waiting and comparing go on
during the next requests. A reference hits if its block and all before it in the request are held; it is pending if they
are held or being stored, and one is the latter.

Some workloads have several tenants. Each has its own workers, with payloads of another size, and as another user if
root runs this.

Hit rates are shown with those of the daemon's cache simulated in one process, with the same users, sizes and hashes.
Where all keys are of one size, those of the simulated policy alone, with other hashes, of LRU, and of Belady's
clairvoyant policy are shown, too. The ceiling is a cache without bounds. Exit status 0 only if no byte was wrong,
something was checked, and the daemon's self-audit found nothing; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.cache.policy import DEFAULT_POLICY
from kvoffloadd.errors import ConfigError, KvOffloadError
from kvoffloadd.model import I64Array
from kvoffloadd.testing.figures import print_grid
from kvoffloadd.testing.output import ProgressBar, print_json
from kvoffloadd.testing.process import DaemonError, private_folder
from kvoffloadd.units import format_bytes, parse_bytes
from scripts.harness.daemon import Daemon
from scripts.replay import seeded
from scripts.replay.alone import CacheAlone
from scripts.replay.tenants import MODELS, Trace, tenants_of
from scripts.replay.trace import belady_hits, ceiling_hits, lru_hits, num_blocks, num_references, simulate
from scripts.replay.worker import WAIT_S, ReplayTally
from scripts.replay.workers import Workers
from scripts.replay.workloads import REQUESTS, WORKLOADS, requests_of, tenants_in

GIB = 1 << 30
SLABS, SLAB_BYTES_MAX, SLAB_SLOTS_MIN = 64, 64 << 20, 16
"""Memory is cut into this many slabs, unless they get too large, as by default; a slab has at least this many slots."""
SIZES_MAX = 256
SIZES = "1,3,2"
CORRUPT_EVERY = 10
"""With --plant-corruption: a bit is flipped in one load of this many."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Describes the capacity of the memory tier, in bytes, and in blocks of the trace. `unbounded`: all of them fit."""

    name: str
    bytes: int
    slab_bytes: int
    blocks: int
    unbounded: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """What of the trace is a tenant's. `restorable`: references that a cache without bounds hits."""

    requests: int
    references: int
    blocks: int
    restorable: int

    @classmethod
    def of(cls, requests: list[I64Array]) -> Counts:
        """Count these."""
        return cls(len(requests), num_references(requests), num_blocks(requests), ceiling_hits(requests))


class Replay:
    """The trace, and how it is replayed."""

    def __init__(self, trace: Trace, arguments: argparse.Namespace) -> None:
        self._trace = trace
        self._arguments = arguments
        self._counts = [Counts.of(trace.requests_of(number)) for number in range(len(trace.tenants))]
        self._whole = Counts(*np.sum([astuple(counts) for counts in self._counts], axis=0).tolist())
        self._is_of_one_size = len({tenant.slot_bytes for tenant in trace.tenants}) == 1

    def capacity(self, text: str) -> Capacity:
        """Reads a capacity from "unbounded", a fraction of the unique blocks, or a size. Raises ValueError."""
        if text == "unbounded":
            slab_bytes = self._slab_bytes(self._bytes_of(1.0))
            return self._capacity(text, self._room(slab_bytes), slab_bytes)
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if 0 < fraction <= 1:
            size = self._bytes_of(fraction)
            return self._capacity(f"{100 * fraction:g} %", size, self._slab_bytes(size))
        try:
            size = parse_bytes(text)
        except ValueError as error:
            raise ValueError(f'--capacity "{text}" {error}; or a fraction, or "unbounded"') from None
        least = max(tenant.block_bytes for tenant in self._trace.tenants)
        if size < least:
            raise ValueError(f'--capacity "{text}" is less than a block, which takes {least} bytes')
        return self._capacity(format_bytes(size), size - size % least, self._slab_bytes(size))

    def _capacity(self, name: str, size: int, slab_bytes: int) -> Capacity:
        blocks = min(size * self._whole.blocks // self._bytes_of(1.0), self._whole.blocks)
        return Capacity(name, size, slab_bytes, blocks, unbounded=size >= self._room(slab_bytes))

    def _bytes_of(self, fraction: float) -> int:
        """What this fraction of each tenant's blocks takes, and at least one block."""
        blocks = [max(1, round(fraction * counts.blocks)) for counts in self._counts]
        return sum(count * tenant.block_bytes for count, tenant in zip(blocks, self._trace.tenants, strict=True))

    def _slab_bytes(self, size: int) -> int:
        """A slab of a memory tier of this size."""
        largest = max(tenant.slot_bytes for tenant in self._trace.tenants)
        return max(min(size // SLABS, SLAB_BYTES_MAX) // largest, SLAB_SLOTS_MIN) * largest

    def _room(self, slab_bytes: int) -> int:
        """What all blocks take, where each tenant has its own slabs."""
        slabs = 0
        for tenant, counts in zip(self._trace.tenants, self._counts, strict=True):
            slots = counts.blocks * tenant.block_bytes // tenant.slot_bytes
            slabs += -(-slots // (slab_bytes // tenant.slot_bytes))
        return slabs * slab_bytes

    def run(self, capacity: Capacity, live: ProgressBar, before: int) -> dict[str, Any]:
        """Replay at one capacity with a separate daemon. Raises DaemonError or KvOffloadError."""
        arguments = self._arguments
        planted = [f"corrupt_every={CORRUPT_EVERY}"] * arguments.plant_corruption
        planted += [f"delay_s={arguments.slow_copies}"] * (arguments.slow_copies > 0)
        with private_folder() as name:
            folder = Path(name)
            folder.chmod(0o755)  # other users connect
            secret = {seeded.VARIABLE: str(arguments.seed)}
            with Daemon(
                folder,
                capacity.bytes,
                self._settings(capacity),
                ",".join(planted),
                environment=secret,
                program=seeded.PROGRAM,
            ) as daemon:
                tallies, seconds = self._replay(daemon, live, before, capacity.name)
                status = daemon.status()
                daemon.observer.drain(WAIT_S, everything=True)
                findings = list(daemon.verify(payloads=True))
        if daemon.exit_status != 0:
            findings.append(f"the daemon's exit status is {daemon.exit_status}")
        return self._result(capacity, tallies, findings, seconds, status)

    def _settings(self, capacity: Capacity) -> dict[str, str]:
        uids = sorted({tenant.uid for tenant in self._trace.tenants})
        settings = {"memory.slab_bytes": str(capacity.slab_bytes), "server.allowed_uids": str(uids)}
        if len(uids) > 1:
            settings["server.socket_mode"] = "0o666"
        if self._arguments.policy:
            settings["memory.policy"] = self._arguments.policy
        return settings

    def _replay(self, daemon: Daemon, live: ProgressBar, before: int, what: str) -> tuple[list[ReplayTally], float]:
        """What was counted of each tenant, and how long it took."""
        workers = Workers(daemon.socket, self._trace, self._arguments.workers, self._arguments.seed)
        try:
            workers.begin()
            begun = time.perf_counter()
            while workers.is_busy():
                live.show(before + workers.done, f"{what}: {workers.done:,} requests")
            tallies = workers.end()
        finally:
            workers.kill()
        return tallies, time.perf_counter() - begun

    def _result(
        self, capacity: Capacity, tallies: list[ReplayTally], findings: list[str], seconds: float, state: dict[str, Any]
    ) -> dict[str, Any]:
        whole, total = self._whole, ReplayTally()
        for tally in tallies:
            total.add(tally)
        shortfall = whole.restorable - total.block_hits
        if capacity.unbounded and shortfall != total.pending_misses:
            findings.append(f"{shortfall} hits are missing, {total.pending_misses} of them were pending")
        if total.verified_loads == 0 and whole.restorable:
            findings.append("no load was verified")
        total.findings += findings
        simulated = self._simulate(capacity)
        references = sum(row["asked"] for row in state["lookups"])
        return {
            "capacity": capacity.name,
            "capacity_blocks": capacity.blocks,
            "capacity_bytes": capacity.bytes,
            "hit_rate": self._rate(total.block_hits),
            "simulated_hit_rate": self._rate(sum(simulated)),
            **self._rates_of_one_size(capacity),
            "ceiling_hit_rate": self._rate(whole.restorable),
            "estimated_ceiling": round(1 - sum(row["new"] for row in state["lookups"]) / references, 4),
            "shortfall": shortfall,
            "evictions": state["cache"]["keys_evicted"],
            "slabs_taken_over": state["cache"]["slabs_taken_over"],
            "seconds": round(seconds, 2),
            "requests_per_s": round(self._whole.requests / seconds, 1),
            "gib_per_s": round((total.stored_bytes + total.loaded_bytes) / GIB / seconds, 3),
            **{name: getattr(total, name) for name in total.__slots__},
            "tenants": self._of_tenants(tallies, simulated),
        }

    def _of_tenants(self, tallies: list[ReplayTally], simulated: list[int]) -> list[dict[str, Any]]:
        """What each of them hit, and would have hit in the simulated cache."""
        return [
            {
                "uid": tenant.uid,
                "payload_bytes": tenant.payload_bytes,
                **asdict(counts),
                "block_hits": tally.block_hits,
                "simulated_hits": hits,
                "restored": _share(tally.block_hits, counts.restorable),
                "simulated_restored": _share(hits, counts.restorable),
            }
            for tenant, counts, tally, hits in zip(self._trace.tenants, self._counts, tallies, simulated, strict=True)
        ]

    @property
    def _policy(self) -> str:
        return self._arguments.policy or DEFAULT_POLICY

    def _simulate(self, capacity: Capacity) -> list[int]:
        """Hits of each tenant in the daemon's cache, in this process."""
        given = (self._trace.tenants, self._policy, capacity.bytes, capacity.slab_bytes, self._arguments.seed)
        with closing(CacheAlone(*given)) as cache:
            return cache.hits(self._trace)

    def _rates_of_one_size(self, capacity: Capacity) -> dict[str, float | None]:
        """What simulators say that count blocks, not bytes; None where these differ in size."""
        known: dict[str, Callable[[list[I64Array], int], int]] = {
            "policy": lambda requests, blocks: simulate(requests, self._policy, blocks, seed=self._arguments.seed),
            "lru": lru_hits,
            "belady": belady_hits,
        }
        if not self._is_of_one_size:
            return {f"{name}_hit_rate": None for name in known}
        return {
            f"{name}_hit_rate": self._rate(hits(self._trace.requests, capacity.blocks)) for name, hits in known.items()
        }

    def title(self) -> str:
        """What is replayed."""
        whole, sizes = self._whole, ", ".join(f"{tenant.payload_bytes:,}" for tenant in self._trace.tenants)
        return (
            f"{whole.requests:,} requests, {whole.references:,} references of {whole.blocks:,} blocks, "
            f"{sizes} bytes each"
        )

    def _rate(self, hits: int) -> float:
        return round(hits / self._whole.references, 5)


def _share(hits: int, restorable: int) -> float | None:
    """None: nothing could be restored."""
    return round(hits / restorable, 5) if restorable else None


SUMMED = ("wrong_bytes", "stores", "loads", "verified_loads", "block_references", "block_hits", "pending_misses")
RATES = (
    "hit_rate", "simulated_hit_rate", "policy_hit_rate", "lru_hit_rate", "belady_hit_rate", "ceiling_hit_rate",
)  # fmt: skip


def summary(results: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one capacity, or of several the sums of counts and the means of rates. All are under
    `capacities`.
    """
    chosen = {name: getattr(arguments, name) for name in ("workers", "model", "policy", "seed")}
    if len(results) == 1:
        top = results[0]
    else:
        top = {name: sum(result[name] for result in results) for name in SUMMED}
        known = [name for name in RATES if results[0][name] is not None]
        top |= {name: round(sum(result[name] for result in results) / len(results), 5) for name in known}
        top["findings"] = [finding for result in results for finding in result["findings"]]
    return {**top, **chosen, "capacities": results}


def show(result: dict[str, Any], title: str) -> None:
    results = result["capacities"]
    print_grid(
        f"{title}\nhits, % of references",
        ("capacity", "blocks", "daemon", "simulated", "policy", "LRU", "Belady", "ceiling", "evicted"),
        (
            (
                one["capacity"],
                f"{one['capacity_blocks']:,}",
                *(_percent(one[name]) for name in RATES),
                f"{one['evictions']:,}",
            )
            for one in results
        ),
    )
    print_grid(
        "\nof what could be restored, %",
        ("capacity", "user", "payload", "requests", "could", "hits", "daemon", "simulated"),
        (
            (
                one["capacity"],
                *(f"{tenant[name]:,}" for name in ("uid", "payload_bytes", "requests", "restorable", "block_hits")),
                *(_percent(tenant[name]) for name in ("restored", "simulated_restored")),
            )
            for one in results
            for tenant in one["tenants"]
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
        if one["pending_misses"]:
            print(f"{one['capacity']}: {one['pending_misses']:,} references were pending")
        if one["capacity"] == "unbounded":
            print(f"\n{one['shortfall']:,} hits fewer than the ceiling's, {one['pending_misses']:,} of them pending")
    if len(results[0]["tenants"]) > 1 and len({tenant["uid"] for tenant in results[0]["tenants"]}) == 1:
        print("\nall tenants are one user, in sessions of their own: only root can connect as others")
    for finding in result["findings"]:
        print(f"finding: {finding}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def parse_arguments() -> argparse.Namespace:
    """The command line; exits with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trace", metavar="TRACE", help=f"a JSON object with `hash_ids` on each line; or one of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of each tenant (default: %(default)s)")
    parser.add_argument(
        "--sizes", default=SIZES, metavar="LIST",
        help="of the tenants' payloads, in times 4 KiB or what --scale makes, round and round (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--capacity", "--capacities", dest="capacities", metavar="LIST", default="unbounded",
        help='of the memory tier: fractions of the unique blocks, sizes, or "unbounded"; several with commas between',
    )  # fmt: skip
    parser.add_argument("--policy", default="", metavar="NAME", help="eviction policy (default: the daemon's)")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="KV geometry (default: %(default)s)")
    parser.add_argument("--scale", type=float, metavar="F", help="of the rows (default: payloads of 4 KiB)")
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N requests only")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the workload, keys, hashes and contents (default: %(default)s)"
    )
    parser.add_argument("--plant-corruption", action="store_true", help="flip bits in loads: they must be noticed")
    parser.add_argument(
        "--slow-copies", type=float, default=0.0, metavar="SECONDS", help="each takes so much longer: more is pending"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    if arguments.workers < 1 or (arguments.limit is not None and arguments.limit < 1):
        parser.error("--workers and --limit are at least 1")
    try:
        arguments.sizes = [int(text) for text in arguments.sizes.split(",")]
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    if not all(1 <= size <= SIZES_MAX for size in arguments.sizes):
        parser.error(f"--sizes: from 1 to {SIZES_MAX}")
    if not 0 <= arguments.seed < 1 << 64:
        parser.error("--seed: from 0 to 2**64 - 1")
    if arguments.scale is not None and not 0 < arguments.scale <= 1:
        parser.error("--scale is above 0 and at most 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    try:
        requests = requests_of(arguments.trace, arguments.seed, arguments.limit or REQUESTS)[: arguments.limit]
        if not num_references(requests):
            raise ValueError(f"{arguments.trace}: no requests")
        whose = tenants_in(arguments.trace, requests)
        tenants = tenants_of(MODELS[arguments.model], arguments.scale, arguments.sizes, int(whose.max()) + 1)
        replay = Replay(Trace(requests, whose, tenants), arguments)
        capacities = [replay.capacity(text.strip()) for text in arguments.capacities.split(",")]
    except (ConfigError, ValueError) as error:
        print(f"replay_trace: {error}", file=sys.stderr)
        return 2
    results = []
    try:
        with ProgressBar("replay_trace", len(requests) * len(capacities)) as live:
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
