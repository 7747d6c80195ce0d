"""`scripts stress`: a short run is clean, kills included, and what is planted is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.testing.disk import disk_settings
from scripts.stress.run import STILL_S
from tests.e2e import gpu_rank
from tests.scripts.running import run_script

pytestmark = pytest.mark.slow

ON_GPU = ("--device", "cuda", "--software-driver")
needs_cuda = pytest.mark.skipif(bool(gpu_rank.why_no_cuda()), reason=gpu_rank.why_no_cuda())


def test_a_short_run_with_kills_is_clean_and_checks_something() -> None:
    done = run_script(
        "stress", "--seconds", "3", "--workers", "2", "--seed", "1", "--memory", "32MiB", "--kill-workers"
    )
    assert (done.status, done.figures["said"], done.figures["errors"], done.figures["findings"]) == (0, [], [], [])
    assert done.figures["wrong_bytes"] == done.figures["broken_promises"] == done.figures["leaks"] == 0
    assert done.figures["verified_loads"] > 0
    assert done.figures["kills"] >= 1
    assert done.figures["unmap_max_ms"] > 0
    assert 0 < done.figures["hit_rate"] < 1
    assert done.figures["seed"] == 1


def test_metrics_are_what_the_workers_counted() -> None:
    done = run_script("stress", "--seconds", "3", "--workers", "2", "--seed", "7", "--memory", "32MiB")
    assert (done.status, done.figures["findings"], done.figures["metrics_compared"]) == (0, [], True)
    assert min(done.figures[name] for name in ("stores", "loads", "block_hits", "stored_bytes")) > 0


LAYOUT_MODELS = {"by-layer": "", "cross-layer": "deepseek-v3.2", "packed-pages": "", "packed-rows": "llama-4-scout"}


@pytest.mark.parametrize("layout", LAYOUT_MODELS)
def test_each_layout_of_the_planner_is_stored_and_loaded(layout: str) -> None:
    model = LAYOUT_MODELS[layout]
    done = run_script(
        "stress", "--seconds", "1.5", "--workers", "2", "--memory", "32MiB", "--layout", layout,
        *(("--model", model) if model else ()),
    )  # fmt: skip
    figures = done.figures
    assert (done.status, figures["said"], figures["errors"], figures["findings"]) == (0, [], [], [])
    assert figures["wrong_bytes"] == figures["broken_promises"] == figures["leaks"] == 0
    assert (figures["layout"], figures["model"]) == (layout, model)
    assert figures["verified_loads_by_layout"] == {layout: figures["verified_loads"]}
    assert figures["verified_loads"] > 0


@pytest.mark.parametrize("where", ["refs", "slots"])
def test_wrong_refs_are_found(where: str) -> None:
    """Some bytes behind their place, or another group's: seen in the layers, whatever the refs say."""
    done = run_script(
        "stress", "--seconds", "1.5", "--workers", "2", "--memory", "32MiB", "--layout", "packed-pages",
        "--plant-corruption", where,
    )  # fmt: skip
    assert (done.status, done.figures["good"], done.figures["findings"]) == (1, False, [])
    assert done.figures["wrong_bytes"] > 0


def test_planted_corruption_is_found() -> None:
    done = run_script("stress", "--seconds", "3", "--workers", "2", "--seed", "1", "--plant-corruption")
    assert done.status == 1
    # One bit in one byte for each of them; those of jobs that were lost or never compared aside.
    assert 0 < done.figures["wrong_bytes"] <= done.figures["faults_planted"]
    assert done.figures["good"] is False


@pytest.mark.soak
def test_workers_outlive_the_daemon() -> None:
    done = run_script(
        "stress", "--seconds", "4", "--workers", "2", "--seed", "2", "--kill-daemon", "--slow-copies", "0.005"
    )
    assert (done.status, done.figures["said"], done.figures["errors"], done.figures["findings"]) == (0, [], [], [])
    assert done.figures["daemon_kills"] >= 1
    assert done.figures["verified_loads"] > 0


@pytest.mark.soak
def test_keys_outlive_the_daemon_on_disk() -> None:
    done = run_script(
        "stress", "--seconds", "10", "--workers", "2", "--seed", "3", "--memory", "16MiB", "--kill-workers",
        "--kill-daemon",
    )  # fmt: skip
    figures, disk = done.figures, done.figures["disk"]
    assert (done.status, figures["said"], figures["errors"], figures["findings"]) == (0, [], [], [])
    assert figures["wrong_bytes"] == figures["broken_promises"] == figures["leaks"] == 0
    assert figures["daemon_kills"] >= 1
    assert figures["verified_loads_from_disk"] > 0
    assert figures["verified_loads_from_memory"] == figures["verified_loads"] - figures["verified_loads_from_disk"] > 0
    assert 0 < disk["most_bytes"] <= disk["capacity_bytes"] == 5 * 16 << 20
    assert disk["samples_after_kills"] >= figures["daemon_kills"]
    assert disk["audits"] >= 2
    assert disk["records_audited"] > 0
    assert disk["corrupt"] == disk["unreadable"] == disk["planted"] == 0
    assert disk["demoted_keys"] > 0


def test_corruption_that_is_planted_on_disk_ends_as_misses() -> None:
    done = run_script(
        "stress", "--seconds", "4", "--workers", "2", "--seed", "4", "--memory", "8MiB", "--plant-corruption", "disk"
    )
    figures, disk = done.figures, done.figures["disk"]
    assert (done.status, figures["good"]) == (1, False)  # whatever was found
    assert (figures["said"], figures["errors"], figures["findings"]) == ([], [], [])
    assert figures["wrong_bytes"] == figures["broken_promises"] == figures["leaks"] == 0
    assert disk["planted"] > 0
    assert disk["corrupt"] + disk["planted_found_by_verify"] > 0


@needs_cuda
def test_on_a_gpu_a_short_run_with_kills_is_clean() -> None:
    done = run_script("stress", "--seconds", "8", "--workers", "2", "--seed", "5", "--kill-workers", *ON_GPU)
    figures = done.figures
    assert (done.status, figures["said"], figures["errors"], figures["findings"]) == (0, [], [], [])
    assert figures["wrong_bytes"] == figures["broken_promises"] == figures["leaks"] == figures["fatal_ends"] == 0
    assert (figures["device"], figures["good"]) == ("cuda", True)
    assert figures["verified_loads"] > 0
    assert figures["kills"] >= 1
    assert figures["unmap_max_ms"] > 0


@pytest.mark.soak
@needs_cuda
def test_on_a_gpu_planted_corruption_is_found() -> None:
    done = run_script(
        "stress", "--seconds", "4", "--workers", "2", "--seed", "5", *ON_GPU, "--plant-corruption",
        "--driver-faults", "corrupt_every=300",
    )  # fmt: skip
    assert (done.status, done.figures["good"]) == (1, False)
    assert done.figures["wrong_bytes"] > 0
    assert done.figures["stray_bytes"] == done.figures["broken_promises"] == done.figures["leaks"] == 0


@pytest.mark.soak
@needs_cuda
def test_workers_outlive_daemons_that_their_gpus_end() -> None:
    done = run_script(
        "stress", "--seconds", "5", "--workers", "2", "--seed", "6", *ON_GPU, "--driver-faults", "sticky_after=800"
    )
    figures = done.figures
    assert (done.status, figures["said"], figures["errors"], figures["findings"]) == (0, [], [], [])
    assert figures["fatal_ends"] >= 1
    assert figures["verified_loads"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--software-driver",), "--device cuda"),
        (("--driver-faults", "no_batch"), "--device cuda"),
        (("--copies", "pitched"), "--device cuda"),
        (("--copies", "backwards", "--device", "cuda"), "--copies"),
        (("--socket", "/nowhere/kvo.sock", "--kill-daemon"), "--socket"),
        (("--socket", "/nowhere/kvo.sock", "--disk", "/tmp"), "--socket"),
        (("--disk-share", "0", "--plant-corruption", "disk"), "--disk-share"),
        (("--disk-share", "-1"), "--disk-share"),
        (("--plant-corruption", "everywhere"), "--plant-corruption"),
        (("--layout", "sideways"), "--layout"),
        (("--layout", "packed-pages", "--model", "gemma-3-4b"), "they are for models with states"),
        (("--model", "unheard-of"), "--model"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], named: str) -> None:
    done = run_script("stress", *arguments)
    assert done.status == 2
    assert named in done.said


def test_a_missing_daemon_is_told() -> None:
    done = run_script("stress", "--seconds", "1", "--socket", "/nowhere/kvo.sock")
    assert done.status == 1
    assert "/nowhere/kvo.sock" in done.said


def test_a_slow_disk_is_no_finding(tmp_path: Path) -> None:
    """I/O on a loaded machine may take longer than a daemon waits by default. A root that it takes off for that is one
    that an audit can't read; one that hangs for good ends the run for want of progress.
    """
    assert float(disk_settings(tmp_path, 1 << 30)["disk.stuck_s"]) > STILL_S
