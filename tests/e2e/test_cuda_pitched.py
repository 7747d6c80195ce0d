"""Small rows copied in runs, one pitched copy each: bytes are right, and what the driver refuses goes row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvoffloadd.client import Group, GroupKind, Ref
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.rank import HYBRID
from tests.e2e.small_rows import KEYS, roundtrip, roundtrips_that_may_fail

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]

PITCHED = "cuda.pitched_row_bytes=1GiB"
ROWS = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 8, 256, 16, 300),)),)
"""A block is 16 rows in one allocation, which lie evenly apart."""
MIXED = (
    Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 256, 16, 300), Ref(1, 0, 4000)), blocks_per_key=2),
    Group(1, GroupKind.SLIDING, 32, refs=(Ref(1, 4001, 13, 9, 14), Ref(0, 4900, 40)), window_keys=2),
)
"""Two runs of rows of unequal length, and rows that belong to none."""
ODD = (
    Group(0, GroupKind.FULL, 16, refs=(Ref(0, 3, 257, 16, 300), Ref(1, 1, 4001)), blocks_per_key=2),
    Group(1, GroupKind.SLIDING, 32, refs=(Ref(1, 4003, 13, 9, 14), Ref(0, 4900, 41)), window_keys=2),
)
"""Rows of odd sizes at odd places."""


def pitched_copies(daemon: Daemon) -> int:
    return int(daemon.gpus()[0]["pitched_copies"])


@pytest.mark.parametrize("kind", ["one", "chunks"])
def test_a_block_takes_one_copy(start_daemon: Start, seed: int, kind: str) -> None:
    daemon = start_daemon(PITCHED)
    roundtrip(daemon, ROWS, seed, kind)
    assert pitched_copies(daemon) == 2 * KEYS


@pytest.mark.parametrize("driver", [{}, {"faults": "packed"}], ids=["apart", "packed"])
@pytest.mark.parametrize("groups", [MIXED, ODD, HYBRID], ids=["mixed", "odd", "hybrid"])
@pytest.mark.parametrize("kind", ["one", "each", "chunks"])
def test_every_layout(
    start_daemon: Start, seed: int, groups: tuple[Group, ...], kind: str, driver: dict[str, str]
) -> None:
    """The driver ends the process of who copies beyond the end of an allocation."""
    daemon = start_daemon(PITCHED, "copy.chunk_bytes=64KiB", driver=driver)
    roundtrip(daemon, groups, seed, kind)
    assert pitched_copies(daemon) > 0


def test_runs_that_lie_over_the_end_of_a_pinned_piece(start_daemon: Start, seed: int) -> None:
    """No copy reaches over one."""
    daemon = start_daemon(PITCHED, "cuda.pin_bytes=84KiB", memory="4MiB")
    roundtrip(daemon, ODD, seed, keys=16)
    assert pitched_copies(daemon) > 0


def test_off_when_told(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon("cuda.pitched_row_bytes=0")
    roundtrip(daemon, ROWS, seed)
    assert pitched_copies(daemon) == 0


def test_large_rows_go_one_by_one(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon("cuda.pitched_row_bytes=255")
    roundtrip(daemon, ROWS, seed)
    assert pitched_copies(daemon) == 0


@pytest.mark.parametrize(("faults", "warnings"), [("no_pitched_batch", 0), ("pitched_batch_error=801", 2)])
def test_runs_go_one_by_one_where_the_driver_takes_no_batch_of_them(
    start_daemon: Start, seed: int, faults: str, warnings: int
) -> None:
    daemon = start_daemon(PITCHED, driver={"faults": faults})
    for round_ in range(3):
        roundtrip(daemon, ROWS, seed + round_)
    assert pitched_copies(daemon) == 3 * 2 * KEYS
    until(lambda: daemon.log().count("cuMemcpy3DBatchAsync failed") >= warnings, "it is told")  # one stream each way
    assert daemon.log().count("cuMemcpy3DBatchAsync failed") == warnings
    assert "cuMemcpy2DAsync failed" not in daemon.log()


@pytest.mark.parametrize("driver", [{"faults": "pitched_error=1"}, {"faults": "pitched_error=801"}])
def test_a_driver_that_refuses_is_asked_once(start_daemon: Start, seed: int, driver: dict[str, str]) -> None:
    daemon = start_daemon(PITCHED, driver=driver)
    for round_ in range(3):
        roundtrip(daemon, ROWS, seed + round_)
    assert pitched_copies(daemon) == 0
    until(lambda: daemon.log().count("cuMemcpy2DAsync failed") >= 2, "it is told")  # one stream each way
    assert daemon.log().count("cuMemcpy2DAsync failed") == 2


@pytest.mark.parametrize("every", [5, 8])
def test_submissions_that_fail(start_daemon: Start, seed: int, every: int) -> None:
    daemon = start_daemon(PITCHED, driver={"faults": f"fail_submit_every={every}"})
    roundtrips_that_may_fail(daemon, MIXED, seed)
