"""A load that reads from disk copies what it promised when it was admitted, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.errors import RemoteError
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.e2e.disk import MIB, Switch, disk_settings, idle, only_on_disk, store_on_disk
from tests.e2e.rank import Rank, new_keys

pytestmark = pytest.mark.slow


def test_what_others_store_meanwhile_is_not_copied(
    start_daemon: Callable[..., Daemon], hold: Hold, tmp_path: Path, seed: int
) -> None:
    """Found by the stress: a key that was pending at admission, and complete when the disk had been read, was copied
    into a block that the client took to be its own.
    """
    switch = Switch(tmp_path)
    settings = (*disk_settings((tmp_path / "disk", 64 * MIB)), "disk.stuck_s=600")
    daemon = start_daemon(*settings, memory="1MiB", faults=f"{hold.fault},disk={switch.path}")
    rng = np.random.default_rng(seed)
    rank = daemon.welcome(Rank(daemon.socket))
    other = daemon.welcome(Rank(daemon.socket))
    keys = new_keys(rng, 64 * 6)
    store_on_disk(daemon, rank, keys)
    on_disk = only_on_disk(rank, keys)[:2]
    idle(daemon)
    switch.set("read_delay_s=3600")
    fresh = new_keys(rng, 1)
    with hold:
        storing = other.begin_store({0: (fresh, np.array([0]))})
        assert rank.states(fresh) == [KeyState.PENDING], "it is being stored"
        rank.wipe()
        wanted = np.concatenate([on_disk[:1], fresh, on_disk[1:]])
        job = rank.client.load(rank.registration, {0: (wanted, np.array([10, 11, 12]))})
        assert job.states[0].tolist() == [KeyState.HIT, KeyState.PENDING, KeyState.HIT]
    assert other.wait(storing).outcome is Outcome.DONE
    assert rank.states(fresh) == [KeyState.HIT], "before the disk has been read"
    switch.set()
    result = rank.wait(job)
    assert result.outcome is Outcome.PARTIAL
    assert result.failed[0].tolist() == [1]
    assert rank.wrong(0, on_disk, np.array([10, 12])) == 0
    rank.wipe_loaded(0, np.array([10, 12]))
    assert rank.clean()


def test_two_keys_from_disk_can_not_go_to_one_block(
    start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int
) -> None:
    """The daemon refuses it at once, as from memory: later, no request would be left to answer."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)), memory="1MiB")
    rank = daemon.welcome(Rank(daemon.socket))
    keys = new_keys(np.random.default_rng(seed), 64 * 6)
    store_on_disk(daemon, rank, keys)
    on_disk = only_on_disk(rank, keys)[:2]
    with pytest.raises(RemoteError, match="duplicate"):
        rank.client.load(rank.registration, {0: (on_disk, np.array([7, 7]))})
    assert rank.states(on_disk) == [KeyState.PENDING] * 2, "nothing was begun"
    assert rank.load({0: (on_disk, np.array([7, 8]))}).outcome is Outcome.DONE
