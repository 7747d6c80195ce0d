"""Watches a daemon during a run: its counters over restarts, its private memory, its self-audit, its log."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, fields
from typing import Any

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from kvoffloadd.testing.process import rss_anon_bytes
from scripts.harness.copies import counted

STATUS_S = 0.5
AUDIT_S = 10.0
WARM_S = 60.0
"""Private memory is compared from here on, or from a fifth of a shorter run."""
SAMPLES = 10


@dataclass(slots=True)
class DaemonCounters:
    """Counters of the daemon, by their names in its status."""

    keys_evicted: int = 0
    slabs_taken_over: int = 0
    keys_without_space: int = 0
    keys_corrupt: int = 0
    busy: int = 0
    errors: int = 0
    peers_killed: int = 0
    faults_planted: int = 0
    pitched_copies: int = 0

    @classmethod
    def of(cls, status: dict[str, Any]) -> DaemonCounters:
        """One run's."""
        known = {**status["cache"], **status["server"], **status["devices"].get("host", {}), **counted(status)}
        return cls(**{item.name: int(known.get(item.name, 0)) for item in fields(cls)})


class Watch:
    """Call `look` often; it does something only when that is due."""

    def __init__(self, observer: Client, seconds: float) -> None:
        self.findings: list[str] = []
        self.status: dict[str, Any] = {}
        self._observer = observer
        self._warm_s = min(WARM_S, seconds / 5)
        self._runs: dict[str, DaemonCounters] = {}
        self._look_at = self._audit_at = 0.0
        self._private: list[tuple[float, int]] = []

    def look(self, *, now_due: bool = False) -> None:
        """Take in what the daemon reports. A daemon that does not answer is for others to notice."""
        now = time.monotonic()
        if now < self._look_at and not now_due:
            return
        self._look_at = now + STATUS_S
        try:
            status = self._observer.status()
            if now >= self._audit_at:
                self._audit_at = now + AUDIT_S
                self.findings += self._observer.verify().findings
        except ClientError:
            return
        if status["boot_id"] not in self._runs:
            self._private.clear()
        self.status = status
        self._runs[status["boot_id"]] = DaemonCounters.of(status)
        try:
            self._private.append((status["uptime_s"], rss_anon_bytes(status["pid"])))
        except OSError:
            return

    def counters(self) -> DaemonCounters:
        """Sums over all runs of the daemon."""
        runs = list(self._runs.values())
        return DaemonCounters(
            **{item.name: sum(getattr(run, item.name) for run in runs) for item in fields(DaemonCounters)}
        )

    def private_bytes(self) -> tuple[int, int] | None:
        """Returns the private bytes of the present run of the daemon, after its warm-up and now; None: it has not run
        for long enough.
        """
        warm = [size for uptime_s, size in self._private if uptime_s >= self._warm_s]
        if len(warm) < 2 * SAMPLES:
            return None
        return int(statistics.median(warm[:SAMPLES])), int(statistics.median(warm[-SAMPLES:]))
