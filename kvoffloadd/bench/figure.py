"""One line of the benchmark: the daemon's value, and the machine's own limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffloadd.testing.figures import median_ratio, p50

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` and `limit_value` in `unit`; `ratio`: the median over the rounds of the limit's time by the daemon's, 1
    where the daemon is as fast as the machine. `limit`: names the limit.
    """

    part: str
    what: str
    value: float
    unit: str
    limit: str
    limit_value: float
    ratio: float


def bandwidth(part: str, what: str, seconds: Sequence[float], limit: str, limits: Sequence[float], size: int) -> Figure:
    """Compares an equal number of rounds of each, in which `size` bytes were moved."""
    rate, best = (size / GIB / p50(samples) for samples in (seconds, limits))
    return Figure(part, what, round(rate, 2), "GiB/s", limit, round(best, 2), round(median_ratio(limits, seconds), 3))


def latency(part: str, what: str, seconds: Sequence[float], limit: str, limits: Sequence[float]) -> Figure:
    """Compares an equal number of rounds of each, by the median of each round."""
    took, best = (round(p50(samples) * 1e6, 1) for samples in (seconds, limits))
    return Figure(part, what, took, "us", limit, best, round(median_ratio(limits, seconds), 3))
