"""The command `kvoffloadd doctor`: reports what on this host would keep the daemon from working, and the remedies."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvoffloadd import config, errors, socketpath
from kvoffloadd.doctor import Diagnosis, Host, Verdict, examine
from kvoffloadd.doctor.diagnosis import problem

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


def diagnoses(read_config: Callable[[], config.Config], host: Host) -> list[Diagnosis]:
    """Lists the problems of the config first; the other diagnoses then use the default config."""
    try:
        chosen, wrong = read_config(), []
    except errors.ConfigError as error:
        wrong = [problem("config", str(error), "correct it; the checks below use the defaults")]
        chosen = config.load(None, environment={**os.environ, socketpath.VARIABLE: ""})
    found = list(examine(chosen, host))
    return [*wrong, *(diagnosis for diagnosis in found if not (wrong and diagnosis.subject == "config"))]


def doctor(arguments: argparse.Namespace, read_config: Callable[[], config.Config]) -> int:
    """Returns the exit code: 1 if there are problems."""
    found = diagnoses(read_config, Host.here())
    problems = sum(diagnosis.verdict == Verdict.PROBLEM for diagnosis in found)
    if arguments.json:
        checks = [asdict(diagnosis) for diagnosis in found]
        sys.stdout.write(json.dumps({"good": not problems, "checks": checks}, indent=2) + "\n")
    else:
        _print(found, problems)
    return 1 if problems else 0


def _print(found: list[Diagnosis], problems: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvoffloadd.cli.report import open_console
    from kvoffloadd.log import printable

    console: Console = open_console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for diagnosis in found:
        text = Text("\n".join(map(printable, diagnosis.found.splitlines())))
        if diagnosis.remedy:
            text.append(f"\n-> {printable(diagnosis.remedy)}", style="italic")
        table.add_row(Text(diagnosis.verdict, style=STYLES[diagnosis.verdict]), printable(diagnosis.subject), text)
    console.print(table)
    notes = sum(diagnosis.verdict == Verdict.NOTE for diagnosis in found)
    verdict = _count(problems, "problem") if problems else "no problems: the daemon can work on this host"
    console.print(f"\n{verdict}; {_count(notes, 'note')}")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
