"""Tests kill -9 of a daemon that is writing: what it had reported as on disk is there, and nothing else is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState, Outcome
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, demoted, disk, disk_settings, group_of, served
from tests.e2e.rank import Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
SIZES = (100, 4096, 9000, 20_000)


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_killed_while_it_writes(start_daemon: Start, tmp_path: Path, seed: int, kills: int) -> None:
    """It is killed at some instant while up to 60 keys are being written. All that was ever stored is looked for at
    every start.
    """
    rng = np.random.default_rng(seed)
    daemon = start_daemon(
        *disk_settings((tmp_path / "disk", (16 + 8 * kills) * MIB)), "disk.segment_bytes=1MiB", memory="8MiB"
    )
    size = SIZES[seed % len(SIZES)]
    keys: list[Keys] = []
    reported = 0
    for _ in range(kills):
        rank = daemon.welcome(Rank(daemon.socket, group_of(size)))
        before = disk(daemon)["keys"]
        keys.append(new_keys(rng, 60))
        job = rank.begin_store({0: (keys[-1], rank.blocks_of(0, 0, 60))})
        least = before + int(rng.integers(0, 60))
        if rng.random() < 0.8:
            assert rank.wait(job).outcome is Outcome.DONE
            demoted(daemon, least)
        reported = disk(daemon)["keys"]
        daemon.kill()
        daemon.leave_guests()
        daemon.start()
        rank = daemon.welcome(Rank(daemon.socket, group_of(size)))
        found = np.concatenate([rank.states(lot) for lot in keys])
        assert int((found == KeyState.PENDING).sum()) == disk(daemon)["keys"] >= 0.95 * reported
        latest = served(rank, keys[-1])
        assert latest.tolist() == (found[-60:] == KeyState.PENDING).tolist()
        if len(keys) <= 15 or len(keys) % 20 == 0:
            with Client(daemon.socket, namespace=None, role="observer") as observer:
                audit = observer.verify(disk=True, deadline_s=HANG_S)
                assert (audit.findings, audit.records) == ((), disk(daemon)["records"])
        daemon.leave_guests()
    rank = daemon.welcome(Rank(daemon.socket, group_of(size)))
    there = sum(int(served(rank, lot).sum()) for lot in keys)
    assert there >= 0.95 * reported
    assert disk(daemon)["corrupt"] == 0
