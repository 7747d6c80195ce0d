"""Claims of a daemon that is stopped or killed: the next one goes on to keep what is claimed, unless it was cleared."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState, Outcome
from kvoffloadd.errors import DeadlineError, RemoteError, UsageError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, Switch, disk_settings, idle, store_on_disk
from tests.e2e.rank import NAMESPACE, Keys, Rank, new_keys

Start = Callable[..., Daemon]

TURNOVERS = 3
DISK_BYTES, RECORD_BYTES = 8 * MIB, 2 * 4096
ROOM = 256
"""Slots of one page in a memory tier of 1 MiB."""


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def pool_file() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvoffloadd-test-claims-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def worker(daemon: Daemon) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket))
    return found


def saved(daemon: Daemon) -> None:
    until(lambda: daemon.status()["retention"]["saved"], "the claims are saved")


def claims(rank: Rank) -> dict[str, tuple[int, int, int, int, float]]:
    """What a client sees of each, by name."""
    return {
        claim.name: (claim.number, claim.priority, claim.keys, claim.tokens, claim.left_s)
        for claim in rank.client.claims()
    }


def again(daemon: Daemon, ends: str) -> Rank:
    """Ends the daemon, and comes to its successor."""
    daemon.leave_guests()
    getattr(daemon, ends)()
    daemon.start()
    return worker(daemon)


def are_the_same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether nothing has changed but the time that is left, which has not grown."""
    facts = [{name: claim[:-1] for name, claim in found.items()} for found in (before, after)]
    return facts[0] == facts[1] and all(0 < after[name][-1] <= before[name][-1] for name in before)


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_what_is_claimed_on_disk_stays_claimed(
    start_daemon: Start, tmp_path: Path, rng: np.random.Generator, ends: str
) -> None:
    """The claimed prefix is whole when the disk has turned over, and others of its age are gone."""
    daemon = start_daemon(
        *disk_settings((tmp_path / "disk", DISK_BYTES)), "disk.segment_bytes=1MiB", "disk.flush_s=0.02", memory="1MiB"
    )
    rank = worker(daemon)
    prefix, other = new_keys(rng, 40), new_keys(rng, 40)
    store_on_disk(daemon, rank, prefix)
    store_on_disk(daemon, rank, other)
    rank.client.retain({0: prefix}, 600, name="system prompt", priority=80)
    rank.client.retain({0: new_keys(rng, 4)}, 600)
    before = claims(rank)
    saved(daemon)
    rank = again(daemon, ends)
    assert are_the_same(before, claims(rank))
    for _ in range(TURNOVERS * DISK_BYTES // RECORD_BYTES // 60):
        assert rank.store_keys(new_keys(rng, 60)).outcome is Outcome.DONE
        idle(daemon)
    assert KeyState.MISS not in rank.states(prefix)
    assert rank.loads_right(prefix)
    assert rank.states(other).count(KeyState.MISS) == 40
    assert daemon.status()["retention"]["keys_unkept"] == 0


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_what_is_claimed_in_memory_alone_stays_claimed(
    start_daemon: Start, pool_file: Path, rng: np.random.Generator, ends: str
) -> None:
    """Also a key that comes after the restart only."""
    daemon = start_daemon(f"memory.pool_file={pool_file}", memory="1MiB")
    rank = worker(daemon)
    prefix, late = new_keys(rng, 20), new_keys(rng, 2)
    rank.store_keys(prefix)
    both: Keys = np.concatenate([prefix, late])
    rank.client.retain({0: both}, 600, name="both")
    before = claims(rank)
    saved(daemon)
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    rank = again(daemon, ends)
    assert are_the_same(before, claims(rank))
    rank.store_keys(late)
    for _ in range(TURNOVERS * ROOM // 32):
        rank.store_keys(new_keys(rng, 32))
    assert rank.states(both) == [KeyState.HIT] * 22
    assert rank.loads_right(both)


def test_a_clear_ends_saved_claims_whenever_the_daemon_dies(
    start_daemon: Start, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Right after the reply, and even if the file of claims from before the clear is put back."""
    root = tmp_path / "disk"
    daemon = start_daemon(*disk_settings((root, 4 * MIB)), "disk.flush_s=0.2", memory="1MiB")
    rank = worker(daemon)
    keys = new_keys(rng, 8)
    store_on_disk(daemon, rank, keys)
    rank.client.retain({0: keys}, 600, name="x")
    saved(daemon)
    shutil.copy(root / "claims", tmp_path / "kept")
    rank.client.clear()
    daemon.leave_guests()
    daemon.kill()
    shutil.copy(tmp_path / "kept", root / "claims")
    daemon.start()
    rank = worker(daemon)
    assert claims(rank) == {}
    assert rank.states(keys) == [KeyState.MISS] * 8
    rank.client.retain({0: keys}, 600, name="x")
    saved(daemon)
    assert list(claims(again(daemon, "kill"))) == ["x"]


def test_claims_hold_before_any_engine_comes(start_daemon: Start, tmp_path: Path, rng: np.random.Generator) -> None:
    """An operator sees them, extends and ends them; then nothing keeps their namespace."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 4 * MIB)), memory="1MiB")
    rank = worker(daemon)
    keys = new_keys(rng, 8)
    store_on_disk(daemon, rank, keys)
    for name in ("a", "b"):
        rank.client.retain({0: keys}, 600, name=name)
    saved(daemon)
    daemon.leave_guests()
    daemon.kill()
    daemon.start()
    with Client(daemon.socket, namespace=NAMESPACE, role="observer") as observer:
        assert [(claim.name, claim.disk_keys, claim.memory_keys) for claim in observer.claims()] == [
            ("a", 8, 0), ("b", 8, 0),
        ]  # fmt: skip
        assert observer.retain({}, 3000, name="a").claims == 1
        assert 600 < observer.claims()[0].left_s <= 3001
        assert [observer.forget(name).claims for name in ("a", "b")] == [1, 1]
    until(lambda: not daemon.status()["namespaces"], "its namespace is forgotten")


def kvoffloadd(daemon: Daemon, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvoffloadd", *arguments, "--socket", str(daemon.socket)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    return done.returncode, done.stdout + done.stderr


def test_a_claimed_prompt_is_brought_into_memory_before_its_traffic(
    start_daemon: Start, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A restart has lost its memory. No load waits for the disk then."""
    switch = Switch(tmp_path)
    daemon = start_daemon(*disk_settings((tmp_path / "disk", DISK_BYTES)), memory="1MiB", faults=f"disk={switch.path}")
    rank = worker(daemon)
    keys = new_keys(rng, 40)
    store_on_disk(daemon, rank, keys)
    absent = new_keys(rng, 2)
    rank.client.retain({0: np.concatenate([keys, absent])}, 600, name="agent 7")
    rank.client.retain({0: absent}, 600, name="absent")
    saved(daemon)
    rank = again(daemon, "kill")
    assert rank.states(keys) == [KeyState.PENDING] * 40
    found = rank.client.prefetch_claims("agent 7")
    assert (found.claims, found.keys, found.memory_keys) == (1, 42, 40)
    switch.set("read=EIO")
    assert rank.states(keys) == [KeyState.HIT] * 40
    assert rank.loads_right(keys)
    assert rank.client.claims()[0].memory_keys == 40
    assert kvoffloadd(daemon, "prefetch", "agent 7") == (0, "1 claim: 40 of 42 keys are in memory\n")
    assert kvoffloadd(daemon, "prefetch", "--number", "2") == (1, "1 claim: 0 of 2 keys are in memory\n")
    code, told = kvoffloadd(daemon, "prefetch", "other")
    assert code == 4 and "no claim is named 'other'" in told


def test_a_prefetch_goes_on_where_it_ended_and_ends_with_its_caller(
    start_daemon: Start, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The disk is slow. What has come stays."""
    switch = Switch(tmp_path)
    daemon = start_daemon(*disk_settings((tmp_path / "disk", DISK_BYTES)), memory="1MiB", faults=f"disk={switch.path}")
    rank = worker(daemon)
    keys = new_keys(rng, 40)
    store_on_disk(daemon, rank, keys)
    rank.client.retain({0: keys}, 600, name="x")
    saved(daemon)
    rank = again(daemon, "kill")
    switch.set("read_delay_s=0.4")
    seen, cursor, memory_keys = [], 0, 0
    while True:
        found, cursor = rank.client.prefetch_claims_page("x", cursor=cursor)
        memory_keys += found.memory_keys
        assert found.keys == 40
        if not cursor:
            break
        seen.append(cursor)
    assert memory_keys == 40
    assert seen and seen == sorted(seen) and 1 <= seen[0] <= 41
    rank.client.forget("x")
    for _ in range(0, ROOM, 32):
        rank.store_keys(new_keys(rng, 32))
    idle(daemon)
    rank.client.retain({0: keys}, 600, name="x")
    switch.set("read_delay_s=10")
    other = worker(daemon)
    found, cursor = other.client.prefetch_claims_page("x")
    assert (found.memory_keys, cursor) == (0, 1), "it replies in time, and nothing has come"
    with pytest.raises(DeadlineError):
        other.client.prefetch_claims("x", deadline_s=0.5)
    daemon.guests.remove(other)
    other.close()
    until(lambda: not waiting(daemon), "nobody waits for it any more")
    switch.set()


def test_no_more_is_brought_than_memory_keeps(start_daemon: Start, tmp_path: Path, rng: np.random.Generator) -> None:
    """A claim that is larger than memory: its beginning comes, and stays; others lose no more than the share."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", DISK_BYTES)), "disk.flush_s=0.02", memory="1MiB")
    rank = worker(daemon)
    keys = new_keys(rng, ROOM * 3 // 2)
    store_on_disk(daemon, rank, keys, at_once=32)
    rank.client.retain({0: keys}, 600, name="large")
    assert rank.client.claims()[0].disk_keys == len(keys)
    saved(daemon)
    rank = again(daemon, "kill")
    others = new_keys(rng, ROOM * 3 // 4)
    for start in range(0, len(others), 32):
        rank.store_keys(others[start : start + 32])
    found = rank.client.prefetch_claims("large")
    kept = rank.client.claims()[0].memory_keys
    assert 0 < kept <= ROOM // 4
    assert kept <= found.memory_keys <= kept + 4, "what was brought when the share was full may go"
    assert rank.states(keys[:kept]) == [KeyState.HIT] * kept
    assert rank.states(others).count(KeyState.HIT) >= len(others) - 8


def waiting(daemon: Daemon) -> int:
    """Requests that wait for others' work."""
    return sum(account.get("drains", 0) for account in daemon.status()["accounts"].values())


def test_without_a_tier_below_a_prefetch_tells_what_memory_has(start_daemon: Start, rng: np.random.Generator) -> None:
    daemon = start_daemon(memory="1MiB")
    rank = worker(daemon)
    keys = new_keys(rng, 6)
    rank.store_keys(keys[:4])
    rank.client.retain({0: keys}, 600, name="x")
    found = rank.client.prefetch_claims(number=1)
    assert (found.claims, found.keys, found.memory_keys) == (1, 6, 4)
    for name, number in (("", 0), ("x", 1)):
        with pytest.raises(UsageError, match="a prefetch needs the name of claims, or the number of one"):
            rank.client.prefetch_claims(name, number)
    with pytest.raises(RemoteError, match="no claim is named"):
        rank.client.prefetch_claims("y")
