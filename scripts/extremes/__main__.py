"""The largest requests of each type that are legal, sent to a daemon that holds many keys, while another peer pings.

One case after the other, each in its own sessions; all of them `--runs` times, each time with a new daemon, and the
median is shown. `turn` is the most CPU time that one turn of the daemon's event loop took while the case ran, which a
busy machine does not change much; while it lasts no other peer is served. `wait` is the longest ping of the bystander,
and `took` how long it took until all was answered, both by the clock. The daemon runs with asyncio's own event loop.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client
from kvoffloadd.testing.disk import disk_folder, disk_settings
from kvoffloadd.testing.figures import print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import private_folder
from scripts.extremes.cases import CASES
from scripts.extremes.crowd import CROWDED
from scripts.extremes.refusals import REFUSALS
from scripts.extremes.scene import KEYS, MIB, PAGE, ExtremeCase, Scene
from scripts.extremes.tiers import CAREFUL, DISK, FULL, WIDE
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result
from scripts.harness.timed import PROGRAM, VARIABLE, Turns

TURN_MAX_S = 0.010
SETTLE_S = 0.2
PING_EVERY_S = 0.002


@dataclass(frozen=True)
class Stage:
    """A daemon for some of the cases. `held`, `memory_bytes`: from how many keys were asked for, the keys it holds when
    they begin, and what memory it has.
    """

    cases: tuple[ExtremeCase, ...]
    held: Callable[[int], int]
    memory_bytes: Callable[[int], int]
    settings: dict[str, str] = field(default_factory=dict)
    has_disk: bool = False


def _roomy(keys: int) -> int:
    return (keys + 8 * KEYS) * PAGE // MIB * MIB


STAGES = (
    Stage((*REFUSALS, *CASES), lambda keys: keys, _roomy),
    Stage(FULL, lambda keys: keys, lambda keys: keys * PAGE // MIB * MIB),
    Stage(CAREFUL, lambda _: 2 * KEYS, lambda _: _roomy(KEYS), {"memory.verify_loads": "true"}),
    Stage(CROWDED, lambda _: KEYS, lambda _: _roomy(KEYS), {"limits.sessions": "4096"}),
    Stage(WIDE, lambda _: 0, lambda _: 4096 * MIB),
    Stage(DISK, lambda _: 8 * KEYS, lambda _: 5 * KEYS * PAGE, has_disk=True),
)
ALL = tuple(case for stage in STAGES for case in stage.cases)


class Pinger:
    """Pings from a separate thread."""

    def __init__(self, socket: Path) -> None:
        self._client = Client(socket, namespace=None, role="observer", deadline_s=60.0)
        self._client.connect()
        self._worst_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ping, daemon=True)
        self._thread.start()

    def _ping(self) -> None:
        while not self._stop.wait(PING_EVERY_S):
            begun = time.monotonic()
            self._client.ping()
            self._worst_s = max(self._worst_s, time.monotonic() - begun)

    def take(self) -> float:
        """The longest ping since the last call, in seconds."""
        found, self._worst_s = self._worst_s, 0.0
        return found

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


def measure(scene: Scene, turns: Turns, bystander: Pinger, case: ExtremeCase) -> dict[str, Any]:
    """One case: its longest turn and what took longest of it, the longest ping, and how long the answers took."""
    steps = case.steps(scene)
    next(steps)
    time.sleep(SETTLE_S)
    bystander.take()
    turns.take()
    begun = time.monotonic()
    for _ in steps:
        raise AssertionError(case.name)
    took_s = time.monotonic() - begun
    time.sleep(SETTLE_S)  # what goes on behind the reply
    found = turns.take()
    wait_s = bystander.take()
    scene.close()
    return {**found, "wait_s": wait_s, "took_s": took_s}


def play(
    stage: Stage, chosen: Sequence[ExtremeCase], options: argparse.Namespace, shown: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    with private_folder() as folder, disk_folder(None) as roots:
        settings = {"server.use_uvloop": "false", **stage.settings}
        if stage.has_disk:
            settings |= disk_settings(Path(roots) / "root", 4 * stage.held(options.keys) * PAGE)
        metrics, turns_path = Path(folder) / "metrics", Path(folder) / "turns"
        settings["metrics.listen"] = str(metrics)
        turns, environment = Turns(turns_path), {VARIABLE: str(turns_path)}
        with Daemon(
            Path(folder), stage.memory_bytes(options.keys), settings, program=PROGRAM, environment=environment
        ) as daemon:
            scene = Scene(daemon.socket, metrics, np.random.default_rng(options.seed))
            scene.fill(stage.held(options.keys), has_disk=stage.has_disk)
            bystander = Pinger(daemon.socket)
            for case in chosen:
                shown(case.name)
                cases[case.name] = measure(scene, turns, bystander, case)
            bystander.stop()
    return cases


def arguments() -> argparse.Namespace:
    parser = benchmark_line(__doc__)
    parser.add_argument("--keys", type=int, default=200_000, help="held when the cases begin (default: %(default)s)")
    parser.add_argument("--case", action="append", choices=[case.name for case in ALL], help="only these")
    parser.add_argument("--runs", type=int, default=1, help="of all cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which keys and block ids (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="show the worst case of each request, for BEHAVIOR.md")
    found = parser.parse_args()
    if found.keys < KEYS:
        parser.error(f"--keys must be at least {KEYS}")
    if found.runs < 1:
        parser.error("--runs must be at least 1")
    return found


def median(case: ExtremeCase, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run whose longest turn is the median (of two, the longer), but the other figures' own medians."""
    middle = sorted(runs, key=lambda run: float(run["turn_s"]))[len(runs) // 2]
    clock = {name: statistics.median(run[name] for run in runs) for name in ("wait_s", "took_s")}
    return {"requests": case.requests, "size": case.size, **middle, **clock}


def main() -> int:
    options = arguments()
    runs: dict[str, list[dict[str, Any]]] = {}
    total = options.runs * len(options.case or ALL)
    with ProgressBar("cases", total) as live:
        done = iter(range(total))
        for stage in STAGES * options.runs:
            chosen = [case for case in stage.cases if not options.case or case.name in options.case]
            if chosen:
                for name, found in play(stage, chosen, options, lambda name: live.show(next(done), name)).items():
                    runs.setdefault(name, []).append(found)
    cases = {case.name: median(case, runs[case.name]) for case in ALL if case.name in runs}
    bounds = [at_most(f"{name}, ms", case["turn_s"] * 1e3, TURN_MAX_S * 1e3) for name, case in cases.items()]
    result = judged({"seed": options.seed, "keys": options.keys, "runs": options.runs, "cases": cases}, bounds)
    return show_result(result, options, show_markdown if options.markdown else show)


def show(result: dict[str, Any]) -> None:
    cases = result["cases"].items()
    rows = ((n, *(f"{c[k] * 1e3:,.1f}" for k in ("turn_s", "wait_s", "took_s"))) for n, c in cases)
    print_grid("legal extremes, milliseconds", ("case", "turn", "wait", "took"), rows)
    print_bounds(result)


def show_markdown(result: dict[str, Any]) -> None:
    """Prints, for each request or group of requests, the case with the longest turn."""
    worst: dict[str, dict[str, Any]] = {}
    for case in sorted(result["cases"].values(), key=lambda case: float(case["turn_s"])):
        worst[case["requests"]] = case
    lines = ["| request | the largest | turn, ms | answered after, ms |", "|---|---|---|---|"]
    for requests, case in sorted(worst.items()):
        lines.append(f"| {requests} | {case['size']} | {case['turn_s'] * 1e3:.1f} | {case['took_s'] * 1e3:,.0f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
