"""What the command line shows to people: status tables with units, and a config as TOML."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffloadd.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from kvoffloadd.config import Config

PIPE_COLUMNS = 200
"""Width of tables that go into a file or a pipe, where there is no terminal to ask."""


def print_status(status: Mapping[str, Any]) -> None:
    """Tables on standard output: first the plain values, then one table for each map or list of maps."""
    # Imported here: a terminal library is no business of the daemon, which shares this package.
    from rich.console import Console

    # No markup: values are the daemon's and its peers' words, not ours.
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    plain = {name: value for name, value in status.items() if not _is_table(value)}
    _print_map(console, "daemon", plain)
    for name, value in status.items():
        if isinstance(value, Mapping):
            _print_nested(console, name, value)
        elif _is_table(value):
            _print_rows(console, name, value)


def _print_nested(console: Console, title: str, values: Mapping[str, Any]) -> None:
    """A map of maps with equal keys reads best as rows; other maps as name and value."""
    if values and all(isinstance(value, Mapping) for value in values.values()):
        _print_rows(console, title, [{"": name, **value} for name, value in values.items()])
    else:
        _print_map(console, title, values)


def _print_map(console: Console, title: str, values: Mapping[str, Any]) -> None:
    from rich.table import Table

    if not values:
        return
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in values.items():
        table.add_row(printable(name), format_value(name, value))
    console.print(table)


def _print_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for name in names:
        numeric = all(isinstance(row.get(name, 0), int | float) for row in rows)
        table.add_column(printable(name), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(format_value(name, row[name]) if name in row else "-" for name in names))
    console.print(table)


def _is_table(value: object) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def format_value(name: str, value: object) -> str:
    """A value with the unit that its name ends in: `_bytes`, `_s`, `_rate` (a fraction, shown in percent)."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int | float):
        return _format_number(name, value)
    if isinstance(value, list | tuple):
        return ", ".join(format_value("", item) for item in value) or "none"
    return printable("-" if value is None else str(value))


def _format_number(name: str, value: float) -> str:
    if name == "bytes" or name.endswith("_bytes"):
        return format_bytes(int(value))
    if name == "seconds" or name.endswith(("_s", "_seconds")):
        return format_seconds(value)
    if name.endswith("_rate") and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def printable(text: str) -> str:
    """`text` without control characters: names come from peers, and a terminal obeys what it is sent."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def config_text(config: Config) -> str:
    """The config as TOML that `config.load` reads back to an equal one; sizes are explained beside their numbers."""
    sections = []
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        lines = [f"[{section.name}]"]
        lines += [_config_line(key.name, getattr(values, key.name)) for key in dataclasses.fields(values)]
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _config_line(name: str, value: object) -> str:
    if name == "socket_mode":
        return f"{name} = 0o{value:o}"
    if isinstance(value, Path):
        value = str(value)
    remark = f"  # {format_bytes(value)}" if name.endswith("_bytes") and isinstance(value, int) else ""
    return f"{name} = {json.dumps(value, ensure_ascii=False)}{remark}"
