"""What the benchmarks share: keys, samples, bounds, and tables."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.harness.oracle import mixed
from scripts.harness.output import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvoffloadd.model import I64Array, U8Array, U64Array

KEY_WORDS = 4
KEY_BYTES = 8 * KEY_WORDS


def keys_of(numbers: I64Array, seed: int = 0) -> U8Array:
    """u8 (n, 32): the keys of these numbers, as unlike each other as hashes."""
    words: U64Array = np.empty((len(numbers), KEY_WORDS), np.uint64)
    words[:] = numbers[:, None]
    words *= np.uint64(KEY_WORDS)
    words += np.arange(KEY_WORDS, dtype=np.uint64)
    return mixed(words ^ np.uint64(seed)).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Bound:
    """A budget of the design: `value` must be at most `bound`, or at least, as `kind` says."""

    what: str
    value: float
    kind: str
    bound: float

    @property
    def kept(self) -> bool:
        return self.value <= self.bound if self.kind == "<=" else self.value >= self.bound


def at_most(what: str, value: float, bound: float) -> Bound:
    """`value` may not be more."""
    return Bound(what, round(value, 3), "<=", bound)


def at_least(what: str, value: float, bound: float) -> Bound:
    """`value` may not be less."""
    return Bound(what, round(value, 3), ">=", bound)


def judged(result: dict[str, Any], bounds: Sequence[Bound]) -> dict[str, Any]:
    """The result with its bounds, and whether all are kept."""
    listed = [{**asdict(bound), "kept": bound.kept} for bound in bounds]
    return {**result, "bounds": listed, "within_budget": all(bound.kept for bound in bounds)}


def p50(samples: Iterable[float]) -> float:
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    """99 % of them are not above."""
    return float(np.percentile(np.asarray(samples), 99))


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over the rounds of one figure by another of the same round: noise that both had cancels."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def print_grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> None:
    """A table of figures; the first `texts` columns are text."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number >= texts else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=COLUMNS, highlight=False).print(table)


def print_bounds(result: dict[str, Any]) -> None:
    """Each bound, and whether it is kept."""
    print_grid(
        "\nbounds",
        ("what", "measured", "bound", ""),
        (
            (bound["what"], f"{bound['value']:,.2f}", f"{bound['kind']} {bound['bound']:g}", _verdict(bound["kept"]))
            for bound in result["bounds"]
        ),
    )


def _verdict(kept: bool) -> str:
    return "kept" if kept else "[red]MISSED[/red]"
