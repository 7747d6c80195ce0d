"""What `gpu_check` shows on the terminal while it runs. Needs nothing but Python's own library."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu.parts import Ended, Part
from scripts.gpu.report import grid, remark_of, short, what_it_found

COLUMNS = 118
COUNT_EVERY_S = 15.0


class Screen:
    """Each part with its number and its time, each row of it as it comes, and its tables at its end."""

    def __init__(self, heading: str, facts: Sequence[tuple[str, str]], parts: int) -> None:
        self._parts = parts
        self._number = 0
        self._passed = 0
        self._steps_shown = False
        self._counted_at = time.monotonic()
        print(f"{heading}\n\n{grid(('what', ''), facts)}", flush=True)

    def begin(self, part: Part, limit_s: float, left_s: float) -> None:
        """`left_s`: of the budget, without what later parts need at least."""
        self._number += 1
        self._passed = 0
        self._steps_shown = False
        times = f"at most {max(limit_s, 0):.0f} s, {max(left_s, 0):.0f} s are left"
        print(f"[{self._number}/{self._parts}] {part.name}: {part.title} ({times})", flush=True)

    def row(self, row: dict[str, Any]) -> None:
        """A case, or a test: those that pass are counted. Of a step everything is shown, and not again at its end."""
        if "step" in row.get("case", ()):
            self._steps_shown = True
            self._step(**row["case"])
        elif "case" in row:
            self._print(_plain(row["case"], ": "))
        elif row["outcome"] != "passed":
            self._print(f"{row['outcome']}: {short(row['test'])}: {remark_of(row)}")
        else:
            self._passed += 1
            if time.monotonic() - self._counted_at >= COUNT_EVERY_S:
                self._counted_at = time.monotonic()
                self._print(f"{self._passed} passed so far")

    def end(self, ended: Ended) -> None:
        """How it went, and what it found."""
        for text in () if self._steps_shown else what_it_found(ended):
            print(text)
        print(f"    {ended.part.name}: {ended.state}, {ended.seconds:.1f} s {ended.remark}\n", flush=True)

    def close(self, verdict: str, report: Path) -> None:
        print(f"{verdict}\n\nSee {report}", flush=True)

    def _step(self, step: str, **found: object) -> None:
        print(f"    {step}")
        width = max(map(len, found), default=0)
        for name, value in found.items():
            print(f"        {name:{width}}  {value}", flush=True)

    def _print(self, text: str) -> None:
        print(textwrap.fill(text, COLUMNS, initial_indent="    ", subsequent_indent=" " * 8), flush=True)


def _plain(value: object, after_name: str = " ") -> str:
    """Formats a value as people write it."""
    if isinstance(value, dict):
        return ", ".join(f"{name}{after_name}{_plain(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
