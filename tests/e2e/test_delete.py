"""What was deleted does not come back: not from disk, not after a restart, not from the store. Through the socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Client, Deleted, KeyState, Outcome
from kvoffloadd.errors import RemoteError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, Switch, disk, disk_settings, idle, served, store_on_disk
from tests.e2e.rank import NAMESPACE, Keys, Rank, new_keys
from tests.e2e.sharedstore import SharedStore
from tests.e2e.test_remote import push, rank_of, remote, states

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
MISS, HIT, PENDING = KeyState.MISS, KeyState.HIT, KeyState.PENDING


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 40)


def worker(daemon: Daemon) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket))
    return found


def restarted(daemon: Daemon) -> Rank:
    daemon.leave_guests()
    daemon.kill()
    daemon.start()
    return worker(daemon)


def test_a_deletion_holds_over_restarts(start_daemon: Start, root: Path, keys: Keys) -> None:
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    store_on_disk(daemon, rank, keys)
    assert rank.client.delete({0: keys[:20]}, wait_s=HANG_S) == Deleted(20, 20 * PAGE_BYTES, 20)
    for _ in range(2):
        assert rank.states(keys[:20]) == [MISS] * 20
        assert served(rank, keys).tolist() == [False] * 20 + [True] * 20
        rank = restarted(daemon)
    store_on_disk(daemon, rank, keys[:5])
    rank = restarted(daemon)
    assert served(rank, keys).tolist() == [True] * 5 + [False] * 15 + [True] * 20
    figures = daemon.status()["deletions"]
    assert (figures["tombstone_keys"], figures["unrecorded"], figures["places"]) == (20, 0, [])


def test_keys_that_are_nowhere_and_groups_that_nobody_registered(start_daemon: Start, root: Path, keys: Keys) -> None:
    """A deletion after a restart needs no engine."""
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    assert rank.client.delete({0: keys}) == Deleted(0, 0, 0)
    assert rank.client.delete({}) == Deleted(0, 0, 0)
    store_on_disk(daemon, rank, keys)
    daemon.leave_guests()
    daemon.kill()
    daemon.start()
    with Client(daemon.socket, namespace=NAMESPACE, role="observer") as observer:
        assert observer.delete({0: keys[:10], 7: keys}, wait_s=HANG_S) == Deleted(0, 0, 10)
    assert served(worker(daemon), keys).tolist() == [False] * 10 + [True] * 30


def test_what_is_too_much_is_refused_in_words(start_daemon: Start, root: Path, seed: int) -> None:
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    with pytest.raises(RemoteError, match="delete in pieces") as caught:
        rank.client.delete({0: new_keys(np.random.default_rng(seed), 1025)})
    assert caught.value.code == "limit"
    assert daemon.status()["deletions"]["requests"] == 0


def test_memory_alone(start_daemon: Start, tmp_path: Path, keys: Keys) -> None:
    """A warm restart finds no slot records of them."""
    daemon = start_daemon(f"memory.pool_file={tmp_path / 'pool'}")
    rank = worker(daemon)
    assert rank.store_keys(keys).outcome is Outcome.DONE
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    pinned = rank.client.pin({0: keys})
    assert rank.client.delete({0: keys[:20]}) == Deleted(20, 20 * PAGE_BYTES, 0)
    assert daemon.status()["memory"]["used_bytes"] == 40 * PAGE_BYTES, "the lease keeps the slots"
    assert rank.states(keys) == [MISS] * 20 + [HIT] * 20
    rank.client.release(pinned.lease)
    assert daemon.status()["memory"]["used_bytes"] == 20 * PAGE_BYTES
    assert rank.client.delete({0: keys[20:30]}).keys == 10
    rank = restarted(daemon)
    assert rank.states(keys) == [MISS] * 30 + [HIT] * 10


def test_a_root_that_is_off_is_told_and_records_it_later(start_daemon: Start, root: Path, keys: Keys) -> None:
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    store_on_disk(daemon, rank, keys)
    away = root.with_name("away")
    root.rename(away)
    until(lambda: disk(daemon)["roots"][0]["state"] == "off", "the root is off")
    assert rank.client.delete({0: keys}, wait_s=0.1).unrecorded == (str(root),)
    assert daemon.status()["deletions"]["places"] == [str(root)]
    away.rename(root)
    until(lambda: daemon.status()["deletions"]["unrecorded"] == 0, "it is recorded")
    assert rank.states(keys) == [MISS] * 40
    assert restarted(daemon).states(keys) == [MISS] * 40


def test_a_deletion_amid_a_write_and_a_read(start_daemon: Start, root: Path, tmp_path: Path, keys: Keys) -> None:
    switch = Switch(tmp_path)
    daemon = start_daemon(*disk_settings((root, 64 * MIB)), "disk.stuck_s=600", faults=f"disk={switch.path}")
    rank = worker(daemon)
    switch.set("write_delay_s=3600")
    assert rank.store_keys(keys).outcome is Outcome.DONE
    until(lambda: disk(daemon)["roots"][0]["writing"], "it is being written")
    assert rank.client.delete({0: keys[:10]}, wait_s=0.0).keys == 10
    switch.set()
    idle(daemon)
    rank = restarted(daemon)
    assert rank.states(keys) == [MISS] * 10 + [PENDING] * 30
    switch.set("read_delay_s=3600")
    pinned = rank.client.pin({0: keys[10:20]})
    assert pinned.promoting == 10
    assert rank.client.delete({0: keys[10:15]}, wait_s=0.0).disk_keys == 5
    switch.set()
    assert rank.client.wait_ready(pinned, HANG_S).states[0].tolist() == [MISS] * 5 + [HIT] * 5
    rank.client.release(pinned.lease)
    assert served(restarted(daemon), keys).tolist() == [False] * 15 + [True] * 25


# --- the store ---


@pytest.fixture
def store(tmp_path: Path) -> SharedStore:
    return SharedStore(tmp_path)


def test_its_objects_go_from_the_store(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    """Another host has its own copies until it is told, too."""
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys)
    assert states(b, keys[:20]) == [HIT] * 20
    assert a.client.delete({0: keys[:30]}, wait_s=HANG_S) == Deleted(30, 30 * PAGE_BYTES, 0)
    assert len(store.objects()) == 10
    assert states(a, keys) == [MISS] * 30 + [HIT] * 10
    assert states(b, keys[:30]) == [HIT] * 20 + [MISS] * 10
    assert b.client.delete({0: keys[:30]}, wait_s=HANG_S).keys == 20
    assert states(b, keys[:30]) == [MISS] * 30
    assert here.status()["deletions"]["tombstone_keys"] == 0, "no other place needs them"


def test_a_store_that_does_not_answer_is_told_and_asked_again(
    start_daemon: Start, store: SharedStore, root: Path, tmp_path: Path, keys: Keys
) -> None:
    """A restart goes on with it. Until it is done nothing is fetched of what was deleted."""
    switch = Switch(tmp_path)
    settings = (*store.settings(), *disk_settings((root, 64 * MIB)))
    daemon = start_daemon(*settings, faults=f"remote={switch.path}")
    rank = rank_of(daemon)
    push(daemon, rank, keys)
    idle(daemon)
    switch.set("remove=FAILED")
    assert rank.client.delete({0: keys[:30]}, wait_s=0.5).unrecorded == ("remote",)
    assert len(store.objects()) == 40
    assert states(rank, keys[:30]) == [MISS] * 30
    daemon.leave_guests()
    daemon.kill()
    daemon.start()
    rank = rank_of(daemon)
    assert daemon.status()["deletions"]["keys_in_store"] == 30
    assert states(rank, keys[:30]) == [MISS] * 30
    switch.set()
    until(lambda: len(store.objects()) == 10, "the objects are removed")
    until(lambda: daemon.status()["deletions"]["keys_in_store"] == 0, "it is noted")
    push(daemon, rank, keys[:5])
    assert len(store.objects()) == 15
    assert remote(daemon)["pushed"]["keys"] == 5
