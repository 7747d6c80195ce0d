"""What a soak found: figures, verdict, table and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvoffloadd.testing.output import SHOWN, format_ms, print_table, print_wrong, ratio
from kvoffloadd.units import format_bytes
from scripts.harness.counters import Counters
from scripts.soak.host import HostReport
from scripts.soak.options import SoakOptions
from scripts.soak.sentinels import SentinelReport
from scripts.soak.vandal import ENDED

GROWTH_MAX_PERCENT, GROWTH_MAX_BYTES = 50.0, 32 << 20
"""Of a daemon's private memory after its warm-up, if it is more than both. Tables grow for minutes, as keys come."""


@dataclass(slots=True)
class SoakReport:
    """All figures of one run."""

    options: SoakOptions
    counters: Counters
    isolated: bool
    seconds: float = 0.0
    hosts: list[HostReport] = field(default_factory=list)
    mishaps: Counter[str] = field(default_factory=Counter)
    sentinels: SentinelReport = field(default_factory=SentinelReport)
    vandal: Counter[str] = field(default_factory=Counter)
    store_starts: int = 0
    left_over: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def findings(self) -> list[str]:
        """Returns the findings of self-audits."""
        return [finding for host in self.hosts for finding in host.findings]

    @property
    def errors(self) -> list[str]:
        """Workers that crashed, what daemons logged, and so on."""
        return self.sentinels.errors + [error for host in self.hosts for error in host.errors]

    @property
    def daemons_ended(self) -> int:
        """Returns how many ended unasked."""
        return sum(host.daemons_ended for host in self.hosts)

    @property
    def said(self) -> list[str]:
        """Returns what workers wrote."""
        return [line for host in self.hosts for line in host.said]

    @property
    def leaks(self) -> list[str]:
        """Returns the leaks of hosts and of the run."""
        return self.left_over + [leak for host in self.hosts for leak in host.leaks] + self._grown()

    def _grown(self) -> list[str]:
        found = []
        for number, host in enumerate(self.hosts):
            warm, last = host.private_bytes or (0, 0)
            if last - warm > GROWTH_MAX_BYTES and 100 * (last - warm) > GROWTH_MAX_PERCENT * warm:
                found.append(f"host {number}: the daemon's private memory, from {warm} to {last} bytes")
        return found

    @property
    def is_good(self) -> bool:
        """Whether everything is right, and something came from the store."""
        total = self.counters.total
        bad = (
            total("wrong_bytes")
            + total("broken_promises")
            + self.sentinels.served
            + self.sentinels.wrong
            + self.daemons_ended
            + self.vandal[ENDED]
        )
        came = total("verified_loads") and self.remote("fetched")
        return not (bad or self.findings or self.leaks or self.errors) and bool(came or self.interrupted)

    def remote(self, name: str) -> int:
        """Sums a figure of all hosts."""
        return sum(host.remote[name] for host in self.hosts)

    def _reasons(self, kind: str) -> dict[str, int]:
        summed: Counter[str] = sum((host.remote for host in self.hosts), Counter())
        return {name.split(": ")[1]: count for name, count in summed.items() if name.startswith(f"{kind}: ")}

    def figures(self) -> str:
        """Returns the figures behind the bar."""
        total = self.counters.total
        return (
            f"{total('stores'):,} stores {total('verified_loads'):,} loads verified "
            f"{sum(self.mishaps.values())} mishaps {total('wrong_bytes'):,} wrong"
        )

    def as_json(self) -> dict[str, object]:
        """Keys are stable."""
        total = self.counters.total
        counted = (
            "wrong_bytes", "stray_bytes", "broken_promises", "stores", "loads", "verified_loads",
            "verified_loads_from_disk", "loaded_bytes", "block_references", "block_hits", "missed_keys", "clears",
            "clears_not_everywhere", "calls_lost", "lost", "operations",
        )  # fmt: skip
        return {
            "seed": self.options.seed,
            "engine": self.options.engine,
            "isolated": self.isolated,
            "seconds": round(self.seconds, 2),
            **{name: total(name) for name in counted},
            "mishaps": dict(self.mishaps),
            "vandal": dict(self.vandal),
            "sentinels": self.sentinels.as_json(),
            "served_after_a_clear": self.sentinels.served,
            "daemons_ended": self.daemons_ended,
            "store_starts": self.store_starts,
            "remote": {name: self.remote(name) for name in sorted({key for host in self.hosts for key in host.remote})},
            "daemon_runs": [host.daemon_runs for host in self.hosts],
            "private_bytes": [host.private_bytes for host in self.hosts],
            "quarantined_most_bytes": max((host.quarantined_most_bytes for host in self.hosts), default=0),
            "findings": self.findings[:SHOWN],
            "leaked": self.leaks,
            "errors": self.errors[:SHOWN],
            "said": self.said[:SHOWN],
            "interrupted": self.interrupted,
            "good": self.is_good,
        }

    def print(self) -> None:
        """The table, and below it each thing that is wrong."""
        where = "network namespaces" if self.isolated else "the loopback device"
        title = f"soak: 2 hosts on {where}, {self.options.engine}, {self.seconds:.0f} s, seed {self.options.seed}"
        sections = [self._moved(), self._shared(), self._gone_wrong(), self._watched(), self._verdict()]
        print_table(title, sections, good=self.is_good)
        print_wrong(self)

    def _moved(self) -> list[tuple[str, str, str]]:
        total, percentile = self.counters.total, self.counters.percentile_s
        hits = 100 * ratio(total("block_hits"), total("block_references"))
        return [
            ("stores", f"{total('stores'):,}", format_bytes(total("stored_bytes"))),
            ("loads", f"{total('loads'):,}", format_bytes(total("loaded_bytes"))),
            ("verified loads", f"{total('verified_loads'):,}", "every byte compared with the oracle"),
            (
                "  not from memory",
                f"{total('verified_loads_from_disk'):,}",
                "a key was on disk or remote when asked for",
            ),
            ("hits", f"{hits:.1f} %", f"of {total('block_references'):,} keys asked for"),
            ("pin latency", format_ms(percentile("pin", 50)), f"p99 {format_ms(percentile('pin', 99))}"),
        ]

    def _shared(self) -> list[tuple[str, str, str]]:
        remote = self.remote
        return [
            ("asked, found", f"{remote('asked'):,}", f"{remote('found'):,} keys were there"),
            ("fetched", f"{remote('fetched'):,}", f"keys, {format_bytes(remote('fetched bytes'))}"),
            ("  not", f"{sum(self._reasons('not_fetched').values()):,}", _listed(self._reasons("not_fetched"))),
            ("pushed", f"{remote('pushed'):,}", f"keys, {format_bytes(remote('pushed bytes'))}"),
            ("  not", f"{sum(self._reasons('not_pushed').values()):,}", _listed(self._reasons("not_pushed"))),
            ("corrupt there", f"{sum(self._reasons('corrupt').values()):,}", _listed(self._reasons("corrupt"))),
            ("eras made", f"{remote('eras_made'):,}", f"{remote('markers_lost'):,} markers were missing"),
            ("most quarantined", format_bytes(max((h.quarantined_most_bytes for h in self.hosts), default=0)), ""),
        ]

    def _gone_wrong(self) -> list[tuple[str, str, str]]:
        total = self.counters.total
        rows = [(name, f"{count:,}", "") for name, count in self.mishaps.items()]
        runs = " and ".join(str(host.daemon_runs) for host in self.hosts)
        return [
            *rows,
            (
                "agents",
                f"{self.remote('agents'):,}",
                f"of {runs} daemons; {self.remote('breakers opened')} breakers opened",
            ),
            ("clears", f"{total('clears'):,}", f"by workers; {total('clears_not_everywhere'):,} not everywhere"),
            ("lost", f"{total('lost'):,}", f"jobs; {total('calls_lost'):,} calls"),
        ]

    def _watched(self) -> list[tuple[str, str, str]]:
        found, heard_s = self.sentinels, sorted(self.sentinels.heard_s)
        slowest = f"slowest {format_ms(heard_s[-1])}" if heard_s else ""
        return [
            ("vandal's acts", f"{self.vandal.total() - self.vandal['could not']:,}", _listed(self.vandal)),
            ("trials", f"{found.trials.total():,}", _listed(found.trials)),
            ("sentinels", f"{found.looks:,}", f"looks; {found.fresh:,} keys, {found.kept:,} of which were kept"),
            ("their clears", f"{found.clears:,}", f"{len(heard_s):,} followed by other hosts; {slowest}"),
        ]

    def _verdict(self) -> list[tuple[str, str, str]]:
        total = self.counters.total
        return [
            ("served after a clear", f"{self.sentinels.served:,}", "keys of sentinels"),
            ("daemons ended", f"{self.daemons_ended:,}", "unexpectedly"),
            ("wrong bytes", f"{total('wrong_bytes'):,}", f"{total('stray_bytes'):,} of them stray"),
            ("broken promises", f"{total('broken_promises'):,}", ""),
            ("self-audit", f"{len(self.findings):,}", "findings"),
            ("leaks", f"{len(self.leaks):,}", "descriptors, mappings, leases, slots, processes, memory"),
            ("errors", f"{len(self.errors):,}", "worker crashes, daemon logs"),
        ]


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()) if count)
