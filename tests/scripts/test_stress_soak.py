"""`scripts stress` for minutes on a GPU in software: with kills, and with each fault that its driver can have."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.harness.copies import COUNTERS, WAYS
from scripts.harness.counters import VERIFIED_LAYOUTS
from tests.scripts.running import Done, run_script
from tests.scripts.test_stress import ON_GPU, needs_cuda

pytestmark = [pytest.mark.soak, needs_cuda]

LONG_S, WAY_S, FAULT_S, END_S = 180, 300, 20, 400

FAULTS = {
    "sticky_after=5000": True,
    "hang_after=5000": True,
    "hang_device_to_host=3000": True,
    "hang_host_to_device=3000": True,
    "link_bytes_per_s=30000000": False,
    "delay_copies_ns=2000000": False,
    "jitter_ns=1000000": False,
    "fail_submit_every=50": False,
    "query_error=806,query_fails_every=200": False,
    "record_error=2,record_fails_every=50": False,
    "register_fails_every=5": False,
    "register_error_after=1": False,
    "batch_hangs_after=500": True,
    "queue_depth=8": False,
    "small_block": False,
    "no_batch": False,
    "close_delay_ns=50000000": False,
}
"""Each fault, and whether it ends daemons."""


def stress(seconds: int, *options: str) -> Done:
    return run_script("stress", "--seconds", str(seconds), *ON_GPU, *options, limit_s=seconds + END_S)


def assert_clean(done: Done) -> None:
    figures = done.figures
    assert (done.status, figures["said"], figures["errors"], figures["findings"]) == (0, [], [], [])
    assert figures["wrong_bytes"] == figures["broken_promises"] == figures["leaks"] == 0
    assert figures["verified_loads"] > 0


@pytest.mark.timeout(LONG_S + 2 * END_S)
def test_three_minutes_with_killed_workers() -> None:
    done = stress(LONG_S, "--workers", "4", "--kill-workers")
    assert_clean(done)
    assert done.figures["verified_loads_by_layout"].keys() == set(VERIFIED_LAYOUTS)
    assert done.figures["fatal_ends"] == 0


@pytest.mark.timeout(LONG_S + 2 * END_S)
def test_three_minutes_with_a_killed_daemon_and_its_disk() -> None:
    done = stress(LONG_S, "--workers", "4", "--kill-workers", "--kill-daemon")
    assert_clean(done)
    assert done.figures["daemon_kills"] >= LONG_S // 20
    assert done.figures["verified_loads_from_disk"] > 0


@pytest.mark.timeout(FAULT_S + 2 * END_S)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_driver(fault: str) -> None:
    done = stress(FAULT_S, "--workers", "3", "--driver-faults", fault, "--kill-workers")
    assert_clean(done)
    assert (done.figures["fatal_ends"] > 0) == FAULTS[fault]


@pytest.mark.timeout(WAY_S + 2 * END_S)
@pytest.mark.parametrize("way", WAYS)
def test_minutes_of_each_way_of_copying(way: str, seed: int) -> None:
    """Workers and daemons are killed, and the driver refuses what it is asked for: each fifth piece of pinned memory,
    and now and then a copy, or to say whether copies have ended (950: a code that no cuda-bindings know).
    """
    rng = np.random.default_rng([seed, *way.encode()])
    refusals = f"register_fails_every=5,fail_submit_every={rng.integers(500, 20_000)}"
    refusals += f",query_error={rng.choice([1, 304, 806, 950])},query_fails_every={rng.integers(100, 500)}"
    faults = f"poison,packed,read_early,jitter_ns=200000,{refusals}"
    done = stress(
        WAY_S, "--workers", "3", "--kill-workers", "--kill-daemon", "--copies", way, "--driver-faults", faults
    )
    assert_clean(done)
    assert (done.figures["copies"], done.figures["fatal_ends"]) == (way, 0)
    assert all(done.figures[name] > 0 for name in COUNTERS[way])


@pytest.mark.timeout(FAULT_S + 2 * END_S)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_copying_that_nothing_refuses(way: str) -> None:
    """All of it goes that way: else the run has an error."""
    done = stress(FAULT_S, "--workers", "3", "--kill-workers", "--copies", way, "--driver-faults", "poison,packed")
    assert_clean(done)
    counted = {name for counters in COUNTERS.values() for name in counters}
    assert {name for name in counted if done.figures[name]} == set(COUNTERS[way])
