"""Flood a daemon: sessions that ask for as much as they may and do not read, next to an honest worker.

Each flooder registers a KV cache, asks for jobs, and for status in between, until the answer is `busy` or the kernel
takes no more bytes from it, and reads a byte now and then or nothing at all. At the end all of them read: every
admitted job must get exactly one completion, every other request exactly one reply. The daemon's memory must stay
bounded, and the honest worker be served all the while, with right bytes. Exit status 0 only if all that held; 1
otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import select
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.program import carry_out
from kvoffloadd.units import format_bytes
from scripts.fuzz.flooder import KINDS, Flooder
from scripts.fuzz.trial import Trial, TrialReport
from scripts.harness.program import add_seed, command_line, seed_of

OUTBOX_BYTES = 8 << 20
RSS_GROWTH_PER_SESSION_MAX = 2 * OUTBOX_BYTES
"""What a session's unread replies, promises and half-read requests may cost; the default limits allow that much."""
READ_S = 120.0


@dataclass(slots=True)
class Flood:
    """All flooders, driven by one thread."""

    flooders: list[Flooder]
    problems: list[str] = field(default_factory=list)
    flooded_s: float = 0.0
    read_s: float = 0.0

    def run(self, seconds: float, live: ProgressBar) -> None:
        """Ask and hardly read."""
        begun = now = time.monotonic()
        while now < begun + seconds and not self.problems:
            asking = [flooder.peer for flooder in self.flooders if flooder.wants_to_ask()]
            by_peer = {flooder.peer: flooder for flooder in self.flooders}
            reading = [flooder for flooder in self.flooders if flooder.wants_to_read(now)]
            _, writable, _ = select.select([], asking, [], 0.01)
            for peer in writable:
                self._guarded(by_peer[peer], by_peer[peer].ask)
            for flooder in reading:
                self._guarded(flooder, flooder.drip if flooder.kind == "dripping" else flooder.read)
            now = time.monotonic()
            live.show(now - begun, f"{sum(flooder.asked for flooder in self.flooders):,} requests")
        self.flooded_s = now - begun

    def settle(self, live: ProgressBar) -> None:
        """Ask nothing more, and read everything."""
        begun = time.monotonic()
        open_ones = set(self.flooders)
        while open_ones and not self.problems and time.monotonic() < begun + READ_S:
            peers = {flooder.peer: flooder for flooder in open_ones}
            readable, writable, _ = select.select(peers, [p for p, f in peers.items() if f.mid_frame], [], 0.1)
            for peer in writable:
                self._guarded(peers[peer], peers[peer].finish_asking)
            for peer in readable:
                if not self._guarded(peers[peer], peers[peer].read):
                    self.problems.append(f"the daemon closed a {peers[peer].kind} session")
            open_ones = {flooder for flooder in open_ones if not flooder.is_settled()}
            live.show(len(self.flooders) - len(open_ones), f"{len(open_ones)} sessions wait")
        self.read_s = time.monotonic() - begun
        self.problems += [problem for flooder in self.flooders for problem in flooder.problems()]

    def _guarded(self, flooder: Flooder, act: Callable[[], bool | None]) -> bool | None:
        try:
            return act()
        except OSError as error:
            self.problems.append(f"a {flooder.kind} session: {error}")
            return True

    def total(self, name: str) -> Counter[str]:
        """Sums a counter of all flooders."""
        return sum((getattr(flooder, name) for flooder in self.flooders), Counter())


@dataclass(frozen=True)
class FloodReport(TrialReport):
    """How it went."""

    flood: Flood

    @property
    def is_good(self) -> bool:
        """Whether, in addition, some requests were refused as `busy`."""
        return super().is_good and self.busy > 0

    @property
    def busy(self) -> int:
        """The number of requests that were refused as `busy`."""
        return sum(flooder.busy for flooder in self.flood.flooders)

    def as_json(self) -> dict[str, object]:
        flood = self.flood
        return super().as_json() | {
            "sessions": len(flood.flooders),
            "flooded_s": round(flood.flooded_s, 3),
            "read_s": round(flood.read_s, 3),
            "requests": sum(flooder.asked for flooder in flood.flooders),
            "replies": dict(sorted(flood.total("replies").items())),
            "busy": self.busy,
            "jobs_admitted": sum(len(flooder.admitted) for flooder in flood.flooders),
            "jobs_completed": sum(len(flooder.ended) for flooder in flood.flooders),
            "outcomes": dict(sorted(flood.total("outcomes").items())),
            "rss_growth_per_session_bytes": self.trial.cost.rss_growth // len(flood.flooders),
            "rss_growth_max_bytes": self.rss_growth_max,
        }

    def print(self) -> None:
        flood, grown = self.flood, self.trial.cost.rss_growth
        admitted = sum(len(flooder.admitted) for flooder in flood.flooders)
        completed = sum(len(flooder.ended) for flooder in flood.flooders)
        rows = [
            ("sessions", f"{len(flood.flooders):,}", ", ".join(KINDS)),
            ("requests", f"{sum(f.asked for f in flood.flooders):,}", f"in {flood.flooded_s:,.1f} s"),
            ("busy", f"{self.busy:,}", "refused, to come again later"),
            ("jobs admitted", f"{admitted:,}", f"{completed:,} completed, read in {flood.read_s:,.1f} s"),
        ]
        growth = ("growth", format_bytes(grown), f"{format_bytes(grown // len(flood.flooders))} a session")
        self.print_sections("flood", rows, [growth])


def run(given: argparse.Namespace, seed: int, folder: Path) -> FloodReport:
    """Everything. Raises DaemonError, KvOffloadError, OSError."""
    faults = [f"delay_s={given.slow_copies}"] if given.slow_copies else []
    faults += ["corrupt_every=1"] if given.plant_corruption else []
    # All are of one user here: its cap must leave the bystander something.
    settings = {"memory.slab_bytes": "1MiB", "limits.jobs": str(1024 * (given.sessions + 1))}
    rng = np.random.default_rng([seed, 0])
    flood = Flood([])
    with Trial(folder, seed, settings, faults) as trial, trial.beside_bystander("flood", expedited=True):
        for number in range(given.sessions):
            flood.flooders.append(trial.daemon.welcome(Flooder(trial.daemon.socket, number, rng)))
        with ProgressBar("flooding", given.seconds) as live:
            flood.run(given.seconds, live)
        with ProgressBar("reading", given.sessions) as live:
            flood.settle(live)
    return FloodReport(trial, flood.problems, given.sessions * RSS_GROWTH_PER_SESSION_MAX, flood)


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--sessions", type=int, default=64, help="that flood (default: %(default)s)")
    add("--seconds", type=float, default=10.0, help="before all of them read (default: %(default).0f)")
    add("--slow-copies", type=float, default=0.02, metavar="SECONDS", help="each copy takes so much longer, "
        "so that queues grow deep (default: %(default)s)")  # fmt: skip
    add("--plant-corruption", action="store_true", help="let the daemon flip bits in loads: this must be noticed")
    add_seed(parser)
    given = parser.parse_args()
    if given.sessions < 1 or given.sessions > 250 or given.seconds <= 0 or given.slow_copies < 0:
        parser.error("--sessions: from 1 to 250; --seconds: above 0; --slow-copies: not below 0")
    return carry_out("flood", partial(run, given, seed_of(given, "flood")), as_json=given.json)
