"""Keys of two parts: a tensor-parallel engine's ranks store halves, and only the whole is served."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KeyState, KvCache, Outcome, Ref, SharedTensor
from kvoffloadd.device.copyruns import copy_payloads
from kvoffloadd.errors import RemoteError, UsageError
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.e2e.gpu_rank import device
from tests.e2e.rank import PAGE, Keys, Rank, new_keys

HIT, MISS, PENDING, RESERVED = KeyState.HIT, KeyState.MISS, KeyState.PENDING, KeyState.RESERVED


def groups(part: int) -> tuple[Group, ...]:
    """Part 0 is larger than part 1."""
    return (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 6000 - 2000 * part),), parts=2, part=part),)


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 6)


@pytest.fixture
def ranks(daemon: Daemon) -> tuple[Rank, Rank]:
    """Makes the ranks of one instance: part 0 and part 1."""
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


def test_the_first_reservation_of_a_part_wins(standing: Callable[..., Daemon], hold: Hold, keys: Keys) -> None:
    """Two replicas of part 0, and one of part 1, at the same time."""
    daemon = standing(faults=hold.fault)
    winner, loser, other = (daemon.welcome(Rank(daemon.socket, groups(part))) for part in (0, 0, 1))
    with hold:
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
    # A session of another instance gets nothing of it.
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


def test_a_key_that_is_gone_before_a_rank_names_it_is_a_miss_of_that_rank_alone(
    standing: Callable[..., Daemon], keys: Keys, seed: int
) -> None:
    """Its other part was stored before, so that it is whole, and can be evicted, once the first rank has filled what
    was reserved. The store that names it stores all others.
    """
    daemon = standing('memory.policy="lru"', memory="4MiB")
    first, second = engine(daemon, 2)
    generator = np.random.default_rng(seed + 1)
    second.store_keys(keys[:3])
    found = first.client.reserve({0: keys})
    assert found.states[0].tolist() == [RESERVED] * 6
    assert first.store_keys(keys, lease=found.lease).states[0].tolist() == [RESERVED] * 6
    assert first.states(keys) == [HIT] * 3 + [PENDING] * 3
    for _ in range(64):  # twice what memory holds, or more
        beside = new_keys(generator, 32)
        for rank in (first, second):
            assert rank.store_keys(beside).states[0].tolist() == [RESERVED] * 32
    result = second.store_keys(keys, lease=found.lease)
    assert (result.states[0].tolist(), result.outcome) == ([MISS] * 3 + [RESERVED] * 3, Outcome.DONE)
    assert result.valid(0).tolist() == [False] * 3 + [True] * 3
    first.client.release(found.lease)
    assert first.states(keys) == [MISS] * 3 + [HIT] * 3
    for rank in (first, second):
        assert rank.loads_right(keys[3:])


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


# --- a rank that holds several parts ---

FOUR = tuple(Group(0, GroupKind.FULL, 16, refs=(Ref(0, part * 1024, 1024),), parts=4, part=part) for part in range(4))
"""Of an engine of one rank; those of two and of four have two of them each, and one."""


def engine(daemon: Daemon, size: int) -> list[Rank]:
    """Ranks of one instance. Their rows begin with the first part that they hold."""
    instance = os.urandom(16)
    held = 4 // size
    return [
        daemon.welcome(
            Rank(
                daemon.socket,
                [replace(FOUR[rank * held + at], refs=FOUR[at].refs) for at in range(held)],
                instance=instance,
            )
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("stored", [1, 2, 4])
@pytest.mark.parametrize("loaded", [1, 2, 4])
def test_engines_of_several_sizes_share(daemon: Daemon, keys: Keys, stored: int, loaded: int) -> None:
    for rank in engine(daemon, stored):
        assert rank.states(keys) == [MISS] * 6
        result = rank.store_keys(keys)
        assert (result.outcome, result.bytes) == (Outcome.DONE, 6 * 4096 // stored)
    for rank in engine(daemon, loaded):
        assert rank.states(keys) == [HIT] * 6
        assert rank.loads_right(keys)
    assert daemon.verify(payloads=True) == ()


def test_parts_that_lie_side_by_side_are_one_copy(start_daemon: Callable[..., Daemon], keys: Keys) -> None:
    """The parts of a key are next to each other in its rows, and in slots of whole pages. What is hashed while it is
    copied is copied payload by payload.
    """
    daemon = start_daemon()
    pages = tuple(replace(one, refs=(Ref(0, one.part * PAGE, PAGE),)) for one in FOUR)
    rank = daemon.welcome(Rank(daemon.socket, pages))
    rank.store_keys(keys)
    assert rank.loads_right(keys)
    transfers = daemon.status()["transfers"]
    store, load = (transfers[name] for name in ("store", "load"))
    hashed = device() == "host" and copy_payloads is not None
    assert (store["descriptors"], store["copies"]) == (24, 24 if hashed else 6)
    assert (load["descriptors"], load["copies"]) == (24, 24 if hashed else 6)


def test_what_is_there_of_a_key_is_not_stored_again(daemon: Daemon, keys: Keys) -> None:
    half = engine(daemon, 2)[0]
    (whole,) = engine(daemon, 1)
    half.store_keys(keys[:3])
    result = whole.store_keys(keys)
    assert (result.states[0].tolist(), result.bytes) == ([RESERVED] * 6, 3 * 2048 + 3 * 4096)
    assert whole.loads_right(keys)
    assert whole.store_keys(keys).states[0].tolist() == [HIT] * 6


def test_a_part_that_another_stores_leaves_the_key_to_it(
    standing: Callable[..., Daemon], hold: Hold, keys: Keys
) -> None:
    """Nothing of the key is stored twice, and nothing is reported as stored that is not."""
    daemon = standing(faults=hold.fault)
    quarter = engine(daemon, 4)[3]
    (whole,) = engine(daemon, 1)
    with hold:
        theirs = quarter.begin_store({0: (keys[:2], quarter.blocks_of(0, 0, 2))})
        job = whole.begin_store({0: (keys, whole.blocks_of(0, 0, 6))})
        assert job.states[0].tolist() == [PENDING] * 2 + [RESERVED] * 4
    assert whole.wait(job).bytes == 4 * 4096
    assert quarter.wait(theirs).outcome is Outcome.DONE
    assert whole.states(keys) == [MISS] * 2 + [HIT] * 4
    assert whole.store_keys(keys).states[0].tolist() == [RESERVED] * 2 + [HIT] * 4
    assert whole.loads_right(keys)


def test_a_reservation_is_filled_by_ranks_of_several_parts(daemon: Daemon, keys: Keys) -> None:
    first, second = engine(daemon, 2)
    found = first.client.reserve({0: keys})
    assert found.states[0].tolist() == [RESERVED] * 6
    for rank in (first, second):
        result = rank.store_keys(keys, lease=int(found.lease))
        assert (result.states[0].tolist(), result.outcome) == ([RESERVED] * 6, Outcome.DONE)
    first.client.release(found.lease)
    assert second.loads_right(keys)
    one = new_keys(np.random.default_rng(0), 1)
    only = first.client.reserve({0: one}, [0])
    result = first.store_keys(one, lease=int(only.lease))
    assert (result.states[0].tolist(), result.bytes) == ([MISS], 0), "its other part is reserved for nobody"
    first.client.release(only.lease)


@pytest.mark.parametrize(
    ("groups_of", "words"),
    [
        ((FOUR[0], FOUR[1], replace(FOUR[0], refs=())), "part 0 of group 0 is registered twice"),
        ((FOUR[0], replace(FOUR[1], parts=5)), "registered as .*parts 4.* and as .*parts 5"),
        ((FOUR[0], replace(FOUR[1], tokens_per_key=32)), "registered as .* and as "),
    ],
)
def test_parts_that_do_not_go_together(daemon: Daemon, groups_of: tuple[Group, ...], words: str) -> None:
    """The peer checks nothing itself."""
    rank = daemon.welcome(Rank(daemon.socket, FOUR, register=False))
    rank.cache.groups = groups_of
    with pytest.raises(RemoteError, match=words):
        rank.client.register(rank.cache)


def test_what_a_client_checks_itself() -> None:
    tensor = SharedTensor.allocate(4, PAGE)
    with pytest.raises(UsageError, match="a part of a group is named twice"):
        KvCache([tensor], [FOUR[0], FOUR[0]])
    with pytest.raises(UsageError, match="the parts of group 0 differ in more than their refs"):
        KvCache([tensor], [FOUR[0], replace(FOUR[1], blocks_per_key=2)])


def test_the_cap_counts_parts(standing: Callable[..., Daemon], keys: Keys) -> None:
    daemon = standing("limits.keys_per_request=20")
    (whole,) = engine(daemon, 1)
    assert whole.store_keys(keys[:5]).outcome is Outcome.DONE
    with pytest.raises(RemoteError, match="24 keys in one request, counted for each part that is held; the cap is 20"):
        whole.store_keys(keys)
