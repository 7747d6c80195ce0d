"""What a stress run found: figures, verdict, table and JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from kvoffloadd.testing.output import SHOWN, format_ms, print_table, print_wrong, ratio
from kvoffloadd.units import format_bytes
from scripts.harness.counters import VERIFIED_LAYOUTS, Counters, verified_in
from scripts.harness.watch import DaemonCounters
from scripts.stress.disk import DiskReport


@dataclass(slots=True)
class StressReport:
    """All figures of one run. `copies`: the way that the daemon was forced to.

    `taken_over`: share of the keys in memory at a kill that the next daemon had. `fatal_ends`: of the daemon, because
    of faults of its driver. `private_bytes`: the daemon's RssAnon, warm and at the end. `said`: what workers wrote.
    """

    seed: int
    device: str
    workers: int
    memory_bytes: int
    working_set_bytes: int
    counters: Counters
    layout: str
    model: str
    seconds: float = 0.0
    kills: int = 0
    kills_with_jobs: int = 0
    daemon_kills: int = 0
    taken_over: list[float] = field(default_factory=list)
    fatal_ends: int = 0
    unmap_s: list[float] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    daemon: DaemonCounters = field(default_factory=DaemonCounters)
    private_bytes: tuple[int, int] | None = None
    disk: DiskReport | None = None
    copies: str = ""
    metrics_compared: bool = False
    interrupted: bool = False

    @property
    def layouts(self) -> dict[str, int]:
        """Verified loads into memory of each layout that ran."""
        found = {layout: self.counters.total(verified_in(layout)) for layout in VERIFIED_LAYOUTS}
        return {layout: loads for layout, loads in found.items() if loads}

    @property
    def is_good(self) -> bool:
        """Whether everything is right, and something was checked (a run that was interrupted may have had no time)."""
        total = self.counters.total
        bad = total("wrong_bytes") + total("broken_promises")
        found = self.findings or self.leaks or self.errors or (self.disk is not None and self.disk.planting)
        return bad == 0 and not found and (total("verified_loads") > 0 or self.interrupted)

    @property
    def rss_growth_percent(self) -> float | None:
        """Returns the growth of the daemon's private memory from the first minute's end to the end."""
        if self.private_bytes is None:
            return None
        warm, last = self.private_bytes
        return 100 * (last / warm - 1)

    def unmap_percentile_s(self, percent: float) -> float | None:
        """Returns a percentile of the time from a worker's SIGKILL until the daemon had unmapped its memory."""
        ordered = sorted(self.unmap_s)
        return ordered[min(int(percent / 100 * len(ordered)), len(ordered) - 1)] if ordered else None

    def rate(self, what: str) -> float:
        """GB/s of the jobs' own time; jobs of several workers run at once."""
        direction = {"store": "stored_bytes", "load": "loaded_bytes"}[what]
        return ratio(self.counters.total(direction) / 1e3, self.counters.total(f"{what}_busy_us"))

    def as_json(self) -> dict[str, object]:
        """Keys are stable."""
        total, percentile = self.counters.total, self.counters.percentile_s
        counted = {
            name: total(name)
            for name in (
                "wrong_bytes", "stray_bytes", "broken_promises", "stores", "loads", "verified_loads",
                "verified_loads_from_disk", "stored_bytes", "loaded_bytes", "loaded_keys_from_disk", "missed_keys",
                "block_references", "block_hits", "block_pending", "block_promoting", "cancelled", "expired", "lost",
                "leases_void", "clears", "reregistrations", "reconnects", "calls_lost", "operations",
            )
        }  # fmt: skip
        latencies = {
            f"{what}_p{percent}_ms": None if (found := percentile(what, percent)) is None else round(found * 1e3, 4)
            for what in ("store", "load", "pin")
            for percent in (50, 99)
        }
        return {
            "seed": self.seed,
            "device": self.device,
            "seconds": round(self.seconds, 2),
            "workers": self.workers,
            "memory_bytes": self.memory_bytes,
            "working_set_bytes": self.working_set_bytes,
            **counted,
            "layout": self.layout,
            "model": self.model,
            "verified_loads_by_layout": self.layouts,
            "verified_loads_from_memory": total("verified_loads") - total("verified_loads_from_disk"),
            "disk": None if self.disk is None else self.disk.as_json(),
            "hit_rate": round(ratio(total("block_hits"), total("block_references")), 4),
            "store_gb_s": round(self.rate("store"), 3),
            "load_gb_s": round(self.rate("load"), 3),
            **latencies,
            "evictions": self.daemon.keys_evicted,
            "slabs_taken_over": self.daemon.slabs_taken_over,
            "keys_without_space": self.daemon.keys_without_space,
            "busy": self.daemon.busy,
            "faults_planted": self.daemon.faults_planted,
            "copies": self.copies,
            "pitched_copies": self.daemon.pitched_copies,
            "kills": self.kills,
            "kills_with_jobs": self.kills_with_jobs,
            "daemon_kills": self.daemon_kills,
            "taken_over_median": round(statistics.median(self.taken_over), 4) if self.taken_over else None,
            "taken_over_min": round(min(self.taken_over), 4) if self.taken_over else None,
            "fatal_ends": self.fatal_ends,
            "unmap_p50_ms": _rounded_ms(self.unmap_percentile_s(50)),
            "unmap_max_ms": _rounded_ms(max(self.unmap_s, default=None)),
            "leaks": len(self.leaks),
            "leaked": self.leaks,
            "verify_findings": len(self.findings),
            "findings": self.findings[:SHOWN],
            "errors": self.errors[:SHOWN],
            "said": self.said[:SHOWN],
            "rss_anon_warm_bytes": self.private_bytes and self.private_bytes[0],
            "rss_anon_end_bytes": self.private_bytes and self.private_bytes[1],
            "rss_anon_growth_pct": None if (grown := self.rss_growth_percent) is None else round(grown, 2),
            "metrics_compared": self.metrics_compared,
            "interrupted": self.interrupted,
            "good": self.is_good,
        }

    def print(self) -> None:
        """The table, and below it each thing that is wrong."""
        title = f"stress: {self.device}, {self.workers} workers, {self.seconds:.0f} s, seed {self.seed}"
        sections = [_moved(self), _found(self), *_on_disk(self), _ended(self), _verdict(self)]
        print_table(title, sections, good=self.is_good)
        print_wrong(self)


def _rounded_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


def _moved(report: StressReport) -> list[tuple[str, str, str]]:
    total, percentile = report.counters.total, report.counters.percentile_s
    rows = []
    for what, done in (("store", "stored_bytes"), ("load", "loaded_bytes")):
        latency = f"p50 {format_ms(percentile(what, 50))}, p99 {format_ms(percentile(what, 99))}"
        moved = f"{format_bytes(total(done))}, {report.rate(what):.2f} GB/s of each job's time"
        rows.append((f"{what}s", f"{total(f'{what}s'):,}", moved))
        rows.append((f"{what} latency", "", latency))
    rows.append(("pin latency", "", f"p50 {format_ms(percentile('pin', 50))}, p99 {format_ms(percentile('pin', 99))}"))
    rows.append(("verified loads", f"{total('verified_loads'):,}", "every byte compared with the oracle"))
    rows += [(f"  {layout}", f"{loads:,}", "") for layout, loads in report.layouts.items()]
    if report.disk is not None:
        from_disk = total("verified_loads_from_disk")
        rows.append(("  from memory", f"{total('verified_loads') - from_disk:,}", "all keys were there when asked for"))
        rows.append(("  from disk", f"{from_disk:,}", "a key was on disk alone when it was asked for"))
    return rows


def _found(report: StressReport) -> list[tuple[str, str, str]]:
    total = report.counters.total
    hit_rate = ratio(total("block_hits"), total("block_references"))
    memory, working_set = format_bytes(report.memory_bytes), format_bytes(report.working_set_bytes)
    return [
        ("hits", f"{total('block_hits'):,}", f"{100 * hit_rate:.1f} % of {total('block_references'):,} keys asked for"),
        ("pending", f"{total('block_pending'):,}", f"{total('block_promoting'):,} on disk, others being stored"),
        ("evictions", f"{report.daemon.keys_evicted:,}", f"{memory} for {working_set}"),
        ("busy", f"{report.daemon.busy:,}", ""),
        *_ways(report),
    ]


def _ways(report: StressReport) -> list[tuple[str, str, str]]:
    daemon = report.daemon
    if report.device != "cuda":
        return []
    return [("pitched copies", f"{daemon.pitched_copies:,}", "of runs of small rows")]


def _on_disk(report: StressReport) -> list[list[tuple[str, str, str]]]:
    disk = report.disk
    if disk is None:
        return []
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in disk.not_demoted.items() if count) or "none"
    again = f"{disk.segments_recycled:,} segments used again"
    share = f"{100 * min(disk.found_again):.1f} %" if disk.found_again else "-"
    direct = "O_DIRECT" if disk.direct else "buffered"
    rows = [
        ("disk", format_bytes(disk.capacity_bytes), f"{disk.file_system}, {direct}"),
        (
            "most at any time",
            format_bytes(disk.most_bytes),
            f"in {disk.samples:,} looks, {disk.samples_after_kills} at kills",
        ),
        ("demoted", f"{disk.demoted_keys:,}", f"keys, {format_bytes(disk.demoted_bytes)}; not: {dropped}"),
        ("promoted", f"{disk.promoted_keys:,}", f"keys, {format_bytes(disk.promoted_bytes)}"),
        ("evicted, rewritten", f"{disk.evicted_keys:,}, {disk.records_rewritten:,}", again),
        ("corrupt", f"{disk.corrupt:,}", f"{disk.planted:,} planted, {disk.planted_found_by_verify:,} found by verify"),
        ("found after kills", share, f"of keys, at worst; median {disk.as_json()['found_again_median']}"),
        ("audits of all", f"{disk.audits:,}", f"{disk.records_audited:,} records, {disk.audits_cut_short} cut short"),
    ]
    return [rows]


def _ended(report: StressReport) -> list[tuple[str, str, str]]:
    total = report.counters.total
    slowest = max(report.unmap_s, default=None)
    growth = report.rss_growth_percent
    grown = "-" if growth is None else f"{growth:+.1f} %"
    sizes = " to ".join(format_bytes(size) for size in report.private_bytes or ())
    return [
        ("cancelled, expired", f"{total('cancelled'):,}, {total('expired'):,}", ""),
        ("reconnects", f"{total('reconnects'):,}", "as another engine"),
        ("registered again", f"{total('reregistrations'):,}", f"{total('clears'):,} clears"),
        ("workers killed", f"{report.kills:,}", f"{report.kills_with_jobs:,} with jobs open"),
        ("until unmapped", format_ms(slowest), f"p50 {format_ms(report.unmap_percentile_s(50))}"),
        ("daemon killed", f"{report.daemon_kills:,}", f"{total('lost'):,} jobs lost, {total('calls_lost'):,} calls"),
        *_taken_over(report.taken_over),
        ("fatal ends", f"{report.fatal_ends:,}", "of the daemon, by faults of its GPU's driver"),
        ("daemon RssAnon", grown, sizes),
    ]


def _taken_over(shares: list[float]) -> list[tuple[str, str, str]]:
    if not shares:
        return []
    return [("memory taken over", f"{100 * statistics.median(shares):.1f} %", f"least {100 * min(shares):.1f} %")]


def _verdict(report: StressReport) -> list[tuple[str, str, str]]:
    total = report.counters.total
    return [
        ("wrong bytes", f"{total('wrong_bytes'):,}", f"{total('stray_bytes'):,} of them stray"),
        ("broken promises", f"{total('broken_promises'):,}", ""),
        ("self-audit", f"{len(report.findings):,}", "findings" + ", metrics compared" * report.metrics_compared),
        ("leaks", f"{len(report.leaks):,}", "descriptors, mappings, leases, slots"),
        ("errors", f"{len(report.errors):,}", "worker crashes, daemon log"),
    ]
