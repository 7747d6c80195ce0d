"""The processor's cost of a row by each way of copying to and from a GPU, on the software driver.

`plan`: from block ids to chunks; `build`: what a thread makes of a chunk before it calls the driver; `calls`: within
calls, the software driver's own work among them, which a real driver does in another way. What the two spend before is
the daemon's on any driver. Times are the thread's own, medians over rounds. Nothing here shows how fast a GPU copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffloadd.testing.figures import print_grid
from kvoffloadd.testing.program import size
from scripts.gpu.bench_submit import COLUMNS, ROW_BYTES, SINGLE, TITLE, Costs, measured, rows_of
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.gpu import Gpu
from scripts.harness.program import benchmark_line, show_result
from tests import softcuda

DAEMON_MAX_US = 0.3
"""Of a row: what the daemon spends before it calls the driver."""


def summary(cases: Sequence[dict[str, Any]], costs: Costs) -> dict[str, Any]:
    """Returns all figures, each with a comparison to that of one call for each row."""
    single = {one["direction"]: one["us"]["in all"] for one in cases if one["way"] == SINGLE}
    compared = [{**one, "to_one_by_one": round(one["us"]["in all"] / single[one["direction"]], 3)} for one in cases]
    result = {
        "row_bytes": ROW_BYTES,
        "rows": costs.rows,
        "costs": compared,
        "skipped": costs.skipped,
        "ratio_to_limit": max(one["to_one_by_one"] for one in compared if one["way"] != SINGLE),
    }
    bounds = [
        at_most(f"{one['way']}, {one['direction']}: plan and build, us", us["plan"] + us["build"], DAEMON_MAX_US)
        for one in compared
        for us in [one["us"]]
    ]
    return judged(result, bounds)


def show(result: dict[str, Any]) -> None:
    rows = zip(rows_of(result["costs"]), result["costs"], strict=True)
    print_grid(
        f"{TITLE}, software driver",
        (*COLUMNS, "to one by one"),
        ([*cells, f"{one['to_one_by_one']:.2f}"] for cells, one in rows),
        texts=2,
    )
    for text in result["skipped"]:
        print(f"skipped: {text}")
    print_bounds(result)


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--bytes", type=size, default="64MiB", help="of one job, about (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.bytes) < 1:
        parser.error("--bytes and --rounds are at least 1")
    softcuda.load()
    costs = Costs(Gpu(), arguments.bytes)
    return show_result(summary(measured(costs, arguments.rounds), costs), arguments, show)
