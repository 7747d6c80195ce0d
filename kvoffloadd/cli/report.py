"""Output of the command line for people: values with units, progress, and a config as TOML."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvoffloadd.config import Config, DiskRoot
from kvoffloadd.log import printable
from kvoffloadd.quotalimits import QuotaLimits
from kvoffloadd.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 200
"""The width of tables that go into a file or a pipe, where there is no terminal to ask."""


def open_console(pipe_columns: int = PIPE_COLUMNS) -> Console:
    """Opens a console on standard output, as wide as the terminal, or `pipe_columns` wide where there is none."""
    # Imported here: the daemon, which shares this package, has no use for a terminal library.
    from rich.console import Console

    # No markup: values come from the daemon and its peers.
    width = None if sys.stdout.isatty() else pipe_columns
    return Console(width=width, markup=False, highlight=False, emoji=False)


def format_value(name: str, value: object) -> str:
    """Formats a value with the unit that its name ends in: `_bytes`, `_s`, `_rate` (a fraction, shown in percent). In a
    map, only counts other than 0 are shown.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int | float):
        return _format_number(name, value)
    if isinstance(value, list | tuple):
        return ", ".join(format_value("", item) for item in value) or "none"
    if isinstance(value, Mapping):  # counts by kind
        return (
            ", ".join(f"{printable(str(name))}: {format_value('', item)}" for name, item in value.items() if item)
            or "none"
        )
    return printable("-" if value is None else str(value))


def _format_number(name: str, value: float) -> str:
    if name == "bytes" or name.endswith("_bytes"):
        return format_bytes(int(value))
    if name == "seconds" or name.endswith(("_s", "_seconds")):
        return format_seconds(value)
    if name.endswith("_rate") and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


class ProgressLine:
    """The progress of a long piece of work, in one line on standard error that disappears at the end.

    Shown only at a terminal, and only if the work lasts. Any thread may call `update`, at any rate. `unit`: formats an
    amount of work.
    """

    FIRST_S, NEXT_S = 1.0, 0.5

    def __init__(self, label: str, unit: Callable[[int], str] = format_bytes) -> None:
        self._label = label
        self._unit = unit
        self._done = (0, 0)
        self._started_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, name="kvo-progress", daemon=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def update(self, done: int, total: int) -> None:
        """Records this amount of work as done."""
        self._done = (done, total)

    def _write_lines(self) -> None:
        wait_s = self.FIRST_S
        while not self._ended.wait(wait_s):
            # One column less than there are: a line that fills the last one would scroll some terminals.
            sys.stderr.write(f"\r\x1b[K{printable(self.text())[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()
            wait_s = self.NEXT_S
        if wait_s == self.NEXT_S:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def text(self) -> str:
        """Returns the line: elapsed time, amount, rate."""
        lasted_s = time.monotonic() - self._started_s
        done, total = self._done
        if total <= 0:
            return f"{self._label}: {format_seconds(lasted_s)}"
        speed = self._unit(int(done / max(lasted_s, 1e-3)))
        return f"{self._label}: {done / total:.0%} of {self._unit(total)}, {speed}/s, {format_seconds(lasted_s)}"


def quota_name(quota: Mapping[str, Any]) -> str:
    """Returns whose a quota in a status is."""
    return f"{'uid' if quota['kind'] == 'user' else quota['kind']} {quota['name']}"


def quota_use(quota: Mapping[str, Any]) -> str:
    """Returns what is used of a quota in a status, and what it grants."""
    limits = [
        f"{word} {format_bytes(quota[key])}"
        for word, key in (("at least", "memory_min_bytes"), ("at most", "memory_max_bytes"))
        if quota[key]
    ]
    return f"{format_bytes(quota['memory_bytes'])} of {' and '.join(limits) or 'any'}"


def config_text(config: Config) -> str:
    """Returns the config as TOML that `config.load` reads back to an equal one; comments next to sizes explain them."""
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
    if name == "roots" and isinstance(value, tuple) and value:
        return "\n".join([f"{name} = [", *(_root_line(root) for root in value), "]"])
    if name in ("users", "namespaces") and isinstance(value, tuple):
        return f"{name} = {{{', '.join(_quota_table(limits) for limits in value)}}}"
    if isinstance(value, Path) or value is None:
        value = str(value or "")
    sized = name.endswith(("_bytes", "_bytes_per_s"))
    remark = f"  # {format_bytes(value)}" if sized and isinstance(value, int) else ""
    return f"{name} = {json.dumps(value, ensure_ascii=False)}{remark}"


def _root_line(root: DiskRoot) -> str:
    path = json.dumps(str(root.path), ensure_ascii=False)
    return f"    {{ path = {path}, capacity = {root.capacity_bytes} }},  # {format_bytes(root.capacity_bytes)}"


def _quota_table(limits: QuotaLimits) -> str:
    """Returns a quota as one entry of an inline table."""
    sizes = {key: size for key, size in dataclasses.asdict(limits).items() if key != "name" and size}
    chosen = ", ".join(f"{key} = {size}" for key, size in (sizes or {"memory_min_bytes": 0}).items())
    return f"{json.dumps(limits.name, ensure_ascii=False)} = {{ {chosen} }}"
