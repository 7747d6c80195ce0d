"""`scripts fuzz_daemon` and `scripts flood`: short runs are good, and what is planted is found."""

from __future__ import annotations

import pytest

from tests.scripts.running import run_script

pytestmark = pytest.mark.slow

FUZZ = ("fuzz_daemon", "--frames", "5000", "--truncations-every", "4")
SHORT_FUZZ = ("fuzz_daemon", "--frames", "300", "--truncations-every", "100")
FLOOD = ("flood", "--sessions", "3", "--seconds", "0.7", "--slow-copies", "0.02")


def test_a_short_fuzz_is_good(seed: int) -> None:
    done = run_script(*FUZZ, "--seed", str(seed))
    found = done.figures
    assert (done.status, found["problems"], found["bad_log_lines"], found["findings"]) == (0, [], [], [])
    assert found["unanswered"] == found["wrong_bytes"] == found["leaks"] == 0
    assert found["bystander_failures"] == []
    assert found["frames"] >= 5000
    assert found["truncations"] > 500
    assert found["verified_loads"] > 0
    assert found["rss_growth_bytes"] < 64 << 20
    # It gets somewhere: jobs are admitted, and every kind of error is met.
    wanted = {"accepted", "attached", "registered", "reserved", "bad_frame", "bad_message", "bad_state", "unknown_name"}
    assert wanted <= set(found["replies"])
    assert "internal" not in found["replies"]


def test_a_short_flood_is_good(seed: int) -> None:
    done = run_script(*FLOOD, "--seed", str(seed))
    found = done.figures
    assert (done.status, found["problems"], found["bad_log_lines"], found["findings"]) == (0, [], [], [])
    assert found["wrong_bytes"] == found["leaks"] == 0
    assert found["bystander_failures"] == []
    assert found["jobs_completed"] == found["jobs_admitted"] > 0
    assert found["busy"] > 0
    assert found["verified_loads"] > 0
    assert found["rss_growth_bytes"] < found["rss_growth_max_bytes"]
    assert found["pings"] > 0


@pytest.mark.parametrize("command", [SHORT_FUZZ, FLOOD], ids=["fuzz", "flood"])
def test_planted_corruption_is_found(command: tuple[str, ...]) -> None:
    done = run_script(*command, "--plant-corruption", "--seed", "1")
    assert done.status == 1
    assert done.figures["wrong_bytes"] > 0
    assert done.figures["good"] is False


@pytest.mark.parametrize("arguments", [("fuzz_daemon", "--frames", "0"), ("flood", "--sessions", "0")])
def test_wrong_usage_is_told(arguments: tuple[str, ...]) -> None:
    done = run_script(*arguments)
    assert done.status == 2
    assert arguments[1] in done.said
