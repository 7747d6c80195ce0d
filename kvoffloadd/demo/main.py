"""Runs the demo, from parsed arguments to an exit status."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from kvoffloadd.demo.report import DemoReport
from kvoffloadd.demo.run import Run
from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.program import carry_out


def demo(given: argparse.Namespace) -> int:
    """Returns the exit status: 0 only if no byte was wrong, something came from disk after the restart, nothing leaked
    and the daemon's self-audit found nothing. `given`: turns, seconds, memory in bytes, seed, json.
    """
    return carry_out("demo", partial(_run, given), as_json=given.json)


def _run(given: argparse.Namespace, folder: Path) -> DemoReport:
    """Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
    with disk_folder(None) as disk:
        return Run(given, folder, Path(disk)).run()
