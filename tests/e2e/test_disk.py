"""Keys outlive memory, and the daemon: what is stored comes back from disk, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvoffloadd.client import KeyState, Outcome
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, demoted, disk, disk_settings
from tests.e2e.rank import HYBRID, Rank, new_keys

GROUPS = (0, 1, 2)


def test_keys_that_memory_has_evicted_come_back_from_disk(
    start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int
) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)), memory="1MiB")
    rank = daemon.welcome(Rank(daemon.socket))
    rng = np.random.default_rng(seed)
    lots = [new_keys(rng, 60) for _ in range(20)]
    for number, keys in enumerate(lots):
        assert rank.store_keys(keys).outcome is Outcome.DONE
        demoted(daemon, 60 * (number + 1))
    assert rank.states(lots[0]) == [KeyState.PENDING] * 60  # 1 MiB of memory holds the last 256
    for keys in lots:
        assert rank.loads_right(keys)
    status = disk(daemon)
    assert status["promoted"]["keys"] >= 1200 - 256
    assert status["corrupt"] == 0


def test_a_restart_finds_everything_again(start_daemon: Callable[..., Daemon], tmp_path: Path, seed: int) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 * MIB)))
    rank = daemon.welcome(Rank(daemon.socket, HYBRID))
    rng = np.random.default_rng(seed)
    keys = {group: new_keys(rng, 20) for group in GROUPS}
    rank.store({group: (keys[group], rank.blocks_of(group, 0, 20)) for group in GROUPS})
    demoted(daemon, 60)
    for end in (daemon.stop, daemon.kill):
        daemon.leave_guests()
        end()
        daemon.start()
        rank = daemon.welcome(Rank(daemon.socket, HYBRID))
        assert disk(daemon)["keys"] == 60
        rank.wipe()
        wanted = {group: (keys[group], rank.blocks_of(group, 20, 20)) for group in GROUPS}
        assert rank.load(wanted).outcome is Outcome.DONE
        assert [rank.wrong(group, *wanted[group]) for group in GROUPS] == [0, 0, 0]
