#!/usr/bin/env python3
"""Flood a daemon: sessions that ask for as much as they may and do not read, beside an honest worker.

Each flooder registers a KV cache, asks for jobs, and for status in between, until it is told `busy` or the kernel
takes no more bytes from it, and reads a byte now and then or nothing at all. At the end all of them read: every
admitted job must get exactly one completion, every other request exactly one reply. The daemon's memory must stay
bounded, and the honest worker be served all the while, with right bytes. Exit status 0 only if all that held; 1
otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import secrets
import select
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.units import format_bytes
from scripts.fuzz.bystander import MEMORY_NAME, Bystander, Cost
from scripts.fuzz.flooder import KINDS, Flooder
from scripts.harness.daemon import Daemon
from scripts.harness.leaks import held, leaks
from scripts.harness.output import Live, format_ms, print_json, print_table
from scripts.harness.process import DaemonError, bad_entries, obey_signals, private_folder

if TYPE_CHECKING:
    from collections.abc import Callable


EXIT_BAD, EXIT_INTERRUPTED = 1, 130
DAEMON_MEMORY_BYTES = 64 << 20
OUTBOX_BYTES = 8 << 20
RSS_GROWTH_PER_SESSION_MAX = 2 * OUTBOX_BYTES
"""What a session's unread replies, promises and half-read requests may cost; the default limits allow so much."""
READ_S = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    sessions: int
    seconds: float
    slow_copies_s: float
    seed: int
    plant_corruption: bool


@dataclass(slots=True)
class Flood:
    """All flooders, driven by one thread."""

    flooders: list[Flooder]
    problems: list[str] = field(default_factory=list)
    flooded_s: float = 0.0
    read_s: float = 0.0

    def run(self, seconds: float, live: Live) -> None:
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

    def settle(self, live: Live) -> None:
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
        """Of a counter of all flooders."""
        return sum((getattr(flooder, name) for flooder in self.flooders), Counter())


@dataclass(frozen=True, slots=True)
class Report:
    """How it went; `as_json` has the names that stay."""

    options: Options
    flood: Flood
    bystander: Bystander
    cost: Cost
    findings: list[str]
    leaks: list[str]
    bad_log_lines: list[str]
    exit_status: int

    @property
    def good(self) -> bool:
        """Whether all that must hold held."""
        seen = self.bystander.experience
        return (
            not (self.flood.problems or self.findings or self.leaks or self.bad_log_lines or seen.failures)
            and seen.wrong_bytes == 0 < seen.verified_loads
            and self.busy > 0
            and self.cost.rss_growth <= self.rss_growth_max
            and self.exit_status == 0
        )

    @property
    def busy(self) -> int:
        """Requests that were told to come again later."""
        return sum(flooder.busy for flooder in self.flood.flooders)

    @property
    def rss_growth_max(self) -> int:
        """What all flooders together may cost."""
        return self.options.sessions * RSS_GROWTH_PER_SESSION_MAX

    def as_json(self) -> dict[str, object]:
        """One object."""
        flood, cost, seen = self.flood, self.cost, self.bystander.experience
        return {
            "good": self.good,
            "seed": self.options.seed,
            "sessions": self.options.sessions,
            "flooded_s": round(flood.flooded_s, 3),
            "read_s": round(flood.read_s, 3),
            "requests": sum(flooder.asked for flooder in flood.flooders),
            "replies": dict(sorted(flood.total("replies").items())),
            "busy": self.busy,
            "jobs_admitted": sum(len(flooder.admitted) for flooder in flood.flooders),
            "jobs_completed": sum(len(flooder.ended) for flooder in flood.flooders),
            "outcomes": dict(sorted(flood.total("outcomes").items())),
            "problems": flood.problems,
            "rss_before_bytes": cost.rss_before,
            "rss_max_bytes": cost.rss_max,
            "rss_after_bytes": cost.rss_after,
            "rss_growth_bytes": cost.rss_growth,
            "rss_growth_per_session_bytes": cost.rss_growth // self.options.sessions,
            "rss_growth_max_bytes": self.rss_growth_max,
            "wrong_bytes": seen.wrong_bytes,
            "stores": seen.stores,
            "loads": seen.loads,
            "verified_loads": seen.verified_loads,
            "missed_keys": seen.missed_keys,
            "bystander_failures": seen.failures,
            "pings": seen.pings,
            "ping_p50_s": seen.ping_p50_s,
            "ping_p99_s": seen.ping_p99_s,
            "ping_max_s": seen.ping_max_s,
            "findings": self.findings,
            "leaks": len(self.leaks),
            "leaked": self.leaks,
            "bad_log_lines": self.bad_log_lines,
            "exit_status": self.exit_status,
        }

    def print(self) -> None:
        """A table."""
        flood, cost, seen = self.flood, self.cost, self.bystander.experience
        admitted = sum(len(flooder.admitted) for flooder in flood.flooders)
        completed = sum(len(flooder.ended) for flooder in flood.flooders)
        per_session = format_bytes(cost.rss_growth // self.options.sessions)
        told = [*flood.problems, *self.findings, *self.leaks, *self.bad_log_lines, *seen.failures]
        sections = [
            [
                ("sessions", f"{self.options.sessions:,}", ", ".join(KINDS)),
                ("requests", f"{sum(f.asked for f in flood.flooders):,}", f"in {flood.flooded_s:,.1f} s"),
                ("busy", f"{self.busy:,}", "told to come again later"),
                ("jobs admitted", f"{admitted:,}", f"{completed:,} completed, read in {flood.read_s:,.1f} s"),
            ],
            [
                ("private memory", format_bytes(cost.rss_max), f"at most; {format_bytes(cost.rss_before)} before"),
                ("growth", format_bytes(cost.rss_growth), f"{per_session} a session"),
            ],
            [
                ("bystander's loads", f"{seen.verified_loads:,}", "of which every byte was compared and right"),
                ("wrong bytes", f"{seen.wrong_bytes:,}", ""),
                ("ping p50, p99", format_ms(seen.ping_p50_s), format_ms(seen.ping_p99_s)),
                ("ping, slowest", format_ms(seen.ping_max_s), f"of {seen.pings:,}"),
            ],
            [("verdict", "good" if self.good else "BAD", "; ".join(told)[:400] or f"seed {self.options.seed}")],
        ]
        print_table("flood", sections, good=self.good)


def run(options: Options, folder: Path) -> Report:
    """Everything. Raises DaemonError, KvOffloadError, OSError."""
    faults = [f"delay_s={options.slow_copies_s}"] if options.slow_copies_s else []
    faults += ["corrupt_every=1"] if options.plant_corruption else []
    # All are of one user here: its cap must leave the bystander something.
    settings = {"memory.slab_bytes": "1MiB", "limits.jobs": str(1024 * (options.sessions + 1))}
    daemon = Daemon(folder, DAEMON_MEMORY_BYTES, settings, ",".join(faults))
    daemon.start()
    rng = np.random.default_rng([options.seed, 0])
    flooders: list[Flooder] = []
    try:
        before = held(daemon.observer, daemon.pid, "")
        with (
            Bystander(daemon.socket, options.seed, folder / "bystander.log", expedited=True) as bystander,
            Cost(daemon.pid) as cost,
        ):
            flooders += [daemon.welcome(Flooder(daemon.socket, number, rng)) for number in range(options.sessions)]
            flood = Flood(flooders)
            with Live("flooding", options.seconds) as live:
                flood.run(options.seconds, live)
            with Live("reading", options.sessions) as live:
                flood.settle(live)
        daemon.leave_guests()
        leaked = [leak for name in (MEMORY_NAME, "flood") for leak in leaks(daemon.observer, daemon.pid, name, before)]
        cost.sample()
        findings = list(daemon.verify(payloads=True))
    finally:
        daemon.leave_guests()
        status = daemon.stop()
    return Report(options, flood, bystander, cost, findings, leaked, bad_entries(daemon.log_path), status)


def main() -> int:
    """Runs it; returns the exit status."""
    options, as_json = _arguments()
    obey_signals()
    print(f"flood: seed {options.seed}", file=sys.stderr)
    try:
        with private_folder() as folder:
            report = run(options, Path(folder))
    except (DaemonError, KvOffloadError, OSError) as error:
        print(f"flood: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if as_json:
        print_json(report.as_json())
    else:
        report.print()
    return 0 if report.good else EXIT_BAD


def _arguments() -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 1)[1])
    add = parser.add_argument
    add("--sessions", type=int, default=64, help="that flood (default: %(default)s)")
    add("--seconds", type=float, default=10.0, help="before all of them read (default: %(default).0f)")
    add("--slow-copies", type=float, default=0.02, metavar="SECONDS", help="each copy takes so much longer, "
        "so that queues grow deep (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, help="of all that is chosen at random (default: a new one, which is told)")
    add("--plant-corruption", action="store_true", help="let the daemon flip bits in loads: this must be noticed")
    add("--json", action="store_true", help="one JSON object on standard output in place of the table")
    given = parser.parse_args()
    if given.sessions < 1 or given.sessions > 250 or given.seconds <= 0 or given.slow_copies < 0:
        parser.error("--sessions: from 1 to 250; --seconds: above 0; --slow-copies: not below 0")
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    return Options(given.sessions, given.seconds, given.slow_copies, seed, given.plant_corruption), given.json


if __name__ == "__main__":
    sys.exit(main())
