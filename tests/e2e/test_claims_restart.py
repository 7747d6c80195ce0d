"""Claims of a daemon that is stopped or killed: the next one goes on to keep what is claimed, unless it was cleared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState, Outcome
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk_settings, idle, store_on_disk
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
