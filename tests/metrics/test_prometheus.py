"""The dashboard and the alerts: a real Prometheus scrapes a real daemon under load, and every expression has data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.testing.process import ROOT, end, spawn, tail
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.rank import Rank, new_keys
from tests.metrics.test_endpoint import free_port

DASHBOARD = ROOT / "config" / "grafana" / "kvoffloadd.json"
ALERTS = ROOT / "config" / "prometheus" / "alerts.yml"
SAMPLES = 4
"""Scrapes before anything is asked: a rate needs two."""

with_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Prometheus is not installed (Debian: apt install prometheus)",
)


def alerts() -> dict[str, str]:
    """Expressions by name. The file is read by eye: no YAML package is among the dependencies."""
    text = ALERTS.read_text(encoding="utf-8")
    return dict(re.findall(r"- alert: (\w+)\n +expr: (.+)\n", text))


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def without_threshold(expression: str) -> list[str]:
    """What an alert compares: that must have data; the comparison has none while all is well."""
    compared = re.split(r" and ", expression)
    sides = [re.sub(r"\s*(==|!=|>=|<=|>|<)\s*[\d.]+$", "", side) for side in compared]
    assert all(side != whole for side, whole in zip(sides, compared, strict=True)), expression
    return sides


@pytest.fixture
def prometheus(start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int) -> Iterator[Callable[[str], list[Any]]]:
    """Asks it: the samples that an expression has now."""
    scraped, own = free_port(), free_port()
    roots = f'disk.roots=[{{ path = "{tmp_path / "disk"}", capacity = "16MiB" }}]'
    store = ("remote.engine=memory", f"remote.directory={tmp_path / 'store'}")
    daemon = start_daemon(roots, "disk.min_free_bytes=0", *store, f'metrics.listen="localhost:{scraped}"')
    config = tmp_path / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{ALERTS}]\n"
        f"scrape_configs: [{{job_name: kvoffloadd, static_configs: [{{targets: ['localhost:{scraped}']}}]}}]\n"
    )
    log = tmp_path / "prometheus.log"
    child = spawn(
        [shutil.which("prometheus") or "", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
         f"--web.listen-address=127.0.0.1:{own}", "--log.level=warn"],
        log,
    )  # fmt: skip

    def ask(expression: str) -> list[Any]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/query?{query}", timeout=HANG_S) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found

    def scrapes() -> int:
        try:
            found = ask("count_over_time(kvoffloadd_uptime_seconds[5m])")
        except OSError:
            assert child.poll() is None, tail(log)
            return 0
        return int(found[0]["value"][1]) if found else 0

    rank: Rank = daemon.welcome(Rank(daemon.socket))
    rng = np.random.default_rng(seed)
    try:
        for before in range(SAMPLES + 1):
            until(lambda before=before: scrapes() >= before, f"{before} scrapes", 120.0, every_s=0.2)  # type: ignore[misc]
            keys = new_keys(rng, 6)
            rank.store_keys(keys[:4])
            rank.client.pin({0: keys})
            rank.load({0: (keys[:4], rank.blocks_of(0, 0, 4))})
        yield ask
    finally:
        end(child, 15, 30.0)


@with_prometheus
def test_every_expression_has_data(prometheus: Callable[[str], list[Any]]) -> None:
    empty = []
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$instance", ".+").replace("$__rate_interval", "1m")
            if not prometheus(expression):
                empty.append(f"{panel['title']}: {expression}")
    for name, expression in alerts().items():
        empty += [f"{name}: {side}" for side in without_threshold(expression) if not prometheus(side)]
    assert empty == []
    assert prometheus('up{job="kvoffloadd"}')[0]["value"][1] == "1"
    firing = prometheus('ALERTS{alertstate="firing", severity!="info"}')
    assert firing == [], "all is well"


@with_prometheus
def test_rules_are_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def test_expressions_name_metrics_that_exist() -> None:
    """Also where there is no Prometheus."""
    document = (ROOT / "docs" / "STATUS.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`((?:kvoffloadd|process)_\w+)`", document))
    used = [target["expr"] for panel in panels() for target in panel["targets"]] + list(alerts().values())
    for expression in used:
        for name in re.findall(r"\b(?:kvoffloadd|process)_\w+", expression):
            assert name.removesuffix("_bucket") in known, expression


def test_every_panel_can_be_read() -> None:
    for panel in panels():
        assert panel["title"] and panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
    text = ALERTS.read_text(encoding="utf-8")
    assert len(alerts()) == text.count("- alert:") == text.count("summary:") == text.count("remedy:") > 10
