"""How many references the eviction policies hit, at several cache sizes, on a trace or on a synthetic workload.

No bytes move: only the policies run. For a trace the exact LRU, Belady's rule and the ceiling stand beside them.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.model import I64Array
from kvoffloadd.trial.output import Live, print_json
from scripts.replay.trace import (
    Signal,
    TraceError,
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

CAPACITIES = "0.01,0.02,0.05,0.1,0.2"
REQUESTS = 12_000
PROMPT_BLOCKS = 16

REFERENCES: dict[str, Callable[[list[I64Array], int], int]] = {
    "LRU, exact": lru_hits,
    "Belady": belady_hits,
    "ceiling": lambda requests, capacity: ceiling_hits(requests),
}


def zipf(random: np.random.Generator) -> list[I64Array]:
    """Whole prompts, drawn by Zipf's law with exponent 0.9 from 6,000."""
    weights = np.arange(1, 6001) ** -0.9
    return _prompts(random.choice(6000, REQUESTS, p=weights / weights.sum()))


def uniform(random: np.random.Generator) -> list[I64Array]:
    """Whole prompts, each of 4,000 as likely as any other."""
    return _prompts(random.integers(0, 4000, REQUESTS))


def loop(random: np.random.Generator) -> list[I64Array]:
    """3,000 prompts in turn, again and again: what LRU is worst at."""
    return _prompts(np.arange(REQUESTS) % 3000)


def scan(random: np.random.Generator) -> list[I64Array]:
    """Hot prompts, drawn by Zipf's law from 1,000, and as many that never come back."""
    weights = np.arange(1, 1001) ** -1.0
    hot = random.choice(1000, REQUESTS, p=weights / weights.sum())
    return _prompts(np.where(random.random(REQUESTS) < 0.5, hot, 1000 + np.arange(REQUESTS)))


def shift(random: np.random.Generator) -> list[I64Array]:
    """Zipf's law over 2,000 prompts, other ones after each quarter of the requests."""
    weights = np.arange(1, 2001) ** -0.9
    drawn = random.choice(2000, REQUESTS, p=weights / weights.sum())
    return _prompts(drawn + 2000 * (np.arange(REQUESTS) * 4 // REQUESTS))


def chat(random: np.random.Generator) -> list[I64Array]:
    """100 conversations at a time under one shared prefix; a turn adds 4 blocks and is the last with chance 0.3."""
    prefix = list(range(4))
    next_id = 4
    prompts: list[list[int]] = [[] for _ in range(100)]
    requests = []
    for _ in range(REQUESTS):
        which = int(random.integers(0, 100))
        prompts[which] = prompts[which] or prefix
        prompts[which] = [*prompts[which], *range(next_id, next_id + 4)]
        next_id += 4
        requests.append(np.array(prompts[which], np.int64))
        if random.random() < 0.3:
            prompts[which] = []
    return requests


def agents(random: np.random.Generator) -> list[I64Array]:
    """60 agents of 6 kinds, each kind with a prefix of 16 blocks. A turn adds 1 to 6 blocks; the last has chance 0.04.
    The next one follows at once (exponential, mean 1), but after one in twelve a person is waited for (mean 60).
    """
    prefixes = [list(range(16 * kind, 16 * kind + 16)) for kind in range(6)]
    next_id = 16 * len(prefixes)
    prompts: list[list[int]] = [[] for _ in range(60)]
    due = [(float(when), which) for which, when in enumerate(random.exponential(10.0, len(prompts)))]
    heapq.heapify(due)
    requests = []
    for _ in range(REQUESTS):
        now, which = heapq.heappop(due)
        prompt = prompts[which] or prefixes[int(random.integers(0, len(prefixes)))]
        added = int(random.integers(1, 7))
        prompts[which] = [*prompt, *range(next_id, next_id + added)]
        next_id += added
        requests.append(np.array(prompts[which], np.int64))
        if random.random() < 0.04:
            prompts[which] = []
        pause_s = 60.0 if random.random() < 1 / 12 else 1.0
        heapq.heappush(due, (now + float(random.exponential(pause_s)), which))
    return requests


def rag(random: np.random.Generator) -> list[I64Array]:
    """A document of 800, drawn by Zipf's law, behind a shared prefix; then a question that never comes back."""
    weights = np.arange(1, 801) ** -0.8
    documents = random.choice(800, REQUESTS, p=weights / weights.sum())
    prefix = np.arange(2)
    bodies = 2 + documents[:, None] * 12 + np.arange(12)
    questions = 2 + 800 * 12 + np.arange(REQUESTS)[:, None] * 2 + np.arange(2)
    return [np.concatenate((prefix, *parts)) for parts in zip(bodies, questions, strict=True)]


SIGNALS: dict[str, Callable[[list[I64Array], int], list[Signal] | None]] = {
    "none": lambda requests, seed: None,
    "perfect": lambda requests, seed: perfect_signals(requests),
    "half": lambda requests, seed: half_right(perfect_signals(requests), seed),
}
"""What clients say when a request ends: nothing, what is true, or that in half of the cases."""

WORKLOADS = {make.__name__: make for make in (zipf, uniform, loop, scan, shift, chat, agents, rag)}


def _prompts(numbers: I64Array) -> list[I64Array]:
    return list(numbers[:, None] * PROMPT_BLOCKS + np.arange(PROMPT_BLOCKS))


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
        raise TraceError("there is no reference in it")
    return requests


def measure(requests: list[I64Array], arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One result per policy or reference: its name, hits and seconds by capacity."""
    capacities = [max(1, int(share * num_blocks(requests))) for share in arguments.capacities]
    names = [*arguments.policies, *REFERENCES]
    signals = SIGNALS[arguments.signals](requests, arguments.seed)
    results = []
    with Live("simulate_policies", len(names) * len(capacities) * len(requests)) as live:
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
    except (OSError, UnicodeDecodeError, TraceError) as error:
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
