"""Blocks that a GPU's stream still works on: jobs are asked for at once, and right only where they name the signal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Timeline
from scripts.harness.daemon import Daemon
from tests.e2e import gpu_rank
from tests.e2e.rank import Rank, new_keys

KEYS = 16
LATE_S = 0.25
JITTER = {"faults": "jitter_ns=300000,read_early"}


class OrderedRank:
    """A rank, and keys in blocks of it."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.timeline = Timeline(gpu_rank.gpu().stream)
        self.rank = daemon.welcome(Rank(daemon.socket, timelines=[self.timeline]))
        self.rank.wipe()
        self.keys = new_keys(np.random.default_rng(seed), KEYS)
        self.blocks = self.rank.blocks_of(0, 0, KEYS)
        self.wanted = {0: (self.keys, self.blocks)}

    def wrong_when_all_is_done(self) -> int:
        return self.rank.wrong(0, self.keys, self.blocks)


@pytest.fixture
def late(daemon: Daemon, seed: int) -> OrderedRank:
    return OrderedRank(daemon, seed)


def test_a_store_that_ignores_the_signal_stores_what_was_there_before(late: OrderedRank) -> None:
    late.rank.fill_late(0, late.keys, late.blocks, LATE_S)
    ready = late.timeline.signal()
    late.rank.wait(late.rank.client.store(late.rank.registration, late.wanted))
    assert not ready.reached
    late.rank.wipe()
    late.rank.load(late.wanted)
    assert late.wrong_when_all_is_done() > 0.9 * KEYS * 4096


def test_a_store_waits_for_the_late_write(late: OrderedRank) -> None:
    late.rank.fill_late(0, late.keys, late.blocks, LATE_S)
    ready = late.timeline.signal()
    assert late.rank.wait(late.rank.client.store(late.rank.registration, late.wanted, ready=ready)).outcome == "done"
    assert ready.reached
    assert late.rank.loads_right(late.keys)


def test_a_load_that_ignores_the_signal_is_overwritten(late: OrderedRank) -> None:
    late.rank.store(late.wanted)
    late.rank.wipe_late(late.blocks, LATE_S)
    late.rank.load(late.wanted)
    assert late.wrong_when_all_is_done() > 0.9 * KEYS * 4096


def test_a_load_waits_until_nobody_uses_its_blocks(late: OrderedRank) -> None:
    late.rank.store(late.wanted)
    late.rank.wipe_late(late.blocks, LATE_S)
    result = late.rank.load(late.wanted, ready=late.timeline.signal())
    assert result.outcome == "done"
    assert late.wrong_when_all_is_done() == 0


@pytest.mark.slow
def test_many_jobs_behind_their_own_points(start_daemon: Callable[..., Daemon], seed: int) -> None:
    """Stores and loads alternate, each queued behind separate work, on a driver that takes its time at random."""
    rng = np.random.default_rng(seed)
    late = OrderedRank(start_daemon(driver=JITTER), seed)
    rank, keys = late.rank, new_keys(rng, 64)
    stores = []
    for at in range(0, 32, 8):
        wanted = {0: (keys[at : at + 8], rank.blocks_of(0, at, 8))}
        rank.fill_late(0, *wanted[0], float(rng.uniform(0, 0.01)))
        stores.append(rank.client.store(rank.registration, wanted, ready=late.timeline.signal()))
    loads = []
    for job, at in zip(stores, range(0, 32, 8), strict=True):
        assert rank.wait(job).outcome == "done"
        wanted = {0: (keys[at : at + 8], rank.blocks_of(0, at + 32, 8))}
        rank.wipe_late(wanted[0][1], float(rng.uniform(0, 0.01)))
        loads.append(rank.client.load(rank.registration, wanted, ready=late.timeline.signal()))
    assert [rank.wait(job).outcome for job in loads] == ["done"] * 4
    assert rank.wrong(0, keys[:32], rank.blocks_of(0, 32, 32)) == 0


def test_a_signal_that_never_comes_costs_the_job_alone(late: OrderedRank, daemon: Daemon) -> None:
    """The daemon queues nothing that waits: the GPU goes on."""
    timeline = Timeline()
    cautious = daemon.welcome(Rank(daemon.socket, timelines=[timeline]))
    job = cautious.client.store(cautious.registration, late.wanted, ready=timeline.signal(), deadline_s=0.3)
    assert late.rank.store_keys(late.keys ^ np.uint8(1)).outcome == "done"
    assert cautious.wait(job).outcome == "expired"
    assert late.rank.store(late.wanted).outcome == "done"


def test_several_streams_of_one_worker(late: OrderedRank, daemon: Daemon, seed: int) -> None:
    """Numbers of one stream say nothing of another's."""
    ahead = Timeline()
    for _ in range(100):
        ahead.signal().reach()
    rank = daemon.welcome(Rank(daemon.socket, timelines=[ahead, late.timeline]))
    keys = new_keys(np.random.default_rng(seed + 1), KEYS)
    rank.fill_late(0, keys, late.blocks, LATE_S)
    job = rank.client.store(rank.registration, {0: (keys, late.blocks)}, ready=late.timeline.signal())
    assert rank.wait(job).outcome == "done"
    assert rank.loads_right(keys)
