"""What is measured, in which unit, and what of it is better: names that stay, for tables and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GB, MS, US, S = "GB/s", "ms", "us", "s"
_SCALES = {GB: 1e-9, MS: 1e3, US: 1e6, S: 1.0}
LOOKUP_TOKENS = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10)


@dataclass(frozen=True, slots=True)
class Figure:
    """`name`: in JSON; `title`: in tables. Samples are bytes per second for GB/s, else seconds."""

    name: str
    title: str
    unit: str

    @property
    def more_is_better(self) -> bool:
        return self.unit == GB

    def shown(self, sample: float) -> str:
        """Formats a sample in the unit, with three significant digits."""
        value = sample * _SCALES[self.unit]
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


FIGURES = (
    Figure("ping", "round trip", US),
    *(Figure(f"lookup_{n >> 10}k", f"lookup of {n >> 10}k tokens, all there", MS) for n in LOOKUP_TOKENS),
    *(Figure(f"miss_{n >> 10}k", f"lookup of {n >> 10}k tokens, nothing there", MS) for n in LOOKUP_TOKENS[-1:]),
    Figure("store", "store", GB),
    Figure("load", "load", GB),
    Figure("write", "store until all is on disk", GB),
    Figure("read", "from disk, lookup and load", GB),
    Figure("start", "start until it can be asked", S),
    Figure("restart", "restart in order, until the first prompt is loaded", S),
    Figure("restart_killed", "restart after SIGKILL, until the first prompt is loaded", S),
)
BY_NAME = {figure.name: figure for figure in FIGURES}
Samples = dict[str, list[float]]
"""Name of a figure -> one sample for each round in which it was had."""


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Returns the spread of the rounds."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples), "rounds": len(samples)}


def ahead(own: str, figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[Figure, str, float]]:
    """Where medians of others are better than those of `own`: the figure, who is best, and by which factor. `figures`:
    system -> name of a figure -> its `spread`.
    """
    found = []
    for figure in FIGURES:
        medians = {who: values[figure.name]["median"] for who, values in figures.items() if figure.name in values}
        median = medians.pop(own, None)
        if median is None or not medians:
            continue
        factors = {who: other / median if figure.more_is_better else median / other for who, other in medians.items()}
        best = max(factors, key=lambda who: factors[who])
        if factors[best] > 1:
            found.append((figure, best, factors[best]))
    return found
