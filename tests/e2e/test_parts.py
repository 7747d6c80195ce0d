"""Keys of two parts: a tensor-parallel engine's ranks store halves, and only the whole is served."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KeyState, Outcome, Ref
from kvoffloadd.errors import RemoteError
from tests.e2e.process import Daemon
from tests.e2e.rank import Keys, Rank, new_keys

HIT, MISS, PENDING, RESERVED = KeyState.HIT, KeyState.MISS, KeyState.PENDING, KeyState.RESERVED


def groups(part: int) -> tuple[Group, ...]:
    """Part 0 is larger than part 1."""
    return (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 6000 - 2000 * part),), parts=2, part=part),)


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 6)


@pytest.fixture
def ranks(daemon: Daemon) -> tuple[Rank, Rank]:
    """Of one instance: part 0 and part 1."""
    instance = os.urandom(16)
    first, second = (daemon.welcome(Rank(daemon.socket, groups(part), instance=instance)) for part in (0, 1))
    return first, second


def test_half_a_key_never_hits(daemon: Daemon, ranks: tuple[Rank, Rank], keys: Keys) -> None:
    first, second = ranks
    assert first.store_keys(keys).outcome is Outcome.DONE
    assert first.states(keys) == second.states(keys) == [MISS] * 6
    first.wipe()
    result = first.load({0: (keys, first.blocks_of(0, 0, 6))})
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, list(range(6)))
    assert first.clean()
    assert len(first.client.snapshot(0)) == 0
    assert first.client.pin({0: keys}).lease == 0

    assert second.store_keys(keys[:4]).outcome is Outcome.DONE
    assert first.states(keys) == second.states(keys) == [HIT] * 4 + [MISS] * 2
    assert first.loads_right(keys[:4])
    assert second.loads_right(keys[:4])
    assert daemon.verify(payloads=True) == ()


def test_a_part_that_is_there_is_not_stored_again(ranks: tuple[Rank, Rank], keys: Keys) -> None:
    first, _ = ranks
    first.store_keys(keys[:3])
    assert first.store_keys(keys).states[0].tolist() == [HIT] * 3 + [RESERVED] * 3


def test_the_first_reservation_of_a_part_wins(standing: Callable[..., Daemon], keys: Keys) -> None:
    """Two replicas of part 0, and one of part 1, at the same time."""
    daemon = standing(faults="delay_s=0.15")
    winner, loser, other = (daemon.welcome(Rank(daemon.socket, groups(part))) for part in (0, 0, 1))
    won = winner.begin_store({0: (keys, winner.blocks_of(0, 0, 6))})
    assert won.states[0].tolist() == [RESERVED] * 6
    lost = loser.begin_store({0: (keys, loser.blocks_of(0, 0, 6))})
    assert lost.states[0].tolist() == [PENDING] * 6
    assert loser.wait(lost).bytes == 0
    theirs = other.begin_store({0: (keys, other.blocks_of(0, 0, 6))})
    assert theirs.states[0].tolist() == [RESERVED] * 6
    assert other.states(keys) == [PENDING] * 6
    assert winner.wait(won).outcome is other.wait(theirs).outcome is Outcome.DONE
    assert loser.store_keys(keys).states[0].tolist() == [HIT] * 6
    assert loser.loads_right(keys)


def test_a_scheduler_reserves_all_parts_and_its_ranks_fill_them(daemon: Daemon, keys: Keys) -> None:
    instance = os.urandom(16)
    scheduler = daemon.welcome(Rank(daemon.socket, (), instance=instance, role="scheduler", register=False)).client
    first, second = (daemon.welcome(Rank(daemon.socket, groups(part), instance=instance)) for part in (0, 1))
    found = scheduler.reserve({0: keys})
    assert found.states[0].tolist() == [RESERVED] * 6
    assert scheduler.reserve({0: keys}).states[0].tolist() == [PENDING] * 6
    # Whoever is not of the instance gets nothing of it.
    stranger = daemon.welcome(Rank(daemon.socket, groups(0)))
    assert stranger.store_keys(keys).states[0].tolist() == [PENDING] * 6
    with pytest.raises(RemoteError, match="bad_lease"):
        stranger.store_keys(keys, lease=int(found.lease))

    assert first.store_keys(keys, lease=found.lease).outcome is Outcome.DONE
    assert second.store_keys(keys[:4], lease=found.lease).outcome is Outcome.DONE
    assert first.states(keys) == [HIT] * 4 + [PENDING] * 2
    scheduler.release(found.lease)
    assert first.states(keys) == [HIT] * 4 + [MISS] * 2
    assert second.store_keys(keys[4:]).states[0].tolist() == [RESERVED] * 2
    assert first.loads_right(keys)
    assert second.loads_right(keys)


def test_one_part_of_a_key_can_be_reserved(daemon: Daemon, ranks: tuple[Rank, Rank], keys: Keys) -> None:
    first, second = ranks
    found = first.client.reserve({0: keys}, parts=[1])
    assert found.states[0].tolist() == [RESERVED] * 6
    assert first.store_keys(keys).states[0].tolist() == [RESERVED] * 6
    assert second.store_keys(keys).states[0].tolist() == [PENDING] * 6
    assert second.store_keys(keys, lease=found.lease).outcome is Outcome.DONE
    assert second.loads_right(keys)
    assert daemon.status()["memory"]["used_bytes"] == 6 * (8192 + 4096)
    second.client.release(found.lease)


def test_parts_of_a_key_go_together(start_daemon: Callable[..., Daemon], seed: int) -> None:
    """Eviction leaves no half a key behind: memory for 8 keys of 2 + 1 pages."""
    daemon = start_daemon("memory.slab_bytes=8KiB", memory="96KiB")
    first, second = (daemon.welcome(Rank(daemon.socket, groups(part))) for part in (0, 1))
    rng = np.random.default_rng(seed)
    for _ in range(10):
        keys = new_keys(rng, 3)
        first.store_keys(keys)
        second.store_keys(keys)
    assert daemon.verify() == ()
    status = daemon.status()
    held = first.client.snapshot(0)
    assert len(held) == status["cache"]["keys"] >= 3
    assert status["memory"]["used_bytes"] == 12288 * len(held)
    assert first.loads_right(held)
    assert second.loads_right(held)


def test_a_leased_store_of_a_part_that_was_there_before(ranks: tuple[Rank, Rank], keys: Keys) -> None:
    """A rank died after its store, the other's never came: the reservation takes the parts that lack, and no others."""
    first, second = ranks
    first.store_keys(keys[:2])
    reserved = first.client.reserve({0: keys})
    assert reserved.states[0].tolist() == [RESERVED] * 6
    job = first.client.store(first.registration, {0: (keys, first.blocks_of(0, 0, 6))}, lease=reserved.lease)
    assert first.wait(job).states[0].tolist() == [HIT] * 2 + [RESERVED] * 4
    job = second.client.store(second.registration, {0: (keys, second.blocks_of(0, 0, 6))}, lease=reserved.lease)
    assert second.wait(job).outcome is Outcome.DONE
    assert first.states(keys) == [HIT] * 6
