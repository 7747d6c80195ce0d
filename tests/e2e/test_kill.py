"""kill -9, of a worker and of the daemon, in the middle of jobs: nobody's memory is let go too early, or kept."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.client import JobDeadlineError, KeyState, Outcome
from scripts.harness.daemon import Daemon
from scripts.harness.wait import HANG_S, throughout, until
from tests.e2e.rank import Keys, Rank, new_keys

Start = Callable[..., Daemon]
Spawn = Callable[..., subprocess.Popen[str]]

DELAY_S = 0.6
RELEASED_S = HANG_S
"""The promise: this long after the last copy's end nothing of a killed worker is left."""
MISS, HIT = KeyState.MISS, KeyState.HIT


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 8)


@pytest.fixture
def slow(standing: Start) -> Daemon:
    """One thread, small chunks, each of which takes its time."""
    return standing("copy.threads=1", "copy.chunk_bytes=64KiB", faults=f"delay_s={DELAY_S}")


def killed(daemon: Daemon, victim: subprocess.Popen[str]) -> float:
    """kill -9; returns how long after its last copy's end nothing of it is left. Others are answered all the while."""
    assert daemon.status()["running"]["jobs"] == 1
    assert daemon.mapped("victim") == 1
    victim.kill()
    victim.wait()
    copied: float | None = None
    slowest = 0.0
    begun = time.monotonic()
    while True:
        slowest = max(slowest, daemon.ping_s())
        mapped = daemon.mapped("victim")
        running = daemon.status()["running"]["jobs"]  # asked after it: the memory may go between the two
        if copied is None and not running:
            copied = time.monotonic()
        # As long as a copy runs, the memory that it reads or writes is there.
        assert mapped == 1 or not running
        if mapped == 0 and leases(daemon) == 0 and copied is not None:
            assert slowest < HANG_S
            return time.monotonic() - copied
        assert time.monotonic() - begun < HANG_S, daemon.log()


def leases(daemon: Daemon) -> int:
    return sum(used.get("leases", 0) for used in daemon.status()["accounts"].values())


def test_a_worker_killed_in_a_store(slow: Daemon, spawn: Spawn, seed: int) -> None:
    """32 keys are two chunks: the second never begins, and a part of a payload is none."""
    keys = new_keys(np.random.default_rng(seed), 32)
    victim = spawn(slow, "store", keys)
    assert leases(slow) == LEASE_KEYS + 32
    released_s = killed(slow, victim)
    print(f"a killed store: released {1000 * released_s:.1f} ms after the copy's end")
    assert released_s < RELEASED_S
    bystander = slow.welcome(Rank(slow.socket))
    assert bystander.states(keys) == [MISS] * 32
    assert slow.status()["memory"]["used_bytes"] == 0
    assert slow.verify() == ()


def test_a_store_whose_last_byte_was_copied_is_kept(slow: Daemon, spawn: Spawn, keys: Keys) -> None:
    """Its only chunk ran when the worker was killed: all bytes came from memory that nobody could change any more."""
    assert killed(slow, spawn(slow, "store", keys)) < RELEASED_S
    bystander = slow.welcome(Rank(slow.socket))
    assert bystander.states(keys) == [HIT] * 8
    assert bystander.loads_right(keys)


def test_a_worker_killed_in_a_load(slow: Daemon, spawn: Spawn, keys: Keys) -> None:
    bystander = slow.welcome(Rank(slow.socket))
    bystander.store_keys(keys)
    victim = spawn(slow, "load", keys)
    assert leases(slow) == 2 * LEASE_KEYS + 16
    released_s = killed(slow, victim)
    print(f"a killed load: released {1000 * released_s:.1f} ms after the copy's end")
    assert released_s < RELEASED_S
    assert bystander.loads_right(keys)
    assert slow.status()["running"] == {"jobs": 0, "holds": 0}


def test_a_forked_child_keeps_a_socket_open_but_no_session(slow: Daemon, spawn: Spawn, keys: Keys) -> None:
    before = slow.status()["server"]["peers_killed"]
    victim = spawn(slow, "store", keys, "fork")
    assert killed(slow, victim) < RELEASED_S
    # The child lives, and holds the other end of the socket.
    assert not _ended(victim.pid)
    assert slow.status()["server"]["peers_killed"] == before + 1
    until(lambda: slow.sessions() == [], "its session is over")


def _ended(group: int) -> bool:
    """Whether no process of this group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_orderly_exit_is_no_different(slow: Daemon, spawn: Spawn, keys: Keys) -> None:
    victim = spawn(slow, "store", keys)
    victim.terminate()
    victim.wait()
    until(lambda: slow.mapped("victim") == 0 and leases(slow) == 0, "nothing of it is left")


def test_a_copy_that_does_not_end_is_the_daemon_s_end(start_daemon: Start, spawn: Spawn, keys: Keys) -> None:
    """A mapping in use can't be released: only the end of the process does it. Others learn that it is dead."""
    daemon = start_daemon("copy.worker_drain_s=0.3", faults=f"delay_s={2 * HANG_S}")
    daemon.expected_in_log = "CRITICAL.*exiting: copies of session"
    bystander = daemon.welcome(Rank(daemon.socket, reconnect=False))
    job = bystander.begin_store({0: (keys ^ np.uint8(1), bystander.blocks_of(0, 0, 8))})
    victim = spawn_raw(spawn, daemon, keys)
    begun = time.monotonic()
    victim.kill()
    assert daemon.wait() == 70
    assert 0.2 < time.monotonic() - begun < HANG_S
    assert "exiting: copies of session 3 do not end within 0.3 s" in daemon.log()
    assert bystander.wait(job).outcome is Outcome.LOST


def spawn_raw(spawn: Spawn, daemon: Daemon, keys: Keys) -> subprocess.Popen[str]:
    victim = spawn(daemon, "store", keys)
    until(lambda: daemon.status()["running"]["jobs"] == 2, "both run")
    return victim


# --- whose the blocks are ------------------------------------------------------------------------------------------


def test_a_deadline_that_passes_in_a_slow_copy_frees_nothing(slow: Daemon, keys: Keys) -> None:
    rank = slow.welcome(Rank(slow.socket))
    begun = time.monotonic()
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 8))}, deadline_s=0.05)
    with pytest.raises(JobDeadlineError, match="still the daemon's") as caught:
        rank.client.wait(job, 0.2)
    assert caught.value.job is job
    assert not job.blocks_free
    assert slow.status()["running"]["jobs"] == 1
    result = rank.wait(job)
    assert job.blocks_free
    assert time.monotonic() - begun >= DELAY_S
    assert result.outcome in (Outcome.DONE, Outcome.EXPIRED)
    assert result.seconds >= DELAY_S


def test_a_deadline_between_two_pieces_ends_the_job_after_the_first(slow: Daemon, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 32)
    rank = slow.welcome(Rank(slow.socket))
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 32))}, deadline_s=0.2)
    result = rank.wait(job)
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.EXPIRED, list(range(32)))
    assert DELAY_S <= result.seconds < 2 * DELAY_S
    assert rank.states(keys) == [MISS] * 32


def test_a_cancel_completes_after_the_last_access(slow: Daemon, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 32)
    rank = slow.welcome(Rank(slow.socket))
    begun = time.monotonic()
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 32))})
    until(lambda: slow.status()["devices"]["host"]["store_running"] == 1, "the first piece is being copied")
    rank.client.cancel(job)
    assert not job.blocks_free
    assert rank.wait(job).outcome is Outcome.CANCELLED
    assert DELAY_S <= time.monotonic() - begun < 2 * DELAY_S
    assert rank.states(keys) == [MISS] * 32


def test_a_job_that_waits_for_its_turn_is_cancelled_at_once(slow: Daemon, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = slow.welcome(Rank(slow.socket))
    first = rank.begin_store({0: (new_keys(rng, 8), rank.blocks_of(0, 0, 8))})
    second = rank.begin_store({0: (new_keys(rng, 8), rank.blocks_of(0, 8, 8))})
    rank.client.cancel(second)
    assert rank.wait(second).outcome is Outcome.CANCELLED
    assert not first.done
    assert rank.wait(first).outcome is Outcome.DONE


def test_lost_is_said_only_of_a_dead_daemon(start_daemon: Start, keys: Keys) -> None:
    """Stopped, it can still wake and go on copying: its silence proves nothing."""
    daemon = start_daemon(faults="delay_s=20")
    rank = daemon.welcome(Rank(daemon.socket, deadline_s=0.5, connect_deadline_s=0.1))
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 8))})
    daemon.signal(signal.SIGSTOP)
    with pytest.raises(JobDeadlineError):
        rank.client.wait(job, 0.6)
    assert not job.blocks_free
    daemon.signal(signal.SIGKILL)
    assert rank.wait(job).outcome is Outcome.LOST
    # Not reaped yet, but no thread of it runs any more.
    assert Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    assert daemon.wait() == -signal.SIGKILL


def test_a_store_is_not_served_before_its_last_byte(slow: Daemon, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 32)
    rank, other = (slow.welcome(Rank(slow.socket)) for _ in range(2))
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 32))})
    throughout(lambda: other.states(keys) == [KeyState.PENDING] * 32, "it is pending", DELAY_S)
    assert rank.wait(job).outcome is Outcome.DONE
    assert other.states(keys) == [HIT] * 32
