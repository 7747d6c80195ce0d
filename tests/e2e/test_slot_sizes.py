"""Groups whose payloads differ share a memory tier of few slabs: a slab has slots of one size at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KeyState, Outcome, Ref
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk, disk_settings
from tests.e2e.rank import Rank, new_keys

pytestmark = pytest.mark.slow

StartDaemon = Callable[..., Daemon]

PAYLOADS = (49_152, 196_608, 4096, 131_072)
"""Bytes, each of a slot size of its own."""

PROMPTS, KEYS = 12, 6


def groups_of(count: int) -> tuple[Group, ...]:
    """Returns groups with payloads of `count` sizes, each in a separate tensor."""
    return tuple(Group(at, GroupKind.FULL, 16, refs=(Ref(at, 0, size),)) for at, size in enumerate(PAYLOADS[:count]))


@pytest.mark.parametrize("sizes", [2, 3, 4])
def test_a_small_memory_holds_what_fits_whatever_the_sizes(start_daemon: StartDaemon, seed: int, sizes: int) -> None:
    """64 MiB with slabs of the size that suits it: 12 prompts of at most 2.2 MiB each are there in every round."""
    daemon = start_daemon("memory.slab_bytes=0", memory="64MiB")
    rank = daemon.welcome(Rank(daemon.socket, groups_of(sizes)))
    rng = np.random.default_rng(seed)
    prompts = [[new_keys(rng, KEYS) for _ in range(sizes)] for _ in range(PROMPTS)]
    for _ in range(3):
        for prompt in prompts:
            wanted = {group: (keys, rank.blocks_of(group, 0, KEYS)) for group, keys in enumerate(prompt)}
            assert rank.store(wanted).outcome is Outcome.DONE
        for prompt in prompts:
            for group, keys in enumerate(prompt):
                assert rank.states(keys, group) == [KeyState.HIT] * KEYS
                assert rank.loads_right(keys, group)
    assert daemon.status()["cache"]["keys_evicted"] == 0
    assert "slots of" not in daemon.log()


def test_more_sizes_than_slabs_are_told_when_they_are_registered(start_daemon: StartDaemon) -> None:
    """Nothing is stored yet. The line names both settings that would mend it."""
    daemon = start_daemon("memory.slab_bytes=1MiB", memory="2MiB")
    daemon.welcome(Rank(daemon.socket, groups_of(2)))
    assert "slots of" not in daemon.log()
    daemon.welcome(Rank(daemon.socket, groups_of(3)))
    until(lambda: "slots of 3 sizes share 2 slabs" in daemon.log(), "the daemon has said so")
    warning = next(line for line in daemon.log().splitlines() if "slots of 3 sizes" in line)
    assert "lower memory.slab_bytes (now 1048576), or raise memory.capacity_bytes" in warning
    assert "the slots have 4096, 49152, 196608 bytes" in warning
    assert "all of memory is one slab" not in daemon.log()


def test_a_store_that_kept_nothing_says_so(start_daemon: StartDaemon, seed: int) -> None:
    """Memory is one slab, as the log warns at the start. While its slots of one size are held, keys of another get no
    space.
    """
    daemon = start_daemon("memory.slab_bytes=1MiB", memory="1MiB")
    assert "all of memory is one slab, whose slots are of one size at a time" in daemon.log()
    rank = daemon.welcome(Rank(daemon.socket, groups_of(2)))
    rng = np.random.default_rng(seed)
    held, others = new_keys(rng, 4), new_keys(rng, 3)
    assert (rank.store_keys(held).outcome, rank.store_keys(held).reason) == (Outcome.DONE, "")
    lease = rank.client.pin({0: held}).lease
    result = rank.store_keys(others, 1)
    assert (result.outcome, result.bytes, result.reason) == (Outcome.DONE, 0, "no space for 3 of 3 keys")
    assert result.states[0].tolist() == [KeyState.NO_SPACE] * 3
    more = new_keys(rng, 20)  # 21 slots of 48 KiB, 4 of them held
    result = rank.store_keys(more)
    assert (result.outcome, result.reason) == (Outcome.DONE, "no space for 3 of 20 keys")
    assert result.bytes == 17 * PAYLOADS[0]
    rank.client.release(lease)
    assert (rank.store_keys(others, 1).reason, rank.states(others, 1)) == ("", [KeyState.HIT] * 3)


def test_what_is_displaced_is_on_disk_or_counted(start_daemon: StartDaemon, tmp_path: Path, seed: int) -> None:
    """One slab, two sizes: each store takes it over, often before there are checksums of what it displaces."""
    settings = disk_settings((tmp_path / "disk", 256 * MIB))
    daemon = start_daemon("memory.slab_bytes=1MiB", *settings, memory="1MiB")
    rank = daemon.welcome(Rank(daemon.socket, groups_of(2)))
    rng = np.random.default_rng(seed)
    stored = 0
    for at in range(40):
        result = rank.store_keys(new_keys(rng, 4), at % 2)
        stored += result.states[0].tolist().count(KeyState.RESERVED)
    assert stored > 40

    def accounted() -> int:
        now = disk(daemon)
        return int(now["keys"]) + sum(map(int, now["not_demoted"].values()))

    until(lambda: accounted() >= stored, "each key that was stored is on disk, or counted as not written")
    assert accounted() == stored
