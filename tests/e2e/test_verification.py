"""Tests bytes that go bad in the arena: planted through the kernel, and found before any engine is served with them."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KeyState, NamespaceSpec, Outcome, Ref, Timeline
from kvoffloadd.device.copyruns import copy_payloads
from scripts.harness.daemon import Daemon
from tests.e2e.gpu_rank import device
from tests.e2e.rank import PAGE, Keys, Rank, content, new_keys

HIT, MISS = KeyState.HIT, KeyState.MISS
Start = Callable[..., Daemon]
Blocks = np.ndarray[Any, np.dtype[np.int64]]


def flip_a_bit(
    daemon: Daemon,
    key: bytes,
    part: int = 0,
    size: int = PAGE,
    group: int = 0,
    *,
    place: int | None = None,
    mask: int = 0x10,
) -> None:
    """Flips a bit at this place of a payload, or in its middle, in the daemon's own memory."""
    payload = content(key, group, part, 0, 0, size).tobytes()
    for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if "kvoffloadd-arena" in os.readlink(entry):
            with entry.open("r+b", buffering=0) as arena:
                at = arena.read().index(payload) + (size // 2 if place is None else place)
                arena.seek(at)
                (byte,) = arena.read(1)
                arena.seek(at)
                arena.write(bytes([byte ^ mask]))
                return
    raise AssertionError("the daemon has no arena")


@pytest.fixture
def verifying(standing: Start) -> Daemon:
    return standing("memory.verify_loads=true")


def touched(blocks: Blocks, good: Blocks) -> Blocks:
    """The blocks that a load may write: those of good keys; and those of bad ones, where the copy finds them out."""
    return blocks if device() == "host" and copy_payloads is not None else blocks[good]


@pytest.fixture
def keys(seed: int, request: pytest.FixtureRequest) -> Keys:
    """Makes keys of this test alone, so that a payload that an earlier test left in a free slot is not mistaken for one
    of them.
    """
    return new_keys(np.random.default_rng([seed, zlib.crc32(request.node.name.encode())]), 6)


def stored(daemon: Daemon, keys: Keys) -> Rank:
    """A rank that has stored the keys; they are sealed."""
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    rank.store_keys(keys)
    assert rank.client.drain(5.0).unsealed == 0
    return rank


def test_a_corrupt_key_is_a_named_failure_and_then_a_miss(verifying: Daemon, keys: Keys) -> None:
    rank = stored(verifying, keys)
    before = verifying.status()["cache"]["keys_corrupt"]
    flip_a_bit(verifying, keys[2].tobytes())
    rank.wipe()
    blocks = rank.blocks_of(0, 10, 6)
    result = rank.load({0: (keys, blocks)})
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [2])
    good = np.array([0, 1, 3, 4, 5])
    assert rank.wrong(0, keys[good], blocks[good]) == 0
    rank.wipe_loaded(0, touched(blocks, good))
    assert rank.clean()
    assert rank.states(keys) == [HIT, HIT, MISS, HIT, HIT, HIT]
    assert verifying.status()["cache"]["keys_corrupt"] == before + 1
    rank.store_keys(keys)
    assert rank.loads_right(keys)


def test_a_corrupt_part_spoils_its_key(verifying: Daemon, keys: Keys) -> None:
    """A rank holds all four: nothing of the key comes."""
    held = [Group(0, GroupKind.FULL, 16, refs=(Ref(0, part * 1024, 1024),), parts=4, part=part) for part in range(4)]
    rank = verifying.welcome(Rank(verifying.socket, held, namespace=NamespaceSpec(model="parts")))
    rank.store_keys(keys)
    assert rank.client.drain(5.0).unsealed == 0
    flip_a_bit(verifying, keys[2].tobytes(), part=3, size=1024)
    rank.wipe()
    blocks = rank.blocks_of(0, 10, 6)
    result = rank.load({0: (keys, blocks)})
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [2])
    good = np.array([0, 1, 3, 4, 5])
    assert rank.wrong(0, keys[good], blocks[good]) == 0
    rank.wipe_loaded(0, touched(blocks, good))
    assert rank.clean()
    assert rank.states(keys) == [HIT, HIT, MISS, HIT, HIT, HIT]


def test_a_corrupt_key_under_a_lease(verifying: Daemon, keys: Keys) -> None:
    rank = stored(verifying, keys)
    lease = rank.client.pin({0: keys}).lease
    flip_a_bit(verifying, keys[0].tobytes())
    blocks = rank.blocks_of(0, 10, 6)
    for _ in range(2):
        rank.wipe()
        result = rank.load({0: (keys, blocks)}, lease=lease)
        assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [0])
        assert rank.wrong(0, keys[1:], blocks[1:]) == 0
    rank.client.release(lease)


def test_what_is_left_of_a_prompt_is_what_the_next_pin_tells(verifying: Daemon, keys: Keys) -> None:
    """One key of each prompt is damaged: of full attention, of a window of two keys, or a state, in that group alone.

    States are there at keys 2, 4 and 6. The bytes that the first load left in its blocks are not needed.
    """
    needs = {0: (GroupKind.FULL, 0), 1: (GroupKind.SLIDING, 2), 2: (GroupKind.MAMBA, 0)}
    groups = [
        Group(number, kind, 16, refs=(Ref(0, number * 1024, 1024),), window_keys=window)
        for number, (kind, window) in needs.items()
    ]
    rank = verifying.welcome(Rank(verifying.socket, groups, namespace=NamespaceSpec(model="prompts")))
    generator = np.random.default_rng(int.from_bytes(keys[0, :4].tobytes()))
    for group, damaged, left in ((0, 4, 4), (0, 0, 0), (1, 5, 4), (1, 4, 4), (2, 5, 4)):
        keys = new_keys(generator, 6)
        for number, which in ((0, slice(6)), (1, slice(6)), (2, slice(1, 6, 2))):
            rank.store_keys(keys[which], number)
        assert rank.client.drain(5.0).unsealed == 0
        flip_a_bit(verifying, keys[damaged].tobytes(), size=1024, group=group)
        lengths = []
        for _ in range(2):
            found = rank.client.pin(dict.fromkeys(needs, keys))
            length = int(found.boundaries[0]) // 16 if len(found.boundaries) else 0
            first = {0: 0, 1: max(0, length - 2), 2: length - 1}
            wanted = {number: (keys[first[number] : length], rank.blocks_of(number, 0, 6)) for number in needs}
            wanted = {number: (prefix, blocks[: len(prefix)]) for number, (prefix, blocks) in wanted.items()}
            rank.wipe()
            result = rank.load(wanted, lease=found.lease) if length else None
            rank.client.release(found.lease)
            lengths.append(length)
        assert lengths == [6, left]
        if result is not None:
            assert result.outcome is Outcome.DONE
            assert all(rank.wrong(number, *one) == 0 for number, one in wanted.items())


def test_only_corrupt_keys(verifying: Daemon, keys: Keys) -> None:
    rank = stored(verifying, keys)
    for key in keys:
        flip_a_bit(verifying, key.tobytes())
    rank.wipe()
    blocks = rank.blocks_of(0, 0, 6)
    result = rank.load({0: (keys, blocks)})
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, list(range(6)))
    rank.wipe_loaded(0, touched(blocks, np.arange(0)))
    assert rank.clean()
    assert rank.states(keys) == [MISS] * 6
    assert verifying.status()["memory"]["used_bytes"] == 0


def test_what_the_self_audit_finds_is_not_served_any_more(daemon: Daemon, keys: Keys) -> None:
    """Where loads are not verified, too: nothing else would keep it from being served."""
    rank = stored(daemon, keys)
    before = daemon.status()["cache"]["keys_corrupt"]
    assert daemon.verify(payloads=True) == ()
    flip_a_bit(daemon, keys[4].tobytes())
    assert daemon.verify() == ()
    (finding,) = daemon.verify(payloads=True)
    assert "does not match its checksum" in finding
    assert rank.states(keys) == [HIT] * 4 + [MISS, HIT]
    assert daemon.status()["cache"]["keys_corrupt"] == before + 1
    assert daemon.says("1 keys did not match their checksums")
    rank.wipe()
    blocks = rank.blocks_of(0, 0, 6)
    result = rank.load({0: (keys, blocks)})
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [4])
    rank.wipe_loaded(0, np.delete(blocks, 4))
    assert rank.clean(), "its block was not touched"
    assert daemon.verify(payloads=True) == ()
    rank.store_keys(keys[4:5])
    assert rank.loads_right(keys), "it can be stored again"


def test_a_load_that_waits_does_not_copy_what_is_found_meanwhile(daemon: Daemon, keys: Keys) -> None:
    timeline = Timeline()
    rank = daemon.welcome(Rank(daemon.socket, timelines=[timeline]))
    rank.store_keys(keys)
    assert rank.client.drain(5.0).unsealed == 0
    rank.wipe()
    ready, blocks = timeline.signal(), rank.blocks_of(0, 10, 6)
    job = rank.client.load(rank.registration, {0: (keys, blocks)}, ready=ready)
    flip_a_bit(daemon, keys[1].tobytes())
    assert len(daemon.verify(payloads=True)) == 1
    ready.reach()
    result = rank.wait(job)
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, [1])
    assert rank.wrong(0, np.delete(keys, 1, axis=0), np.delete(blocks, 1)) == 0
    rank.wipe_loaded(0, np.delete(blocks, 1))
    assert rank.clean()


@pytest.mark.slow
def test_the_operator_s_verify_exits_with_bad_news(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon()
    rank = stored(daemon, keys)
    command = [sys.executable, "-m", "kvoffloadd", "verify", "--payloads", "--socket", str(daemon.socket)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    flip_a_bit(daemon, keys[1].tobytes())
    found = subprocess.run(command, capture_output=True, check=False, text=True)
    assert found.returncode == 1
    assert "1 finding in" in found.stdout
    rank.client.clear()


@pytest.mark.slow
def test_planted_faults_are_seen_by_who_compares(start_daemon: Start, keys: Keys) -> None:
    """`serve --faults corrupt_every=1` is how scripts prove that they would notice."""
    daemon = start_daemon(faults="corrupt_every=1")
    rank = stored(daemon, keys)
    rank.wipe()
    assert rank.load({0: (keys, rank.blocks_of(0, 0, 6))}).outcome is Outcome.DONE
    assert rank.wrong(0, keys, rank.blocks_of(0, 0, 6)) == 1
    assert daemon.status()["devices"]["host"]["faults_planted"] == 1


@pytest.mark.slow
def test_a_device_that_fails_stores_nothing(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon(faults="fail_every=2")
    rank = daemon.welcome(Rank(daemon.socket))
    assert rank.store_keys(keys[:3]).outcome is Outcome.DONE
    result = rank.store_keys(keys[3:])
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.FAILED, [0, 1, 2])
    assert rank.states(keys) == [HIT] * 3 + [MISS] * 3
    assert daemon.status()["memory"]["used_bytes"] == 3 * PAGE
    assert rank.loads_right(keys[:3])
