"""How long a start takes with 1, 2, 4 million records in sealed segments, and what memory they take.

The segment files are made with the daemon's own functions: headers and footers are real, the space for the payloads of
4 KiB is left as holes, which a start never looks at. Time: from the launch of the process (Python, imports and all) to
the first answered `status`. Figures for more records are a straight line through the last two levels, and say so.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.format import ENTRY, KeyspaceId, SegmentHeader, footer_pages
from kvoffloadd.storage.disk.manifest import Manifest, write_manifest
from kvoffloadd.storage.disk.segment import create_segment, seal_segment
from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.figures import KEY_BYTES, keys_of, p50, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import private_folder
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result

LEVELS = (1_000_000, 2_000_000, 4_000_000)
SEGMENT_BYTES = 256 << 20
SPACE = KeyspaceId(b"f" * 16, b"s" * 16, 0, 0, 1, KEY_BYTES)
BOUND_RECORDS, START_MAX_S, BYTES_MAX = 1_000_000, 3.0, 100.0
EXTRAPOLATED = 10_000_000
TIB = 1 << 40


class SparseFiles(Files):
    """Makes files without blocks, so that millions of records take little space."""

    def allocate(self, fd: int, size: int) -> None:
        """See the class."""
        os.ftruncate(fd, size)


def make_root(root: Path, records: int) -> int:
    """Makes a root with `records` records in sealed segments; returns the number of segments."""
    files = SparseFiles()
    files.make_directory(root)
    files.make_directory(root / "segments")
    asyncio.run(write_manifest(root, Manifest(secrets.token_bytes(16), 0, 0, {})))
    folder = files.open_directory(root / "segments")
    pages = SEGMENT_BYTES // PAGE_BYTES
    fit = (pages - 1 - footer_pages(pages // 2, 1)) // 2
    number = 0
    for first in range(0, records, fit):
        number += 1
        numbers = np.arange(first, min(first + fit, records))
        entries = np.zeros(len(numbers), ENTRY)
        entries["key"] = keys_of(numbers).view("<u8")
        entries["sequence"] = numbers + 1
        entries["payload_bytes"] = PAGE_BYTES
        entries["page"] = 1 + 2 * np.arange(len(numbers))
        header = SegmentHeader(secrets.token_bytes(16), number, SEGMENT_BYTES, int(time.time()))
        fd = create_segment(files, folder, f"{number:016x}", header, direct=False)
        seal_segment(files, fd, header, entries, [SPACE])
        files.close(fd)
    files.close(folder)
    return number


def start(folder: Path, root: Path, records: int) -> dict[str, float]:
    """One start: seconds, and bytes per record."""
    settings = {"disk.roots": f'[{{ path = "{root}", capacity = {TIB} }}]', "disk.min_free_bytes": "0"}
    begun = time.perf_counter()
    with Daemon(folder, 64 << 20, settings) as daemon:
        disk = daemon.status()["disk"]
        seconds = time.perf_counter() - begun
        if disk["records"] != records:
            raise SystemExit(f"{disk['records']} of {records} records were found")
        return {"start_s": seconds, "index_bytes": disk["index_bytes"], "rss_bytes": daemon.rss_anon_bytes()}


def measure(records: int, rounds: int, base_bytes: float, parent: Path | None) -> dict[str, Any]:
    """Measures medians of some starts with `records` records. `base_bytes`: what a daemon without records takes."""
    with private_folder() as name, disk_folder(parent) as place:
        root = Path(place) / "root"
        segments = make_root(root, records) if records else 0
        starts = [start(Path(name), root, records) for _ in range(rounds)]
    level: dict[str, Any] = {
        "records": records,
        "segments": segments,
        "start_s": round(p50(one["start_s"] for one in starts), 3),
        "starts_s": [round(one["start_s"], 3) for one in starts],
        "rss_bytes": p50(one["rss_bytes"] for one in starts),
    }
    if records:
        level["index_bytes_per_record"] = round(p50(one["index_bytes"] for one in starts) / records, 1)
        level["rss_bytes_per_record"] = round((level["rss_bytes"] - base_bytes) / records, 1)
    return level


def summary(levels: list[dict[str, Any]]) -> dict[str, Any]:
    """The levels, a straight line, the bounds."""
    small = min(levels[1:], key=lambda level: abs(level["records"] - BOUND_RECORDS))
    last, before = levels[-1], levels[-2]
    slope = (last["start_s"] - before["start_s"]) / (last["records"] - before["records"])
    there = last["start_s"] + slope * (EXTRAPOLATED - last["records"])
    bounds = [
        at_most(f"start with {small['records']:,} records, s", small["start_s"], START_MAX_S),
        at_most("index bytes per record", last["index_bytes_per_record"], BYTES_MAX),
    ]
    extrapolated = {"records": EXTRAPOLATED, "start_s": round(there, 1)}
    ratio = round(small["start_s"] / START_MAX_S, 3)
    return judged({"levels": levels, "extrapolated": extrapolated, "ratio_to_limit": ratio}, bounds)


def show(result: dict[str, Any]) -> None:
    print_grid(
        "starts with records on disk",
        ("records", "segments", "start s", "index B/record", "RssAnon B/record"),
        (
            (
                f"{level['records']:,}",
                f"{level['segments']:,}",
                f"{level['start_s']:.2f}",
                f"{level.get('index_bytes_per_record', 0):.1f}",
                f"{level.get('rss_bytes_per_record', 0):.1f}",
            )
            for level in result["levels"]
        ),
    )
    there = result["extrapolated"]
    print(f"{there['records']:,} records, extrapolated: {there['start_s']:.1f} s")
    print_bounds(result)


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--records", type=int, nargs="*", default=LEVELS, help="levels (default: 1, 2 and 4 million)")
    parser.add_argument("--rounds", type=int, default=3, help="starts at each level (default: %(default)s)")
    parser.add_argument("--path", type=Path, help="a folder on the disk to use (default: /var/tmp)")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or not arguments.records or min(arguments.records) < 1:
        parser.error("--rounds and --records are at least 1")
    levels: list[dict[str, Any]] = []
    with ProgressBar("bench_recovery", len(arguments.records) + 1) as live:
        for records in (0, *sorted(arguments.records)):
            live.show(len(levels), f"{records:,} records")
            base = levels[0]["rss_bytes"] if levels else 0.0
            levels.append(measure(records, arguments.rounds, base, arguments.path))
    result = summary(levels)
    return show_result(result, arguments, show)
