#!/usr/bin/env python3
"""Stores and loads of GPU memory through the daemon, beside one plain copy of as many bytes, by size of rows.

Times are the client's, from `store` or `load` to the end of `wait`; the ceiling is cuMemcpyAsync between the GPU and a
registered memfd, each way and both at once, in the same rounds. Block ids are scattered, so that nothing is merged.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from scripts.gpu.bench import (
    KIB,
    MIB,
    Ceiling,
    GpuWorkload,
    Shape,
    await_pinned,
    daemon,
    done,
    gb_per_s,
    in_time,
    parse,
    parser,
    sample,
    table,
    tell,
)
from scripts.harness.figures import at_least, at_most, median_ratio
from scripts.harness.gpu import Gpu

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from scripts.harness.figures import Bound

ROW_BYTES = tuple(size * KIB for size in (4, 8, 16, 24, 32, 64, 256, 2048))
LARGE_ROW_BYTES = 64 * KIB
ROWS_MAX = 1 << 17
"""Of a job: more of the smallest rows would only take longer."""

ONE_WAY_MIN, BOTH_WAYS_MIN = 0.95, 0.90
KINDS = ("store", "stores", "load", "both")
"""`stores`: back to back, so that what the one before stored is hashed meanwhile."""

PLAIN = ("store", "load", "both")


def run_case(gpu: Gpu, socket: Path, row_bytes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One size of rows."""
    shape = Shape(row_bytes)
    worker = GpuWorkload(gpu, socket, shape, min(arguments.bytes, ROWS_MAX * row_bytes))
    await_pinned(socket)
    ceiling = Ceiling(gpu, worker.bytes)
    work = {
        "plain store": ceiling.store,
        "store": worker.store_s,
        "stores": lambda: worker.stores_s(3),
        "plain load": ceiling.load,
        "load": worker.load_s,
        "plain both": ceiling.both,
        "both": worker.both_s,
    }
    worker.store()
    seconds = sample(arguments.rounds, work, worker.drain)
    wrong = worker.wrong_bytes()
    ceiling.close()
    worker.close()
    against = {"store": "store", "stores": "store", "load": "load", "both": "both"}
    return {
        "name": shape.name,
        "row_bytes": row_bytes,
        "job_bytes": worker.bytes,
        "wrong_bytes": wrong,
        "ratio_to_limit": {
            kind: round(median_ratio(seconds[f"plain {against[kind]}"], seconds[kind]), 3) for kind in KINDS
        },
        "gb_per_s": {
            kind: gb_per_s(worker.bytes * (2 if kind.endswith("both") else 1), taken) for kind, taken in seconds.items()
        },
    }


def bounds_of(cases: list[dict[str, Any]]) -> list[Bound]:
    """The budgets of the design."""
    bounds = [at_most("wrong bytes", sum(case["wrong_bytes"] for case in cases), 0)]
    large = [case["ratio_to_limit"] for case in cases if case["row_bytes"] >= LARGE_ROW_BYTES]
    for kind in KINDS:
        if large:
            minimum = BOTH_WAYS_MIN if kind == "both" else ONE_WAY_MIN
            least = min(ratios[kind] for ratios in large)
            bounds.append(at_least(f"{kind}, rows >= 64 KiB: least ratio to the ceiling", least, minimum))
    return bounds


def main() -> int:
    """Runs it; returns the exit status."""
    made = parser(__doc__ or "")
    made.add_argument("--rows", type=int, nargs="*", metavar="KIB", help="rows of so many KiB only")
    arguments = parse(made, 32 * MIB)
    gpu = Gpu()
    rows = [size for size in ROW_BYTES if not arguments.rows or size // KIB in arguments.rows]
    if arguments.quick:
        rows = rows[::3]
    cases: list[dict[str, Any]] = []
    left_out: list[str] = []
    with daemon(arguments.bytes) as socket:
        # The largest first: they have bounds.
        largest_first = in_time(rows[::-1], arguments.seconds, left_out)
        for row_bytes in largest_first:
            done(run_case(gpu, socket, row_bytes, arguments), cases)
    cases.reverse()
    plain = [f"plain {kind}" for kind in PLAIN]
    speeds = [[case["name"], *(f"{case['gb_per_s'][kind]:.1f}" for kind in (*KINDS, *plain))] for case in cases]
    ratios = [[case["name"], *(f"{case['ratio_to_limit'][kind]:.2f}" for kind in KINDS)] for case in cases]
    tables = [
        table("through the daemon: ratio to the plain copy", ("rows", *KINDS), ratios),
        table("GB/s; plain: one cuMemcpyAsync", ("rows", *KINDS, *plain), speeds),
    ]
    result = {"cases": cases, "left_out": left_out, "tables": tables}
    return tell(arguments, result, bounds_of(cases))


if __name__ == "__main__":
    sys.exit(main())
