"""Completes the command line in shells, with scripts generated from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

FILES = ("FILE", "PATH")
"""Options with these values are completed with file names."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns a script for the shell, for the commands and options of `parser`. Raises ImportError without shtab."""
    import shtab

    for action in _actions(parser):
        if action.metavar in FILES or action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    script: str = shtab.complete(parser, shell)
    return script if script.endswith("\n") else script + "\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        for child in (action.choices or {}).values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _actions(child)
