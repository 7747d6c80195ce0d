"""Tests keys on their way from disk: the answer comes at once, then one `ready`, and the lease holds all hits in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.client import Group, GroupKind, KeyState, Outcome, Ref
from kvoffloadd.errors import RemoteError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.damage import flip
from tests.e2e.disk import (
    Switch,
    disk,
    disk_settings,
    group_of,
    only_on_disk,
    records_of,
    segments,
    served,
    store_on_disk,
)
from tests.e2e.rank import PAGE, Keys, Rank, content, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
HIT, PENDING, MISS = KeyState.HIT, KeyState.PENDING, KeyState.MISS
SLOTS = 256
"""Of 1 MiB of memory."""
HELD = "read_delay_s=3600"
"""For the switch: no read ends before it is set anew."""


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path)


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 640)


@pytest.fixture
def daemon(start_daemon: Start, switch: Switch, tmp_path: Path) -> Daemon:
    """Starts a daemon with 1 MiB of memory."""
    found: Daemon = start_daemon(
        *disk_settings((tmp_path / "disk", 64 << 20)), "disk.read_threads=2", "disk.stuck_s=600", memory="1MiB",
        faults=f"disk={switch.path}",
    )  # fmt: skip
    return found


@pytest.fixture
def rank(daemon: Daemon, keys: Keys) -> Rank:
    """All keys are on disk."""
    found: Rank = daemon.welcome(Rank(daemon.socket, num_blocks=SLOTS))
    store_on_disk(daemon, found, keys, 128)
    return found


def leases(daemon: Daemon) -> int:
    return sum(used.get("leases", 0) for used in daemon.status()["accounts"].values())


def test_the_answer_comes_at_once_and_the_rest_when_it_is_there(
    daemon: Daemon, rank: Rank, switch: Switch, keys: Keys
) -> None:
    """Others fill memory meanwhile, and afterwards: what is leased stays."""
    on_disk = only_on_disk(rank, keys)[:60]
    other = daemon.welcome(Rank(daemon.socket, num_blocks=SLOTS))
    switch.set(HELD)
    found = rank.client.pin({0: on_disk})
    assert (found.states[0].tolist(), found.promoting) == ([PENDING] * 60, 60)
    assert len(found.boundaries) == 0
    pressure = new_keys(np.random.default_rng(1), 600)
    for start in range(0, 600, 60):
        assert other.store_keys(pressure[start : start + 60]).outcome is Outcome.DONE
    assert not found.ready
    switch.set()
    ready = rank.client.wait_ready(found, HANG_S)
    assert (ready.states[0].tolist(), ready.promoting, ready.lease) == ([HIT] * 60, 0, found.lease)
    assert ready.boundaries.tolist()[0] == 60 * 16
    for start in range(0, 600, 60):
        assert other.store_keys(pressure[start : start + 60] ^ np.uint8(1)).outcome is Outcome.DONE
    assert rank.states(on_disk) == [HIT] * 60
    assert rank.loads_right(on_disk, lease=found.lease)
    assert leases(daemon) == LEASE_KEYS + 60
    rank.client.release(found.lease)
    assert leases(daemon) == 0


def test_released_before_it_is_ready(daemon: Daemon, rank: Rank, switch: Switch, keys: Keys) -> None:
    on_disk = only_on_disk(rank, keys)[:60]
    switch.set(HELD)
    found = rank.client.pin({0: on_disk})
    rank.client.release(found.lease)
    switch.set()
    ready = rank.client.wait_ready(found, HANG_S)
    assert ready.lease == 0
    until(lambda: leases(daemon) == 0, "nothing is charged")
    assert rank.loads_right(on_disk)


def test_the_session_dies_meanwhile(daemon: Daemon, rank: Rank, switch: Switch, keys: Keys) -> None:
    on_disk = only_on_disk(rank, keys)[:120]
    switch.set(HELD)
    peer = daemon.peer()
    peer.hello("scheduler", namespace={"model": "e2e"})
    found = peer.ok("pin", groups=[{"group": 0, "keys": on_disk[:60].tobytes(), "first": 0}])
    assert found["promoting"] == 60
    peer.ok("prefetch", groups=[{"group": 0, "keys": on_disk[60:].tobytes(), "first": 0}])
    peer.close()
    until(lambda: leases(daemon) == 0, "its leases have ended")
    switch.set()
    assert served(rank, on_disk).all()
    assert "tiers" not in found, "it has not asked, and may not know the field"


def test_the_scheduler_dies_and_its_lease_covers_what_it_has(
    daemon: Daemon, rank: Rank, switch: Switch, keys: Keys
) -> None:
    """While a pin waits for the disk, its lease covers whatever its engine's ranks load. Once the pin's session is
    gone, it covers no other key.
    """
    on_disk = only_on_disk(rank, keys)
    pinned, others = on_disk[:60], on_disk[60:70]
    token = os.urandom(16)
    mate = daemon.welcome(Rank(daemon.socket, num_blocks=SLOTS, instance=token))
    assert mate.loads_right(others)  # from now on in memory
    switch.set(HELD)
    scheduler = daemon.peer()
    scheduler.hello("scheduler", namespace={"model": "e2e"}, instance=token)
    lease = scheduler.ok("pin", groups=[{"group": 0, "keys": pinned.tobytes(), "first": 0}])["lease"]
    assert mate.loads_right(others, lease=lease)
    scheduler.close()
    until(lambda: len(daemon.sessions()) == 2, "the scheduler is gone")
    with pytest.raises(RemoteError, match="bad_lease"):
        mate.loads_right(others, lease=lease)
    switch.set()


def test_a_load_overtakes_what_it_waits_for(daemon: Daemon, rank: Rank, switch: Switch, keys: Keys) -> None:
    """It joins the prefetch that reads its keys already, and hastens it before other prefetches, as the order of the
    session's notices shows.
    """
    on_disk = only_on_disk(rank, keys)
    others, loaded = on_disk[:150], on_disk[150:180]
    peer = daemon.peer()
    peer.hello(namespace={"model": "e2e"})
    memory = os.memfd_create("overtaker")
    os.ftruncate(memory, 30 * PAGE)
    (allocation,) = peer.attach([memory])
    tensor = {"allocation": allocation, "offset": 0, "num_blocks": 30, "page_bytes": PAGE, "stride_bytes": PAGE}
    group = {"group": 0, "kind": "full", "tokens_per_key": 16, "refs": [{"tensor": 0, "offset": 0, "length": PAGE}]}
    registration = peer.ok("register", tensors=[tensor], groups=[group])["registration"]
    switch.set(HELD)
    # One key a request: a read each, two at a time.
    for key in others:
        peer.ok("prefetch", groups=[{"group": 0, "keys": key.tobytes()}])
    assert peer.ok("prefetch", groups=[{"group": 0, "keys": loaded.tobytes()}])["promoting"] == 30
    blocks = np.arange(30, dtype="<u4").tobytes()
    wanted = [{"group": 0, "keys": loaded.tobytes(), "blocks": blocks}]
    peer.ok("load", job=1, registration=registration, groups=wanted)
    switch.set("read_delay_s=0.2")
    before = 0
    while (push := peer.receive() or {})["type"] == "ready":
        before += 1
    assert (push["type"], push["outcome"]) == ("completed", "done")
    assert before < len(others) - 2, "in their order it would come after the reads of all others"
    switch.set()
    assert os.pread(memory, 30 * PAGE, 0) == b"".join(
        content(key.tobytes(), 0, 0, 0, 0, PAGE).tobytes() for key in loaded
    )
    os.close(memory)
    assert disk(daemon)["promoted"]["keys"] >= 30


def test_more_than_memory_holds(daemon: Daemon, rank: Rank, keys: Keys) -> None:
    """A prefix comes; the rest are misses now, and are not lost."""
    on_disk = only_on_disk(rank, keys)
    assert len(on_disk) > SLOTS + 100
    found = rank.client.pin({0: on_disk})
    assert found.promoting == len(on_disk)
    ready = rank.client.wait_ready(found, HANG_S)
    states = ready.states[0]
    came = int((states == HIT).sum())
    assert SLOTS // 2 < came <= SLOTS
    assert set(states[:came].tolist()) == {HIT}
    assert HIT not in states[came:].tolist()
    assert ready.boundaries.tolist()[0] == came * 16
    assert rank.loads_right(on_disk[:came], lease=ready.lease)
    # All of memory is held: nothing else can come.
    rank.wipe()
    result = rank.load({0: (on_disk[came : came + 10], rank.blocks_of(0, 0, 10))})
    assert result.failed[0].tolist() == list(range(10))
    assert rank.clean()
    rank.client.release(ready.lease)
    assert served(rank, on_disk[came:]).all()


def test_a_prefetch_evicts_nothing_that_it_names(rank: Rank, keys: Keys) -> None:
    """What it brings comes in the place of what it does not name."""
    on_disk = only_on_disk(rank, keys)
    there = keys[[state == HIT for state in rank.states(keys)]][:200]
    found = rank.client.prefetch({0: np.concatenate([there, on_disk[:200]])})
    assert (found.promoting, found.states[0].tolist().count(HIT)) == (200, len(there))
    states = rank.client.wait_ready(found, HANG_S).states[0].tolist()
    assert states == [HIT] * SLOTS + [MISS] * (len(there) + 200 - SLOTS)
    assert rank.states(there) == [HIT] * len(there)


def test_what_is_stored_meanwhile_is_not_told_to_be_held(
    daemon: Daemon, rank: Rank, switch: Switch, keys: Keys
) -> None:
    """If `ready` reports a HIT for a key that was a miss when it was pinned, the lease has to cover it."""
    on_disk = only_on_disk(rank, keys)[:20]
    late = new_keys(np.random.default_rng(2), 4)
    wanted = np.concatenate([on_disk, late])
    switch.set(HELD)
    found = rank.client.pin({0: wanted})
    assert found.states[0].tolist() == [PENDING] * 20 + [MISS] * 4
    other = daemon.welcome(Rank(daemon.socket))
    assert other.store_keys(late).outcome is Outcome.DONE
    switch.set()
    ready = rank.client.wait_ready(found, HANG_S)
    hits = wanted[ready.states[0] == HIT]
    assert len(hits) >= 20
    assert rank.loads_right(hits, lease=ready.lease)


def test_a_damaged_key_shortens_the_prefix(daemon: Daemon, rank: Rank, tmp_path: Path, keys: Keys) -> None:
    on_disk = only_on_disk(rank, keys)[:60]
    records_of(tmp_path / "disk", on_disk)[25].flip(5000)
    found = rank.client.pin({0: on_disk})
    ready = rank.client.wait_ready(found, HANG_S)
    assert ready.states[0].tolist() == [HIT] * 25 + [MISS] + [HIT] * 34
    assert ready.boundaries.tolist()[0] == 25 * 16
    assert rank.loads_right(on_disk[:25], lease=found.lease)


TWO = (
    Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 4096),)),
    Group(1, GroupKind.MAMBA, 64, refs=(Ref(1, 0, 9000),)),
)


def test_two_groups(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    """One `ready` for both."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 << 20)))
    rng = np.random.default_rng(seed)
    full, states = new_keys(rng, 40), new_keys(rng, 10)
    rank = Rank(daemon.socket, TWO)
    rank.store({0: (full, rank.blocks_of(0, 0, 40)), 1: (states, rank.blocks_of(1, 0, 10))})
    until(lambda: disk(daemon)["keys"] == 50, "all is on disk")
    rank.close()
    daemon.stop()
    daemon.start()
    rank = daemon.welcome(Rank(daemon.socket, TWO))
    found = rank.client.pin({0: full, 1: states})
    assert found.promoting == 50
    ready = rank.client.wait_ready(found, HANG_S)
    assert [s.tolist() for s in ready.states] == [[HIT] * 40, [HIT] * 10]
    assert ready.boundaries.tolist()[0] == 640
    rank.wipe()
    wanted = {0: (full, rank.blocks_of(0, 0, 40)), 1: (states, rank.blocks_of(1, 40, 10))}
    assert rank.load(wanted, lease=ready.lease).outcome is Outcome.DONE
    assert [rank.wrong(group, *wanted[group]) for group in wanted] == [0, 0]


def test_two_ranks(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    """A scheduler's pin brings both parts; a key with one damaged part is a miss to both."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 << 20)))
    keys = new_keys(np.random.default_rng(seed), 40)

    def open_ranks() -> list[Rank]:
        instance = os.urandom(16)
        return [Rank(daemon.socket, group_of(4096, 2, part), instance=instance) for part in (0, 1)]

    ranks = open_ranks()
    for rank in ranks:
        assert rank.store_keys(keys).outcome is Outcome.DONE
    until(lambda: disk(daemon)["keys"] == 40, "all is on disk")
    for rank in ranks:
        rank.close()
    daemon.stop()
    # The first record that has part 1 of some key.
    path = next(path for path in segments(tmp_path / "disk") if b"KVORECD\n" in path.read_bytes())
    raw = path.read_bytes()
    at = next(at for at in range(0, len(raw), 4096) if raw[at : at + 8] == b"KVORECD\n" and raw[at + 12] == 1)
    bad = raw[at + 48 : at + 80]
    flip(path, at + 4096)
    daemon.start()
    ranks = [daemon.welcome(rank) for rank in open_ranks()]
    found = ranks[0].client.pin({0: keys})
    assert found.promoting == 40
    ready = ranks[0].client.wait_ready(found, HANG_S)
    good = np.array([key.tobytes() != bad for key in keys])
    assert (ready.states[0] == HIT).tolist() == good.tolist()
    for rank in ranks:
        assert rank.loads_right(keys[good], lease=ready.lease)
        assert not served(rank, keys[~good]).any()
