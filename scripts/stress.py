#!/usr/bin/env python3
"""Stress: many worker processes against one daemon, workers and daemon killed, every loaded byte checked.

Each worker registers random KV caches (several groups, parts, tensors, paddings), and stores, loads, reserves, cancels
and reconnects at random. Contents are a function of the key, so that what one worker stored another can check. Exit
status 0 only if no byte was wrong, no promise broken, nothing leaked, the daemon's self-audit found nothing, and
something was checked at all; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from _daemon import DaemonError
from _output import print_json
from _stress_report import Report, print_report
from _stress_run import Options, Run

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.units import parse_bytes


def main() -> int:
    """Runs it; returns the exit status."""
    options, as_json = _arguments()
    print(f"stress: seed {options.seed}", file=sys.stderr)
    try:
        report = Run(options).run()
    except (DaemonError, KvOffloadError, OSError) as error:
        print(f"stress: {error}", file=sys.stderr)
        return 1
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report)
    return 0 if report.is_good else 1
