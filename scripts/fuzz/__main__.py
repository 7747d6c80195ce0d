#!/usr/bin/env python3
"""Fuzz a daemon over its socket: random, mutated and truncated frames in many sessions, beside an honest worker.

Every whole frame must be answered once, or its session be closed; the daemon must live, its memory and descriptors
stay bounded, its self-audit find nothing; the honest worker must be served all the while, and with right bytes. Exit
status 0 only if all that held; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.units import format_bytes
from scripts.fuzz.bystander import MEMORY_NAME, Bystander, Cost
from scripts.fuzz.sessions import Fuzzer, Tally
from scripts.harness.daemon import Daemon
from scripts.harness.leaks import held, leaks
from scripts.harness.output import Live, format_ms, print_json, print_table
from scripts.harness.process import DaemonError, bad_entries, obey_signals, private_folder

EXIT_BAD, EXIT_INTERRUPTED = 1, 130
DAEMON_MEMORY_BYTES = 64 << 20
RSS_GROWTH_MAX = 64 << 20
FDS_GROWTH_MAX = 64 * 8
TRUNCATIONS_ABOUT = 4500
WARM_UP_FRAMES = 300
# A job may wait for a signal that never comes, and a `drain` for the job: both end well before the judge's patience.
SETTINGS = {"memory.slab_bytes": "1MiB", "copy.deadline_max_s": "5.0"}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    frames: int
    truncations_every: int
    threads: int
    seed: int
    plant_corruption: bool


@dataclass(frozen=True, slots=True)
class Report:
    """How it went; `as_json` has the names that stay."""

    options: Options
    tally: Tally
    bystander: Bystander
    cost: Cost
    seconds: float
    findings: list[str]
    leaks: list[str]
    bad_log_lines: list[str]
    exit_status: int

    @property
    def good(self) -> bool:
        """Whether all that must hold held."""
        seen = self.bystander.experience
        return (
            not (self.tally.problems or self.findings or self.leaks or self.bad_log_lines or seen.failures)
            and seen.wrong_bytes == 0 < seen.verified_loads
            and self.cost.rss_growth <= RSS_GROWTH_MAX
            and self.cost.fds_max - self.cost.fds_before <= FDS_GROWTH_MAX
            and self.exit_status == 0
        )

    def as_json(self) -> dict[str, object]:
        """One object."""
        tally, cost, seen = self.tally, self.cost, self.bystander.experience
        return {
            "good": self.good,
            "seed": self.options.seed,
            "frames": tally.frames,
            "truncations": tally.truncations,
            "sessions": tally.sessions,
            "answered": tally.answered,
            "closed": tally.closed,
            "unanswered": tally.unanswered,
            "replies": dict(sorted(tally.replies.items())),
            "problems": tally.problems,
            "seconds": round(self.seconds, 3),
            "rss_before_bytes": cost.rss_before,
            "rss_max_bytes": cost.rss_max,
            "rss_after_bytes": cost.rss_after,
            "rss_growth_bytes": cost.rss_growth,
            "fds_before": cost.fds_before,
            "fds_max": cost.fds_max,
            "wrong_bytes": seen.wrong_bytes,
            "stores": seen.stores,
            "loads": seen.loads,
            "verified_loads": seen.verified_loads,
            "missed_keys": seen.missed_keys,
            "bystander_failures": seen.failures,
            "ping_p50_s": seen.ping_p50_s,
            "ping_p99_s": seen.ping_p99_s,
            "findings": self.findings,
            "leaks": len(self.leaks),
            "leaked": self.leaks,
            "bad_log_lines": self.bad_log_lines,
            "exit_status": self.exit_status,
        }

    def print(self) -> None:
        """A table."""
        tally, cost, seen = self.tally, self.cost, self.bystander.experience
        codes = ", ".join(f"{code} {count:,}" for code, count in tally.replies.most_common(6))
        told = [*tally.problems, *self.findings, *self.leaks, *self.bad_log_lines, *seen.failures]
        sections = [
            [
                (
                    "frames",
                    f"{tally.frames:,}",
                    f"and {tally.truncations:,} truncations, in {tally.sessions:,} sessions",
                ),
                ("answered", f"{tally.answered:,}", codes),
                ("closed", f"{tally.closed:,}", "sessions ended by the daemon"),
                ("unanswered", f"{tally.unanswered:,}", "or answered twice"),
            ],
            [
                ("private memory", format_bytes(cost.rss_max), f"at most; {format_bytes(cost.rss_before)} before"),
                ("descriptors", f"{cost.fds_max:,}", f"at most; {cost.fds_before:,} before"),
            ],
            [
                ("bystander's loads", f"{seen.verified_loads:,}", "of which every byte was compared and right"),
                ("wrong bytes", f"{seen.wrong_bytes:,}", ""),
                ("ping p50, p99", format_ms(seen.ping_p50_s), format_ms(seen.ping_p99_s)),
            ],
            [
                ("time", f"{self.seconds:,.1f} s", f"seed {self.options.seed}"),
                ("verdict", "good" if self.good else "BAD", "; ".join(told)[:400]),
            ],
        ]
        print_table("fuzz", sections, good=self.good)


def run(options: Options, folder: Path) -> Report:
    """Everything. Raises DaemonError, KvOffloadError, OSError."""
    faults = "corrupt_every=1" if options.plant_corruption else ""
    daemon = Daemon(folder, DAEMON_MEMORY_BYTES, SETTINGS, faults)
    daemon.start()
    tally = Tally()
    fuzzer = Fuzzer(daemon.socket, options.seed, tally)
    total = options.frames + TRUNCATIONS_ABOUT / options.truncations_every
    try:
        with Live("warming up", 1) as live:  # what every daemon of some age has allocated is no growth
            fuzzer.run(min(WARM_UP_FRAMES, options.frames // 4), 1, live)
        before = held(daemon.observer, daemon.pid, "")
        begun = time.monotonic()
        with (
            Bystander(daemon.socket, options.seed, folder / "bystander.log") as bystander,
            Cost(daemon.pid) as cost,
            Live("fuzzing", total) as live,
        ):
            fuzzer.run(options.frames - tally.frames, options.threads, live)
            fuzzer.truncate(live, options.truncations_every)
        seconds = time.monotonic() - begun
        leaked = [leak for name in (MEMORY_NAME, "fuzz") for leak in leaks(daemon.observer, daemon.pid, name, before)]
        cost.sample()
        findings = list(daemon.verify(payloads=True))
    finally:
        fuzzer.close()
        status = daemon.stop()
    return Report(options, tally, bystander, cost, seconds, findings, leaked, bad_entries(daemon.log_path), status)


def main() -> int:
    """Runs it; returns the exit status."""
    options, as_json = _arguments()
    obey_signals()
    print(f"fuzz: seed {options.seed}", file=sys.stderr)
    try:
        with private_folder() as folder:
            report = run(options, Path(folder))
    except (DaemonError, KvOffloadError, OSError) as error:
        print(f"fuzz: {error}", file=sys.stderr)
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
    add("--frames", type=int, default=20_000, help="random and mutated frames (default: %(default)s)")
    add("--truncations-every", type=int, default=1, metavar="N", help="send one truncation of N (default: all)")
    add("--threads", type=int, default=2, help="sessions that misbehave at once (default: %(default)s)")
    add("--seed", type=int, help="of all that is chosen at random (default: a new one, which is told)")
    add("--plant-corruption", action="store_true", help="let the daemon flip bits in loads: this must be noticed")
    add("--json", action="store_true", help="one JSON object on standard output in place of the table")
    given = parser.parse_args()
    if min(given.frames, given.truncations_every, given.threads) < 1:
        parser.error("--frames, --truncations-every and --threads: at least 1")
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    options = Options(given.frames, given.truncations_every, given.threads, seed, given.plant_corruption)
    return options, given.json


if __name__ == "__main__":
    sys.exit(main())
