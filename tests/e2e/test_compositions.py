"""Engines of one namespace whose KV has one size and is not the same: the later one is refused, also after restarts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Group, KeyState, Ref, digest_layers
from kvoffloadd.errors import RemoteError
from kvoffloadd.model import Dtype
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, demoted, disk_settings, served, store_all
from tests.e2e.rank import HYBRID, PAGE, SIMPLE, Keys, Rank, new_keys

Start = Callable[..., Daemon]
HIT, MISS, PENDING = KeyState.HIT, KeyState.MISS, KeyState.PENDING


def told(dtype: Dtype, *layers: str, part: int = 0, parts: int = 1) -> list[Group]:
    """Returns one group with this composition."""
    ref = Ref(0, 0, PAGE, dtype=dtype, layers=digest_layers(layers))
    return [replace(SIMPLE[0], refs=(ref,), part=part, parts=parts)]


MINE = told("bfloat16", "l0", "l1")
UNLIKE = {
    "dtype": told("float16", "l0", "l1"),
    "layers": told("bfloat16", "l0", "l2"),
    "order": told("bfloat16", "l1", "l0"),
    "dtype alone": told("float16"),
    "layers alone": told("", "l2"),
}
LIKE = {"all": MINE, "nothing": list(SIMPLE), "dtype": told("bfloat16"), "layers": told("", "l0", "l1")}


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 40)


@pytest.fixture
def arena_file(tmp_path: Path) -> Iterator[Path]:
    """Where memory files lie, if there is such a place."""
    path = Path(f"/dev/shm/kvoffloadd-test-compositions-{os.getpid()}")
    if not os.access(path.parent, os.W_OK):
        path = tmp_path / "pool"
    yield path
    path.unlink(missing_ok=True)


def refused(daemon: Daemon, groups: list[Group]) -> None:
    """And its session goes on."""
    rank = daemon.welcome(Rank(daemon.socket, groups, register=False))
    with pytest.raises(RemoteError, match=r"group 0 part 0 has .* in this namespace, not .*") as error:
        rank.client.register(rank.cache)
    assert (error.value.code, error.value.fault) == ("schema_mismatch", "client")
    rank.client.ping()


@pytest.mark.parametrize("unlike", UNLIKE)
def test_equal_sizes_of_unlike_contents_are_refused(daemon: Daemon, keys: Keys, unlike: str) -> None:
    one = daemon.welcome(Rank(daemon.socket, MINE))
    one.store_keys(keys)
    refused(daemon, UNLIKE[unlike])
    assert one.loads_right(keys)


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_alike_or_not_told_is_shared(daemon: Daemon, keys: Keys, like: str, swapped: bool) -> None:
    first, second = (MINE, LIKE[like])[:: -1 if swapped else 1]
    one, other = (daemon.welcome(Rank(daemon.socket, groups)) for groups in (first, second))
    one.store_keys(keys[:20])
    other.store_keys(keys[20:])
    assert other.loads_right(keys)
    assert one.loads_right(keys)
    refused(daemon, UNLIKE["dtype"])
    refused(daemon, UNLIKE["layers"])


def test_ranks_of_a_pipeline_have_other_layers(daemon: Daemon, keys: Keys) -> None:
    """Each its own part of a key. Ranks of one stage are compared with each other."""
    stages = [told("bfloat16", f"l{part}", part=part, parts=2) for part in range(2)]
    ranks = [daemon.welcome(Rank(daemon.socket, stage)) for stage in stages]
    for rank in ranks:
        rank.store_keys(keys)
    assert all(rank.loads_right(keys) for rank in ranks)
    refused(daemon, told("bfloat16", "l1", part=0, parts=2))


def test_groups_are_compared_each_for_itself(daemon: Daemon) -> None:
    """One that is refused takes the others with it: nothing of the registration is known then."""
    first, *others = [replace(group, refs=[replace(ref, dtype="bfloat16") for ref in group.refs]) for group in HYBRID]
    daemon.welcome(Rank(daemon.socket, [first]))
    half = replace(first, refs=[replace(ref, dtype="float16") for ref in first.refs])
    rank = daemon.welcome(Rank(daemon.socket, [*others, half], register=False))
    with pytest.raises(RemoteError, match="group 0 part 0 has elements of bfloat16 in this namespace, not of float16"):
        rank.client.register(rank.cache)
    halves = [replace(group, refs=[replace(ref, dtype="float16") for ref in group.refs]) for group in others]
    daemon.welcome(Rank(daemon.socket, halves))


def test_nothing_on_disk_is_served_to_others_after_a_restart(start_daemon: Start, tmp_path: Path, keys: Keys) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)))
    store_all(daemon.welcome(Rank(daemon.socket, MINE)), keys)
    demoted(daemon, len(keys))
    for groups in (UNLIKE["dtype"], UNLIKE["layers"], list(SIMPLE)):
        restart(daemon)
        rank = daemon.welcome(Rank(daemon.socket, groups))
        assert set(rank.states(keys)) == {MISS}
    restart(daemon)
    rank = daemon.welcome(Rank(daemon.socket, MINE))
    assert set(rank.states(keys)) == {PENDING}
    assert served(rank, keys).all()


def test_what_joined_those_that_told_nothing_is_not_theirs_after_a_restart(
    start_daemon: Start, tmp_path: Path, keys: Keys
) -> None:
    """A session that names no composition comes first, each time, and one that does joins it."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)))
    daemon.welcome(Rank(daemon.socket))
    store_all(daemon.welcome(Rank(daemon.socket, MINE)), keys)
    demoted(daemon, len(keys))
    restart(daemon)
    first = daemon.welcome(Rank(daemon.socket))
    assert set(first.states(keys)) == {MISS}
    other = daemon.welcome(Rank(daemon.socket, UNLIKE["dtype"]))
    assert set(other.states(keys)) == {MISS}
    restart(daemon)
    daemon.welcome(Rank(daemon.socket))
    alike = daemon.welcome(Rank(daemon.socket, MINE))
    assert served(alike, keys).all()


def test_memory_that_is_taken_over_is_served_to_those_alike(start_daemon: Start, arena_file: Path, keys: Keys) -> None:
    daemon = start_daemon(f"memory.pool_file={arena_file}")
    store_all(daemon.welcome(Rank(daemon.socket, MINE)), keys)
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    restart(daemon, kill=True)
    assert daemon.status()["cache"]["keys_adopted"] == len(keys)
    refused(daemon, UNLIKE["dtype"])
    refused(daemon, UNLIKE["layers"])
    for groups in LIKE.values():
        rank = daemon.welcome(Rank(daemon.socket, groups))
        assert set(rank.states(keys)) == {HIT}
        assert served(rank, keys).all()


def restart(daemon: Daemon, *, kill: bool = False) -> None:
    """Restarts the daemon without the sessions that it had."""
    daemon.leave_guests()
    if kill:
        daemon.kill()
    else:
        daemon.stop()
    daemon.start()
