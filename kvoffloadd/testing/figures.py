"""Helpers that benchmarks share: keys, samples and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from kvoffloadd.model import I64Array, U8Array, U64Array
from kvoffloadd.testing.oracle import mixed
from kvoffloadd.testing.output import COLUMNS

KEY_WORDS = 4
KEY_BYTES = 8 * KEY_WORDS


def keys_of(numbers: I64Array, seed: int = 0) -> U8Array:
    """Returns u8 (n, 32): the keys of these numbers, as unlike each other as hashes."""
    words: U64Array = np.empty((len(numbers), KEY_WORDS), np.uint64)
    words[:] = numbers[:, None]
    words *= np.uint64(KEY_WORDS)
    words += np.arange(KEY_WORDS, dtype=np.uint64)
    return mixed(words ^ np.uint64(seed)).view(np.uint8)


def p50(samples: Iterable[float]) -> float:
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    """Returns the value that 99 % of them do not exceed."""
    return float(np.percentile(np.asarray(samples), 99))


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median over the rounds of one figure by another of the same round: noise that both had cancels."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def print_grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> None:
    """Prints a table of figures; the first `texts` columns are text."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number >= texts else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=COLUMNS, highlight=False).print(table)
