"""What a run of holes found: figures, verdict, table and JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvoffloadd.testing.output import SHOWN, print_table, print_wrong, ratio
from kvoffloadd.units import format_bytes
from scripts.harness.counters import Counters
from scripts.harness.watch import DaemonCounters
from scripts.holes.options import HolesOptions

COUNTED = (
    "operations", "stores", "loads", "verified_loads", "block_references", "block_hits", "missed_keys", "failed_jobs",
    "lost", "calls_lost", "reconnects", "comparisons", "excused_bytes",
)  # fmt: skip


@dataclass(slots=True)
class HolesReport:
    """All figures of one run. `said`: what workers wrote."""

    options: HolesOptions
    counters: Counters
    seconds: float = 0.0
    mishaps: Counter[str] = field(default_factory=Counter)
    daemon: DaemonCounters = field(default_factory=DaemonCounters)
    forbidden_runs: int = 0
    daemon_runs: int = 0
    findings: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    interrupted: bool = False

    def of_bystanders(self, name: str) -> int:
        return sum(self.counters.get(row, name) for row in range(self.options.bystanders))

    def of_attackers(self, name: str) -> int:
        return self.counters.total(name) - self.of_bystanders(name)

    @property
    def is_good(self) -> bool:
        """Whether everything is right, and something was checked next to holes that were made."""
        total = self.counters.total
        bad = total("wrong_bytes") + total("broken_promises")
        checked = self.of_bystanders("verified_loads") and (total("holes") or not self.options.attackers)
        return not (bad or self.findings or self.leaks or self.errors) and bool(checked or self.interrupted)

    def figures(self) -> str:
        """Returns the figures behind the bar."""
        total = self.counters.total
        return (
            f"{self.of_bystanders('verified_loads'):,} loads verified {total('holes'):,} holes "
            f"{total('failed_jobs'):,} jobs met one {sum(self.mishaps.values())} kills {total('wrong_bytes'):,} wrong"
        )

    def as_json(self) -> dict[str, object]:
        """Keys are stable."""
        total = self.counters.total
        return {
            "seed": self.options.seed,
            "seconds": round(self.seconds, 2),
            "wrong_bytes": total("wrong_bytes"),
            "stray_bytes": total("stray_bytes"),
            "broken_promises": total("broken_promises"),
            "holes": total("holes"),
            "bystanders": {name: self.of_bystanders(name) for name in COUNTED},
            "attackers": {name: self.of_attackers(name) for name in COUNTED},
            "mishaps": dict(self.mishaps),
            "daemon_runs": self.daemon_runs,
            "daemon_runs_without_holes": self.forbidden_runs,
            "evictions": self.daemon.keys_evicted,
            "keys_corrupt": self.daemon.keys_corrupt,
            "faults_planted": self.daemon.faults_planted,
            "findings": self.findings[:SHOWN],
            "leaked": self.leaks,
            "errors": self.errors[:SHOWN],
            "said": self.said[:SHOWN],
            "evidence": str(self.options.evidence) if total("wrong_bytes") else None,
            "interrupted": self.interrupted,
            "good": self.is_good,
        }

    def print(self) -> None:
        """The table, and below it each thing that is wrong."""
        options = self.options
        title = f"holes: {options.bystanders} bystanders, {options.attackers} attackers, {self.seconds:.0f} s"
        sections = [self._served(), self._attacked(), self._verdict()]
        print_table(f"{title}, seed {options.seed}", sections, good=self.is_good)
        print_wrong(self)

    def _served(self) -> list[tuple[str, str, str]]:
        total = self.of_bystanders
        hits = 100 * ratio(total("block_hits"), total("block_references"))
        return [
            ("stores", f"{total('stores'):,}", f"by bystanders, {format_bytes(total('stored_bytes'))}"),
            ("loads", f"{total('loads'):,}", f"by bystanders, {format_bytes(total('loaded_bytes'))}"),
            ("  verified", f"{total('verified_loads'):,}", "every byte compared with the oracle"),
            ("hits", f"{hits:.1f} %", f"of {total('block_references'):,} keys pinned"),
            ("missed keys", f"{total('missed_keys'):,}", "of loads, or lost with a daemon"),
            ("  excused bytes", f"{total('excused_bytes'):,}", "theirs: wrong for a check that ignores states"),
        ]

    def _attacked(self) -> list[tuple[str, str, str]]:
        theirs = self.of_attackers
        forbidden = f"{self.daemon_runs:,} runs of the daemon, {self.forbidden_runs:,} of which fill no holes"
        return [
            ("holes", f"{theirs('holes'):,}", "made by attackers in their memory"),
            ("stores, loads", f"{theirs('stores'):,}, {theirs('loads'):,}", "of attackers"),
            ("  met a hole", f"{theirs('failed_jobs'):,}", "and failed"),
            *((name, f"{count:,}", "") for name, count in self.mishaps.items()),
            ("lost", f"{self.counters.total('lost'):,}", f"jobs; {self.counters.total('calls_lost'):,} calls"),
            ("daemons", f"{self.daemon_runs:,}", forbidden),
            ("evictions", f"{self.daemon.keys_evicted:,}", f"memory is {format_bytes(self.options.memory_bytes)}"),
        ]

    def _verdict(self) -> list[tuple[str, str, str]]:
        total = self.counters.total
        evidence = f"; see {self.options.evidence}" if total("wrong_bytes") else ""
        return [
            ("wrong bytes", f"{total('wrong_bytes'):,}", f"{total('stray_bytes'):,} of them stray{evidence}"),
            ("broken promises", f"{total('broken_promises'):,}", ""),
            ("self-audit", f"{len(self.findings):,}", "findings"),
            ("leaks", f"{len(self.leaks):,}", "descriptors, mappings, leases, slots"),
            ("errors", f"{len(self.errors):,}", "worker crashes, daemon log"),
        ]
