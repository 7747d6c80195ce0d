"""The shape of the code: through how many hands a store and a load go, which modules import each other, sizes.

Counts, not times: the same on every machine. With --tree, of another checkout, whose package is run with this Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvoffloadd.testing.output import print_table
from kvoffloadd.testing.process import ROOT, module
from scripts.harness.program import benchmark_line, show_result
from scripts.shape.modules import lines_of, shape_of

TRACE_S = 60.0


def measure(tree: Path) -> dict[str, Any]:
    """All counts of a checkout. Raises subprocess.SubprocessError if its daemon can't be traced."""
    traced = subprocess.run(
        module("scripts.shape.trace", str(tree)), cwd=ROOT, capture_output=True, check=True, timeout=TRACE_S
    )
    package = shape_of(tree, "kvoffloadd")
    return {
        **json.loads(traced.stdout),
        "within_budget": not package.circles,
        "circles": package.circles,
        "names_twice": package.twice,
        "files": package.files,
        "short_files": package.short_files,
        "lines": {name: lines_of(tree / name) for name in ("kvoffloadd", "scripts", "tests")},
    }


def show(result: dict[str, Any]) -> None:
    """Prints the result as a table."""
    jobs = [
        (what, f"{one['changes']} changes of file", f"{one['calls']} calls in {one['files']} files")
        for what, one in ((name, result[name]) for name in ("store", "load"))
    ]
    circles = [("circle", f"{len(group)} modules", ", ".join(group)) for group in result["circles"]]
    names = ", ".join(sorted(result["names_twice"]))
    modules = [
        ("modules", f"{result['files']}", f"{result['short_files']} of fewer than 60 lines"),
        ("in circles", f"{sum(map(len, result['circles']))}", "imports for types counted"),
        *circles,
        ("class names used twice", f"{len(result['names_twice'])}", names),
    ]
    lines = [(name, f"{count:,} lines", "") for name, count in result["lines"].items()]
    print_table("shape", [jobs, modules, lines], good=not result["circles"])


def main() -> int:
    """Runs it; returns the exit status."""
    parser = benchmark_line(__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to look at (default: this one)")
    given = parser.parse_args()
    return show_result(measure(given.tree.resolve()), given, show)


if __name__ == "__main__":
    sys.exit(main())
