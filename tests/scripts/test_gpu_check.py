"""Tests `scripts gpu_check` from end to end, on the software driver and with sizes whose figures mean nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.process import ROOT
from scripts.gpu import SOFT_VARIABLE
from scripts.gpu.__main__ import SOFT_TESTS_MIN
from tests import softcuda

pytestmark = pytest.mark.slow

PARTS = ("pinning", "raw", "paths", "life", "submit", "hunt", "gather", "bindings")
"""Those that nothing else runs: tests are tests, and `contact` and `stress` have tests of their own."""
LIMIT_S = 280.0


_WITHOUT_TORCH = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else found(name, *rest)
"""


def check(out: Path, *parts: str, variables: dict[str, str] | None = None) -> str:
    """What is on the terminal."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    try:
        softcuda.build()
    except softcuda.SoftCudaError as error:
        pytest.skip(str(error))
    command = [sys.executable, str(ROOT / "scripts"), "gpu_check", "--soft", "--quick", "--out", str(out)]
    done = subprocess.run(
        [*command, "--only", *parts], env=variables, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder, and what was on the terminal."""
    out = tmp_path_factory.mktemp("gpu-check")
    return out, check(out, *PARTS)


def states_of(out: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return {row["part"]: row["state"] for row in rows if "state" in row}


def cases_of(out: Path, part: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found: list[dict[str, Any]] = next(
        row["figures"]["cases"] for row in rows if row["part"] == part and "figures" in row
    )
    return found


def test_every_part_reports(checked: tuple[Path, str]) -> None:
    out, screen = checked
    assert states_of(out) == dict.fromkeys(PARTS, "ran") | {"bindings": "skipped"}
    report = (out / "report.md").read_text()
    for part in PARTS:
        assert f"| {part} " in report
        assert f"] {part}: " in screen
    assert "bindings skipped: because the machine has no cuda-bindings" in screen
    assert "## nvidia-smi -q" in report


def test_every_path_of_the_daemon_is_taken_and_right(checked: tuple[Path, str]) -> None:
    paths = {case["path"]: case for case in cases_of(checked[0], "paths") if "path" in case}
    assert paths["pitched"]["by"].keys() == {"pitched_copies"}
    assert paths["batches of 1,024"]["by"] == {}
    assert all(case["wrong_bytes"] == 0 for case in paths.values())


def test_every_way_of_the_driver_is_measured_both_ways(checked: tuple[Path, str]) -> None:
    cases = cases_of(checked[0], "raw")
    ways = ("one by one", "batch", "batch, flag 1", "batch, any order", "2D", "3D batch")
    for direction in ("store", "load"):
        for rows in ("4 KiB", "64 KiB"):
            found = [one for one in cases if one["direction"] == direction and one["rows"] == rows]
            assert tuple(one["method"] for one in found) == ("plain", *ways, "daemon")
            assert all(one["wrong_bytes"] == 0 and one["gb_per_s"] > 0 for one in found)


def test_a_hunt_finds_nothing_on_a_driver_that_is_well(checked: tuple[Path, str]) -> None:
    cases = cases_of(checked[0], "hunt")
    assert [case["direction"] for case in cases] == ["store", "load"]
    assert all(case["batches"] and case["in runs"] and case["wrong_bytes"] == 0 for case in cases)
    assert [case["stuck"] for case in cases] == ["none", "none"]


def test_rows_that_a_worker_gathers_are_right() -> None:
    """It runs on the CPU, where torch needs no GPU: the gathering is the same."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "scripts.gpu.bench_gather", "--device", "host", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    cases = json.loads(done.stdout)["cases"]
    assert {(case["way"], case["direction"]) for case in cases} == {
        (way, direction) for way in ("gather", "batches of 1,024") for direction in ("store", "load")
    }
    assert all(case["wrong_bytes"] == 0 and case["gb_per_s"] > 0 for case in cases)


def test_what_can_not_be_measured_says_why(checked: tuple[Path, str]) -> None:
    out, screen = checked
    assert [case["registered"] for case in cases_of(out, "pinning")[:2]] == ["nothing", "1 x 64 MiB"]
    assert "Skipped: cuMemHostAlloc: " in screen  # which the software driver has not
    assert "Skipped: all: torch " in screen  # `gather`: whatever torch there is can't use this driver


@pytest.mark.parametrize("kinds", [("matmul", "memory"), ("fill",)], ids=["with torch", "without torch"])
def test_kernels_run_beside_copies_by_each_path(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    variables = dict(os.environ)
    if kinds == ("fill",):
        (tmp_path / "sitecustomize.py").write_text(_WITHOUT_TORCH)
        variables["PYTHONPATH"] = str(tmp_path)
    elif not importlib.util.find_spec("torch"):
        pytest.skip("needs torch")
    check(tmp_path, "interference", variables=variables)
    assert states_of(tmp_path) == {"interference": "ran"}
    paths = {(case["path"], case["kernels"], case["jobs"]) for case in cases_of(tmp_path, "interference")}
    jobs = ("store", "load", "both")
    assert paths == {(path, kind, job) for path in ("batches of 1,024", "pitched") for kind in kinds for job in jobs}


def test_the_gpu_tests_run_as_on_a_gpu() -> None:
    """No setting names the driver as one in software: it is found as a real one is."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    try:
        found = softcuda.environment()
    except softcuda.SoftCudaError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    variables = {**os.environ, **found, SOFT_VARIABLE: "0"}
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= (SOFT_TESTS_MIN if os.getuid() == 0 else SOFT_TESTS_MIN // 2)
