"""A daemon's metrics as Prometheus gets them, and whether they are what workers have counted themselves."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from scripts.harness.counters import Counters

SCRAPE_S = 30.0


class _LocalConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SCRAPE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SCRAPE_S)
        self.sock.connect(str(self._path))


class Scraped:
    """One scrape of the socket at `path`. Raises OSError."""

    def __init__(self, path: Path) -> None:
        connection = _LocalConnection(path)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            text = answer.read().decode("utf-8")
        finally:
            connection.close()
        if answer.status != 200:
            raise ConnectionError(f"metrics are answered with status {answer.status}: {text}")
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(self, name: str, **labels: str) -> int:
        """Sum of the samples of that name which have these labels."""
        samples = (s for s in self._samples if s.name == f"kvoffloadd_{name}")
        return round(sum(s.value for s in samples if labels.items() <= s.labels.items()))


def disagreements(scraped: Scraped, counters: Counters, *, exact: bool) -> list[str]:
    """Where metrics are not what the workers counted. `exact` False: of workers that were killed the daemon may know
    more.
    """
    total, metric = counters.total, scraped.total
    hits, pending = total("block_hits"), total("block_pending")
    pairs = {
        "keys asked for": (metric("asked_keys_total"), total("block_references")),
        "hits in memory": (metric("hit_keys_total", tier="memory"), hits),
        "hits on disk": (metric("hit_keys_total", tier="disk"), total("block_promoting")),
        "keys pending": (metric("missed_keys_total", reason="pending"), pending - total("block_promoting")),
        "misses": (metric("missed_keys_total"), total("block_references") - hits - total("block_promoting")),
        "stores": (metric("jobs_total", direction="store"), total("stores")),
        "loads": (metric("jobs_total", direction="load"), total("loads")),
        "bytes stored": (metric("transfer_bytes_total", direction="store"), total("moved_in_bytes")),
        "bytes loaded": (metric("transfer_bytes_total", direction="load"), total("moved_out_bytes")),
    }
    return [
        f"metrics: {what}: the daemon reports {reported:,}, the workers counted {counted:,}"
        for what, (reported, counted) in pairs.items()
        if reported != counted and (exact or reported < counted)
    ]
