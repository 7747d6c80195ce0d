"""Runs a command in a private folder: prints its result, and has its exit statuses and the values of its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.testing.output import print_json
from kvoffloadd.testing.process import DaemonError, obey_signals, private_folder
from kvoffloadd.units import parse_bytes

EXIT_BAD, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class RunReport(Protocol):
    """The result of a run."""

    @property
    def is_good(self) -> bool:
        """Returns whether all requirements were met."""

    def as_json(self) -> dict[str, object]:
        """Returns the result by stable names."""

    def print(self) -> None:
        """Prints a table."""


def carry_out(name: str, run: Callable[[Path], RunReport], *, as_json: bool) -> int:
    """Runs `run` in a private folder, and shows its result; returns the exit status."""
    obey_signals()
    try:
        with private_folder() as folder:
            report = run(Path(folder))
    except (DaemonError, KvOffloadError, OSError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if as_json:
        print_json(report.as_json())
    else:
        report.print()
    return 0 if report.is_good else EXIT_BAD


def size(text: str) -> int:
    """Parses an option's bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}" {error}') from None


def seconds(text: str) -> float:
    """Parses an option's duration, above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
