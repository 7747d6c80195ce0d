"""`scripts fuzz_daemon`, `flood` and `hostile`: short runs are good, and what is planted is found."""

from __future__ import annotations

import pytest

from scripts.fuzz.attackers import ATTACKS
from tests.scripts.running import run_script

pytestmark = pytest.mark.slow

FUZZ = ("fuzz_daemon", "--frames", "5000", "--truncations-every", "4")
SHORT_FUZZ = ("fuzz_daemon", "--frames", "300", "--truncations-every", "100")
HOSTILE = ("hostile", "--seconds", "10")
SHORT_HOSTILE = ("hostile", "--seconds", "1", "--only", "holes", "clears")
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


def test_a_short_siege_is_good(seed: int) -> None:
    """Each attack once, and all at once: nothing ends, nothing is lost, and nothing is charged to who has left."""
    done = run_script(*HOSTILE, "--seed", str(seed))
    found = done.figures
    faults = found["problems"], found["bad_log_lines"], found["findings"]
    assert (done.status, *faults) == (0, [], [], []), f"{done.said}\n{found}"
    assert (found["wrong_bytes"], found["leaked"], found["bystander_failures"]) == (0, [], [])
    assert found["verified_loads"] > 0
    assert found["rounds"] > 0
    phases = found["phases"]
    attacks = {name: phase for name, phase in phases.items() if name not in ("nothing", "all at once")}
    assert len(attacks) == len(ATTACKS) if found["as_other_users"] else attacks
    assert [name for name, phase in attacks.items() if not phase["asked"]] == []
    if found["as_other_users"]:  # they get as much as they may have, and no more
        greedy = ("long_labels", "mappings", "page_tables", "pins_of_everything")
        assert [name for name in greedy if "limit" not in phases[name]["refusals"]] == []
    assert "bad_extent" in phases["refused_registers"]["refusals"]


@pytest.mark.parametrize("command", [SHORT_FUZZ, FLOOD, SHORT_HOSTILE], ids=["fuzz", "flood", "hostile"])
def test_planted_corruption_is_found(command: tuple[str, ...]) -> None:
    done = run_script(*command, "--plant-corruption", "--seed", "1")
    assert done.status == 1
    assert done.figures["wrong_bytes"] > 0
    assert done.figures["good"] is False


@pytest.mark.parametrize(
    "arguments", [("fuzz_daemon", "--frames", "0"), ("flood", "--sessions", "0"), ("hostile", "--seconds", "0")]
)
def test_wrong_usage_is_told(arguments: tuple[str, ...]) -> None:
    done = run_script(*arguments)
    assert done.status == 2
    assert arguments[1] in done.said
