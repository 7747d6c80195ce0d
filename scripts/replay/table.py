"""Hit rates of all workloads under several policies: of the blocks that could be restored, how many are.

A reference can be restored if its block and all before it were asked for before, so a cache without bounds has 100 %.
Means of several seeds, which pick the workload and the hashes; of a trace, the hashes alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.errors import ConfigError
from kvoffloadd.model import I64Array
from kvoffloadd.testing.figures import print_grid
from kvoffloadd.testing.output import ProgressBar, print_json
from scripts.replay.trace import ceiling_hits, num_blocks, simulate
from scripts.replay.workloads import WORKLOADS, requests_of

REQUESTS = 6000
SHARES = (0.02, 0.1, 0.2)
SEEDS = 4


def rates(requests: list[I64Array], policy: str, seed: int) -> list[float]:
    """Returns the rates at each of `SHARES`, in per cent."""
    ceiling, blocks = ceiling_hits(requests), num_blocks(requests)
    return [
        100 * simulate(requests, policy, max(1, int(share * blocks)), seed=seed) / max(1, ceiling) for share in SHARES
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "loads", nargs="*", metavar="LOAD", help="workloads, or files with traces (default: all workloads)"
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="names, by commas (default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each workload (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    policies, loads = arguments.policies.split(","), arguments.loads or list(WORKLOADS)
    if unknown := set(policies) - set(POLICIES):
        parser.error(f"--policies: {unknown.pop()!r} is not one of {', '.join(POLICIES)}")
    found: dict[str, dict[str, list[float]]] = {}
    with ProgressBar("policy_table", len(loads) * arguments.seeds * len(policies)) as live:
        for number, load in enumerate(loads):
            seen: dict[str, list[list[float]]] = {policy: [] for policy in policies}
            for seed in range(arguments.seeds):
                try:
                    requests = requests_of(load, seed, arguments.requests)
                except ConfigError as error:
                    print(f"policy_table: {error}", file=sys.stderr)
                    return 2
                for at, policy in enumerate(policies):
                    live.show((number * arguments.seeds + seed) * len(policies) + at, f"{load}: {policy}")
                    seen[policy].append(rates(requests, policy, seed))
            found[load] = {policy: np.mean(each, axis=0).round(2).tolist() for policy, each in seen.items()}
    if arguments.json:
        print_json({"shares": SHARES, "seeds": arguments.seeds, "requests": arguments.requests, "rates": found})
        return 0
    rows = [
        (Path(load).name, f"{100 * share:g} %", *(f"{of[policy][at]:.2f}" for policy in policies))
        for load, of in found.items()
        for at, share in enumerate(SHARES)
    ]
    print_grid("hits, % of what could be restored", ("load", "blocks held", *policies), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
