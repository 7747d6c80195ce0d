"""What is made of the times of requests and of the daemon's counters; neither vLLM nor a daemon is needed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from kvoffloadd.testing.figures import p50, p99

MIB = 1 << 20

FIGURES = {
    "ttft_p50_ms": "TTFT, median, ms",
    "ttft_p99_ms": "TTFT, p99, ms",
    "prefill_p50_ms": "prefill engine, ms",
    "whole_p50_ms": "both engines to first token, ms",
    "handed_tokens": "tokens not computed",
    "store_keys": "stored, keys",
    "store_descriptors": "stored, descriptors",
    "store_mib": "stored, MiB",
    "store_ms": "stores in the daemon, ms",
    "load_keys": "loaded, keys",
    "load_descriptors": "loaded, descriptors",
    "load_mib": "loaded, MiB",
    "load_ms": "loads in the daemon, ms",
    "own_p50_ms": "limit: TTFT, own prefix cache, ms",
    "memcpy_ms": "limit: memcpy of what is loaded, ms",
    "ratio_to_limit": "TTFT, of limit",
}
"""Of one request at a time, and what they are called in the table."""

LOAD_FIGURES = {
    "requests_per_s": "requests/s",
    "busy_ttft_p50_ms": "TTFT, median, ms",
    "busy_ttft_p99_ms": "TTFT, p99, ms",
    "busy_whole_p50_ms": "both engines to first token, ms",
    "busy_token_ms": "each further token, ms",
    "busy_handed_tokens": "tokens not computed",
    "busy_computed_percent": "requests computed as a whole, %",
}
"""Of several clients at once."""


@dataclass(frozen=True, slots=True)
class RequestSample:
    """A request. `ttft_s`: from its submission to the decode engine to its first token; `whole_s`: from that to the
    first engine that got it. `prefill_s`: until the prefill engine answered; 0: there is none. `token_s`: for each
    further token. `cached`: prompt tokens that the decode engine did not compute.
    """

    ttft_s: float
    whole_s: float
    prefill_s: float
    token_s: float
    cached: int
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Sums up a daemon's stores or loads; `seconds`: durations of the jobs, summed."""

    jobs: float
    keys: float
    descriptors: float
    bytes: float
    seconds: float

    @property
    def job_bytes(self) -> float:
        """Requests that came too early, and loaded nothing, do not count here. 0: there was no job."""
        return self.bytes / self.jobs if self.jobs else 0.0

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any], way: str, requests: int) -> Self:
        """Computes the totals for each request from two answers to `status`. `way`: "store" or "load"."""
        first, last = before["transfers"][way], after["transfers"][way]
        return cls(**{one.name: (last[one.name] - first[one.name]) / requests for one in fields(cls)})


@dataclass(frozen=True, slots=True)
class ServingRound:
    """One of a case. `single`: one request at a time; `own`: the same prompts once more, which the decode engine's own
    prefix cache has; `busy`: several clients at once, which took `busy_s` in all. `memcpy_s`: of as many bytes as a
    request loads.
    """

    single: Sequence[RequestSample]
    own: Sequence[RequestSample]
    busy: Sequence[RequestSample]
    busy_s: float
    store: TransferTotals
    load: TransferTotals
    memcpy_s: float

    @property
    def limit_s(self) -> float:
        """A TTFT can't be less: that of the engine's own cache, and the copying of what is in the daemon's."""
        return p50(one.ttft_s for one in self.own) + self.memcpy_s

    @property
    def ratio_to_limit(self) -> float:
        return p50(one.ttft_s for one in self.single) / self.limit_s

    def figures(self) -> dict[str, float]:
        """Returns the figures by name, without those of rare requests."""
        return {
            "ttft_p50_ms": p50(one.ttft_s for one in self.single) * 1e3,
            "prefill_p50_ms": p50(one.prefill_s for one in self.single) * 1e3,
            "whole_p50_ms": p50(one.whole_s for one in self.single) * 1e3,
            "handed_tokens": statistics.mean(one.cached for one in self.single),
            "store_keys": self.store.keys,
            "store_descriptors": self.store.descriptors,
            "store_mib": self.store.bytes / MIB,
            "store_ms": self.store.seconds * 1e3,
            "load_keys": self.load.keys,
            "load_descriptors": self.load.descriptors,
            "load_mib": self.load.bytes / MIB,
            "load_ms": self.load.seconds * 1e3,
            "own_p50_ms": p50(one.ttft_s for one in self.own) * 1e3,
            "memcpy_ms": self.memcpy_s * 1e3,
            "ratio_to_limit": self.ratio_to_limit,
            "requests_per_s": len(self.busy) / self.busy_s,
            "busy_ttft_p50_ms": p50(one.ttft_s for one in self.busy) * 1e3,
            "busy_whole_p50_ms": p50(one.whole_s for one in self.busy) * 1e3,
            "busy_token_ms": statistics.mean(one.token_s for one in self.busy) * 1e3,
            "busy_handed_tokens": statistics.mean(one.cached for one in self.busy),
        }


def figures_of(rounds: Sequence[ServingRound]) -> dict[str, float]:
    """Medians over the rounds; p99s, and how many were computed, are of the requests of all rounds together."""
    each = [one.figures() for one in rounds]
    found = {name: statistics.median(one[name] for one in each) for name in each[0]}
    busy = [sample for one in rounds for sample in one.busy]
    found["ttft_p99_ms"] = p99([sample.ttft_s for one in rounds for sample in one.single]) * 1e3
    found["busy_ttft_p99_ms"] = p99([sample.ttft_s for sample in busy]) * 1e3
    found["busy_computed_percent"] = 100 * statistics.mean(not sample.cached for sample in busy)
    return {name: round(found[name], 3) for name in (*FIGURES, *LOAD_FIGURES)}


def rows(cases: Mapping[str, Mapping[str, float]], figures: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Returns the rows of a table, which has a column for each case. A figure that no case has is left out; one that a
    case does not have is -.
    """
    return [
        (text, *(_text(case[name]) for case in cases.values()))
        for name, text in figures.items()
        if any(case[name] for case in cases.values())
    ]


def _text(value: float) -> str:
    if not value:
        return "-"
    digits = 0 if value == int(value) or value >= 1000 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def differing(reference: Sequence[RequestSample], samples: Sequence[RequestSample]) -> int:
    """How many answers are not those of the reference."""
    return sum(one.answer != other.answer for one, other in zip(reference, samples, strict=True))
