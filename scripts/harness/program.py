"""What the command lines of scripts have in common: options, how a result is shown, and exit statuses."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable
from typing import Any

from kvoffloadd.testing.output import print_json
from kvoffloadd.testing.program import EXIT_BAD


def command_line(documentation: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a run that is good or not. The first line of the script's documentation describes it."""
    what, _, more = (documentation or "").partition("\n")
    parser = argparse.ArgumentParser(description=what, epilog=more)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output in place of the table")
    return parser


def benchmark_line(documentation: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a benchmark, which has bounds."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output in place of tables")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a bound is not kept")
    return parser


def add_seed(parser: argparse.ArgumentParser) -> None:
    """`--seed`, see `seed_of`."""
    parser.add_argument("--seed", type=int, help="of all that is chosen at random (default: a new one; it is printed)")


def seed_of(given: argparse.Namespace, name: str) -> int:
    """Returns the seed that was asked for, or a new one; prints it to standard error."""
    seed: int = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    print(f"{name}: seed {seed}", file=sys.stderr)
    return seed


def show_result(result: dict[str, Any], given: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> int:
    """Shows the result of a benchmark; returns the exit status."""
    if given.json:
        print_json(result)
    else:
        show(result)
    return EXIT_BAD if given.check and not result["within_budget"] else 0
