"""Tests clears by another host that come through a store whose small objects can't be read, or are forged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import xxhash

from kvoffloadd.agentwire.names import marker_name, successor_name
from kvoffloadd.cache.remote.era import decode_era
from kvoffloadd.client import KeyState, NamespaceSpec
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk_settings, store_on_disk
from tests.e2e.rank import Keys, Rank, new_keys
from tests.e2e.sharedstore import SharedStore
from tests.e2e.test_remote import ready, remote, states

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
HIT, MISS = KeyState.HIT, KeyState.MISS


@pytest.fixture
def store(tmp_path: Path) -> SharedStore:
    return SharedStore(tmp_path)


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 16)


def rank_in(daemon: Daemon, model: str) -> Rank:
    """An engine of this model, whose era is known."""
    known = {name for name, era in remote(daemon)["eras"].items() if era}
    rank: Rank = daemon.welcome(Rank(daemon.socket, namespace=NamespaceSpec(model=model)))
    until(lambda: {name for name, era in remote(daemon)["eras"].items() if era} - known, "its era is known")
    return rank


def pointers(store: SharedStore) -> set[Path]:
    return {path for path in store.small() if path.name.endswith("%2Fera")}


def put(store: SharedStore, name: str, value: bytes) -> None:
    (store.path / quote(name, safe="")).write_bytes(value)


def forged(fingerprint: bytes, generation: int, identity: bytes) -> bytes:
    """A small object that no daemon writes, with the right checksum."""
    fields = struct.pack("<8sQ8s", b"KVOERA1\n", generation, identity)
    return fields + xxhash.xxh3_128_digest(fingerprint + fields)


@pytest.mark.parametrize("how", ["a folder", "too large", "damaged"])
def test_a_pointer_that_cannot_be_read_hides_no_other_clear(
    start_daemon: Start, store: SharedStore, keys: Keys, how: str
) -> None:
    """Its own namespace may lose hits; all the others hear of their clears."""
    here, there = start_daemon(*store.settings("remote.push=never")), start_daemon(*store.settings("remote.push=never"))
    rank_in(here, "bad")
    (bad,) = pointers(store)
    models = [f"m{number}" for number in range(8)]
    clearing = [rank_in(here, model) for model in models]
    others = [rank_in(there, model) for model in models]
    for rank in others:
        rank.store_keys(keys)
    victim = rank_in(there, "bad")
    bad.unlink()
    if how == "a folder":
        bad.mkdir()
    else:
        bad.write_bytes(bytes(1 << 20 if how == "too large" else 48))
    for rank in clearing:
        assert rank.client.clear().unrecorded == ()
    none = [MISS] * len(keys)
    until(lambda: all(rank.states(keys) == none for rank in others), "all have heard of their clears")
    assert victim.states(keys) == none
    if how == "a folder":
        until(lambda: any("bad" in name for name in remote(there)["eras_overdue"]), "it is named")
        bad.rmdir()
    until(lambda: pointers(store) >= {bad} and bad.is_file() and len(bad.read_bytes()) == 40, "it is written again")


@pytest.mark.parametrize("runs", [False, True], ids=["before the start", "after the start"])
def test_what_a_disk_keeps_does_not_outlive_a_clear_elsewhere(
    start_daemon: Start, store: SharedStore, keys: Keys, *, runs: bool
) -> None:
    """The engine has gone. Of a clear before its daemon's start nothing is served from the first request on; of one
    after that, when the daemon has heard of it.
    """
    root = store.folder / "root"
    root.mkdir(mode=0o700)
    here = start_daemon(*store.settings("remote.push=never"))
    there = start_daemon(*store.settings("remote.push=never"), *disk_settings((root, 64 * MIB)))
    a, b = rank_in(here, "m"), rank_in(there, "m")
    store_on_disk(there, b, keys)
    there.leave_guests()
    there.stop()
    if runs:
        there.start()
        assert a.client.clear().unrecorded == ()
        until(lambda: remote(there)["cleared_elsewhere"] == 1, "it has heard of the clear")
    else:
        assert a.client.clear().unrecorded == ()
        there.start()
    b = there.welcome(Rank(there.socket, namespace=NamespaceSpec(model="m")))
    blocks = b.blocks_of(0, 0, len(keys))
    b.wipe()
    result = b.load({0: (keys, blocks)})
    assert not any(result.valid(0)), "it is served after a clear that was answered"
    b.wipe_loaded(0, blocks)
    assert b.clean()
    ready(there, b)
    until(lambda: states(b, keys) == [MISS] * len(keys), "and it is gone")
    b.store_keys(keys)
    assert b.loads_right(keys)


@pytest.mark.parametrize(
    ("generation", "identity"), [(0, b"\xff" * 8), ((1 << 53) - 1, bytes(8)), ((1 << 62) - 1, bytes(8))]
)
def test_small_objects_of_others_end_no_daemon_and_empty_no_disk(
    start_daemon: Start, store: SharedStore, keys: Keys, generation: int, identity: bytes
) -> None:
    """The last numbers that there are, with the right checksum and a marker. `generation`: 0 for that which counts."""
    root = store.folder / "root"
    root.mkdir(mode=0o700)
    daemon = start_daemon(*store.settings("remote.push=never"), *disk_settings((root, 64 * MIB)))
    other = rank_in(daemon, "other")
    store_on_disk(daemon, other, keys)
    before = pointers(store)
    victim = rank_in(daemon, "victim")
    (pointer,) = pointers(store) - before
    name = bytes.fromhex(pointer.name.split("%2F")[1])
    era = decode_era(name, pointer.read_bytes())
    assert era is not None
    evil = forged(name, generation or era.generation, identity)
    put(store, marker_name(name, generation or era.generation, identity), evil)
    put(store, successor_name(name, era.generation, era.id), evil)
    rounds = remote(daemon)["answering_s"]
    until(lambda: remote(daemon)["answering_s"] > rounds + 1.0, "some rounds")
    other.client.clear(wait_s=0.1)
    other.store_keys(keys)
    victim.client.clear(wait_s=0.1)
    until(lambda: daemon.status()["disk"]["keys"] >= len(keys), "what was stored since is on disk")
    daemon.leave_guests()
    assert daemon.stop() == 0
    daemon.start()
    other = daemon.welcome(Rank(daemon.socket, namespace=NamespaceSpec(model="other")))
    until(lambda: MISS not in states(other, keys), "it is still there")
    assert other.loads_right(keys)
