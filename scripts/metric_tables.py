"""The table of docs/STATUS.md that lists every metric, from the code; a test compares the two.

`python -m scripts metric_tables --write` rewrites the document's generated part in place. It starts a daemon.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from kvoffloadd.metrics.families import families
from kvoffloadd.testing.process import ROOT, private_folder
from scripts.harness.daemon import Daemon

DOCUMENT = ROOT / "docs" / "STATUS.md"
BEGIN, END = "<!-- generated: metrics -->", "<!-- end -->"


def name_of(metric: Metric) -> str:
    """The name that its samples have."""
    return metric.name + "_total" * (metric.type == "counter")


def metrics(status: Mapping[str, Any]) -> Iterable[Metric]:
    """All that a daemon with this status exports."""
    yield from families(status)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    yield from registry.collect()


def table(status: Mapping[str, Any]) -> str:
    """One row for each metric, in the order of their export."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics(status):
        labels = list(getattr(metric, "_labelnames", None) or ()) + ["le"] * (metric.type == "histogram")
        rows.append(f"| `{name_of(metric)}` | {metric.type} | {', '.join(labels)} | {metric.documentation} |")
    return "\n".join(rows)


def fill(document: str, status: Mapping[str, Any]) -> str:
    """The document with its generated part made anew."""
    made = f"{BEGIN}\n{table(status)}\n{END}"
    return re.sub(rf"{BEGIN}\n.*?{END}", lambda _: made, document, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite {DOCUMENT.name} in place")
    write = parser.parse_args().write
    with private_folder() as folder, tempfile.TemporaryDirectory() as disk:
        roots = f'[{{ path = "{disk}/root", capacity = "16MiB" }}]'
        with Daemon(Path(folder), "16MiB", {"disk.roots": roots, "disk.min_free_bytes": "0"}) as daemon:
            status = daemon.status()
    if write:
        DOCUMENT.write_text(fill(DOCUMENT.read_text(encoding="utf-8"), status), encoding="utf-8")
    else:
        print(table(status))
    return 0
