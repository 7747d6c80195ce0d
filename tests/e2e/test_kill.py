"""Tests kill -9 of a worker and of the daemon in the middle of jobs: no memory is let go too early, or kept."""

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
from kvoffloadd.client import Job, JobDeadlineError, KeyState, Outcome
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.wait import throughout
from tests.e2e.daemons import Hold
from tests.e2e.rank import Keys, Rank, new_keys

Start = Callable[..., Daemon]
Spawn = Callable[..., subprocess.Popen[str]]

MISS, HIT = KeyState.MISS, KeyState.HIT


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 8)


@pytest.fixture
def holdable(standing: Start, hold: Hold) -> Daemon:
    """A daemon with one thread and small chunks, and each chunk can be held."""
    return standing("copy.threads=1", "copy.chunk_bytes=64KiB", faults=hold.fault)


def spawn_held(daemon: Daemon, spawn: Spawn, what: str, keys: Keys, *options: str) -> subprocess.Popen[str]:
    """Its first chunk is being copied."""
    victim = spawn(daemon, what, keys, *options)
    until(lambda: daemon.status()["devices"]["host"][f"{what}_running"] == 1, "it copies")
    assert daemon.status()["running"]["jobs"] == 1
    assert daemon.mapped("victim") == 1
    return victim


def kill(daemon: Daemon, victim: subprocess.Popen[str], hold: Hold) -> None:
    """kill -9, while a chunk of it is held; returns when nothing of it is left. Others are answered all the while."""
    victim.kill()
    victim.wait()
    until(lambda: f"of pid {victim.pid} ends: " in daemon.log(), "the daemon has seen it")
    assert daemon.status()["running"]["jobs"] == 1
    assert daemon.mapped("victim") == 1, "as long as a copy runs, the memory that it reads or writes is there"
    hold.release()
    until(lambda: nothing_left(daemon), "nothing of it is left")


def nothing_left(daemon: Daemon) -> bool:
    mapped = daemon.mapped("victim")
    running = daemon.status()["running"]["jobs"]  # asked after it: the memory may go between the two
    assert mapped == 1 or not running
    return mapped == 0 and not running and leases(daemon) == 0


def leases(daemon: Daemon) -> int:
    return sum(used.get("leases", 0) for used in daemon.status()["accounts"].values())


@pytest.mark.slow
def test_a_worker_killed_in_a_store(holdable: Daemon, spawn: Spawn, hold: Hold, seed: int) -> None:
    """32 keys are two chunks: the second never begins, and a part of a payload is none."""
    keys = new_keys(np.random.default_rng(seed), 32)
    with hold:
        victim = spawn_held(holdable, spawn, "store", keys)
        assert leases(holdable) == LEASE_KEYS + 32
        kill(holdable, victim, hold)
    bystander = holdable.welcome(Rank(holdable.socket))
    assert bystander.states(keys) == [MISS] * 32
    assert holdable.status()["memory"]["used_bytes"] == 0
    assert holdable.verify() == ()


@pytest.mark.slow
def test_a_store_whose_last_byte_was_copied_is_kept(holdable: Daemon, spawn: Spawn, hold: Hold, keys: Keys) -> None:
    """Its only chunk ran when the worker was killed: all bytes came from memory that no process could still change."""
    with hold:
        kill(holdable, spawn_held(holdable, spawn, "store", keys), hold)
    bystander = holdable.welcome(Rank(holdable.socket))
    assert bystander.states(keys) == [HIT] * 8
    assert bystander.loads_right(keys)


@pytest.mark.slow
def test_a_worker_killed_in_a_load(holdable: Daemon, spawn: Spawn, hold: Hold, keys: Keys) -> None:
    bystander = holdable.welcome(Rank(holdable.socket))
    bystander.store_keys(keys)
    with hold:
        victim = spawn_held(holdable, spawn, "load", keys)
        assert leases(holdable) == 2 * LEASE_KEYS + 16
        kill(holdable, victim, hold)
    assert bystander.loads_right(keys)
    assert holdable.status()["running"] == {"jobs": 0, "holds": 0}


@pytest.mark.slow
def test_a_forked_child_keeps_a_socket_open_but_no_session(
    holdable: Daemon, spawn: Spawn, hold: Hold, keys: Keys
) -> None:
    before = holdable.status()["server"]["peers_killed"]
    with hold:
        victim = spawn_held(holdable, spawn, "store", keys, "fork")
        kill(holdable, victim, hold)
    # The child lives, and holds the other end of the socket.
    assert not _ended(victim.pid)
    assert holdable.status()["server"]["peers_killed"] == before + 1
    until(lambda: holdable.sessions() == [], "its session is over")


def _ended(group: int) -> bool:
    """Whether no process of this group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_an_orderly_exit_is_no_different(holdable: Daemon, spawn: Spawn, hold: Hold, keys: Keys) -> None:
    with hold:
        victim = spawn_held(holdable, spawn, "store", keys)
        victim.terminate()
        victim.wait()
    until(lambda: holdable.mapped("victim") == 0 and leases(holdable) == 0, "nothing of it is left")


@pytest.mark.slow
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
    assert daemon.says("exiting: copies of session 3 do not end within 0.3 s")
    assert bystander.wait(job).outcome is Outcome.LOST


def spawn_raw(spawn: Spawn, daemon: Daemon, keys: Keys) -> subprocess.Popen[str]:
    victim = spawn(daemon, "store", keys)
    until(lambda: daemon.status()["running"]["jobs"] == 2, "both run")
    return victim


# --- whose the blocks are ------------------------------------------------------------------------------------------


def begin_in_time(daemon: Daemon, rank: Rank, keys: Keys) -> tuple[Job, float]:
    """A store whose first chunk is being copied, and its deadline in seconds, which has not passed before that."""
    for deadline_s in (0.2, 2.0, 20.0):
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, len(keys)))}, deadline_s=deadline_s)
        until(lambda: copies(daemon) or not daemon.status()["running"]["jobs"], "it copies, or has expired")
        if copies(daemon):
            return job, deadline_s
        rank.wait(job)
    raise TimeoutError("no copy begins")


def copies(daemon: Daemon) -> int:
    return int(daemon.status()["devices"]["host"]["store_running"])


def test_a_deadline_that_passes_in_a_slow_copy_frees_nothing(holdable: Daemon, hold: Hold, keys: Keys) -> None:
    rank = holdable.welcome(Rank(holdable.socket))
    with hold:
        job, deadline_s = begin_in_time(holdable, rank, keys)
        with pytest.raises(JobDeadlineError, match="the daemon still uses its blocks") as caught:
            rank.client.wait(job, 2 * deadline_s)
        assert caught.value.job is job
        assert not job.blocks_free
        assert holdable.status()["running"]["jobs"] == 1
    result = rank.wait(job)
    assert job.blocks_free
    assert result.outcome in (Outcome.DONE, Outcome.EXPIRED)
    assert result.seconds >= 2 * deadline_s


def test_a_deadline_between_two_pieces_ends_the_job_after_the_first(holdable: Daemon, hold: Hold, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 32)
    rank = holdable.welcome(Rank(holdable.socket))
    with hold:
        job, deadline_s = begin_in_time(holdable, rank, keys)
        with pytest.raises(JobDeadlineError):
            rank.client.wait(job, 2 * deadline_s)
    result = rank.wait(job)
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.EXPIRED, list(range(32)))
    assert rank.states(keys) == [MISS] * 32


def test_a_cancel_completes_after_the_last_access(holdable: Daemon, hold: Hold, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 32)
    rank = holdable.welcome(Rank(holdable.socket))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 32))})
        until(lambda: holdable.status()["devices"]["host"]["store_running"] == 1, "the first piece is being copied")
        rank.client.cancel(job)
        with pytest.raises(JobDeadlineError):
            rank.client.wait(job, 0.1)
        assert not job.blocks_free
    assert rank.wait(job).outcome is Outcome.CANCELLED
    assert rank.states(keys) == [MISS] * 32


def test_a_job_that_waits_for_its_turn_is_cancelled_at_once(holdable: Daemon, hold: Hold, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = holdable.welcome(Rank(holdable.socket))
    with hold:
        first = rank.begin_store({0: (new_keys(rng, 8), rank.blocks_of(0, 0, 8))})
        second = rank.begin_store({0: (new_keys(rng, 8), rank.blocks_of(0, 8, 8))})
        rank.client.cancel(second)
        assert rank.wait(second).outcome is Outcome.CANCELLED
        assert not first.done
    assert rank.wait(first).outcome is Outcome.DONE


@pytest.mark.slow
def test_lost_is_said_only_of_a_dead_daemon(start_daemon: Start, hold: Hold, keys: Keys) -> None:
    """Stopped, it can still wake and go on copying: its silence proves nothing."""
    daemon = start_daemon(faults=hold.fault)
    rank = daemon.welcome(Rank(daemon.socket, connect_deadline_s=0.1))
    with hold:
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


def test_a_store_is_not_served_before_its_last_byte(holdable: Daemon, hold: Hold, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 32)
    rank, other = (holdable.welcome(Rank(holdable.socket)) for _ in range(2))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 32))})
        throughout(lambda: other.states(keys) == [KeyState.PENDING] * 32, "it is pending", 0.1)
    assert rank.wait(job).outcome is Outcome.DONE
    assert other.states(keys) == [HIT] * 32
