"""How far the miss-ratio curve of miniature simulations is from whole simulations, by load, policy and size.

Each load is simulated as a whole at 1/4, 1/2, 1, 2 and 4 times a capacity, and then in miniature with several secrets
of the hashes, which choose the sample. Exit status 0 only if no mean error is above 1 point, and no error above 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvoffloadd.cache.curve.curve import Curve
from kvoffloadd.cache.curve.miniature import ROWS
from kvoffloadd.cache.curve.prompt import AskedKeys
from kvoffloadd.cache.policy import POLICIES, create_policy
from kvoffloadd.errors import ConfigError
from kvoffloadd.model import I64Array
from kvoffloadd.testing.figures import print_grid
from kvoffloadd.testing.output import ProgressBar, print_json
from scripts.replay.trace import key_hashes, num_blocks, num_references, simulate
from scripts.replay.workloads import WORKLOADS, requests_of

TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
SHARE, SEEDS, REQUESTS = 0.05, 3, 12_000
LOADS = ("chat", "agents", "shift", "tree")
MEAN_MAX, WORST_MAX = 1.0, 2.0
FANOUT, DEPTH, PIECE = 40, 5, 6


def tree(random: np.random.Generator, requests: int) -> list[I64Array]:
    """Prompts of one to five pieces of 6 blocks, each piece one of 40 that can follow the one before, by Zipf's law."""
    weights = np.arange(1, FANOUT + 1) ** -1.1
    chosen = random.choice(FANOUT, (requests, DEPTH), p=weights / weights.sum()).astype(np.int64)
    numbers = np.zeros(requests, np.int64)
    pieces = []
    for depth in range(DEPTH):
        numbers = numbers * (FANOUT + 1) + chosen[:, depth] + 1
        pieces.append(numbers)
    found = np.stack(pieces, axis=1)
    lengths = random.integers(1, DEPTH + 1, requests)
    blocks = found[:, :, None] * PIECE + np.arange(PIECE)
    return [blocks[at, :length].reshape(-1) for at, length in enumerate(lengths.tolist())]


@dataclass(frozen=True, slots=True)
class Result:
    """The hit rates of one load and policy, % of the references, by capacity; and by seed the curve's errors, points,
    with the standard errors that it tells.
    """

    load: str
    policy: str
    capacities: list[int]
    rates: list[float]
    sample_rates: list[float]
    errors: list[list[float]]
    told: list[list[float]]
    us_a_key: float  # of processor time, a key asked for, all sizes


def measure(
    load: str, requests: list[I64Array], policy: str, arguments: argparse.Namespace, tell: Callable[[], None]
) -> Result:
    """Returns one row. `tell` is called after each simulation."""
    blocks, references = max(1, int(arguments.share * num_blocks(requests))), num_references(requests)
    capacities = [max(1, round(many * blocks)) for many in TIMES]
    rates = []
    for capacity in capacities:
        rates.append(100 * simulate(requests, policy, capacity) / references)
        tell()
    begun, errors, told, sampled = time.process_time(), [], [], list[float]()
    for seed in range(arguments.seeds):
        curve = Curve(partial(create_policy, policy), blocks, times=TIMES, rows_max=arguments.rows)
        for ids in requests:
            prompt = [AskedKeys(key_hashes(ids, 100 + seed), 1, 1)]
            curve.ask(prompt)
            curve.store(prompt)
        found = curve.estimates()
        ratios = [float("nan") if one.hit_ratio is None else 100 * one.hit_ratio for one in found]
        errors.append((np.array(ratios) - rates).tolist())
        told.append([100 * one.error for one in found])
        sampled = [one.rate for one in found]
        tell()
    us_a_key = 1e6 * (time.process_time() - begun) / references / arguments.seeds
    return Result(load, policy, capacities, rates, sampled, errors, told, us_a_key)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "loads", nargs="*", metavar="LOAD", help=f"workloads, or files with traces (default: {', '.join(LOADS)})"
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="names, by commas (default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="samples (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each workload (default: %(default)s)")
    parser.add_argument("--share", type=float, default=SHARE, help="of the blocks: size 1 (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="that a miniature has at most (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    policies, loads = arguments.policies.split(","), arguments.loads or list(LOADS)
    if unknown := set(policies) - set(POLICIES):
        parser.error(f"--policies: {unknown.pop()!r} is not one of {', '.join(POLICIES)}")
    results, done = list[Result](), 0
    with ProgressBar("curve_error", len(loads) * len(policies) * (len(TIMES) + arguments.seeds)) as live:
        for load in loads:
            try:
                requests = (
                    tree(np.random.default_rng(0), arguments.requests)
                    if load == "tree"
                    else requests_of(load, 0, arguments.requests)
                )
            except ConfigError as error:
                print(f"curve_error: {error}; workloads: tree, {', '.join(WORKLOADS)}", file=sys.stderr)
                return 2
            for policy in policies:

                def tell(what: str = f"{Path(load).name}: {policy}") -> None:
                    nonlocal done
                    done += 1
                    live.show(done, what)

                results.append(measure(Path(load).name, requests, policy, arguments, tell))
    errors = np.array([result.errors for result in results])  # by load and policy, seed, size
    means, worst = np.abs(errors).mean(axis=(1, 2)), np.abs(errors).max(axis=(1, 2))
    if arguments.json:
        print_json({"results": [asdict(result) for result in results], "mean": means.tolist(), "worst": worst.tolist()})
    else:
        rows = [
            (
                result.load,
                result.policy,
                *(
                    f"{rate:.2f} ({error:+.2f})"
                    for rate, error in zip(result.rates, np.mean(result.errors, 0), strict=True)
                ),
                f"{mean:.2f}, {most:.2f}",
            )
            for result, mean, most in zip(results, means, worst, strict=True)
        ]
        sizes = [f"{many:g}" for many in TIMES]
        print_grid("hits, % (mean error)", ("load", "policy", *sizes, "error: mean, worst"), rows)
    return 0 if not (np.isnan(errors).any() or (means > MEAN_MAX).any() or (worst > WORST_MAX).any()) else 1


if __name__ == "__main__":
    sys.exit(main())
