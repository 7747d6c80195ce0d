"""Runs the benchmark, from parsed arguments to an exit status, and prints its figures."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvoffloadd import __version__
from kvoffloadd.bench.disk import measure_disk
from kvoffloadd.bench.figure import Figure
from kvoffloadd.bench.gpu import measure_gpu
from kvoffloadd.bench.memory import measure_memory
from kvoffloadd.bench.requests import measure_requests
from kvoffloadd.bench.rounds import Show
from kvoffloadd.errors import DeviceError
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.program import carry_out

PIPE_COLUMNS = 110


@dataclass(slots=True)
class BenchReport:
    """All figures. `skipped`: the parts that can't be measured here, and why. `load`: the machine's load before the
    run.
    """

    figures: list[Figure] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def is_good(self) -> bool:
        """Returns whether anything was measured: a benchmark has no other verdict."""
        return bool(self.figures)

    def as_json(self) -> dict[str, object]:
        """Returns the figures by stable keys."""
        return {
            "version": __version__,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "arch": platform.machine()},
            "load": round(self.load, 2),
            "figures": [asdict(figure) for figure in self.figures],
            "skipped": self.skipped,
        }

    def print(self) -> None:
        """Prints a table."""
        table = Table(box=None, pad_edge=False)
        for name, justify in (("part", "left"), ("what", "left"), ("daemon", "right"), ("ratio", "right")):
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("this machine's limit")
        for figure in self.figures:
            limit = f"{figure.limit_value:,.1f} {figure.unit}: {figure.limit}"
            table.add_row(figure.part, figure.what, f"{figure.value:,.1f} {figure.unit}", f"{figure.ratio:.2f}", limit)
        console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
        console.print(f"kvoffloadd bench, medians; load of the machine before: {self.load:.1f}\n", table, sep="\n")
        for part, why in self.skipped.items():
            console.print(f"{part}: not measured: {why}", markup=False)


def bench(given: argparse.Namespace) -> int:
    """Returns the exit status. `given`: only, bytes, rounds, folder, json."""

    def run(folder: Path) -> BenchReport:
        report = BenchReport()
        parts = _parts(given, folder)
        with ProgressBar("bench", len(parts)) as live:
            for number, (name, measure) in enumerate(parts.items()):
                try:
                    report.figures += measure(partial(_show, live, number, name))
                except DeviceError as error:
                    report.skipped[name] = str(error)
        return report

    return carry_out("bench", run, as_json=given.json)


def _show(live: ProgressBar, number: int, part: str, done: float, text: str) -> None:
    live.show(number + done, f"{part}, {text}")


def _parts(given: argparse.Namespace, folder: Path) -> dict[str, Callable[[Show], list[Figure]]]:
    parts: dict[str, Callable[[Show], list[Figure]]] = {
        "memory": lambda show: measure_memory(_sub(folder, "m"), given.bytes, given.rounds, show),
        "disk": lambda show: measure_disk(_sub(folder, "d"), given.folder, given.bytes, given.rounds, show),
        "requests": lambda show: measure_requests(_sub(folder, "r"), given.rounds, show),
        "gpu": lambda show: measure_gpu(_sub(folder, "g"), given.bytes, given.rounds, show),
    }
    return {name: part for name, part in parts.items() if name in given.only or not given.only}


def _sub(folder: Path, name: str) -> Path:
    """Makes a folder for one daemon: its socket's path must stay short."""
    path = folder / name
    path.mkdir()
    return path
