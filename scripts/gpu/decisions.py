"""What the parts of `gpu_check` decide together: the defaults of switches, and what may go.

What no figures were taken of decides nothing; wrong bytes are no figures. Needs nothing but Python's own library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import ge
from typing import Any

from scripts.gpu.parts import Ended

Case = Mapping[str, Any]
Decision = tuple[str, str, str]
"""What is decided, how, and by which figures."""

WAYS, BOTH = ("store", "load"), "both"
BATCH, RUNS, SINGLE = "batch", "3D batch", "one by one"
DRIVERS_MIN = 0.95
"""How much of the driver's own speed the daemon has to reach with the same rows."""

RAW_ROW_BYTES = 64 << 10
"""Rows of this size have a bound, and are in both parts."""

GATHER_GAIN_MIN, DECODE_LOSS_MAX = 1.3, 0.02
"""The worker gathers if loads are this many times as fast, and decoding loses no more against the best other way."""

WAIT_MAX_MS = 20.0
"""How long a copy may wait while memory is registered, in the median."""

_RUNS_FILES = "kvoffloadd/device/pitched.py, `Way.RUNS`, cuda.pitched_row_bytes"


def cases_of(parts: Iterable[Ended], name: str) -> Sequence[Case]:
    """Returns a part's cases, in whatever way it has ended."""
    return next((ended.figures.get("cases", ended.cases) for ended in parts if ended.part.name == name), ())


def bounds_of(parts: Sequence[Ended]) -> Iterator[dict[str, Any]]:
    """Yields the bounds that hold one part against another: small rows against the driver's own batches of them."""
    speeds = _speeds(cases_of(parts, "raw"))
    for case in cases_of(parts, "copy"):
        for way in WAYS:
            limit = speeds.get((case["row_bytes"], way, BATCH), 0.0)
            if case["row_bytes"] == RAW_ROW_BYTES and limit:
                ratio = round(case["gb_per_s"][way] / limit, 3)
                yield {
                    "what": f"{way}, rows of 64 KiB: ratio to the driver's batches of the same rows",
                    "value": ratio,
                    "kind": ">=",
                    "bound": DRIVERS_MIN,
                    "kept": ratio >= DRIVERS_MIN,
                }


def decisions_of(parts: Sequence[Ended]) -> list[Decision]:
    """Returns what the figures that there are decide."""
    raw = cases_of(parts, "raw")
    return [
        *_small_rows(_speeds(raw), cases_of(parts, "hunt")),
        *_batches(_speeds(raw), cases_of(parts, "hunt")),
        *_gathering(cases_of(parts, "gather")),
        *_pieces(cases_of(parts, "pinning")),
    ]


def _speeds(cases: Iterable[Case]) -> dict[tuple[int, str, str], float]:
    """Maps bytes of rows, direction and method to GB/s."""
    return {
        (_bytes(case["rows"]), case["direction"], case["method"]): float(case["gb_per_s"])
        for case in cases
        if "gb_per_s" in case and not case.get("wrong_bytes")
    }


def _bytes(rows: str) -> int:
    """Returns 4096 for "4 KiB"."""
    return int(rows.split()[0]) << 10


def _small_rows(speeds: Mapping[tuple[int, str, str], float], hunt: Sequence[Case]) -> Iterator[Decision]:
    """Yields up to which rows runs are at least as fast as batches, each way and both ways at once."""
    bad = _bad(hunt, "runs")
    if bad:
        yield "cuda.pitched_row_bytes", "0", bad
        return
    measured = sorted({size for size, _, _ in speeds})
    wanted = [(way, method) for way in (*WAYS, BOTH) for method in (RUNS, BATCH)]
    sizes = [size for size in measured if all((size, *one) in speeds for one in wanted)]
    if not sizes:
        return
    by = {
        (size, method): [speeds.get((size, way, method), 0.0) for way in (*WAYS, BOTH)]
        for size in sizes
        for method in (RUNS, BATCH)
    }
    won = [size for size in sizes if all(map(ge, by[size, RUNS], by[size, BATCH]))]
    last = _unbroken(sizes, won)
    figures = ", ".join(f"{size >> 10} KiB {_listed(by[size, RUNS])} to {_listed(by[size, BATCH])}" for size in sizes)
    because = f"GB/s of runs to batches, store/load/both: {figures}"
    if not last:
        yield "cuda.pitched_row_bytes", "0", because
        yield "to delete", _RUNS_FILES, "runs are slower than batches with the smallest rows"
    elif last == sizes[-1]:
        yield "cuda.pitched_row_bytes", f"{last >> 10} KiB or more: measure larger rows", because
    else:
        above = sizes[sizes.index(last) + 1]
        yield "cuda.pitched_row_bytes", f"from {last >> 10} KiB to below {above >> 10} KiB", because


def _listed(speeds: Iterable[float]) -> str:
    return "/".join(f"{speed:.1f}" for speed in speeds)


def _unbroken(sizes: Sequence[int], won: Sequence[int]) -> int:
    """Returns the last size up to which all are among those that won; 0: not even the first did."""
    last = 0
    for size in sizes:
        if size not in won:
            break
        last = size
    return last


def _batches(speeds: Mapping[tuple[int, str, str], float], hunt: Sequence[Case]) -> Iterator[Decision]:
    gains = [
        speed / single
        for (size, way, method), speed in speeds.items()
        if method == BATCH and (single := speeds.get((size, way, SINGLE)))
    ]
    bad = _bad(hunt, "batches")
    if bad:
        yield "cuda.batch", "false", bad
    elif gains:
        value = "true" if min(gains) >= 1 else "false where rows are copied faster one by one"
        hunted = f"; none of {sum(int(case['batches']) for case in hunt)} hunted batches was stuck" if hunt else ""
        yield "cuda.batch", value, f"{min(gains):.1f} to {max(gains):.1f} times as fast as one by one{hunted}"


def _bad(hunt: Sequence[Case], way: str) -> str:
    """Returns what was wrong with a way in a hunt; empty: nothing was. Wrong bytes may be either way's."""
    stuck = [str(case["stuck"]) for case in hunt if case["stuck"] != "none" and case["last way"] == way]
    wrong = sum(int(case["wrong_bytes"]) for case in hunt)
    if stuck:
        return f"it did not end: {stuck[0]}"
    return f"{wrong} wrong bytes in the hunt: find out which way brought them" if wrong else ""


def _gathering(cases: Sequence[Case]) -> Iterator[Decision]:
    """Lets loads decide: an engine waits for them."""
    loads: dict[str, dict[str, Case]] = {}
    for case in cases:
        if case["direction"] == "load":
            loads.setdefault(case["rows"], {})[case["way"]] = case
    for rows, by in sorted(loads.items(), key=lambda item: _bytes(item[0])):
        others = [case for way, case in by.items() if way != "gather"]
        if "gather" not in by or not others:
            continue
        gathered, best = by["gather"], max(others, key=lambda case: float(case["gb_per_s"]))
        gain = gathered["gb_per_s"] / max(best["gb_per_s"], 0.01)
        pays = gain >= GATHER_GAIN_MIN and gathered["decode"] >= best["decode"] - DECODE_LOSS_MAX
        yield (
            f"rows of {rows}: gathered by the worker",
            "worth building" if pays else "no",
            f"loads are {gain:.2f} times as fast as by {best['way']}, decoding beside them has "
            f"{gathered['decode']:.2f} of its speed, not {best['decode']:.2f}",
        )


def _pieces(cases: Sequence[Case]) -> Iterator[Decision]:
    """Yields the largest pieces that keep others waiting for a moment only."""
    waits = {
        str(case["registered"]): float(str(case["copy"]).split(" / ")[0])
        for case in cases
        if " x " in str(case.get("registered", "")) and "copy" in case
    }
    short = [name for name, wait_ms in waits.items() if wait_ms <= WAIT_MAX_MS]
    if waits:
        figures = ", ".join(f"{name} {wait_ms:g} ms" for name, wait_ms in waits.items())
        value = short[0].partition(" x ")[2] if short else "smaller than any that was tried"
        yield "cuda.pin_bytes", value, f"a copy waits, in the median: {figures}"
