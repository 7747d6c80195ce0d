"""Tests that the benchmarks run, and what their JSON holds, with sizes whose figures mean nothing."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.scripts.running import run_script
from tests.scripts.test_stress import needs_cuda


def result_of(script: str, *arguments: str) -> dict[str, Any]:
    done = run_script(script, *arguments)
    assert done.status == 0, done.said
    found = done.figures
    assert {"ratio_to_limit", "bounds", "within_budget"} <= found.keys()
    assert all({"what", "value", "kind", "bound", "kept"} == bound.keys() for bound in found["bounds"])
    assert found["within_budget"] == all(bound["kept"] for bound in found["bounds"])
    return found


@pytest.mark.soak
def test_bench_lookup() -> None:
    found = result_of("bench_lookup", "--max-keys", "12000", "--rounds", "1", "--calls", "2")
    assert [level["keys"] for level in found["levels"]] == [10_000, 12_000]
    for level in found["levels"]:
        assert {"ping", "lookup prompt", "lookup scattered", "lookup missing", "pin, release"} <= level["calls"].keys()
        assert all(call["p99_us"] >= call["p50_us"] > 0 for call in level["calls"].values())
        assert level["filling"]["turn_max_ms"] >= level["filling"]["turn_p50_ms"] > 0
        assert 50 < level["bytes"]["index_per_key"] < 200
        assert level["bytes"]["rss_anon_per_key"] > 0
    assert found["ratio_to_limit"] > 0


@pytest.mark.slow
def test_bench_engines() -> None:
    sizes = ("--keys", "4", "--page-bytes", "4KiB", "--rounds", "1", "--seconds", "0.3")
    found = result_of("bench_engines", "--engines", "1", "2", *sizes)
    assert [case["engines"] for case in found["cases"]] == [1, 2]
    for case in found["cases"]:
        assert case["per_s"].keys() == case["least_share"].keys() == {"pins", "stores", "loads"}
        assert case["pin_p99_us"] >= case["pin_p50_us"] > 0
        assert all(0 <= share <= 1 for share in case["least_share"].values())
    assert len(found["bounds"]) == 3


@pytest.mark.slow
def test_bench_copy() -> None:
    found = result_of("bench_copy", "--bytes", "1MiB", "--rounds", "1", "--jobs", "1", "--rows", "4KiB")
    cases = [(case["tensors"], case["contiguous"]) for case in found["cases"]]
    assert cases == [(1, False), (16, False), (64, False), (1, True)]
    for case in found["cases"]:
        kinds = {"store", "store, drained", "load"}
        assert case["ratio_to_limit"].keys() == case["daemon_ratio"].keys() == kinds
        assert all(ratio >= 0 for ratio in case["ratio_to_limit"].values())
        assert {*kinds, "memcpy"} <= case["gib_per_s"].keys()
        assert case["ping"].keys() == {"idle", "stores", "loads"}
    least = min(case["ratio_to_limit"][kind] for case in found["cases"] for kind in ("store", "load"))
    assert found["ratio_to_limit"] == least


@pytest.mark.slow
def test_bench_copy_of_a_layout() -> None:
    """It also runs one that verifies nothing, whose loads are no part of the ratio to memcpy."""
    arguments = ("--layout", "packed-pages", "--model", "lfm2-1.2b", "--unverified")
    found = result_of("bench_copy", "--bytes", "1MiB", "--rounds", "1", "--jobs", "1", *arguments)
    (case,) = found["cases"]
    assert case["name"] == "lfm2-1.2b, packed-pages"
    assert case["ratio_to_unverified"] > 0
    assert found["ratio_to_limit"] == min(case["ratio_to_limit"][kind] for kind in ("store", "load"))
    assert [bound["bound"] for bound in found["bounds"] if "not verified" in bound["what"]] == [0.9]
    assert all(ratio >= 0 for ratio in case["ratio_to_limit"].values())


@pytest.mark.slow
def test_bench_layouts() -> None:
    """A block of each of Gemma 3's 7 groups: 34 descriptors in a tensor a layer, 7 in others, as planned."""
    found = result_of(
        "bench_layouts", "--bytes", "8MiB", "--rounds", "1", "--models", "gemma-3-4b", "--submit-ns", "50"
    )
    assert (found["bounds"][0]["value"], found["within_budget"], found["submit_ns"]) == (0, True, 50)
    (model,) = found["models"]
    layouts = {layout["layout"]: layout for layout in model["layouts"]}
    assert layouts.keys() == {"by-layer", "cross-layer", "packed-rows"}
    assert layouts["by-layer"]["descriptors"] == [5, 5, 5, 5, 5, 4, 5]
    assert layouts["cross-layer"]["descriptors"] == layouts["packed-rows"]["descriptors"] == [1] * 7
    assert len({layout["job_bytes"] for layout in layouts.values()}) == 1
    assert found["left_out"] or "software driver" in layouts["by-layer"]["devices"]
    for layout in layouts.values():
        for device, directions in layout["devices"].items():
            for figures in directions.values():
                assert figures["descriptors"] >= figures["copies"] > 0
                assert figures["submission_ms"] == (0 if device == "host" else round(figures["copies"] * 50 / 1e6, 2))
                assert min(figures["ms"], figures["gb_per_s"], figures["time_to_by_layer"]) > 0


@needs_cuda
def test_bench_submit() -> None:
    found = result_of("bench_submit", "--bytes", "1MiB", "--rounds", "1")
    cases = {(one["way"], one["direction"]) for one in found["costs"]}
    assert cases == {(way, to) for way in ("one by one", "batch", "runs") for to in ("store", "load")}
    assert (found["rows"], found["row_bytes"], found["skipped"]) == (256, 4096, [])
    for one in found["costs"]:
        parts = one["us"]
        assert min(parts.values()) > 0
        assert parts["in all"] == pytest.approx(parts["plan"] + parts["build"] + parts["calls"], abs=0.01)


@pytest.mark.slow
def test_a_missed_bound_is_an_error_when_asked() -> None:
    done = run_script("bench_lookup", "--max-keys", "500", "--rounds", "1", "--calls", "1", "--check")
    assert done.status == (0 if done.figures["within_budget"] else 1)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("bench_lookup", ("--rounds", "0")),
        ("bench_lookup", ("--max-keys", "-3")),
        ("bench_copy", ("--jobs", "0")),
        ("bench_copy", ("--rows", "5KiB")),
        ("bench_copy", ("--bytes", "many")),
        ("bench_copy", ("--layout", "packed-pages")),
        ("bench_layouts", ("--submit-ns", "-1")),
        ("bench_submit", ("--rounds", "0")),
    ],
)
def test_wrong_usage_is_refused(script: str, arguments: tuple[str, str]) -> None:
    done = run_script(script, *arguments)
    assert done.status == 2
    assert arguments[0] in done.said
    assert "Traceback" not in done.said


@pytest.mark.soak
def test_bench_disk() -> None:
    found = result_of("bench_disk", "--bytes", "4MiB", "--rounds", "1", "--payloads", "64KiB,1MiB")
    assert [case["payload_bytes"] for case in found["cases"]] == [64 << 10, 1 << 20]
    for case in found["cases"]:
        for what in ("demote", "promote"):
            assert case[what]["mb_per_s"] > 0
            assert (case[what]["fio_mb_per_s"] is None) == (shutil.which("fio") is None)
            assert 0 <= case[what]["lag_ms"] <= case[what]["lag_worst_ms"]


@pytest.mark.slow
def test_bench_recovery() -> None:
    found = result_of("bench_recovery", "--records", "1000", "40000", "--rounds", "1")
    assert [(level["records"], level["segments"]) for level in found["levels"]] == [(0, 0), (1000, 1), (40_000, 2)]
    assert all(0 < level["start_s"] < 30 for level in found["levels"])
    assert found["levels"][2]["index_bytes_per_record"] < 100
