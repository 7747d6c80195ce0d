"""What follows from two statuses, or from one, or from two runs of a daemon."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffloadd.cli.top.frame import WINDOW_S, History, figures

from .samples import lane, root, session, status


def later(seconds: float = 2.0, **changes: Any) -> History:
    """Two looks."""
    history = History()
    history.add(100.0, status())
    history.add(100.0 + seconds, status(**changes))
    return history


def test_one_look_has_no_rates() -> None:
    history = History()
    history.add(5.0, status())
    shown = figures(history)
    assert shown["interval_s"] == 0
    assert {moved["bytes_per_s"] for moved in shown["throughput"].values()} == {0}
    assert shown["lookups"]["total"]["hit_rate"] == pytest.approx(700 / 1050, abs=1e-4)
    assert shown["lookups"]["ceiling_rate"] == pytest.approx(1 - 150 / 1050, abs=1e-4)


def test_rates_are_differences_over_time() -> None:
    store = {"jobs": 110, "bytes": (10 << 30) + 4096, "keys": 0, "seconds": 0.0}
    disk = {**status()["disk"], "demoted": {"bytes": 2000, "keys": 8}}
    disk["roots"] = [root("/nvme0/kvoffloadd", read_bytes=600, written_bytes=2000), root("/new")]
    shown = figures(
        later(
            transfers={"store": store, "load": status()["transfers"]["load"]},
            disk=disk,
            lanes={"host store": lane(3.0), "memory hash": lane(40.0)},
            server={**status()["server"], "requests": 1500},
        )
    )
    assert shown["throughput"]["store"] == {
        "bytes": (10 << 30) + 4096,
        "bytes_per_s": 2048.0,
        "unit": "jobs",
        "per_s": 5.0,
    }
    assert (shown["throughput"]["demote"]["bytes_per_s"], shown["throughput"]["demote"]["per_s"]) == (1000.0, 4.0)
    assert shown["throughput"]["load"]["bytes_per_s"] == shown["throughput"]["promote"]["per_s"] == 0
    assert [(r["read_bytes_per_s"], r["write_bytes_per_s"]) for r in shown["roots"]] == [(300.0, 1000.0), (0.0, 0.0)]
    assert {one["lane"]: one["busy_rate"] for one in shown["lanes"]} == {"host store": 0.75, "memory hash": 1.0}
    assert shown["requests_per_s"] == 250


def test_another_run_of_the_daemon_begins_anew_and_goes_on_in_the_picture() -> None:
    history = later()
    history.miss()
    history.add(105.0, status(boot_id="cd", transfers={d: {"jobs": 0, "bytes": 0} for d in ("store", "load")}))
    assert figures(history)["interval_s"] == 0
    assert len(history.rates["store"]) == 4
    assert min(history.rates["store"]) == 0
    history.add(106.0, status(boot_id="cd"))
    assert figures(history)["throughput"]["store"]["bytes_per_s"] == 10 << 30


def test_what_hit_lately_is_of_the_last_minute() -> None:
    history = History()
    for second in range(200):
        row = {**status()["lookups"][0], "asked": second, "hit": second, "on_disk": 0, "missed": {}}
        history.add(float(second), status(lookups=[row]))
    recent = figures(history)["lookups"]
    assert recent["recent_s"] == WINDOW_S
    assert recent["recent"] == {"asked": 60, "hit_rate": 1.0, "keys": {"hit": 60, "on_disk": 0, "remote": 0}}


def test_instances_are_sessions_by_engine() -> None:
    found = figures(later())["instances"]
    assert [(one["instance"], one["workers"], one["schedulers"]) for one in found] == [(1, 2, 1), (2, 1, 0)]
    assert (found[0]["mapped_bytes"], found[0]["jobs"], found[0]["pids"]) == (2 << 30, 3, [1001, 1002, 1003])
    assert (found[0]["devices"], found[1]["devices"][0][:5]) == (["host"], "cuda:")
    assert figures(later(sessions=[session(1, "", 0)]))["instances"] == []


def test_without_a_disk() -> None:
    history = History()
    bare = {name: value for name, value in status().items() if name != "disk"}
    history.add(0.0, bare)
    history.add(1.0, bare)
    shown = figures(history)
    assert [tier["tier"] for tier in shown["tiers"]] == ["memory"]
    assert (shown["roots"], shown["backlog_bytes"], shown["throughput"]["promote"]["bytes_per_s"]) == ([], 0, 0)


def test_quotas_are_passed_on_and_an_older_daemon_has_none() -> None:
    row = {"kind": "user", "name": "0", "memory_bytes": 5}
    assert figures(later(quotas=[row]))["quotas"] == [row]
    assert figures(later())["quotas"] == []


def test_what_is_claimed_of_each_tier_and_nothing_from_an_older_daemon() -> None:
    claims = {"memory_bytes": 5, "disk_bytes": 7}
    assert [tier["claimed_bytes"] for tier in figures(later(retention=claims))["tiers"]] == [5, 7]
    bare = {name: value for name, value in status().items() if name != "retention"}
    history = History()
    history.add(0.0, bare)
    assert [tier["claimed_bytes"] for tier in figures(history)["tiers"]] == [0, 0]
