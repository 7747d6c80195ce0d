"""Workers that are killed, and drivers that fail, while rows are copied in runs. The same of single copies is in
test_cuda_ends and test_cuda_faults.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.errors import ClientError
from kvoffloadd.model import NO_BLOCK
from kvoffloadd.testing.wait import until
from scripts.harness.copies import COUNTERS, WAYS, counted
from scripts.harness.daemon import Daemon
from tests.e2e import gpu_rank
from tests.e2e.rank import ROWS, Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
Spawn = Callable[..., subprocess.Popen[str]]

EXIT_FATAL = 70
KEYS, CHUNKS = 16, 4
"""A chunk of 64 KiB has no more than so many keys."""


@pytest.fixture(autouse=True)
def needs_software() -> None:
    gpu_rank.needs_soft("what is planted")


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), KEYS)


def start(start_daemon: Start, faults: str, *settings: str) -> Daemon:
    forced = [f"{name}={value}" for name, value in WAYS["pitched"].items()]
    return start_daemon(*forced, *settings, driver={"faults": f"poison,{faults}"})


def rank_of(daemon: Daemon) -> Rank:
    """Rows go one by one until all is pinned."""
    found: Rank = daemon.welcome(Rank(daemon.socket, ROWS, reconnect=False))
    daemon.await_pinned()
    return found


def is_copying(daemon: Daemon, what: str) -> bool:
    return bool(daemon.gpus()[0][f"{what}_running"])


def moved(daemon: Daemon) -> set[str]:
    return {name for name, count in counted(daemon.status()).items() if count}


def test_killed_workers(start_daemon: Start, spawn: Spawn, keys: Keys) -> None:
    """Their memory goes when their last copy has ended: softcuda ends the process of who lets go of it before."""
    daemon = start(start_daemon, "link_bytes_per_s=400000", "copy.chunk_bytes=64KiB")
    theirs = new_keys(np.random.default_rng(1), CHUNKS * KEYS)
    for what in ("store", "load"):
        victim = spawn(daemon, what, theirs if what == "store" else keys, "rows")
        until(partial(is_copying, daemon, what), "it copies")
        victim.kill()
        until(lambda: not daemon.sessions() and daemon.gpus()[0]["mapped_bytes"] == 0, "all is unmapped")
        rank = rank_of(daemon)
        assert set(rank.states(theirs)) == {KeyState.MISS}
        assert rank.store_keys(keys).outcome is Outcome.DONE
        assert rank.loads_right(keys)
        daemon.leave_guests()
    assert moved(daemon) == {*COUNTERS["pitched"]}


def test_an_error_that_lasts(start_daemon: Start, seed: int) -> None:
    """It exits with status 70, and the next one starts anew."""
    rng = np.random.default_rng(seed)
    copies = 10 * KEYS * ROWS[0].refs[0].count
    daemon = start(start_daemon, f"sticky_after={copies}")
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    rank = rank_of(daemon)
    assert rank.store_keys(new_keys(rng, KEYS)).outcome is Outcome.DONE
    assert moved(daemon) == {*COUNTERS["pitched"]}
    with suppress(ClientError):
        while rank.store_keys(new_keys(rng, KEYS)).outcome is Outcome.DONE:
            pass
    assert daemon.wait() == EXIT_FATAL
    daemon.start()
    again, keys = rank_of(daemon), new_keys(rng, KEYS)
    assert again.store_keys(keys).outcome is Outcome.DONE
    assert again.loads_right(keys)


def test_a_load_of_no_block(start_daemon: Start, keys: Keys) -> None:
    """The keys hit, but none of their blocks is wanted."""
    daemon = start(start_daemon, "packed")
    rank = rank_of(daemon)
    rank.store_keys(keys)
    rank.wipe()
    result = rank.load({0: (keys, np.full(KEYS, NO_BLOCK, np.uint32))})
    assert (result.outcome, result.bytes, rank.clean()) == (Outcome.DONE, 0, True)
