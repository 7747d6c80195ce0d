"""Stores and loads of GPU memory through the daemon, against one plain copy of as many bytes, by size of rows.

Times are the client's, from `store` or `load` to the end of `wait`; the ceiling is cuMemcpyAsync between the GPU and a
registered memfd, each way and both at once, in the same rounds. Block ids are scattered, so that nothing is merged.
"""

from __future__ import annotations

import sys
from typing import Any

from scripts.gpu.bench import KIB, KINDS, MIB, BenchRun, KvShape, against_ceiling, cut_short, daemon, parser, table
from scripts.harness.figures import Bound, at_least, at_most
from scripts.harness.gpu import Gpu

ROW_BYTES = tuple(size * KIB for size in (4, 8, 16, 24, 32, 64, 256, 2048))
LARGE_ROW_BYTES = 256 * KIB
"""Smaller ones are held against the driver's own way (`decisions.py`): there it is not the link that limits."""

ROWS_MAX = 1 << 17
"""Of a job: more of the smallest rows would only take longer."""

ONE_WAY_MIN, BOTH_WAYS_MIN = 0.95, 0.90
PLAIN = ("plain store", "plain load", "plain both")


def bounds_of(cases: list[dict[str, Any]]) -> list[Bound]:
    """The budgets of the design."""
    bounds = [at_most("wrong bytes", sum(case["wrong_bytes"] for case in cases), 0)]
    large = [case["ratio_to_limit"] for case in cases if case["row_bytes"] >= LARGE_ROW_BYTES]
    for kind in KINDS:
        if large:
            minimum = BOTH_WAYS_MIN if kind == "both" else ONE_WAY_MIN
            least = min(ratios[kind] for ratios in large)
            bounds.append(at_least(f"{kind}, rows >= 256 KiB: least ratio to the ceiling", least, minimum))
    return bounds


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--rows", type=int, nargs="*", metavar="KIB", help="only rows of these sizes, in KiB")
    run = BenchRun(made, 32 * MIB)
    given = run.given
    gpu = Gpu()
    rows = [size for size in ROW_BYTES if not given.rows or size // KIB in given.rows]
    rows = [size for size in rows if 2 * KvShape(size).payload_bytes <= given.bytes]  # jobs of several keys
    if given.quick:
        rows = rows[::3]
    with cut_short(), daemon(given.bytes) as socket:
        # The largest first: they have bounds.
        for row_bytes in run.in_time(rows[::-1]):
            shape, job_bytes = KvShape(row_bytes), min(given.bytes, ROWS_MAX * row_bytes)
            found = against_ceiling(gpu, socket, shape, job_bytes, given.rounds, tuple(KINDS))
            run.done({"name": shape.name, **found})
    run.cases.reverse()
    speeds = [[case["name"], *(f"{case['gb_per_s'][kind]:.1f}" for kind in (*KINDS, *PLAIN))] for case in run.cases]
    ratios = [[case["name"], *(f"{case['ratio_to_limit'][kind]:.2f}" for kind in KINDS)] for case in run.cases]
    tables = [
        table("through the daemon: ratio to the plain copy", ("rows", *KINDS), ratios),
        table("GB/s; plain: one cuMemcpyAsync", ("rows", *KINDS, *PLAIN), speeds),
    ]
    return run.tell(tables, bounds_of(run.cases))


if __name__ == "__main__":
    sys.exit(main())
