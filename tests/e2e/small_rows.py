"""What tests of GPU copies do with small rows, whichever way these are moved: every byte is looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffloadd.client import Group, Outcome
from scripts.harness.daemon import Daemon
from tests.e2e.gpu_rank import Where
from tests.e2e.rank import Rank, new_keys

KEYS = 8


def roundtrip(daemon: Daemon, groups: Sequence[Group], seed: int, kind: str = "one", keys: int = KEYS) -> None:
    """A new rank stores `keys` keys of each group, and loads them. `kind`: of its memory, see `Where`."""
    rng = np.random.default_rng(seed)
    where = Where("cuda", kind=kind)
    rank: Rank = daemon.welcome(Rank(daemon.socket, groups=groups, where=where, num_blocks=8 * keys))
    daemon.await_pinned()  # else rows go one by one
    wanted = {one.group: (new_keys(rng, keys), rank.blocks_of(one.group, 2 * keys * one.group, keys)) for one in groups}
    assert rank.store(wanted).outcome is Outcome.DONE
    rank.wipe()
    assert rank.load(wanted).outcome is Outcome.DONE
    assert [rank.wrong(group, *those) for group, those in wanted.items()] == [0] * len(groups)
    for group, (_, blocks) in wanted.items():
        rank.wipe_loaded(group, blocks)
    assert rank.clean()


def roundtrips_that_may_fail(daemon: Daemon, groups: Sequence[Group], seed: int) -> None:
    """The driver refuses submissions now and then: they are made in another way, or fail. What is loaded is right."""
    rng = np.random.default_rng(seed)
    rank: Rank = daemon.welcome(Rank(daemon.socket, groups=groups, where=Where("cuda")))
    daemon.await_pinned()
    done = 0
    for _ in range(12):
        wanted = {one.group: (new_keys(rng, 3), rank.blocks_of(one.group, 20 * one.group, 3)) for one in groups}
        rank.store(wanted)
        rank.wipe()
        if rank.load(wanted).outcome is Outcome.DONE:
            done += 1
            assert [rank.wrong(group, *those) for group, those in wanted.items()] == [0] * len(groups)
    assert done > 0
