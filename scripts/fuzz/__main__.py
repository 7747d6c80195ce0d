"""Fuzz a daemon over its socket: random, mutated and truncated frames in many sessions, next to an honest worker.

Every whole frame must be answered once, or its session be closed; the daemon must live, its memory and descriptors
stay bounded, its self-audit find nothing; the honest worker must be served all the while, and with right bytes. Exit
status 0 only if all that held; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.program import carry_out
from scripts.fuzz.sessions import FrameTally, Fuzzer
from scripts.fuzz.trial import Trial, TrialReport
from scripts.harness.program import add_seed, command_line, seed_of

RSS_GROWTH_MAX = 64 << 20
FDS_GROWTH_MAX = 64 * 8
TRUNCATIONS_ABOUT = 4500
WARM_UP_FRAMES = 300
# A job may wait for a signal that never comes, and a `drain` for the job: both end well before the judge's patience.
SETTINGS = {"memory.slab_bytes": "1MiB", "copy.deadline_max_s": "5.0"}


@dataclass(frozen=True)
class FuzzReport(TrialReport):
    """How it went."""

    tally: FrameTally
    seconds: float

    @property
    def is_good(self) -> bool:
        """Descriptors are bounded, too."""
        return super().is_good and self.trial.cost.fds_max - self.trial.cost.fds_before <= FDS_GROWTH_MAX

    def as_json(self) -> dict[str, object]:
        tally = self.tally
        return super().as_json() | {
            "frames": tally.frames,
            "truncations": tally.truncations,
            "sessions": tally.sessions,
            "answered": tally.answered,
            "closed": tally.closed,
            "unanswered": tally.unanswered,
            "replies": dict(sorted(tally.replies.items())),
            "seconds": round(self.seconds, 3),
            "fds_before": self.trial.cost.fds_before,
            "fds_max": self.trial.cost.fds_max,
        }

    def print(self) -> None:
        tally, cost = self.tally, self.trial.cost
        codes = ", ".join(f"{code} {count:,}" for code, count in tally.replies.most_common(6))
        truncated = f"and {tally.truncations:,} truncations, in {tally.sessions:,} sessions"
        rows = [
            ("frames", f"{tally.frames:,}", truncated),
            ("answered", f"{tally.answered:,}", codes),
            ("closed", f"{tally.closed:,}", "sessions ended by the daemon"),
            ("unanswered", f"{tally.unanswered:,}", "or answered twice"),
            ("time", f"{self.seconds:,.1f} s", f"seed {self.trial.seed}"),
        ]
        self.print_sections(
            "fuzz", rows, [("descriptors", f"{cost.fds_max:,}", f"at most; {cost.fds_before:,} before")]
        )


def run(given: argparse.Namespace, seed: int, folder: Path) -> FuzzReport:
    """Everything. Raises DaemonError, KvOffloadError, OSError."""
    tally = FrameTally()
    total = given.frames + TRUNCATIONS_ABOUT / given.truncations_every
    with Trial(folder, seed, SETTINGS, ["corrupt_every=1"] * given.plant_corruption) as trial:
        fuzzer = Fuzzer(trial.daemon.socket, seed, tally)
        try:
            with ProgressBar("warming up", 1) as live:  # what every daemon of some age has allocated is no growth
                fuzzer.run(min(WARM_UP_FRAMES, given.frames // 4), 1, live)
            begun = time.monotonic()
            with trial.beside_bystander("fuzz"), ProgressBar("fuzzing", total) as live:
                fuzzer.run(given.frames - tally.frames, given.threads, live)
                fuzzer.truncate(live, given.truncations_every)
            seconds = time.monotonic() - begun
        finally:
            fuzzer.close()
    return FuzzReport(trial, tally.problems, RSS_GROWTH_MAX, tally, seconds)


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--frames", type=int, default=20_000, help="random and mutated frames (default: %(default)s)")
    add("--truncations-every", type=int, default=1, metavar="N", help="send one truncation of N (default: all)")
    add("--threads", type=int, default=2, help="sessions that misbehave at once (default: %(default)s)")
    add("--plant-corruption", action="store_true", help="let the daemon flip bits in loads: this must be noticed")
    add_seed(parser)
    given = parser.parse_args()
    if min(given.frames, given.truncations_every, given.threads) < 1:
        parser.error("--frames, --truncations-every and --threads: at least 1")
    return carry_out("fuzz", partial(run, given, seed_of(given, "fuzz")), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
