"""The largest requests of each type that are legal, sent to a daemon that holds many keys, while another peer pings.

One case after the other, each in a session of its own. `turn` is the daemon's own word: the most CPU time that its
event loop took from one beat (every 5 ms) to the next while the case ran (`loop.recent_cpu_s` of its status), so that a
busy machine does not change it much. While such a turn lasts nobody is served. `wait` is the longest ping of the
bystander, by the clock.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client
from kvoffloadd.server.lag import WINDOW_S
from kvoffloadd.trial.disk import disk_folder, disk_settings
from kvoffloadd.trial.figures import print_grid
from kvoffloadd.trial.output import Live
from kvoffloadd.trial.process import private_folder
from scripts.extremes.cases import CASES
from scripts.extremes.refusals import REFUSALS
from scripts.extremes.scene import KEYS, MIB, PAGE, Case, Scene
from scripts.extremes.tiers import CAREFUL, CROWDED, DISK, FULL, WIDE
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result

TURN_MAX_S = 0.020
BEAT_S = 0.005
PING_EVERY_S = 0.002


@dataclass(frozen=True)
class Stage:
    """A daemon for some of the cases. `held`, `memory_bytes`: from how many keys were asked for, the keys it holds when
    they begin, and what memory it has.
    """

    cases: tuple[Case, ...]
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


class Bystander:
    """Pings from a thread of its own, and asks now and then for the daemon's longest turn."""

    def __init__(self, socket: Path) -> None:
        self._client = Client(socket, namespace=None, role="observer", deadline_s=60.0)
        self._client.connect()
        self._worst_s = self._turn_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ping, daemon=True)
        self._thread.start()

    def _ping(self) -> None:
        asked = 0.0
        while not self._stop.wait(PING_EVERY_S):
            begun = time.monotonic()
            self._client.ping()
            now = time.monotonic()
            self._worst_s = max(self._worst_s, now - begun)
            if now - asked > WINDOW_S / 2:
                asked = now
                self._turn_s = max(self._turn_s, self._client.status()["loop"]["recent_cpu_s"])

    def take(self) -> tuple[float, float]:
        """The longest ping and the longest turn since the last call, in seconds."""
        found = self._worst_s, self._turn_s
        self._worst_s = self._turn_s = 0.0
        return found

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


def measure(scene: Scene, observer: Client, bystander: Bystander, case: Case) -> dict[str, Any]:
    """One case: the longest turn in seconds, and the longest ping."""
    steps = case(scene)
    next(steps)
    time.sleep(2 * WINDOW_S + 0.1)  # what came before is forgotten
    bystander.take()
    begun = time.monotonic()
    for _ in steps:
        raise AssertionError(case.__name__)
    took_s = time.monotonic() - begun
    time.sleep(0.2)  # what goes on behind the reply
    last_s = observer.status()["loop"]["recent_cpu_s"]
    wait_s, turn_s = bystander.take()
    scene.close()
    return {"turn_s": max(turn_s, last_s), "wait_s": wait_s, "took_s": took_s}


def play(
    stage: Stage, chosen: Sequence[Case], options: argparse.Namespace, shown: Callable[[str], None]
) -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {}
    with private_folder() as folder, disk_folder(None) as roots:
        settings = dict(stage.settings)
        if stage.has_disk:
            settings |= disk_settings(Path(roots) / "root", 4 * stage.held(options.keys) * PAGE)
        with Daemon(Path(folder), stage.memory_bytes(options.keys), settings) as daemon:
            scene = Scene(daemon.socket, np.random.default_rng(options.seed))
            scene.fill(stage.held(options.keys), has_disk=stage.has_disk)
            bystander = Bystander(daemon.socket)
            for case in chosen:
                shown(case.__name__)
                cases[case.__name__] = measure(scene, daemon.observer, bystander, case)
            bystander.stop()
    return cases


def arguments() -> argparse.Namespace:
    parser = benchmark_line(__doc__)
    parser.add_argument("--keys", type=int, default=200_000, help="held when the cases begin (default: %(default)s)")
    parser.add_argument("--case", action="append", choices=[case.__name__ for case in ALL], help="only these")
    parser.add_argument("--seed", type=int, default=1, help="which keys and block ids (default: %(default)s)")
    found = parser.parse_args()
    if found.keys < KEYS:
        parser.error(f"--keys must be at least {KEYS}")
    return found


def main() -> int:
    options = arguments()
    cases: dict[str, dict[str, Any]] = {}
    total = len(options.case or ALL)
    with Live("cases", total) as live:
        done = iter(range(total))
        for stage in STAGES:
            chosen = [case for case in stage.cases if not options.case or case.__name__ in options.case]
            if chosen:
                cases |= play(stage, chosen, options, lambda name: live.show(next(done), name))
    bounds = [at_most(f"{name}, ms", case["turn_s"] * 1e3, (TURN_MAX_S + BEAT_S) * 1e3) for name, case in cases.items()]
    result = judged({"seed": options.seed, "keys": options.keys, "cases": cases}, bounds)
    return show_result(result, options, show)


def show(result: dict[str, Any]) -> None:
    cases = result["cases"].items()
    rows = ((n, *(f"{c[k] * 1e3:,.1f}" for k in ("turn_s", "wait_s", "took_s"))) for n, c in cases)
    print_grid("legal extremes, milliseconds", ("case", "turn", "wait", "took"), rows)
    print_bounds(result)


if __name__ == "__main__":
    sys.exit(main())
