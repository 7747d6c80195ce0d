"""scripts/stress.py: a short run is clean, kills included, and what is planted is found."""

from __future__ import annotations

from tests.scripts.running import run_script


def test_a_short_run_with_kills_is_clean_and_checks_something() -> None:
    done = run_script(
        "stress.py", "--seconds", "3", "--workers", "2", "--seed", "1", "--memory", "32MiB", "--kill-workers"
    )
    assert (done.status, done.figures["said"], done.figures["errors"], done.figures["findings"]) == (0, [], [], [])
    assert done.figures["wrong_bytes"] == done.figures["broken_promises"] == done.figures["leaks"] == 0
    assert done.figures["verified_loads"] > 0
    assert done.figures["kills"] >= 2
    assert done.figures["unmap_max_ms"] < 2000
    assert 0 < done.figures["hit_rate"] < 1
    assert done.figures["seed"] == 1


def test_planted_corruption_is_found() -> None:
    done = run_script("stress.py", "--seconds", "3", "--workers", "2", "--seed", "1", "--plant-corruption")
    assert done.status == 1
    # One bit in one byte for each of them; those of jobs that were lost or never compared aside.
    assert 0 < done.figures["wrong_bytes"] <= done.figures["faults_planted"]
    assert done.figures["good"] is False


def test_workers_outlive_the_daemon() -> None:
    done = run_script(
        "stress.py", "--seconds", "4", "--workers", "2", "--seed", "2", "--kill-daemon", "--slow-copies", "0.005"
    )
    assert (done.status, done.figures["said"], done.figures["errors"], done.figures["findings"]) == (0, [], [], [])
    assert done.figures["daemon_kills"] >= 1
    assert done.figures["verified_loads"] > 0


def test_wrong_usage_is_told() -> None:
    done = run_script("stress.py", "--socket", "/nowhere/kvo.sock", "--kill-daemon")
    assert done.status == 2
    assert "--socket" in done.said


def test_a_missing_daemon_is_told() -> None:
    done = run_script("stress.py", "--seconds", "1", "--socket", "/nowhere/kvo.sock")
    assert done.status == 1
    assert "/nowhere/kvo.sock" in done.said
