"""`kvoffloadd demo`: a short demo is clean, restores what the other worker stored, and survives both kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.demo.chat import ChatTurn
from kvoffloadd.demo.report import DemoReport
from kvoffloadd.demo.worker import TurnAnswer
from kvoffloadd.testing.wait import HANG_S
from tests import softcuda
from tests.e2e import gpu_rank

pytestmark = pytest.mark.slow

LIMIT_S = 4.5 * HANG_S


def kvoffloadd(*arguments: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvoffloadd", *arguments],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, env={**os.environ, **variables},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_short_demo_is_clean() -> None:
    code, out, err = kvoffloadd("demo", "--turns", "30", "--memory", "32MiB", "--seconds", "200", "--json")
    assert code == 0, f"{out}\n{err}"
    figures: dict[str, Any] = json.loads(out)
    assert [figures[name] for name in ("said", "errors", "findings", "leaked")] == [[], [], [], []]
    assert figures["wrong_bytes"] == figures["stray_bytes"] == figures["corrupt"] == 0
    assert figures["turns"] == 30
    assert figures["verified_loads"] == figures["loads"] > 0
    assert 0 < figures["restored_tokens"] <= figures["known_tokens"] <= figures["prompt_tokens"]
    assert figures["kills"] == figures["daemon_kills"] == 1
    assert figures["unmap_ms"] > 0
    assert figures["keys_found_on_disk"] >= figures["demoted_keys"] > 0
    assert 0 < figures["after_restart_from_disk_keys"] <= figures["after_restart_hit_keys"]
    assert figures["disk_most_bytes"] <= figures["disk_bytes"]


def test_a_wrong_byte_is_found() -> None:
    """The demo checks bytes itself: the daemon damages what it loads (a fault for tests), and the demo reports it."""
    source = """
import sys
from kvoffloadd import cli
from kvoffloadd.demo import run
real = run.OwnDaemon
run.OwnDaemon = lambda *given, **named: real(*given, faults="corrupt_every=5", **named)
sys.exit(cli.main(["demo", "--turns", "20", "--memory", "64MiB", "--json"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["wrong_bytes"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--turns", "1"), ("--memory", "much"), ("--memory", "4KiB"), ("--seconds", "0"), ("--seed", "-1"),
        ("--seed", str(1 << 32)),
    ],
)  # fmt: skip
def test_wrong_usage_is_told(arguments: tuple[str, ...]) -> None:
    code, _, err = kvoffloadd("demo", *arguments)
    assert code == 2
    assert arguments[0] in err


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    report = DemoReport(seed=0, memory_bytes=1 << 20, chat_bytes=1 << 21, disk_bytes=1 << 22)
    report.count(ChatTurn(0, 0, 0, 512, 600, 700), TurnAnswer(512, 64, 0, 1, 0, 0))
    report.count_after(TurnAnswer(512, 64, 64, 1, 0, 0))
    assert report.is_good
    report.count_after(TurnAnswer(512, 64, 64, 1, 3, 0))
    assert not report.is_good
    report.print()
    shown = capsys.readouterr().out
    assert "2 of 3" in shown, "verified loads"
    assert "512" in shown and "85.3 %" in shown


# --- kvoffloadd bench ---


def test_bench_measures_all_that_there_is() -> None:
    code, out, err = kvoffloadd("bench", "--bytes", "4MiB", "--rounds", "1", "--json")
    assert code == 0, err
    result = json.loads(out)
    found = {(figure["part"], figure["what"].split(",")[0]) for figure in result["figures"]}
    assert {("memory", "store"), ("memory", "load"), ("disk", "store"), ("disk", "load"), ("requests", "ping")} <= found
    assert all(
        figure["value"] > 0 and figure["limit_value"] > 0 and figure["ratio"] > 0 for figure in result["figures"]
    )
    assert ("gpu" in result["skipped"]) != ("gpu" in {figure["part"] for figure in result["figures"]})


@pytest.mark.parametrize("part", ["memory", "disk", "gpu"])
def test_bench_of_more_than_memory_holds(part: str) -> None:
    code, _, err = kvoffloadd("bench", "--only", part, "--bytes", "1PiB")
    assert code == 2
    assert "--bytes 1 PiB: the benchmark takes 6 times as much memory, and only" in err


def test_bench_of_more_than_the_disk_holds(tmp_path: Path) -> None:
    code, _, err = kvoffloadd("bench", "--only", "disk", "--rounds", "1000000", "--folder", str(tmp_path))
    assert code == 1
    assert "are needed, and" in err
    assert list(tmp_path.iterdir()) == []


def test_bench_of_one_part_as_a_table() -> None:
    code, out, err = kvoffloadd("bench", "--only", "requests", "--rounds", "1")
    assert code == 0, err
    assert "lookup of 512 keys" in out
    assert "memcpy" not in out


@pytest.mark.skipif(bool(gpu_rank.why_no_cuda()), reason=gpu_rank.why_no_cuda())
def test_bench_of_a_gpu_on_a_software_driver() -> None:
    code, out, err = kvoffloadd(
        "bench", "--only", "gpu", "--bytes", "4MiB", "--rounds", "1", "--json", **softcuda.environment()
    )
    assert code == 0, err
    result = json.loads(out)
    assert [figure["what"].split(",")[0] for figure in result["figures"]] == ["store", "load"]
    assert result["skipped"] == {}
