"""How many references the eviction policies hit, at several cache sizes, on a trace or on a synthetic workload.

No bytes move: only the policies run. For a trace the exact LRU, Belady's rule and the ceiling are shown, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.errors import ConfigError
from kvoffloadd.model import I64Array
from kvoffloadd.testing.output import ProgressBar, print_json
from scripts.replay.trace import (
    Signal,
    belady_hits,
    ceiling_hits,
    half_right,
    load_trace,
    lru_hits,
    num_blocks,
    num_references,
    perfect_signals,
    simulate,
)
from scripts.replay.workloads import WORKLOADS

CAPACITIES = "0.01,0.02,0.05,0.1,0.2"

REFERENCES: dict[str, Callable[[list[I64Array], int], int]] = {
    "LRU, exact": lru_hits,
    "Belady": belady_hits,
    "ceiling": lambda requests, capacity: ceiling_hits(requests),
}


SIGNALS: dict[str, Callable[[list[I64Array], int], list[Signal] | None]] = {
    "none": lambda requests, seed: None,
    "perfect": lambda requests, seed: perfect_signals(requests),
    "half": lambda requests, seed: half_right(perfect_signals(requests), seed),
}
"""What clients say when a request ends: nothing, what is true, or that in half of the cases."""


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("trace", nargs="?", type=Path, help="JSONL with `hash_ids` per line (Mooncake's format)")
    source.add_argument("--workload", choices=WORKLOADS, help="a synthetic one instead of a trace")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names, by commas (default: all)")
    parser.add_argument("--capacities", default=CAPACITIES, help=f"shares of the blocks (default: {CAPACITIES})")
    parser.add_argument("--part", choices=("all", "first", "second"), default="all", help="half of the requests to use")
    parser.add_argument("--signals", choices=SIGNALS, default="none", help="of clients, how right they are")
    parser.add_argument("--seed", type=int, default=0, help="of hashes and synthetic workloads (default: 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    arguments.policies = arguments.policies.split(",")
    for name in arguments.policies:
        if name not in POLICIES:
            parser.error(f"--policies: {name!r} is not one of {', '.join(POLICIES)}")
    try:
        arguments.capacities = [float(text) for text in arguments.capacities.split(",")]
    except ValueError as error:
        parser.error(f"--capacities: {error}")
    if not all(0 < share <= 1 for share in arguments.capacities):
        parser.error("--capacities: shares are above 0 and at most 1")
    if not 0 <= arguments.seed < 1 << 32:
        parser.error("--seed: from 0 to 2**32 - 1")
    return arguments


def read_requests(arguments: argparse.Namespace) -> list[I64Array]:
    """The trace or workload asked for, or the half of it."""
    if arguments.workload:
        requests = WORKLOADS[arguments.workload](np.random.default_rng(arguments.seed))
    else:
        requests = load_trace(arguments.trace)
    middle = len(requests) // 2
    requests = {"all": requests, "first": requests[:middle], "second": requests[middle:]}[arguments.part]
    if not num_references(requests):
        raise ConfigError("there is no reference in it")
    return requests


def measure(requests: list[I64Array], arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One result per policy or reference: its name, hits and seconds by capacity."""
    capacities = [max(1, int(share * num_blocks(requests))) for share in arguments.capacities]
    names = [*arguments.policies, *REFERENCES]
    signals = SIGNALS[arguments.signals](requests, arguments.seed)
    results = []
    with ProgressBar("simulate_policies", len(names) * len(capacities) * len(requests)) as live:
        done = 0
        for name in names:
            hits, seconds = [], []
            for capacity in capacities:
                started = time.perf_counter()
                if name in REFERENCES:
                    hits.append(REFERENCES[name](requests, capacity))
                else:

                    def tell(served: int, before: int = done, what: str = name) -> None:
                        live.show(before + served, what)

                    hits.append(simulate(requests, name, capacity, seed=arguments.seed, signals=signals, progress=tell))
                seconds.append(round(time.perf_counter() - started, 2))
                done += len(requests)
                live.show(done, name)
            results.append({"name": name, "hits": hits, "seconds": seconds})
    return results


def print_results(result: dict[str, object], rows: list[dict[str, object]], shares: list[float]) -> None:
    """The table."""
    references = result["references"]
    assert isinstance(references, int)
    table = Table(title=f"hits, % of {references:,} references of {result['blocks']:,} blocks")
    table.add_column("capacity, % of blocks")
    for share in shares:
        table.add_column(f"{100 * share:g}", justify="right")
    table.add_column("mean", justify="right", style="bold")
    for row in rows:
        hits = row["hits"]
        assert isinstance(hits, list)
        rates = [100 * h / references for h in hits]
        table.add_row(str(row["name"]), *(f"{rate:.2f}" for rate in rates), f"{sum(rates) / len(rates):.2f}")
    Console().print(table)


def main() -> int:
    arguments = parse_arguments()
    try:
        requests = read_requests(arguments)
    except ConfigError as error:
        print(f"simulate_policies: {error}", file=sys.stderr)
        return 2
    rows = measure(requests, arguments)
    result: dict[str, object] = {
        "source": arguments.workload or str(arguments.trace),
        "part": arguments.part,
        "requests": len(requests),
        "references": num_references(requests),
        "blocks": num_blocks(requests),
        "capacities": arguments.capacities,
        "seed": arguments.seed,
        "signals": arguments.signals,
        "results": rows,
    }
    if arguments.json:
        print_json(result)
    else:
        print_results(result, rows, arguments.capacities)
    return 0
