"""A daemon that serves a bystander while others misbehave, and what must hold of it in the end, whatever they did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.testing.leaks import held, leaks
from kvoffloadd.testing.output import format_ms, print_table
from kvoffloadd.testing.process import bad_entries
from kvoffloadd.units import format_bytes
from scripts.fuzz.bystander import MEMORY_NAME, Bystander, Cost, Experience
from scripts.harness.daemon import Daemon

DAEMON_MEMORY_BYTES = 64 << 20


class Trial:
    """The daemon, which runs as long as the context lasts. `findings`, `leaks`, `exit_status`: what came of it."""

    def __init__(self, folder: Path, seed: int, settings: Mapping[str, str], faults: Sequence[str]) -> None:
        self.seed = seed
        self.findings: list[str] = []
        self.leaks: list[str] = []
        self.bad_log_lines: list[str] = []
        self.exit_status: int | None = None
        self.daemon = Daemon(folder, DAEMON_MEMORY_BYTES, settings, ",".join(faults))
        self._log = folder / "bystander.log"

    def __enter__(self) -> Trial:
        self.daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.__exit__()
        self.exit_status = self.daemon.exit_status
        self.bad_log_lines = bad_entries(self.daemon.log_path)

    @contextmanager
    def beside_bystander(self, memory_name: str, *, expedited: bool = False, uid: int | None = None) -> Iterator[None]:
        """What is done within must cost no more than it may; the memory that is registered for it has this name.
        `uid`: the user as whom the bystander connects.
        """
        daemon = self.daemon
        before = held(daemon.observer, daemon.pid, "")
        bystander = Bystander(daemon.socket, self.seed, self._log, expedited=expedited, uid=uid)
        with bystander, Cost(daemon.pid) as cost:
            yield
        daemon.leave_guests()
        for name in (MEMORY_NAME, memory_name):
            self.leaks += leaks(daemon.observer, daemon.pid, name, before)
        cost.sample()
        self.findings += daemon.verify(payloads=True)
        self.experience, self.samples, self.cost = bystander.experience, bystander.samples, cost


@dataclass(frozen=True)
class TrialReport:
    """How it went. `problems`: of those who misbehaved; `rss_growth_max`: what they may cost the daemon."""

    trial: Trial
    problems: list[str]
    rss_growth_max: int

    @property
    def seen(self) -> Experience:
        """Returns what the bystander has seen."""
        return self.trial.experience

    @property
    def complaints(self) -> list[str]:
        """All that must not be."""
        trial = self.trial
        return [*self.problems, *trial.findings, *trial.leaks, *trial.bad_log_lines, *self.seen.failures]

    @property
    def is_good(self) -> bool:
        """Whether all that must hold held."""
        grown = self.trial.cost.rss_growth > self.rss_growth_max
        return (
            not self.complaints
            and self.seen.wrong_bytes == 0 < self.seen.verified_loads
            and not (grown or self.trial.exit_status)
        )

    def as_json(self) -> dict[str, object]:
        """What all trials have."""
        trial, cost, seen = self.trial, self.trial.cost, self.seen
        return {
            "good": self.is_good,
            "seed": trial.seed,
            "problems": self.problems,
            "rss_before_bytes": cost.rss_before,
            "rss_max_bytes": cost.rss_max,
            "rss_after_bytes": cost.rss_after,
            "rss_growth_bytes": cost.rss_growth,
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
            "cycle_p50_s": seen.cycle_p50_s,
            "cycle_p99_s": seen.cycle_p99_s,
            "event_p50_s": seen.event_p50_s,
            "event_p99_s": seen.event_p99_s,
            "event_gaps": seen.event_gaps,
            "findings": trial.findings,
            "leaks": len(trial.leaks),
            "leaked": trial.leaks,
            "bad_log_lines": trial.bad_log_lines,
            "exit_status": trial.exit_status,
        }

    def print_sections(self, title: str, rows: list[tuple[str, str, str]], costs: list[tuple[str, str, str]]) -> None:
        """A table: what was asked, what it cost, what the bystander saw."""
        cost, seen = self.trial.cost, self.seen
        memory = (
            "private memory", format_bytes(cost.rss_max), f"at most; {format_bytes(cost.rss_before)} before"
        )  # fmt: skip
        served = [
            ("bystander's loads", f"{seen.verified_loads:,}", "of which every byte was compared and right"),
            ("wrong bytes", f"{seen.wrong_bytes:,}", ""),
            ("ping p50, p99", format_ms(seen.ping_p50_s), format_ms(seen.ping_p99_s)),
            ("ping, slowest", format_ms(seen.ping_max_s), f"of {seen.pings:,}"),
            ("store and load p50, p99", format_ms(seen.cycle_p50_s), format_ms(seen.cycle_p99_s)),
            ("store to event p50, p99", format_ms(seen.event_p50_s), format_ms(seen.event_p99_s)),
            ("gaps in events", f"{seen.event_gaps:,}", ""),
        ]
        verdict = (
            "verdict",
            "good" if self.is_good else "BAD",
            "; ".join(self.complaints)[:400] or f"seed {self.trial.seed}",
        )
        print_table(title, [rows, [memory, *costs], served, [verdict]], good=self.is_good)
