"""Answers about the command line itself: its help, its manual page, and its completion in shells.

The manual page and the scripts are files that `python -m scripts command_files` makes of the parser: shells that start
do not wait for the making.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvoffloadd.cli.exits import EXIT_OK, EXIT_USAGE

SHELLS = ("bash", "zsh", "tcsh", "fish")

GENERATED = Path(__file__).with_name("generated")


def without_command(arguments: argparse.Namespace) -> int:
    """Shows the help where a command is missing. That is a usage error: a script may have lost a word."""
    sys.stderr.write(arguments.parser.format_help())
    return EXIT_USAGE


def show_help(arguments: argparse.Namespace) -> int:
    """Shows the help of the whole or of one command, as `--help` there does."""
    arguments.parser.parse_args([*arguments.words, "--help"])  # ends the process
    return EXIT_OK


def completion(arguments: argparse.Namespace) -> int:
    """Prints the script for a shell."""
    return _print(f"kvoffloadd.{arguments.shell}")


def man(_: argparse.Namespace) -> int:
    """Prints the manual page."""
    return _print("kvoffloadd.1")


def _print(name: str) -> int:
    sys.stdout.write((GENERATED / name).read_text(encoding="utf-8"))
    return EXIT_OK
