"""Output of scripts: progress on standard error, at the end a table or one JSON object on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

COLUMNS = 80
PLAIN_EVERY_S = 15.0
SHOWN = 20


class ProgressBar:
    """A progress bar followed by figures; where standard error is no terminal, a line now and then."""

    def __init__(self, what: str, total: float) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn(what), BarColumn(bar_width=20), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
            console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, figures="")
        self._what = what
        self._total = total
        self._told_at = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, done: float, figures: str) -> None:
        """Shows the present state."""
        self._progress.update(self._task, completed=min(done, self._total), figures=figures)
        if not self._console.is_terminal and time.monotonic() - self._told_at >= PLAIN_EVERY_S:
            self._told_at = time.monotonic()
            sys.stderr.write(f"{self._what}: {100 * min(done / self._total, 1):.0f} % {figures}\n")

    def print(self, line: str) -> None:
        """Prints a line that stays, above the bar."""
        self._console.print(f"{self._what}: {line}", markup=False, highlight=False, soft_wrap=True)


def print_json(values: Mapping[str, object]) -> None:
    """Prints one object on standard output."""
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def print_table(title: str, sections: Sequence[Sequence[tuple[str, str, str]]], *, good: bool) -> None:
    """Prints rows of name, value and remark, with a line between sections; green or red by result."""
    table = Table(
        title=title, title_style="bold", border_style="green" if good else "red", show_header=False, width=COLUMNS
    )
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="bold")
    table.add_column(style="dim")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    Console(width=COLUMNS, highlight=False).print(table)


def format_ms(seconds: float | None) -> str:
    """Formats a latency."""
    return "-" if seconds is None else f"{seconds * 1e3:,.2f} ms"


def ratio(part: float, whole: float) -> float:
    """Returns the ratio; 0 for nothing."""
    return part / whole if whole else 0.0


class Audited(Protocol):
    """A result with lists of problems."""

    @property
    def findings(self) -> list[str]:
        """Returns the findings of self-audits."""

    @property
    def leaks(self) -> list[str]:
        """Returns what was not released."""

    @property
    def errors(self) -> list[str]:
        """Returns what failed."""

    @property
    def said(self) -> list[str]:
        """Returns what workers wrote."""


def print_wrong(report: Audited) -> None:
    """Prints each problem, below the table."""
    findings = [f"finding: {finding}" for finding in report.findings]
    leaked = [f"leaked: {leak}" for leak in report.leaks]
    for text in [*findings[:SHOWN], *leaked, *report.errors[:SHOWN], *report.said[:SHOWN]]:
        sys.stdout.write(text + "\n")
