"""What `gpu_check` makes of its figures: which defaults hold on this GPU, and what may go."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import until
from scripts.gpu.__main__ import BUDGET_S, PLANS, names_of, parts_of, unfinished, verdict_of
from scripts.gpu.decisions import bounds_of, decisions_of
from scripts.gpu.parts import Ended, Part
from scripts.gpu.report import write

ONE_BY_ONE, BATCH, RUNS = "one by one", "batch", "3D batch"
Figures = dict[int, dict[str, tuple[float, ...]]]
H200: Figures = {
    4: {ONE_BY_ONE: (1.9, 1.6), BATCH: (10.9, 8.9, 8.8), RUNS: (26.7, 26.7, 27.4)},
    24: {ONE_BY_ONE: (9.7, 8.4), BATCH: (41.7, 12.6, 19.3), RUNS: (47.3, 46.4, 47.0)},
    32: {ONE_BY_ONE: (12.2, 10.5), BATCH: (42.0, 40.7, 60.0), RUNS: (48.4, 47.0, 49.0)},
    64: {ONE_BY_ONE: (18.9, 17.3), BATCH: (36.1, 39.0, 76.3), RUNS: (50.7, 48.2, 51.0)},
}
"""GB/s by KiB of rows and way: store, load, both at once; about as measured (docs/benchmarks/gpu.md)."""


def ended(name: str, cases: list[dict[str, Any]], state: str = "ran") -> Ended:
    return Ended(Part(name, name.title(), ["true"], 1), state, figures={"cases": cases}, cases=cases)


def raw(figures: Figures) -> Ended:
    return ended("raw", [
        {"rows": f"{size} KiB", "direction": direction, "method": method, "gb_per_s": speed}
        for size, by in figures.items() for method, speeds in by.items()
        for direction, speed in zip(("store", "load", "both"), speeds, strict=False)
    ])  # fmt: skip


def decided(*parts: Ended) -> dict[str, str]:
    return {what: verdict for what, verdict, _ in decisions_of(parts)}


def test_an_h200() -> None:
    found = decided(raw(H200), hunted(("none", "batches", 0), ("none", "runs", 0)))
    assert found == {"cuda.pitched_row_bytes": "from 24 KiB to below 32 KiB", "cuda.batch": "true"}


def test_a_gpu_whose_runs_are_slow() -> None:
    slow: Figures = {size: {**by, RUNS: (0.1, 0.1, 0.1)} for size, by in H200.items()}
    found = decided(raw(slow))
    assert found["cuda.pitched_row_bytes"] == "0"
    assert "pitched.py" in found["to delete"]


def test_a_gpu_whose_runs_are_always_faster() -> None:
    fast: Figures = {size: {**by, RUNS: (99.0, 99.0, 99.0)} for size, by in H200.items()}
    assert decided(raw(fast))["cuda.pitched_row_bytes"] == "64 KiB or more: measure larger rows"


def test_runs_that_win_again_with_larger_rows_do_not_count() -> None:
    """The setting is one size: up to it, all rows go in runs."""
    again: Figures = {**H200, 8: {BATCH: (9.0, 9.0, 9.0), RUNS: (9.0, 8.9, 9.0)}}
    assert decided(raw(again))["cuda.pitched_row_bytes"] == "from 4 KiB to below 8 KiB"


def hunted(*seen: tuple[str, str, int]) -> Ended:
    return ended("hunt", [
        {"stuck": stuck, "last way": way, "wrong_bytes": wrong, "batches": 100} for stuck, way, wrong in seen
    ])  # fmt: skip


def test_runs_that_hang() -> None:
    """Batches are not to blame."""
    found = decided(raw(H200), hunted(("runs 7: 32 copies", "runs", 0), ("none", "batches", 0)))
    assert found == {"cuda.pitched_row_bytes": "0", "cuda.batch": "true"}


def test_wrong_bytes_speak_against_both_ways() -> None:
    found = decided(raw(H200), hunted(("none", "runs", 0), ("none", "batches", 3)))
    assert found == {"cuda.pitched_row_bytes": "0", "cuda.batch": "false"}


@pytest.mark.parametrize("way", ["store", "load", "both"])
@pytest.mark.parametrize("method", [BATCH, RUNS])
@pytest.mark.parametrize("how", [{"gb_per_s": 99.0, "wrong_bytes": 1}, {"refused": "CUresult 1"}])
def test_a_size_of_which_a_figure_is_missing_decides_nothing(way: str, method: str, how: dict[str, Any]) -> None:
    whole = raw(H200)
    for case in whole.figures["cases"]:
        if case["rows"] == "32 KiB" and (case["direction"], case["method"]) == (way, method):
            del case["gb_per_s"]
            case.update(how)
    assert decided(whole)["cuda.pitched_row_bytes"] == "from 24 KiB to below 64 KiB"


def test_batches_that_hang_or_are_slow() -> None:
    stuck = hunted(("none", "runs", 0), ("batches 7: 3 copies", "batches", 0))
    assert decided(raw(H200), stuck) == {**decided(raw(H200)), "cuda.batch": "false"}
    slow: Figures = {32: {**H200[32], ONE_BY_ONE: (50.0, 10.0)}}
    assert decided(raw(slow))["cuda.batch"] == "false where rows are copied faster one by one"


@pytest.mark.parametrize(
    ("gb_per_s", "decode", "verdict"), [(30.0, 0.97, "worth building"), (26.0, 0.97, "no"), (60.0, 0.9, "no")]
)
def test_gathering_pays_if_it_is_faster_and_decoding_no_slower(gb_per_s: float, decode: float, verdict: str) -> None:
    cases = [
        {"rows": "4 KiB", "way": way, "direction": direction, "gb_per_s": speed, "decode": share}
        for way, speed, share in (("gather", gb_per_s, decode), ("pitched", 22.0, 0.98), ("batches", 2.0, 0.8))
        for direction in ("store", "load")
    ]
    assert decided(ended("gather", cases)) == {"rows of 4 KiB: gathered by the worker": verdict}


def test_pieces_of_pinned_memory() -> None:
    cases = [{"registered": "nothing", "copy": "0.01 / 0.02 / 0.10"}, *(
        {"registered": f"{count} x {size}", "copy": f"{wait} / 200.00 / 300.00"}
        for count, size, wait in ((1, "16 GiB", 384.0), (16, "1 GiB", 117.0), (128, "128 MiB", 11.0))
    )]  # fmt: skip
    assert decided(ended("pinning", cases)) == {"cuda.pin_bytes": "128 MiB"}
    assert decided(ended("pinning", cases[:3])) == {"cuda.pin_bytes": "smaller than any that was tried"}


@pytest.mark.parametrize(
    "part", [ended("raw", []), ended("life", [{"killed": "ipc"}]), Ended(raw(H200).part, "not run")]
)
def test_no_figures_decide_nothing(part: Ended) -> None:
    assert decisions_of([part]) == []


def copied(speed: float) -> Ended:
    figures = {"store": speed, "load": 39.0}
    return ended(
        "copy", [{"name": f"{size >> 10} KiB", "row_bytes": size, "gb_per_s": figures} for size in (4096, 65536)]
    )


@pytest.mark.parametrize(("speed", "kept"), [(35.0, True), (34.0, False)])
def test_small_rows_are_held_against_the_drivers_own_way(speed: float, kept: bool) -> None:
    parts = [raw(H200), copied(speed)]
    assert [bound["kept"] for bound in bounds_of(parts)] == [kept, True]
    words, good = verdict_of(parts, arguments(), complete=True)
    assert (good, "bound missed: store, rows of 64 KiB" in words) == (kept, not kept)
    assert list(bounds_of(parts[1:])) == []


def test_the_report_has_them(tmp_path: Path) -> None:
    """They are left out where figures mean nothing."""
    write(tmp_path, "GPU check", [], [raw(H200)], "All is well.", [], decides=False)
    assert "decides" not in (tmp_path / "report.md").read_text()
    write(tmp_path, "GPU check", [], [raw(H200)], "All is well.", [])
    report = (tmp_path / "report.md").read_text()
    assert "## What this decides" in report
    assert "| cuda.pitched_row_bytes | from 24 KiB to below 32 KiB | GB/s of runs to batches" in report


# --- which parts are run -------------------------------------------------------------------------------------------


def arguments(**given: Any) -> Any:
    return argparse.Namespace(**{"soft": False, "quick": False, "only": None, "plan": None, "again": None, **given})


def test_the_plans_are_all_parts_in_their_order() -> None:
    names = [part.name for part in parts_of(arguments())]
    assert [name for plan in PLANS.values() for name in plan] == names


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_fits_into_its_time(plan: str) -> None:
    chosen = [part for part in parts_of(arguments()) if part.name in PLANS[plan]]
    assert sum(part.limit_s for part in chosen) < BUDGET_S


def test_again_is_what_has_not_come_to_a_good_end(tmp_path: Path) -> None:
    states = {"contact": "ran", "raw": "cut short", "copy": "not run", "tests": "failed", "bindings": "skipped"}
    parts = [Ended(Part(name, name, ["true"], 1), state) for name, state in states.items()]
    for name in "ab":
        (tmp_path / name).mkdir()
    write(tmp_path / "a", "", [], parts, "", [])
    write(tmp_path / "b", "", [], [Ended(Part("life", "", ["true"], 1), "timed out")], "", [])
    assert unfinished([tmp_path / "a"]) == {"raw", "copy", "tests"}
    assert names_of(arguments(again=[tmp_path / "a", tmp_path / "b"])) == {"raw", "copy", "tests", "life"}
    write(tmp_path / "b", "", [], [Ended(Part("raw", "", ["true"], 1), "ran")], "", [])
    assert unfinished([tmp_path / "a", tmp_path / "b"]) == {"copy", "tests"}
    with pytest.raises(SystemExit, match=r"results\.jsonl"):
        unfinished([tmp_path])


def test_a_check_that_is_killed_has_named_all_of_its_parts(tmp_path: Path) -> None:
    """It is started elsewhere, with a folder that is named from there."""
    command = [sys.executable, str(ROOT / "scripts"), "gpu_check", "--soft", "--plan", "first", "--out", "it"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True) as check:
        try:
            until((tmp_path / "it" / "results.jsonl").exists, "it has begun")
        finally:
            os.killpg(check.pid, signal.SIGKILL)
    assert unfinished([tmp_path / "it"]) == set(PLANS["first"])


def test_tests_that_were_cut_short_are_no_problem() -> None:
    rows = [{"test": "one", "outcome": "passed", "seconds": 0, "reason": "", "properties": {}}]
    cut = Ended(Part("tests", "Tests", ["true"], 1, tests=True), "cut short", tests=rows)
    words, good = verdict_of([cut], arguments(), complete=True)
    assert good
    assert "tests cut short" in words
    cut.state = "ran"
    assert not verdict_of([cut], arguments(), complete=True)[1]
