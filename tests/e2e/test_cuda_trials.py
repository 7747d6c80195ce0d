"""Tests ways of copying that a daemon does not survive: the next one does without, logs that, and how to try again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Outcome
from kvoffloadd.errors import ClientError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e import gpu_rank
from tests.e2e.daemons import Hold
from tests.e2e.gpu_rank import Where
from tests.e2e.rank import ROWS, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]

EXIT_FATAL = 70
STUCK = "cuda.stuck_s=1"
NO_RUNS, RUNS = "cuda.pitched_row_bytes=0", "cuda.pitched_row_bytes=1GiB"


@pytest.fixture(autouse=True)
def needs_software() -> None:
    gpu_rank.needs_soft("what is planted")


def rank_of(daemon: Daemon) -> Rank:
    """Rows go one by one until all is pinned."""
    found: Rank = daemon.welcome(Rank(daemon.socket, ROWS, reconnect=False, where=Where("cuda")))
    daemon.await_pinned()
    return found


def trials(daemon: Daemon) -> Path:
    return Path(f"{daemon.socket}.trials")


def lives(daemon: Daemon, seed: int) -> bool:
    """Whether three jobs each way end well. If not, the daemon has ended for good reason."""
    rank, rng = rank_of(daemon), np.random.default_rng(seed)
    with suppress(ClientError):
        for _ in range(3):
            keys = new_keys(rng, 8)
            blocks = {0: (keys, rank.blocks_of(0, 8, 8))}
            outcomes = [rank.store_keys(keys).outcome, rank.load(blocks).outcome]
            if Outcome.LOST in outcomes:
                break
            assert outcomes == [Outcome.DONE] * 2
            assert rank.wrong(0, *blocks[0]) == 0
        else:
            return True
    daemon.leave_guests()
    assert daemon.wait() == EXIT_FATAL
    return False


def failed(daemon: Daemon) -> list[str]:
    """Ways that its file names, but for those that have worked."""
    lines = trials(daemon).read_text().splitlines() if trials(daemon).exists() else []
    return [line for line in lines if not line.endswith("\tworks")]


def test_what_goes_well_is_not_left_out(start_daemon: Start, seed: int) -> None:
    for settings in ((NO_RUNS,), (RUNS,)):
        daemon = start_daemon(*settings, driver={"faults": "packed"})
        assert lives(daemon, seed)
        assert failed(daemon) == []
        assert trials(daemon).exists()
        assert daemon.gpus()[0]["left_out"] == ""


@pytest.mark.parametrize("settings", [NO_RUNS, RUNS])
def test_a_daemon_that_is_killed_while_it_copies_as_others_have_before(
    start_daemon: Start, hold: Hold, seed: int, settings: str
) -> None:
    """It was not the driver's fault: nothing is left out, however often that is."""
    daemon = start_daemon(settings, faults=hold.fault)
    assert lives(daemon, seed)
    for _ in range(2):
        daemon.leave_guests()
        daemon.kill()
        daemon.start()
        rank = rank_of(daemon)
        with hold:
            rank.begin_store({0: (new_keys(np.random.default_rng(seed), 4), rank.blocks_of(0, 0, 4))})
            until(lambda: daemon.gpus()[0]["store_running"] > 0, "it copies")
            daemon.kill()
        daemon.leave_guests()
        daemon.start()
        assert lives(daemon, seed)
        assert daemon.gpus()[0]["left_out"] == ""


@pytest.mark.parametrize("after", [1, 3])
def test_batches_that_never_end(start_daemon: Start, seed: int, after: int) -> None:
    daemon = start_daemon(NO_RUNS, STUCK, driver={"faults": f"batch_hangs_after={after}"})
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    assert not lives(daemon, seed)
    daemon.start()
    assert lives(daemon, seed), "it makes no batches"
    assert daemon.gpus()[0]["left_out"] == "batch"
    assert f"remove {trials(daemon)} and restart" in daemon.log()
    daemon.leave_guests()
    assert daemon.stop() == 0
    trials(daemon).unlink()
    daemon.start()
    assert not lives(daemon, seed), "it has tried again, as it was told"


def test_one_way_after_the_other(start_daemon: Start, seed: int) -> None:
    """Neither works. Each is tried once, and then all is copied one by one."""
    faults = "pitched_batch_hangs_after=1,batch_hangs_after=1"
    daemon = start_daemon(RUNS, STUCK, driver={"faults": faults})
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    assert not lives(daemon, seed)
    daemon.start()
    assert not lives(daemon, seed)
    daemon.start()
    assert lives(daemon, seed)
    assert daemon.gpus()[0]["left_out"] == "batch, runs"
    assert daemon.gpus()[0]["pitched_copies"] == 0


def test_single_copies_that_never_end_are_no_reason_to_leave_anything_out(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon(NO_RUNS, STUCK, "cuda.batch=false", driver={"faults": "hang_after=3"})
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    assert not lives(daemon, seed)
    assert failed(daemon) == []


def test_an_error_that_breaks_the_context_later_is_not_held_against_batches(start_daemon: Start, seed: int) -> None:
    copies = 8 * ROWS[0].refs[0].count
    daemon = start_daemon(NO_RUNS, driver={"faults": f"sticky_after={3 * copies}"})
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    assert not lives(daemon, seed)
    assert failed(daemon) == []


def test_a_daemon_that_is_killed_while_it_tries(start_daemon: Start, hold: Hold, seed: int) -> None:
    """A crash within the driver ends a daemon in the same way, and no daemon can report it."""
    daemon = start_daemon(NO_RUNS, faults=hold.fault)
    rank = rank_of(daemon)
    with hold:
        rank.begin_store({0: (new_keys(np.random.default_rng(seed), 4), rank.blocks_of(0, 0, 4))})
        until(trials(daemon).exists, "it is written down")
        daemon.kill()
    daemon.leave_guests()
    daemon.start()
    assert lives(daemon, seed)
    assert daemon.gpus()[0]["left_out"] == "batch"
