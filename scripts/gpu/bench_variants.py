#!/usr/bin/env python3
"""What the daemon's settings and the layout of block ids do to stores and loads of GPU memory.

Each line is a daemon of its own, or the same one with block ids that are consecutive (neighbours are merged). Times are
the client's; ratios are to one plain copy of as many bytes in the same rounds.
"""

from __future__ import annotations

import sys
from typing import Any

from scripts.gpu.bench import (
    KIB,
    MIB,
    Shape,
    against_ceiling,
    daemon,
    done,
    in_time,
    parse,
    parser,
    table,
    tell,
)
from scripts.harness.gpu import Gpu

ROW_BYTES = (4 * KIB, 16 * KIB, 64 * KIB)
DAEMONS: dict[str, dict[str, str]] = {
    "1,024 a call": {},
    "256 a call": {"cuda.batch_descriptors": "256"},
    "4,096 a call": {"cuda.batch_descriptors": "4096"},
    "one by one": {"cuda.batch": "false"},
}
KINDS = ("store", "load")
BLOCKS_PER_KEY = 8


def main() -> int:
    arguments = parse(parser(__doc__ or "", "512MiB", 5), 8 * MIB)
    gpu = Gpu()
    rows = ROW_BYTES[:1] if arguments.quick else ROW_BYTES
    cases: list[dict[str, Any]] = []
    left_out: list[str] = []
    for name in in_time(list(DAEMONS), arguments.seconds, left_out):
        settings = DAEMONS[name]
        with daemon(arguments.bytes, settings) as socket:
            for row_bytes in rows:
                for scattered in (True, False) if not settings else (True,):
                    shape = Shape(row_bytes, scattered, blocks_per_key=BLOCKS_PER_KEY)
                    found = against_ceiling(gpu, socket, shape, arguments.bytes, arguments.rounds, KINDS)
                    named = name if scattered else f"{name}, coalesced"
                    done({"name": named, "scattered": scattered, **found}, cases)
    lines = [
        [f"{case['row_bytes'] // KIB} KiB", case["name"]]
        + [f"{case['gb_per_s'][kind]:.1f} ({case['ratio_to_limit'][kind]:.2f})" for kind in KINDS]
        for case in sorted(cases, key=lambda case: int(case["row_bytes"]))
    ]
    title = "GB/s (ratio to the plain copy), by copies in a call of the driver"
    return tell(
        arguments,
        {"cases": cases, "left_out": left_out, "tables": [table(title, ("rows", "daemon", *KINDS), lines)]},
        [],
    )


if __name__ == "__main__":
    sys.exit(main())
