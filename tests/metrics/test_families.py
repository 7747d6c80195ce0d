"""docs/STATUS.md lists every metric with its labels, and no other; what is exported is what `status` reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvoffloadd.metrics.families import families
from scripts.harness.daemon import Daemon
from scripts.metric_tables import fill, metrics, name_of
from tests.e2e.rank import Rank, new_keys

DOCUMENT = (Path(__file__).parents[2] / "docs" / "STATUS.md").read_text(encoding="utf-8")


@pytest.fixture
def status(start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int) -> dict[str, Any]:
    """Returns the status of a daemon with a disk, something stored, loaded and asked for."""
    roots = f'disk.roots=[{{ path = "{tmp_path / "disk"}", capacity = "16MiB" }}]'
    store = ("remote.engine=memory", f"remote.directory={tmp_path / 'store'}")
    daemon = start_daemon(roots, "disk.min_free_bytes=0", *store)
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    keys = new_keys(np.random.default_rng(seed), 6)
    rank.store_keys(keys[:4])
    rank.client.pin({0: keys})
    rank.load({0: (keys[:4], rank.blocks_of(0, 0, 4))})
    rank.client.drain(10.0)
    return daemon.status()


def exported(status: dict[str, Any]) -> dict[str, Metric]:
    """Every metric, under the name that its samples have."""
    found = {}
    for metric in families(status):
        found[metric.name + "_total" * (metric.type == "counter")] = metric
    return found


@pytest.mark.slow
def test_the_document_lists_every_metric_and_no_other(status: dict[str, Any]) -> None:
    assert fill(DOCUMENT, status) == DOCUMENT, "python -m scripts metric_tables --write"


@pytest.mark.slow
def test_labels_are_those_that_are_listed(status: dict[str, Any]) -> None:
    for name, metric in exported(status).items():
        (row,) = re.findall(rf"^\| `{name}` \| \w+ \| ([\w, ]*?) ?\|", DOCUMENT, re.MULTILINE)
        for sample in metric.samples:
            if metric.type != "histogram" or sample.name.endswith("_bucket"):
                assert ", ".join(sample.labels) == row, name


def test_remedies_are_for_metrics_that_exist(status: dict[str, Any]) -> None:
    named = re.findall(r"^\| `((?:kvoffloadd|process)_\w+)` \| [^|]+ \|$", DOCUMENT, re.MULTILINE)
    assert len(named) > 30
    assert set(named) <= {name_of(metric) for metric in metrics(status)}


def test_names_and_samples_are_well_formed(status: dict[str, Any]) -> None:
    for name, metric in exported(status).items():
        assert re.fullmatch(r"kvoffloadd_[a-z_]+", name)
        assert metric.documentation.endswith(".")
        assert not re.search(r"_(ms|kb|mb|count|percent)(_total)?$", name)
        seen = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in metric.samples]
        assert len(set(seen)) == len(seen), name
        assert all(sample.value >= 0 for sample in metric.samples)


def test_text_says_what_the_status_did(status: dict[str, Any]) -> None:
    class Collector:
        def collect(self) -> list[Metric]:
            return list(families(status))

    registry = CollectorRegistry()
    registry.register(Collector())
    text = generate_latest(registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(name: str, **labels: str) -> float:
        return sum(s.value for s in samples if s.name == f"kvoffloadd_{name}" and labels.items() <= s.labels.items())

    assert total("asked_keys_total") == 6
    assert total("hit_keys_total", tier="memory") == status["cache"]["keys_hit"] == 4
    assert total("missed_keys_total") == total("missed_keys_total", reason="never_stored") == 2
    assert total("transfer_bytes_total", direction="store") == status["transfers"]["store"]["bytes"] > 0
    assert total("transfer_bytes_total", direction="load") == status["transfers"]["load"]["bytes"]
    assert total("memory_bytes") == total("memory_capacity_bytes") == status["memory"]["capacity_bytes"]
    assert total("namespace_keys") == 4
    assert total("disk_state") == 1
    assert total("loop_lag_seconds_bucket", le="+Inf") == total("loop_lag_seconds_count")
    assert total("loop_lag_seconds_sum") == pytest.approx(status["loop"]["late_s"])
    assert total("sessions", role="worker") == 1
    assert total("demoted_keys_total") == status["disk"]["demoted"]["keys"]
    assert total("lane_threads", lane="memory hash") == 1


@pytest.mark.slow
def test_no_more_namespaces_than_are_told_apart(status: dict[str, Any]) -> None:
    one = status["namespaces"][0]
    many = [{**one, "namespace": f"model#{number}", "keys": 1, "bytes": 10} for number in range(100)]
    found = exported({**status, "namespaces": many})["kvoffloadd_namespace_keys"].samples
    assert len(found) == 64  # one of them is in `lookups` and has nothing
    assert sum(sample.value for sample in found) == 100
    assert {sample.labels["namespace"]: sample.value for sample in found}["other"] == 37


def test_without_a_disk_its_metrics_have_no_samples(status: dict[str, Any]) -> None:
    found = exported({name: value for name, value in status.items() if name != "disk"})
    assert set(found) == set(exported(status))
    assert found["kvoffloadd_disk_keys"].samples == []
    assert [s.value for s in found["kvoffloadd_evicted_keys_total"].samples] == [0, 0]
