"""What the stress run compares: a metric that differs from the workers' count is a finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.harness.counters import Counters
from scripts.harness.metrics import Scraped, disagreements


class GivenMetrics(Scraped):
    """Metrics by name, whatever their labels."""

    def __init__(self, figures: dict[str, int]) -> None:
        self._figures = figures

    def total(self, name: str, **labels: str) -> int:
        return self._figures.get(" ".join([name, *labels.values()]), 0)


TOLD = {
    "asked_keys_total": 10, "hit_keys_total memory": 5, "hit_keys_total disk": 1, "missed_keys_total": 4,
    "missed_keys_total pending": 2, "jobs_total store": 3, "jobs_total load": 4, "transfer_bytes_total store": 100,
    "transfer_bytes_total load": 200,
}  # fmt: skip


@pytest.fixture
def counters(tmp_path: Path) -> Counters:
    made = Counters(tmp_path / "counters", 1, 0)
    counted = {
        "block_references": 10, "block_hits": 5, "block_pending": 3, "block_promoting": 1, "stores": 3, "loads": 4,
        "moved_in_bytes": 100, "moved_out_bytes": 200,
    }  # fmt: skip
    for name, count in counted.items():
        made.add(name, count)
    return made


def test_agreement_is_no_finding(counters: Counters) -> None:
    assert disagreements(GivenMetrics(TOLD), counters, exact=True) == []


@pytest.mark.parametrize("name", TOLD)
def test_each_metric_that_is_one_off_is_found(counters: Counters, name: str) -> None:
    (finding,) = disagreements(GivenMetrics({**TOLD, name: TOLD[name] + 1}), counters, exact=True)
    assert f"{TOLD[name] + 1:,}" in finding
    assert disagreements(GivenMetrics({**TOLD, name: TOLD[name] + 1}), counters, exact=False) == []
    assert disagreements(GivenMetrics({**TOLD, name: TOLD[name] - 1}), counters, exact=False) != []
