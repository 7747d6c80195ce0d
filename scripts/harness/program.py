"""What the command lines of scripts have in common: options, how a result is shown, and exit statuses."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.units import parse_bytes
from scripts.harness.output import print_json
from scripts.harness.process import DaemonError, obey_signals, private_folder

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_BAD, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class Report(Protocol):
    """How a run went."""

    @property
    def is_good(self) -> bool:
        """Whether all that must hold held."""

    def as_json(self) -> dict[str, object]:
        """Names that stay."""

    def print(self) -> None:
        """A table."""


def command_line(documentation: str | None) -> argparse.ArgumentParser:
    """Of a run that is good or not. The first line of the script's documentation says what it is."""
    what, _, more = (documentation or "").partition("\n")
    parser = argparse.ArgumentParser(description=what, epilog=more)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output in place of the table")
    return parser


def benchmark_line(documentation: str | None) -> argparse.ArgumentParser:
    """Of a benchmark, which has bounds."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output in place of tables")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a bound is not kept")
    return parser


def add_seed(parser: argparse.ArgumentParser) -> None:
    """`--seed`, see `seed_of`."""
    parser.add_argument("--seed", type=int, help="of all that is chosen at random (default: a new one, which is told)")


def seed_of(given: argparse.Namespace, name: str) -> int:
    """The one that was asked for, or a new one; told on standard error."""
    seed: int = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    print(f"{name}: seed {seed}", file=sys.stderr)
    return seed


def carry_out(name: str, run: Callable[[Path], Report], *, as_json: bool) -> int:
    """Run it in a folder of its own, and show what came of it; returns the exit status."""
    obey_signals()
    try:
        with private_folder() as folder:
            report = run(Path(folder))
    except (DaemonError, KvOffloadError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if as_json:
        print_json(report.as_json())
    else:
        report.print()
    return 0 if report.is_good else EXIT_BAD


def show_result(result: dict[str, Any], given: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> int:
    """Of a benchmark; returns the exit status."""
    if given.json:
        print_json(result)
    else:
        show(result)
    return EXIT_BAD if given.check and not result["within_budget"] else 0


def size(text: str) -> int:
    """An option's bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{text}" {error}') from None


def seconds(text: str) -> float:
    """An option's duration, above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
