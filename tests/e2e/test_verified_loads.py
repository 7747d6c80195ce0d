"""Bits that flip in the arena of a daemon with its defaults: a load to shared memory never passes them off as good."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KeyState, NamespaceSpec, Outcome, Ref
from kvoffloadd.device.copyruns import copy_payloads
from kvoffloadd.model import NO_BLOCK
from scripts.harness.daemon import Daemon
from scripts.harness.damage import flip_in_files
from tests.device.hiding import hide
from tests.e2e.daemons import Hold
from tests.e2e.rank import HYBRID, PAGE, ROWS, SIMPLE, Keys, Rank, content, new_keys
from tests.e2e.test_verification import flip_a_bit

Start = Callable[..., Daemon]
HIT, MISS = KeyState.HIT, KeyState.MISS
LAYOUTS = {"pages": SIMPLE, "runs of odd sizes": ROWS, "several groups": HYBRID}
PAIRS = (Group(0, GroupKind.FULL, 32, refs=(Ref(0, 0, PAGE), Ref(1, 8, 100, 5, 128)), blocks_per_key=2),)
"""Keys of two blocks, of which a load may want one."""

with_helper = pytest.mark.skipif(copy_payloads is None, reason="nothing hashes while it copies here")
VERIFYING = ("auto", "true") if copy_payloads is not None else ("true",)


def some_keys(seed: int, count: int, *name: object) -> Keys:
    """Makes keys of one test alone, so that a payload that an earlier test left in a free slot is not mistaken for one
    of them.
    """
    return new_keys(np.random.default_rng([seed, zlib.crc32(repr(name).encode())]), count)


def joined(daemon: Daemon, groups: tuple[Group, ...], num_blocks: int = 64) -> Rank:
    """Returns a rank with these groups, in a separate namespace."""
    namespace = NamespaceSpec(model=f"flips {zlib.crc32(repr(groups).encode())}")
    rank: Rank = daemon.welcome(Rank(daemon.socket, groups, num_blocks=num_blocks, namespace=namespace))
    return rank


def stored(daemon: Daemon, groups: tuple[Group, ...], keys: Keys, num_blocks: int = 64) -> Rank:
    """A rank that has stored the keys in all groups; they are sealed."""
    rank = joined(daemon, groups, num_blocks)
    rank.store({one.group: (keys, rank.blocks_of(one.group, 0, len(keys))) for one in groups})
    assert rank.client.drain(5.0).unsealed == 0
    return rank


def flip(daemon: Daemon, rank_groups: tuple[Group, ...], key: bytes, group: int = 0) -> None:
    """A bit of the key's payload in this group."""
    first = next(one for one in rank_groups if one.group == group).refs[0]
    flip_a_bit(daemon, key, size=first.payload_bytes, group=group)


def way(daemon: Daemon) -> str:
    """Returns how the daemon verifies what it loads to shared memory, by its status."""
    found: str = daemon.status()["devices"]["host"]["loads_verified"]
    return found


@pytest.mark.parametrize("verify", VERIFYING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_fails_its_key_and_no_other(standing: Start, layout: str, verify: str, seed: int) -> None:
    groups = LAYOUTS[layout]
    daemon = standing() if verify == "auto" else standing("memory.verify_loads=true")
    for group in (one.group for one in groups):
        keys = some_keys(seed, 6, layout, verify, group)
        rank = stored(daemon, groups, keys)
        before = daemon.status()["cache"]["keys_corrupt"]
        flip(daemon, groups, keys[3].tobytes(), group)
        rank.wipe()
        wanted = {one.group: (keys, rank.blocks_of(one.group, 10, 6)) for one in groups}
        result = rank.load(wanted)
        assert result.outcome is Outcome.PARTIAL
        assert [failed.tolist() for failed in result.failed] == [[3] * (one.group == group) for one in groups]
        for number, (_, blocks) in wanted.items():
            good = np.delete(np.arange(6), 3) if number == group else np.arange(6)
            assert rank.wrong(number, keys[good], blocks[good]) == 0
            rank.wipe_loaded(number, blocks)
        assert rank.clean(), "nothing but the blocks of the load was written"
        assert rank.states(keys, group) == [HIT] * 3 + [MISS] + [HIT] * 2
        assert daemon.status()["cache"]["keys_corrupt"] == before + 1
        rank.store_keys(keys, group)
        assert rank.loads_right(keys, group)
        rank.close()


@with_helper
def test_it_says_how_it_verifies(start_daemon: Start) -> None:
    ways = {
        ("memory.verify_loads=auto",): "copied",
        ("memory.verify_loads=true",): "copied",
        ("memory.verify_loads=false",): "adopted",
    }
    assert {settings: way(start_daemon(*settings)) for settings in ways} == ways
    assert way(start_daemon()) == "copied"


@pytest.mark.parametrize(("verify", "expected"), [("auto", "adopted"), ("true", "before"), ("false", "adopted")])
def test_without_the_helper_loads_are_verified_on_request(
    start_daemon: Start, verify: str, expected: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hide(tmp_path, ("native",)).items():
        monkeypatch.setenv(name, value)
    daemon = start_daemon(f"memory.verify_loads={verify}", "server.use_uvloop=false")
    assert way(daemon) == expected
    keys = some_keys(seed, 6, verify)
    rank = stored(daemon, SIMPLE, keys)
    flip(daemon, SIMPLE, keys[3].tobytes())
    rank.wipe()
    blocks = rank.blocks_of(0, 10, 6)
    result = rank.load({0: (keys, blocks)})
    if verify != "true":
        assert (result.outcome, rank.wrong(0, keys, blocks)) == (Outcome.DONE, 1), "as documented"
        rank.client.clear()
        return
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [3])
    rank.wipe_loaded(0, np.delete(blocks, 3))
    assert rank.clean(), "the bad one was not copied"


@with_helper
@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
def test_of_keys_that_are_loaded_in_part(daemon: Daemon, damaged: int, seed: int) -> None:
    """Its payload is not copied whole: it is checked before. The other keys are checked as ever."""
    keys = some_keys(seed, 6, damaged)
    rank = stored(daemon, PAIRS, keys)
    flip(daemon, PAIRS, keys[damaged].tobytes())
    blocks = rank.blocks_of(0, 20, 6)
    blocks[0, 0] = blocks[3, 1] = NO_BLOCK
    rank.wipe()
    result = rank.load({0: (keys, blocks)})
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [damaged])
    good = np.delete(np.arange(6), damaged)
    assert rank.wrong(0, keys[good], blocks[good]) == 0
    in_part = damaged in (0, 3)
    rank.wipe_loaded(0, blocks[good] if in_part else blocks)
    assert rank.clean()


@with_helper
def test_of_payloads_that_are_too_large_to_be_hashed_meanwhile(standing: Start, seed: int) -> None:
    """Half a chunk is what a copy hashes, at most: they are checked before."""
    daemon = standing("copy.chunk_bytes=64KiB")
    for pages, before in ((8, False), (9, True)):
        groups = (replace(SIMPLE[0], refs=(Ref(0, 0, pages * PAGE),)),)
        keys = some_keys(seed, 6, pages)
        rank = stored(daemon, groups, keys)
        flip(daemon, groups, keys[5].tobytes())
        blocks = rank.blocks_of(0, 20, 6)
        rank.wipe()
        result = rank.load({0: (keys, blocks)})
        assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [5])
        assert rank.wrong(0, keys[:5], blocks[:5]) == 0
        assert (rank.wrong(0, keys[5:], blocks[5:]) == 1) != before
        rank.wipe_loaded(0, blocks)
        assert rank.clean()


@with_helper
@pytest.mark.parametrize("groups", [SIMPLE, ROWS], ids=["pages", "runs"])
def test_of_a_load_in_many_chunks(standing: Start, groups: tuple[Group, ...], seed: int, rng: random.Random) -> None:
    daemon = standing("copy.chunk_bytes=64KiB")
    keys = some_keys(seed, 1000, groups)
    rank = stored(daemon, groups, keys, num_blocks=2000)
    damaged = sorted(rng.sample(range(1000), 7))
    for at in damaged:
        flip(daemon, groups, keys[at].tobytes())
    for expedited in (True, False):
        blocks = np.random.default_rng(seed).permutation(np.arange(1000, 2000))
        result = rank.load({0: (keys, blocks)}, expedited=expedited)
        assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, damaged)
        good = np.delete(np.arange(1000), damaged)
        assert rank.wrong(0, keys[good], blocks[good]) == 0
    assert rank.states(keys) == [MISS if at in damaged else HIT for at in range(1000)]


@with_helper
def test_several_loads_of_the_same_wrong_key(start_daemon: Start, hold: Hold, seed: int) -> None:
    """Their copies are under way at the same time, and one has the key under a lease: all of them name it; it counts
    once, and its slot goes with the last of them.
    """
    daemon = start_daemon(faults=hold.fault)
    keys = some_keys(seed, 6)
    rank = stored(daemon, SIMPLE, keys)
    lease = rank.client.pin({0: keys}).lease
    flip(daemon, SIMPLE, keys[2].tobytes())
    with hold:
        jobs = [
            rank.client.load(rank.registration, {0: (loaded, rank.blocks_of(0, 10 * at, len(loaded)))}, lease=held)
            for at, (loaded, held) in enumerate([(keys, 0), (keys[2:], lease), (keys[:3], 0), (keys[:2], 0)])
        ]
        assert daemon.status()["running"]["jobs"] == 4
    failed = [result.failed[0].tolist() for result in map(rank.wait, jobs)]
    assert failed == [[2], [0], [2], []]
    assert daemon.status()["cache"]["keys_corrupt"] == 1
    assert daemon.status()["memory"]["used_bytes"] == 6 * PAGE, "the lease still holds it"
    rank.client.release(lease)
    assert daemon.status()["memory"]["used_bytes"] == 5 * PAGE
    assert rank.states(keys) == [HIT, HIT, MISS, HIT, HIT, HIT]


@with_helper
def test_a_key_that_is_cleared_while_it_is_copied(start_daemon: Start, hold: Hold, seed: int) -> None:
    """It is no key of the cache any more, and wrong all the same."""
    daemon = start_daemon(faults=hold.fault)
    keys = some_keys(seed, 6)
    rank = stored(daemon, SIMPLE, keys)
    flip(daemon, SIMPLE, keys[2].tobytes())
    blocks = rank.blocks_of(0, 10, 6)
    with hold:
        job = rank.client.load(rank.registration, {0: (keys, blocks)})
        rank.client.clear()
    result = rank.wait(job)
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [2])
    assert rank.wrong(0, np.delete(keys, 2, axis=0), np.delete(blocks, 2)) == 0
    assert daemon.status()["cache"]["keys_corrupt"] == 0
    assert daemon.status()["memory"]["used_bytes"] == 0


@with_helper
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_any_bit_of_a_payload(daemon: Daemon, groups: tuple[Group, ...], seed: int, rng: random.Random) -> None:
    """The first, the last, any other: of the bytes as they lie in memory."""
    keys = some_keys(seed, 4, "any", groups)
    rank = stored(daemon, groups, keys)
    for group, at in product([one.group for one in groups], range(4)):
        size = next(one for one in groups if one.group == group).refs[0].payload_bytes
        place = (0, size - 1, *(rng.randrange(size) for _ in range(2)))[at]
        flip_a_bit(daemon, keys[at].tobytes(), size=size, group=group, place=place, mask=1 << rng.randrange(8))
    wanted = {one.group: (keys, rank.blocks_of(one.group, 20, 4)) for one in groups}
    assert [failed.tolist() for failed in rank.load(wanted).failed] == [[0, 1, 2, 3]] * len(groups)


@with_helper
def test_what_an_earlier_daemon_left_is_verified_in_any_case(start_daemon: Start, seed: int, tmp_path: Path) -> None:
    daemon = start_daemon(f"memory.pool_file={tmp_path / 'pool'}", "memory.verify_loads=false")
    keys = some_keys(seed, 6)
    stored(daemon, SIMPLE, keys).close()
    daemon.stop()
    assert flip_in_files(tmp_path, content(keys[1].tobytes(), 0, 0, 0, 0, PAGE).tobytes()) == 1
    daemon.start()
    rank = joined(daemon, SIMPLE)
    blocks = rank.blocks_of(0, 10, 6)
    for _ in range(2):
        rank.wipe()
        result = rank.load({0: (keys, blocks)})
        assert result.failed[0].tolist() == [1], "dropped, and then a miss"
        good = np.delete(np.arange(6), 1)
        assert rank.wrong(0, keys[good], blocks[good]) == 0
    assert daemon.status()["cache"]["keys_corrupt"] == 1
