"""Tests ends: a daemon whose GPU can't be used any more logs that, ends, and another one follows; and workers end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Job, KeyState, Outcome
from kvoffloadd.errors import ClientError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold, gpu_mappings
from tests.e2e.disk import demoted, disk_settings
from tests.e2e.rank import Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
Spawn = Callable[..., subprocess.Popen[str]]

MIB = 1 << 20
EXIT_FATAL = 70
STUCK_S, DRAIN_S = 0.6, 0.3


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 16)


def store_until_it_ends(rank: Rank, seed: int) -> Job | None:
    """Stores, one after the other, until the daemon is gone: the last of them, if it was accepted."""
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        try:
            job = rank.begin_store({0: (new_keys(rng, 16), rank.blocks_of(0, 0, 16))})
            if rank.wait(job).outcome is Outcome.LOST:
                return job
        except ClientError:
            return None
    raise AssertionError("the daemon lives")


def test_an_error_that_lasts_ends_the_daemon_and_a_new_one_finds_its_keys(
    start_daemon: Start, keys: Keys, seed: int, tmp_path: Path
) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)), driver={"faults": "sticky_after=100"})
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    rank = daemon.welcome(Rank(daemon.socket, reconnect=False))
    rank.store_keys(keys)
    demoted(daemon, 16)
    (uuid,) = (kind for kind in daemon.status()["devices"] if kind.startswith("cuda:"))
    store_until_it_ends(rank, seed)
    assert daemon.wait() == EXIT_FATAL
    assert daemon.says(f"exiting: {uuid} can't be used any more")
    assert daemon.says("CUDA_ERROR_ILLEGAL_ADDRESS")
    daemon.start()
    again = daemon.welcome(Rank(daemon.socket))
    assert set(again.states(keys)) == {KeyState.PENDING}  # on disk
    assert again.loads_right(keys)


def test_a_copy_that_never_ends_is_the_daemon_s_end(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon(f"cuda.stuck_s={STUCK_S}", driver={"faults": "hang_device_to_host=40"})
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    rank = daemon.welcome(Rank(daemon.socket, reconnect=False))
    rank.store_keys(keys)
    job = rank.begin_store({0: (new_keys(np.random.default_rng(1), 48), rank.blocks_of(0, 16, 48))})
    began = time.monotonic()
    # Loads go on, and the loop answers, until it ends.
    assert rank.load({0: (keys, rank.blocks_of(0, 0, 16))}).outcome is Outcome.DONE
    assert daemon.ping_s() < HANG_S
    assert daemon.wait() == EXIT_FATAL
    assert STUCK_S / 2 < time.monotonic() - began < HANG_S
    assert daemon.says(f"a copy has not ended after {STUCK_S} s")
    assert rank.wait(job).outcome is Outcome.LOST
    daemon.start()
    assert daemon.welcome(Rank(daemon.socket)).store_keys(keys).outcome is Outcome.DONE


def test_a_copy_that_never_ends_behind_which_all_calls_wait_is_the_daemon_s_end(
    start_daemon: Start, keys: Keys
) -> None:
    """The stream's queue is full, so that no call to the driver comes back any more: the loop lives, and ends it."""
    daemon = start_daemon(f"cuda.stuck_s={STUCK_S}", driver={"faults": "hang_device_to_host=40,queue_depth=3"})
    daemon.expected_in_log = "CRITICAL.*exiting: cuda:"
    rank = daemon.welcome(Rank(daemon.socket, reconnect=False))
    rank.store_keys(keys)
    rng = np.random.default_rng(1)
    jobs = [rank.begin_store({0: (new_keys(rng, 12), rank.blocks_of(0, 16 + at, 12))}) for at in range(0, 48, 12)]
    assert daemon.ping_s() < HANG_S
    assert daemon.wait() == EXIT_FATAL
    assert daemon.says(f"has not ended after {STUCK_S}")
    outcomes = [rank.wait(job).outcome for job in jobs]
    assert outcomes[-1] is Outcome.LOST
    daemon.start()
    again = daemon.welcome(Rank(daemon.socket))
    assert again.store_keys(keys).outcome is Outcome.DONE


def test_a_killed_worker_s_copy_that_never_ends_is_the_daemon_s_end(
    start_daemon: Start, spawn: Spawn, keys: Keys
) -> None:
    daemon = start_daemon(f"copy.worker_drain_s={DRAIN_S}", driver={"faults": "hang_device_to_host=4"})
    daemon.expected_in_log = "CRITICAL.*exiting: copies of session"
    victim = spawn(daemon, "store", keys[:8])
    until(lambda: daemon.gpus()[0]["store_running"] > 0, "it copies")
    began = time.monotonic()
    victim.kill()
    assert daemon.wait() == EXIT_FATAL
    assert DRAIN_S / 2 < time.monotonic() - began < HANG_S
    assert daemon.says(f"do not end within {DRAIN_S} s")


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_killed_worker_s_memory_is_let_go_after_its_last_copy(
    start_daemon: Start, spawn: Spawn, hold: Hold, seed: int, what: str
) -> None:
    """64 keys are four chunks, two of them under way: a part of a payload is none."""
    keys = new_keys(np.random.default_rng(seed), 64)
    daemon = start_daemon("copy.chunk_bytes=64KiB", faults=hold.fault)
    if what == "load":
        with Rank(daemon.socket) as helper:
            helper.store_keys(keys)
        until(lambda: gpu_mappings(daemon) == 0, "the helper is gone")
    with hold:
        victim = spawn(daemon, what, keys)
        until(lambda: daemon.gpus()[0][f"{what}_running"], "it copies")
        victim.kill()
        victim.wait()
        until(lambda: f"of pid {victim.pid} ends: " in daemon.log(), "the daemon has seen it")
        assert daemon.status()["running"]["jobs"] == 1
        assert gpu_mappings(daemon) >= 1, "what a copy uses stays"
    until(lambda: gpu_mappings(daemon) == 0, "its memory is let go")
    assert daemon.alive
    until(lambda: daemon.sessions() == [], "its session is gone")
    assert daemon.gpus()[0]["mapped_bytes"] == 0
    with Rank(daemon.socket) as bystander:
        expected = KeyState.MISS if what == "store" else KeyState.HIT
        assert bystander.states(keys) == [expected] * 64


def test_a_daemon_that_is_killed_leaves_a_worker_s_memory_alone(start_daemon: Start, hold: Hold, keys: Keys) -> None:
    daemon = start_daemon(faults=hold.fault)
    rank = daemon.welcome(Rank(daemon.socket))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 16))})
        until(lambda: daemon.gpus()[0]["store_running"], "it copies")
        daemon.kill()
    assert rank.wait(job).outcome is Outcome.LOST
    assert rank.wrong(0, keys, rank.blocks_of(0, 0, 16)) == 0
    daemon.start()
    assert rank.store_keys(keys).outcome is Outcome.DONE  # it is registered again
    assert rank.loads_right(keys)
    rank.close()
