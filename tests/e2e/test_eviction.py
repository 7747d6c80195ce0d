"""Tests a small memory tier under pressure: exactly what is needed goes, what is held stays, and a store that gets
nothing reports it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KeyState, NamespaceSpec, Outcome, Ref
from scripts.harness.daemon import Daemon
from tests.e2e.rank import Rank, new_keys

pytestmark = pytest.mark.slow

SLOTS = 16
HIT, MISS, RESERVED, NO_SPACE = KeyState.HIT, KeyState.MISS, KeyState.RESERVED, KeyState.NO_SPACE


@pytest.fixture
def small(start_daemon: Callable[..., Daemon]) -> Daemon:
    """Room for 16 keys of one page."""
    return start_daemon(memory="64KiB")


@pytest.fixture
def rank(small: Daemon) -> Rank:
    found: Rank = small.welcome(Rank(small.socket))
    return found


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def evicted(daemon: Daemon) -> int:
    return int(daemon.status()["cache"]["keys_evicted"])


def test_exactly_as_many_go_as_are_needed(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    assert rank.store_keys(keys).bytes == SLOTS * 4096
    assert (evicted(small), rank.states(keys)) == (0, [HIT] * SLOTS)
    gone = 0
    for count in (1, 3, 7):
        more = new_keys(rng, count)
        assert rank.store_keys(more).states[0].tolist() == [RESERVED] * count
        gone += count
        assert evicted(small) == gone
        assert rank.states(more) == [HIT] * count
        assert small.status()["memory"]["used_bytes"] == SLOTS * 4096
    assert rank.states(keys).count(HIT) == SLOTS - gone


def test_what_will_not_be_used_again_goes_first(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    kept, done, others = new_keys(rng, 6), new_keys(rng, 6), new_keys(rng, 4)
    for keys in (kept, others, done):
        rank.store_keys(keys)
    rank.client.keep({0: done}, "drop")
    rank.client.keep({0: kept}, "soon")
    rank.client.keep({0: new_keys(rng, 3)}, "drop")  # no tier has these
    cache = small.status()["cache"]
    assert (cache["keys_soon"], cache["keys_done"]) == (6, 6)
    for _ in range(3):
        rank.store_keys(new_keys(rng, 2))
    assert (rank.states(kept), rank.states(others)) == ([HIT] * 6, [HIT] * 4)
    assert rank.states(done) == [MISS] * 6


def test_what_an_engine_has_itself_stays(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    """Keys that it reports as used count as if they had been loaded; of a key that is not there nothing is kept."""
    used, absent = new_keys(rng, 4), new_keys(rng, 2)
    rank.store_keys(used)
    for _ in range(20):
        rank.client.touch({0: np.concatenate([used, absent])})
        rank.store_keys(new_keys(rng, 4))
    assert rank.states(np.concatenate([used, absent])) == [HIT] * 4 + [MISS] * 2
    cache = small.status()["cache"]
    assert (cache["keys_touched"], cache["keys_evicted"]) == (80, 4 + 80 - SLOTS)


def test_hints_are_no_leases(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    rank.store_keys(keys)
    for _ in range(3):
        rank.client.keep({0: np.concatenate([keys, keys])}, "soon")
    rank.store_keys(new_keys(rng, SLOTS))
    assert rank.states(keys) == [MISS] * SLOTS


def test_keys_of_many_parts_of_which_one_is_stored_leave_records_to_others(
    start_daemon: Callable[..., Daemon], rng: np.random.Generator
) -> None:
    """A key has a record for each part that it could have: they are shared out as slots are."""
    daemon = start_daemon(memory="4MiB")
    wide = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 4096),), parts=1024, part=0),)
    first = daemon.welcome(Rank(daemon.socket, wide, num_blocks=256, namespace=NamespaceSpec(model="wide")))
    keys = new_keys(rng, 200)
    took = first.store_keys(keys).states[0].tolist().count(RESERVED)
    assert 0 < took < 200, "there are not so many"
    other = daemon.welcome(Rank(daemon.socket))
    own, more = new_keys(rng, 64), new_keys(rng, 64)
    assert other.store_keys(own).states[0].tolist() == [RESERVED] * 64
    assert other.loads_right(own)
    assert evicted(daemon) <= 1
    first.client.clear()
    assert other.store_keys(more).states[0].tolist() == [RESERVED] * 64
    assert other.states(own) == other.states(more) == [HIT] * 64
    assert daemon.verify(payloads=True) == ()


def test_a_request_for_more_than_there_is_gets_the_first_ones(rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS + 5)
    result = rank.store_keys(keys)
    assert result.outcome is Outcome.DONE
    assert result.states[0].tolist() == [RESERVED] * SLOTS + [NO_SPACE] * 5
    assert rank.states(keys) == [HIT] * SLOTS + [MISS] * 5
    assert rank.loads_right(keys[:SLOTS])


def test_what_a_request_names_is_no_victim_of_it(rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    rank.store_keys(keys)
    both = np.concatenate([keys[:10], new_keys(rng, 6), keys[10:12]])
    # 12 of the 16 are named, so that 4 can go.
    wanted = [HIT] * 10 + [RESERVED] * 4 + [NO_SPACE] * 2 + [HIT] * 2
    assert rank.store_keys(both).states[0].tolist() == wanted
    assert rank.states(both) == [HIT] * 14 + [MISS] * 2 + [HIT] * 2


@pytest.mark.parametrize("by", ["store", "reserve"])
def test_what_a_request_names_in_another_group_is_no_victim_of_it(
    small: Daemon, rng: np.random.Generator, by: str
) -> None:
    rank = small.welcome(Rank(small.socket, [Group(n, GroupKind.FULL, 16, refs=(Ref(n, 0, 4096),)) for n in range(2)]))
    keys, others = new_keys(rng, 12), new_keys(rng, 12)
    rank.store_keys(keys)
    if by == "store":
        both = {group: (those, rank.blocks_of(group, 0, 12)) for group, those in ((0, keys), (1, others))}
        states = rank.store(both).states
    else:
        reserved = rank.client.reserve({0: keys, 1: others})
        states = reserved.states
        rank.client.release(reserved.lease)
    assert [of_group.tolist() for of_group in states] == [[HIT] * 12, [RESERVED] * 4 + [NO_SPACE] * 8]
    assert rank.states(keys) == [HIT] * 12
    assert evicted(small) == 0


def test_pinned_keys_outlive_any_pressure(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    rank.store_keys(keys)
    lease = rank.client.pin({0: keys[3:9]}).lease
    for _ in range(20):
        rank.store_keys(new_keys(rng, 7))
    assert rank.states(keys[3:9]) == [HIT] * 6
    assert evicted(small) == 20 * 7
    assert rank.loads_right(keys[3:9], lease=lease)
    rank.client.release(lease)
    for _ in range(8):
        rank.store_keys(new_keys(rng, SLOTS))
    assert rank.states(keys) == [MISS] * SLOTS


def test_no_space_when_all_is_pinned(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    rank.store_keys(keys)
    lease = rank.client.pin({0: keys}).lease
    before = small.status()
    more = new_keys(rng, 3)
    for _ in range(3):
        result = rank.store_keys(more)
        assert (result.states[0].tolist(), result.bytes) == ([NO_SPACE] * 3, 0)
        assert not result.valid(0).any()
        assert rank.client.reserve({0: more}).lease == 0
    after = small.status()
    assert after["cache"]["keys_without_space"] - before["cache"]["keys_without_space"] == 18
    assert after["memory"] == before["memory"]
    assert rank.states(more) == [MISS] * 3
    rank.client.release(lease)
    assert rank.store_keys(more).states[0].tolist() == [RESERVED] * 3


def test_pins_of_two_count_twice(rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    rank.store_keys(keys)
    first, second = (rank.client.pin({0: keys}).lease for _ in range(2))
    rank.client.release(first)
    assert rank.store_keys(new_keys(rng, 1)).states[0].tolist() == [NO_SPACE]
    rank.client.release(second)
    assert rank.store_keys(new_keys(rng, 1)).states[0].tolist() == [RESERVED]


def test_reserved_slots_are_held_until_they_are_released(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    found = rank.client.reserve({0: keys})
    assert found.states[0].tolist() == [RESERVED] * SLOTS
    assert rank.states(keys) == [KeyState.PENDING] * SLOTS
    other = small.welcome(Rank(small.socket))
    assert other.store_keys(new_keys(rng, 1)).states[0].tolist() == [NO_SPACE]
    assert rank.store_keys(keys[:4], lease=found.lease).outcome is Outcome.DONE
    assert other.store_keys(new_keys(rng, 4)).states[0].tolist() == [RESERVED] * 4
    rank.client.release(found.lease)
    assert small.status()["memory"]["used_bytes"] == 4 * 4096
    assert other.store_keys(new_keys(rng, SLOTS)).states[0].tolist() == [RESERVED] * SLOTS


def test_the_end_of_an_instance_ends_its_leases(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, SLOTS)
    rank.store_keys(keys)
    instance = bytes(range(16))
    scheduler, worker = (Rank(small.socket, instance=instance) for _ in range(2))
    scheduler.client.pin({0: keys[:8]})
    scheduler.client.reserve({0: new_keys(rng, 2)})
    scheduler.close()
    assert rank.store_keys(new_keys(rng, 8)).states[0].tolist() == [RESERVED] * 6 + [NO_SPACE] * 2
    worker.close()
    assert rank.store_keys(new_keys(rng, SLOTS)).states[0].tolist() == [RESERVED] * SLOTS


def test_keys_that_are_alike_harm_nobody(start_daemon: Callable[..., Daemon], rng: np.random.Generator) -> None:
    """Whole words that differ in their top bits alone: by a sum of words, thousands of them would have one hash."""
    daemon = start_daemon(memory="32MiB")
    other = daemon.welcome(Rank(daemon.socket, namespace=NamespaceSpec(model="other")))
    theirs = new_keys(rng, 50)
    other.store_keys(theirs)
    rank = daemon.welcome(Rank(daemon.socket))
    top = np.arange(16, dtype=np.uint64) << np.uint64(60)
    alike = np.stack([column.ravel() for column in np.meshgrid(top, top, top, top)], axis=1)[:8000]
    reserved = rank.client.reserve({0: alike.tobytes()})
    assert (reserved.states[0] == RESERVED).all()
    assert other.states(theirs) == [HIT] * len(theirs)
    assert rank.client.lookup({0: alike.tobytes()}).states[0].tolist() == [KeyState.PENDING] * len(alike)
    rank.client.release(reserved.lease)
