"""The disk's share of a stress run: its bytes, its counters over the daemon's runs, audits after each start, damage."""

from __future__ import annotations

import re
import statistics
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from kvoffloadd.linux.mounts import file_system_of
from kvoffloadd.testing.disk import disk_settings, used_bytes
from scripts.harness.disk import Planted, Planter
from scripts.harness.watch import Watch

AUDIT_S = 120.0
FOUND_AGAIN_MIN = 0.5
"""Of the keys on disk at a kill, unless there was a clear; segments that are given up meanwhile are a few percent."""
_DAMAGED = re.compile(r"disk: the record at .*/([0-9a-f]{16}), page (\d+) is damaged")


@dataclass(slots=True)
class DiskReport:
    """What is reported of the disk. `found_again`: share of the keys on disk before a kill that were there after it."""

    file_system: str
    capacity_bytes: int
    most_bytes: int = 0
    samples: int = 0
    samples_after_kills: int = 0
    direct: bool = False
    demoted_keys: int = 0
    demoted_bytes: int = 0
    promoted_keys: int = 0
    promoted_bytes: int = 0
    promoted_without_space: int = 0
    not_demoted: dict[str, int] = field(default_factory=dict)
    corrupt: int = 0
    unreadable: int = 0
    evicted_keys: int = 0
    records_rewritten: int = 0
    segments_recycled: int = 0
    audits: int = 0
    audits_cut_short: int = 0
    records_audited: int = 0
    found_again: list[float] = field(default_factory=list)
    kills_in_start: int = 0
    planting: bool = False
    planted: int = 0
    planted_found_by_verify: int = 0

    def as_json(self) -> dict[str, object]:
        """Keys are stable."""
        named = asdict(self)
        found = sorted(named.pop("found_again"))
        del named["planting"]
        return named | {
            "found_again_median": round(statistics.median(found), 4) if found else None,
            "found_again_min": round(found[0], 4) if found else None,
        }


class StressDisk:
    """One root, watched by the main process. `findings` and `errors`: what was not right."""

    def __init__(self, root: Path, capacity_bytes: int, rng: np.random.Generator, *, planting: bool) -> None:
        self.root = root
        self.findings: list[str] = []
        self.errors: list[str] = []
        self.report = DiskReport(file_system_of(root.parent), capacity_bytes, planting=planting)
        self._planter = Planter(root, rng)
        self._runs: dict[str, dict[str, Any]] = {}
        self._before: tuple[int, int] | None = None
        self._audit: threading.Thread | None = None
        self._places: set[Planted] = set()

    @property
    def settings(self) -> dict[str, str]:
        """Returns the settings for the daemon."""
        return disk_settings(self.root, self.report.capacity_bytes)

    # --- while it runs ---

    def sample(self, *, after_kill: bool = False) -> None:
        """How many bytes there are."""
        report = self.report
        size = used_bytes(self.root)
        report.most_bytes = max(report.most_bytes, size)
        report.samples += 1
        report.samples_after_kills += after_kill
        if size > report.capacity_bytes:
            self.errors.append(f"{size} bytes in a root of {report.capacity_bytes}{', after a kill' * after_kill}")

    def note(self, watch: Watch) -> None:
        """Counters of the daemon's present run."""
        if "disk" in watch.status:
            self._runs[watch.status["boot_id"]] = watch.status["disk"]

    def plant(self) -> None:
        """Damage a record, if that is asked for."""
        if self.report.planting and self._planter.plant():
            self.report.planted = len(self._planter.planted)

    # --- kills and starts ---

    def killed(self, watch: Watch, clears: int) -> None:
        """Right after a kill. `clears`: how many there were so far."""
        self.sample(after_kill=True)
        if "disk" in watch.status:
            self._before = int(watch.status["disk"]["keys"]), clears

    def started(self, status: dict[str, Any], socket: Path, clears: int) -> None:
        """Notes what a start found again, and begins the audit of all of it, which goes on meanwhile."""
        self.sample()
        before, self._before = self._before, None
        if before is not None and before[0] >= 100 and before[1] == clears:
            share = status["disk"]["keys"] / before[0]
            self.report.found_again.append(share)
            if share < FOUND_AGAIN_MIN:
                self.errors.append(f"of {before[0]} keys on disk {status['disk']['keys']} were found after a start")
        self._audit = threading.Thread(target=self._look_at_all, args=(socket,), daemon=True)
        self._audit.start()

    @property
    def is_auditing(self) -> bool:
        """An audit is under way."""
        return self._audit is not None and self._audit.is_alive()

    def wait_for_audit(self, limit_s: float) -> None:
        """Waits until the audit under way has ended."""
        if self._audit is not None:
            self._audit.join(limit_s)

    def _look_at_all(self, socket: Path) -> None:
        try:
            with Client(socket, namespace=None, role="observer", connect_deadline_s=2.0) as observer:
                self.audit(observer)
        except ClientError:
            self.report.audits_cut_short += 1

    def audit(self, observer: Client, *, repair: bool = False) -> None:
        """Everything in memory and on disk. Damage that was planted is no finding. Raises ClientError."""
        done = observer.verify(payloads=True, disk=True, repair=repair, deadline_s=AUDIT_S)
        self.report.audits += 1
        self.report.records_audited += done.records
        for finding in done.findings:
            place = _DAMAGED.match(finding)
            if place is None or not self.report.planting:
                self.findings.append(finding)
            else:
                self._places.add(Planted(place[1], int(place[2])))
        self.report.planted_found_by_verify = len(self._places)

    # --- the end ---

    def finish(self) -> None:
        """Sums over the daemon's runs, and what they must be."""
        report = self.report
        for disk in self._runs.values():
            report.direct = all(root["direct"] for root in disk["roots"])
            report.demoted_keys += disk["demoted"]["keys"]
            report.demoted_bytes += disk["demoted"]["bytes"]
            report.promoted_keys += disk["promoted"]["keys"]
            report.promoted_bytes += disk["promoted"]["bytes"]
            report.promoted_without_space += disk["promoted"]["without_space"]
            report.unreadable += disk["promoted"]["unreadable"]
            report.corrupt += disk["corrupt"]
            report.evicted_keys += disk["evicted_keys"]
            report.records_rewritten += disk["rewritten"]
            report.segments_recycled += sum(root["segments_recycled"] for root in disk["roots"])
            report.not_demoted = dict(Counter(report.not_demoted) + Counter(disk["not_demoted"]))
        if report.unreadable:
            self.errors.append(f"{report.unreadable} records could not be read")
        if report.corrupt and not report.planting:
            self.errors.append(f"{report.corrupt} records were corrupt, and none was planted")
        if report.planting and not (report.planted and report.corrupt + report.planted_found_by_verify):
            self.errors.append(f"of {report.planted} damaged records none was found: too few loads from disk?")
