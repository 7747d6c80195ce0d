"""Two daemons and a store: what one has stored hits on the other, every byte of it right, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Found, Group, GroupKind, KeyState, Outcome, Ref
from kvoffloadd.model import Tier
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import Switch, disk_settings
from tests.e2e.rank import HYBRID, Keys, Rank, new_keys
from tests.e2e.sharedstore import SharedStore

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
HIT, PENDING, MISS = KeyState.HIT, KeyState.PENDING, KeyState.MISS


@pytest.fixture
def store(tmp_path: Path) -> SharedStore:
    return SharedStore(tmp_path)


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path)


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 64)


def remote(daemon: Daemon) -> dict[str, Any]:
    """Returns its status of the store."""
    found: dict[str, Any] = daemon.status()["remote"]
    return found


def ready(daemon: Daemon, rank: Rank) -> Rank:
    """Wait until the era of the rank's namespace is known."""
    until(lambda: any(remote(daemon)["eras"].values()), "an era is known")
    return rank


def rank_of(daemon: Daemon, *args: Any, **options: Any) -> Rank:
    found: Rank = ready(daemon, daemon.welcome(Rank(daemon.socket, *args, **options)))
    return found


def push(daemon: Daemon, rank: Rank, keys: Keys, group: int = 0) -> None:
    """Store these keys, and wait until the store has them."""
    before = remote(daemon)["pushed"]["keys"]
    assert rank.store_keys(keys, group).outcome is Outcome.DONE
    until(lambda: remote(daemon)["pushed"]["keys"] >= before + len(keys), "all are pushed")


def pin(rank: Rank, keys: Keys, group: int = 0) -> Found:
    """Its last word."""
    found = rank.client.pin({group: keys})
    return rank.client.wait_ready(found, HANG_S) if found.promoting else found


def states(rank: Rank, keys: Keys, group: int = 0) -> list[int]:
    """Returns states as a pin finds them in the end; it is released."""
    found = pin(rank, keys, group)
    if found.lease:
        rank.client.release(found.lease)
    return list(found.states[0].tolist())


def test_what_one_host_stores_hits_on_the_other(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:32])
    assert len(store.objects()) == 32
    found = b.client.pin({0: keys})
    assert (found.states[0].tolist(), found.promoting) == ([PENDING] * 64, 64)
    last = b.client.wait_ready(found, HANG_S)
    assert last.states[0].tolist() == [HIT] * 32 + [MISS] * 32
    assert last.boundaries.tolist()[0] == 32 * 16
    assert b.loads_right(keys[:32], lease=last.lease)
    b.client.release(last.lease)
    status = remote(there)
    assert (status["fetched"]["keys"], status["asked"], status["found"]) == (32, 64, 32)
    assert there.status()["lookups"][0]["remote"] == 32
    until(lambda: there.status()["cache"]["unsealed"] == 0, "what came is sealed")
    assert remote(there)["pushed"]["keys"] == 0, "what came from there is put there again"


def test_a_load_asks_too(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:20])
    blocks = b.blocks_of(0, 0, 40)
    b.wipe()
    result = b.load({0: (keys[:40], blocks)})
    assert result.outcome is Outcome.PARTIAL
    assert result.failed[0].tolist() == list(range(20, 40))
    assert b.wrong(0, keys[:20], blocks[:20]) == 0
    b.wipe_loaded(0, blocks[:20])
    assert b.clean()


def test_a_prefetch_brings_them_into_memory(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:20])
    found = b.client.prefetch({0: keys[:20]})
    assert found.promoting == 20
    assert b.client.wait_ready(found, HANG_S).states[0].tolist() == [HIT] * 20
    assert b.states(keys[:20]) == [HIT] * 20
    assert b.loads_right(keys[:20])


def parts(part: int) -> tuple[Group, ...]:
    return (Group(0, GroupKind.FULL, 16, parts=2, part=part, refs=(Ref(0, 0, 3000 + 1000 * part),)),)


def test_both_parts_of_a_key_travel_together(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    """Tensor parallelism: two ranks, payloads of different sizes."""
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    senders = [rank_of(here, parts(part)) for part in (0, 1)]
    receivers = [rank_of(there, parts(part)) for part in (0, 1)]
    senders[0].store_keys(keys[:16])
    assert not store.objects()
    push(here, senders[1], keys[:16])
    assert len(store.objects()) == 16
    found = pin(receivers[0], keys[:16])
    assert found.states[0].tolist() == [HIT] * 16
    assert all(rank.loads_right(keys[:16]) for rank in receivers)


def test_only_what_the_longest_prefix_needs_is_fetched(start_daemon: Start, store: SharedStore, seed: int) -> None:
    """A hybrid model: every key of full attention, the window's, and one state; both once more for the prefix before,
    which is a state shorter: the prompt may end where the longest one does.
    """
    rng = np.random.default_rng(seed)
    full, sliding, mamba = new_keys(rng, 32), new_keys(rng, 16), new_keys(rng, 8)
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here, HYBRID), rank_of(there, HYBRID)
    for group, needed in ((0, full), (1, sliding), (2, mamba)):
        push(here, a, needed, group)
    found = b.client.pin({0: full, 1: sliding, 2: mamba})
    last = b.client.wait_ready(found, HANG_S)
    assert last.boundaries.tolist()[0] == 512
    assert [int((of == HIT).sum()) for of in last.states] == [32, 4, 2]
    assert remote(there)["fetched"]["keys"] == 38
    assert b.loads_right(full, 0)
    b.client.release(last.lease)


@pytest.mark.parametrize("damage", ["flip", "flip_header", "shorter", "longer", "swap", "MISS", "LEASE_OVER", "SIZE"])
def test_what_comes_wrong_is_a_miss(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys, damage: str
) -> None:
    here = start_daemon(*store.settings())
    there = start_daemon(*store.settings(), faults=f"remote={switch.path}")
    there.expected_in_log = "failed verification"
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:16])
    switch.set(f"get={damage}")
    assert states(b, keys[:16]) == [MISS] * 16
    status = remote(there)
    assert status["fetched"]["keys"] == 0
    assert sum(status["not_fetched"].values()) == 16
    if damage not in ("MISS", "LEASE_OVER"):
        assert sum(status["corrupt"].values()) == 16
        until(lambda: not store.objects(), "they are removed there")
    switch.set()
    assert a.store_keys(keys[:16]).outcome is Outcome.DONE
    assert b.store_keys(keys[:16]).outcome is Outcome.DONE
    assert b.loads_right(keys[:16])


def test_a_get_that_is_late_is_a_miss_and_its_slots_are_not_used(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys
) -> None:
    here = start_daemon(*store.settings())
    there = start_daemon(*store.settings("remote.fetch_s=0.3"), faults=f"remote={switch.path}")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:16])
    switch.set("get=hang")
    assert states(b, keys[:16]) == [MISS] * 16
    status = remote(there)
    assert status["quarantined_bytes"] > 0
    assert status["not_fetched"]["late"] == 16
    assert b.store_keys(keys[:16]).outcome is Outcome.DONE, "in other slots"
    assert b.loads_right(keys[:16])
    switch.set()
    until(lambda: remote(there)["quarantined_bytes"] == 0, "the get has ended")
    assert b.loads_right(keys[:16])


def test_a_store_that_does_not_answer_costs_a_deadline_and_then_nothing(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys
) -> None:
    there = start_daemon(*store.settings("remote.lookup_s=0.05"), faults=f"remote={switch.path}")
    b = rank_of(there)
    switch.set("exists=hang")
    for number in range(3):
        assert states(b, keys[8 * number : 8 * number + 8]) == [MISS] * 8
    until(lambda: remote(there)["lookups"]["breaker"] == "open", "the breaker opens")
    found = b.client.pin({0: keys[32:40]})
    assert (found.promoting, found.states[0].tolist()) == (0, [MISS] * 8)
    switch.set()
    until(lambda: b.client.pin({0: keys[40:48]}).promoting == 8, "it closes again")


# --- clears ---------------------------------------------------------------------------------------------


def test_a_clear_holds_on_every_host(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:32])
    assert states(b, keys[:16]) == [HIT] * 16
    a.client.clear()
    assert states(b, keys[16:32]) == [MISS] * 16, "what the store had is cleared at once"
    until(lambda: states(b, keys[:16]) == [MISS] * 16, "the other host has cleared its memory")
    assert remote(there)["cleared_elsewhere"] == 1
    assert states(a, keys[:32]) == [MISS] * 32
    ready(here, a)
    push(here, a, keys[:8])
    until(lambda: states(b, keys[:8]) == [HIT] * 8, "and goes on in the new era")
    assert b.loads_right(keys[:8])
    until(lambda: len(store.objects()) == 8, "objects of the old era are swept")


def test_a_clear_of_everything_holds_on_every_host(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:16])
    assert states(b, keys[:8]) == [HIT] * 8
    here.clear()
    assert states(b, keys[8:16]) == [MISS] * 8
    until(lambda: states(b, keys[:8]) == [MISS] * 8, "the other host has cleared its memory")


def test_a_clear_beats_a_fetch_that_is_under_way(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys
) -> None:
    here = start_daemon(*store.settings())
    there = start_daemon(*store.settings("remote.era_poll_s=60"), faults=f"remote={switch.path}")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:32])
    switch.set("get=hang")
    found = b.client.pin({0: keys[:32]})
    until(lambda: remote(there)["gets"] and remote(there)["found"] == 32, "it is under way")
    a.client.clear()
    switch.set()
    last = b.client.wait_ready(found, HANG_S)
    assert last.states[0].tolist() == [MISS] * 32
    assert sum(remote(there)["not_fetched"].get(why, 0) for why in ("cleared", "miss")) == 32


def test_a_clear_that_the_store_did_not_take_is_said_and_made_up_for(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys
) -> None:
    here = start_daemon(*store.settings(), faults=f"remote={switch.path}")
    there = start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:16])
    switch.set("remove=FAILED")
    assert a.client.clear(wait_s=0.1).unrecorded == ("remote",)
    assert states(a, keys[:16]) == [MISS] * 16, "here it holds"
    switch.set()
    until(lambda: states(b, keys[:16]) == [MISS] * 16, "the daemon goes on trying")


def test_a_host_that_was_away_clears_before_it_hits(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here = start_daemon(*store.settings())
    there = start_daemon(*store.settings(), f"memory.pool_file={store.folder / 'pool'}")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:16])
    assert states(b, keys[:16]) == [HIT] * 16
    there.leave_guests()
    there.stop()
    a.client.clear()
    there.start()
    b = rank_of(there)
    until(lambda: states(b, keys[:16]) == [MISS] * 16, "it has heard of the clear")


def test_a_daemon_that_cleared_while_the_store_was_away_clears_it_when_it_is_back(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys
) -> None:
    here = start_daemon(*store.settings(), f"memory.pool_file={store.folder / 'pool'}", faults=f"remote={switch.path}")
    there = start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:16])
    switch.set("read=FAILED", "remove=FAILED", "write=FAILED")
    assert a.client.clear(wait_s=0.1).unrecorded == ("remote",)
    here.leave_guests()
    here.stop()
    switch.set()
    assert states(b, keys[:16]) == [HIT] * 16, "nobody could tell it"
    here.start()
    rank_of(here)
    until(lambda: states(b, keys[:16]) == [MISS] * 16, "now it is told")


def test_a_marker_that_is_lost_voids_what_the_store_has_and_nothing_else(
    start_daemon: Start, store: SharedStore, keys: Keys
) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:32])
    assert states(b, keys[:16]) == [HIT] * 16
    (marker,) = store.markers()
    marker.unlink()
    assert states(b, keys[16:32]) == [MISS] * 16
    assert states(b, keys[:16]) == states(a, keys[:16]) == [HIT] * 16, "nobody has cleared"
    until(lambda: [path for path in store.markers() if path != marker], "a new era begins")
    until(lambda: len(set(map(_era, (here, there)))) == 1 and _era(here), "both are in it")
    push(here, a, keys[32:40])
    assert states(b, keys[32:40]) == [HIT] * 8


def _era(daemon: Daemon) -> str:
    (era,) = remote(daemon)["eras"].values()
    return str(era)


def test_a_pointer_that_is_damaged_is_made_anew(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings())
    here.expected_in_log = there.expected_in_log = "damaged"
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:8])
    path = store.pointer()
    right = path.read_bytes()
    damaged = bytearray(right)
    damaged[10] ^= 0x80  # of the generation: it would be far in the future
    fresh = path.with_name("fresh")
    fresh.write_bytes(damaged)
    fresh.replace(path)
    until(lambda: path.exists() and path.read_bytes() == right, "it is as it was")
    assert states(a, keys[:8]) == states(b, keys[:8]) == [HIT] * 8, "nobody has cleared"


def test_hosts_that_begin_at_once_agree(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    daemons = [start_daemon(*store.settings()) for _ in range(4)]
    ranks = [rank_of(daemon) for daemon in daemons]
    until(lambda: len({_era(daemon) for daemon in daemons}) == 1, "one era")
    push(daemons[0], ranks[0], keys[:8])
    assert [states(rank, keys[:8]) for rank in ranks] == [[HIT] * 8] * 4
    until(lambda: len(store.markers()) == 1, "those that lost have taken theirs away")


# --- the agent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["exists", "get", "put", "read"])
def test_an_agent_that_crashes_costs_hits_alone(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys, when: str
) -> None:
    here = start_daemon(*store.settings())
    there = start_daemon(*store.settings(), faults=f"remote={switch.path}")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:16])
    starts = remote(there)["agent"]["starts"]
    switch.set(f"{when}=crash")
    if when == "put":
        assert b.store_keys(keys[32:40]).outcome is Outcome.DONE
    elif when != "read":
        assert states(b, keys[:16]) == [MISS] * 16
    until(lambda: remote(there)["agent"]["ends"] > 0, "it has crashed")
    switch.set()
    until(lambda: remote(there)["agent"]["starts"] > starts, "there is another one")
    until(lambda: states(b, keys[16:32] if when == "get" else keys[:16]) is not None, "it is asked")
    assert b.store_keys(keys[40:48]).outcome is Outcome.DONE
    assert b.loads_right(keys[40:48])


def test_a_daemon_without_a_store_is_as_before(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon()
    rank = daemon.welcome(Rank(daemon.socket))
    assert "remote" not in daemon.status()
    found = rank.client.pin({0: keys})
    assert (found.promoting, found.states[0].tolist(), found.lease) == (0, [MISS] * 64, 0)
    assert not [path for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == daemon.pid]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def test_memory_without_room_is_a_miss(start_daemon: Start, store: SharedStore, seed: int) -> None:
    """Everything is leased."""
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings(), memory="1MiB")
    keys, held = new_keys(np.random.default_rng(seed), 32), new_keys(np.random.default_rng(seed + 1), 256)
    a, b = rank_of(here), rank_of(there, num_blocks=256)
    push(here, a, keys)
    assert b.store_keys(held).outcome in (Outcome.DONE, Outcome.PARTIAL)
    lease = pin(b, held)
    assert states(b, keys) == [MISS] * 32
    assert remote(there)["not_fetched"]["no_space"] == 32
    b.client.release(lease.lease)
    assert states(b, keys) == [HIT] * 32


# --- with a disk -----------------------------------------------------------------------------------------


def test_one_request_brings_keys_from_disk_and_from_the_store(
    start_daemon: Start, store: SharedStore, tmp_path: Path, seed: int
) -> None:
    """What came from the store is written to disk like any other key, and found there after a restart."""
    rng = np.random.default_rng(seed)
    keys, pressure = new_keys(rng, 48), new_keys(rng, 512)
    here = start_daemon(*store.settings())
    there = start_daemon(*store.settings(), *disk_settings((tmp_path / "disk", 64 << 20)), memory="1MiB")
    a, b = rank_of(here), rank_of(there, num_blocks=256)
    assert b.store_keys(keys[:24]).outcome is Outcome.DONE
    for start in range(0, 512, 64):
        assert b.store_keys(pressure[start : start + 64]).outcome is Outcome.DONE
        b.client.drain(HANG_S)
        until(lambda: there.status()["disk"]["backlog_bytes"] == 0, "it is on disk")
    assert b.states(keys[:24]) == [PENDING] * 24, "on disk alone"
    assert a.store_keys(keys[24:]).outcome is Outcome.DONE
    until(lambda: remote(here)["pushed"]["keys"] == 24, "the rest is in the store")
    found = b.client.pin({0: keys})
    assert found.promoting == 48
    last = b.client.wait_ready(found, HANG_S)
    assert last.states[0].tolist() == [HIT] * 48
    assert last.boundaries.tolist()[0] == 48 * 16
    for one in (found, last):
        assert one.tiers[0].tolist() == [Tier.DISK] * 24 + [Tier.REMOTE] * 24
    again = b.client.pin({0: keys})
    assert (again.promoting, again.tiers) == (0, []), "all are in memory by now"
    b.client.release(again.lease)
    assert b.loads_right(keys, lease=last.lease)
    b.client.release(last.lease)
    assert remote(there)["fetched"]["keys"] == 24
    assert there.status()["disk"]["promoted"]["keys"] >= 24
    until(lambda: there.status()["disk"]["backlog_bytes"] == 0, "what came from the store is on disk, too")
    there.leave_guests()
    there.stop()
    there.settings["remote.engine"] = ""
    there.start()
    b = there.welcome(Rank(there.socket, num_blocks=256))
    assert b.states(keys) == [PENDING] * 48
    assert b.loads_right(keys)


def test_what_is_local_waits_for_no_store(
    start_daemon: Start, store: SharedStore, switch: Switch, tmp_path: Path, seed: int
) -> None:
    """Only keys on this host's disks are pending; a load brings these and no others."""
    rng = np.random.default_rng(seed)
    keys, pressure, stored = new_keys(rng, 48), new_keys(rng, 512), new_keys(rng, 8)
    here = start_daemon(*store.settings())
    disk = disk_settings((tmp_path / "disk", 64 << 20))
    there = start_daemon(*store.settings(), *disk, memory="1MiB", faults=f"remote={switch.path}")
    a, b = rank_of(here), rank_of(there, num_blocks=256)
    assert b.store_keys(keys[:24]).outcome is Outcome.DONE
    for start in range(0, 512, 64):
        assert b.store_keys(pressure[start : start + 64]).outcome is Outcome.DONE
        b.client.drain(HANG_S)
        until(lambda: there.status()["disk"]["backlog_bytes"] == 0, "it is on disk")
    push(here, a, keys[24:])
    switch.set("get=hang")
    coming = b.client.prefetch({0: keys[24:]})
    assert coming.promoting == 24
    until(lambda: PENDING in b.states(keys[24:]), "it is on its way")
    lease = b.client.reserve({0: stored}).lease
    assert b.states(stored) == [PENDING] * 8
    named = np.concatenate([keys, stored])
    expected = [PENDING] * 24 + [MISS] * 32
    assert b.client.lookup({0: named}, local=True).states[0].tolist() == expected
    found = b.client.prefetch({0: named}, local=True)
    assert (found.states[0].tolist(), found.promoting) == (expected, 24)
    assert b.client.wait_ready(found, HANG_S).states[0].tolist()[:24] == [HIT] * 24
    blocks = b.blocks_of(0, 0, len(named))
    b.wipe()
    result = b.load({0: (named, blocks)}, local=True)
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, list(range(24, 56)))
    assert b.wrong(0, keys[:24], blocks[:24]) == 0
    assert remote(there)["fetched"]["keys"] == 0, "the store still hangs"
    assert b.client.prefetch({0: new_keys(rng, 8)}, local=True).promoting == 0, "it is asked for nothing"
    b.client.release(lease)
    switch.set()
    until(lambda: b.client.wait_ready(coming, HANG_S).states[0].tolist() == [HIT] * 24, "it has come")


# --- what is put there -----------------------------------------------------------------------------------


def test_only_what_is_used_again_is_put_there(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here = start_daemon(*store.settings("remote.push=second-use"))
    a = rank_of(here)
    assert a.store_keys(keys[:32]).outcome is Outcome.DONE
    a.client.drain(HANG_S)
    assert states(a, keys[:8]) == [HIT] * 8
    until(lambda: remote(here)["pushed"]["keys"] == 8, "those that were used again")
    assert len(store.objects()) == 8


def test_what_memory_is_about_to_evict_is_put_there(start_daemon: Start, store: SharedStore, seed: int) -> None:
    """Memory has room for 256 keys. What goes next is put there while there is still room for others."""
    here, there = start_daemon(*store.settings("remote.push=evict"), memory="1MiB"), start_daemon(*store.settings())
    keys = new_keys(np.random.default_rng(seed), 250)
    a, b = rank_of(here, num_blocks=256), rank_of(there, num_blocks=256)
    for start in range(0, 200, 50):
        assert a.store_keys(keys[start : start + 50]).outcome is Outcome.DONE
    a.client.drain(HANG_S)
    assert not store.objects(), "there is room for more"
    assert a.store_keys(keys[200:]).outcome is Outcome.DONE
    until(lambda: remote(here)["pushed"]["keys"] > 0, "those that go next")
    pushed = remote(here)["pushed"]["keys"]
    assert pushed < 250
    assert states(a, keys) == [HIT] * 250, "none has gone"
    result = b.load({0: (keys, b.blocks_of(0, 0, 250))})
    assert result.outcome is Outcome.PARTIAL
    assert 250 - len(result.failed[0]) >= pushed, "the other host has them, wherever they stand in the prompt"


def test_a_host_that_never_puts_still_reads(start_daemon: Start, store: SharedStore, keys: Keys) -> None:
    here, there = start_daemon(*store.settings()), start_daemon(*store.settings("remote.push=never"))
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:8])
    assert b.store_keys(keys[8:16]).outcome is Outcome.DONE
    assert states(b, keys[:8]) == [HIT] * 8
    b.client.drain(HANG_S)
    assert len(store.objects()) == 8


def test_a_store_without_room_costs_no_store_and_is_tried_again(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys
) -> None:
    here = start_daemon(*store.settings(), faults=f"remote={switch.path}")
    a = rank_of(here)
    switch.set("put=NO_SPACE")
    assert a.store_keys(keys[:8]).outcome is Outcome.DONE
    until(lambda: remote(here)["not_pushed"].get("no_space") == 8, "it was told")
    switch.set()
    assert a.store_keys(keys[8:16]).outcome is Outcome.DONE
    until(lambda: remote(here)["pushed"]["keys"] == 8, "after a while")
    assert a.loads_right(keys[:16])


# --- restarts --------------------------------------------------------------------------------------------


def test_a_daemon_that_is_killed_amid_a_fetch_serves_what_it_had(
    start_daemon: Start, store: SharedStore, switch: Switch, keys: Keys
) -> None:
    """The next one takes over the memory, which the agent of the first one may no longer write to."""
    here = start_daemon(*store.settings())
    there = start_daemon(*store.settings(), f"memory.pool_file={store.folder / 'pool'}", faults=f"remote={switch.path}")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:32])
    assert b.store_keys(keys[32:48]).outcome is Outcome.DONE
    b.client.drain(HANG_S)
    switch.set("get=hang")
    assert b.client.pin({0: keys[:32]}).promoting == 32
    until(lambda: remote(there)["gets"]["calls"] > 0, "the agent is at it")
    there.kill()
    there.leave_guests()
    switch.set()
    there.start()
    b = rank_of(there)
    assert b.states(keys[32:48]) == [HIT] * 16
    assert b.loads_right(keys[32:48])
    assert states(b, keys[:32]) == [HIT] * 32
    assert b.loads_right(keys[:32])
