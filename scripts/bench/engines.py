"""What many engines get of one daemon: requests a second, how long a pin takes, and the share of each.

Each engine is a process with two sessions, as vLLM has them: a scheduler that pins prompts and releases them, and a
rank that stores prompts and loads them, all without a pause. For each number of engines a separate daemon serves them
for some rounds. An engine's fair share is what all of them got, by their number; `least_share` is what the one that got
the least had of it, the median over the rounds. A pin's time is that of the pin and its release. Engines need
processors, too: the machine divides those among them, not the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from statistics import median
from typing import Any

from kvoffloadd.testing.figures import p50, p99, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import private_folder
from kvoffloadd.testing.program import size
from kvoffloadd.testing.worker import WorkerProcess
from kvoffloadd.units import format_bytes
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_least, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result

COUNTS = (1, 4, 16)
LEAST_SHARE = 0.5
HELD = 4
"""Prompts of each engine for which there is memory."""
ANSWER_S = 60.0
KINDS = ("pins", "stores", "loads")


def run_case(engines: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all rounds with this number of engines."""
    prompt_bytes = arguments.keys * arguments.page_bytes
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(private_folder()))
        daemon = stack.enter_context(Daemon(folder, engines * HELD * prompt_bytes + (32 << 20)))
        options = {"socket": str(daemon.socket), "keys": arguments.keys, "page_bytes": arguments.page_bytes}
        workers = [
            WorkerProcess("scripts.bench.engine", options, folder / f"engine-{number}.log") for number in range(engines)
        ]
        for worker in workers:
            stack.callback(worker.end)
        rounds = [round_of(workers, 0.2 if number < 0 else arguments.seconds) for number in range(-1, arguments.rounds)]
    return case_of(engines, rounds[1:], arguments.seconds)


def round_of(workers: list[WorkerProcess], seconds: float) -> list[dict[str, list[float]]]:
    """What each engine did in it."""
    for worker in workers:
        worker.ask({"seconds": seconds})
    return [worker.answer(ANSWER_S + seconds) for worker in workers]


def case_of(engines: int, rounds: list[list[dict[str, list[float]]]], seconds: float) -> dict[str, Any]:
    """Returns the figures of this number of engines, from what each did in each round."""
    pins = [duration for found in rounds for one in found for duration in one["pins"]]
    return {
        "engines": engines,
        "per_s": {
            kind: round(median(sum(len(one[kind]) for one in found) for found in rounds) / seconds, 1) for kind in KINDS
        },
        "pin_p50_us": round(p50(pins) * 1e6, 1),
        "pin_p99_us": round(p99(pins) * 1e6, 1),
        "least_share": {kind: round(median(least_share(found, kind) for found in rounds), 2) for kind in KINDS},
    }


def least_share(found: list[dict[str, list[float]]], kind: str) -> float:
    """What the engine that did the least had of an equal share."""
    counts = [len(one[kind]) for one in found]
    return min(counts) * len(counts) / max(1, sum(counts))


def summary(cases: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The cases and the bounds."""
    bounds = [
        at_least(f"{case['engines']} engines, {kind}: least share", case["least_share"][kind], LEAST_SHARE)
        for case in cases
        for kind in KINDS
        if case["engines"] > 1
    ]
    found = {
        "cases": cases,
        "keys": arguments.keys,
        "page_bytes": arguments.page_bytes,
        "ratio_to_limit": min((bound.value for bound in bounds), default=1.0),
    }
    return judged(found, bounds)


def show(result: dict[str, Any]) -> None:
    prompt = f"{result['keys']} keys of {format_bytes(result['page_bytes'])}"
    print_grid(
        f"engines that pin, store and load prompts of {prompt} without a pause",
        ("engines", "pins/s", "stores/s", "loads/s", "pin p50 us", "pin p99 us", "least share"),
        (
            (
                str(case["engines"]),
                *(f"{case['per_s'][kind]:,.0f}" for kind in KINDS),
                f"{case['pin_p50_us']:,.0f}",
                f"{case['pin_p99_us']:,.0f}",
                " ".join(f"{case['least_share'][kind]:.2f}" for kind in KINDS),
            )
            for case in result["cases"]
        ),
        texts=0,
    )
    print_bounds(result)


def main() -> int:
    parser = benchmark_line(__doc__)
    add = parser.add_argument
    add("--engines", type=int, nargs="*", default=COUNTS, help="how many at a time (default: 1 4 16)")
    add("--keys", type=int, default=64, help="keys of a prompt (default: %(default)s)")
    add("--page-bytes", type=size, default="64KiB", help="of a key (default: %(default)s)")
    add("--rounds", type=int, default=5, help="with each number of engines (default: %(default)s)")
    add("--seconds", type=float, default=2.0, help="of each round (default: %(default)s)")
    arguments = parser.parse_args()
    if min(*arguments.engines, arguments.keys, arguments.rounds) < 1 or arguments.seconds <= 0:
        parser.error("--engines, --keys, --rounds and --seconds are above 0")
    cases = []
    with ProgressBar("bench_engines", len(arguments.engines)) as live:
        for number, engines in enumerate(arguments.engines):
            live.show(number, f"{engines} engines")
            cases.append(run_case(engines, arguments))
    return show_result(summary(cases, arguments), arguments, show)
