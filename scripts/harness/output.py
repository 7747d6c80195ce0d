"""What scripts show: the same as the trials of the package."""

from __future__ import annotations

from kvoffloadd.trial.output import (
    COLUMNS,
    PLAIN_EVERY_S,
    SHOWN,
    Judged,
    Live,
    format_ms,
    print_json,
    print_table,
    print_wrong,
    ratio,
)

__all__ = [
    "COLUMNS",
    "PLAIN_EVERY_S",
    "SHOWN",
    "Judged",
    "Live",
    "format_ms",
    "print_json",
    "print_table",
    "print_wrong",
    "ratio",
]
