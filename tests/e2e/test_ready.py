"""A job's ready signal: nothing of its blocks is touched before it, and nothing waits for ever that it never comes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Job, Ready, Timeline
from kvoffloadd.errors import UsageError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.rank import Rank, new_keys

KEYS = 16


class LateRank:
    """A rank whose computing can be made to end late."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self.timeline = Timeline()
        self.rank = daemon.welcome(Rank(daemon.socket, timelines=[self.timeline]))
        self.keys = new_keys(np.random.default_rng(seed), KEYS)
        self.wanted = {0: (self.keys, self.rank.blocks_of(0, 0, KEYS))}

    def compute(self) -> None:
        self.rank.fill(0, self.keys, self.wanted[0][1])

    def store(self, ready: Ready | None, *, deadline_s: float = 60.0) -> Job:
        return self.rank.client.store(self.rank.registration, self.wanted, ready=ready, deadline_s=deadline_s)

    def load(self, ready: Ready | None) -> Job:
        return self.rank.client.load(self.rank.registration, self.wanted, ready=ready)

    def wrong(self) -> int:
        return self.rank.wrong(0, *self.wanted[0])


@pytest.fixture
def late(daemon: Daemon, seed: int) -> LateRank:
    return LateRank(daemon, seed)


def let_it_copy(late: LateRank) -> None:
    """Time enough for any copy that does not wait, and its completion."""
    time.sleep(0.1)
    late.rank.client.ping()


def test_a_store_that_ignores_the_signal_stores_what_was_there_before(late: LateRank) -> None:
    job = late.store(None)
    late.rank.wait(job)
    late.compute()
    late.rank.wipe()
    late.rank.load(late.wanted)
    assert late.wrong() > 0


def test_a_store_waits_for_the_late_write(late: LateRank) -> None:
    ready = late.timeline.signal()
    job = late.store(ready)
    let_it_copy(late)
    assert not job.done
    late.compute()
    ready.reach()
    assert late.rank.wait(job).outcome == "done"
    late.rank.wipe()
    late.rank.load(late.wanted)
    assert late.wrong() == 0


def test_a_load_that_ignores_the_signal_is_overwritten_by_the_late_reader(late: LateRank) -> None:
    """Write after read: the blocks still belong to the request that used them before."""
    late.rank.store(late.wanted)
    late.rank.wipe()
    late.rank.wait(late.load(None))
    assert late.wrong() == 0
    assert not late.rank.clean()  # a late reader of these blocks has read another's


def test_a_load_waits_for_the_late_reader(late: LateRank) -> None:
    late.rank.store(late.wanted)
    late.rank.wipe()
    ready = late.timeline.signal()
    job = late.load(ready)
    let_it_copy(late)
    assert late.rank.clean()
    assert not job.done
    ready.reach()
    assert late.rank.wait(job).outcome == "done"
    assert late.wrong() == 0


def test_jobs_begin_in_the_order_of_their_points(late: LateRank) -> None:
    first, second = late.timeline.signal(), late.timeline.signal()
    late.compute()
    job = late.store(second)
    first.reach()
    let_it_copy(late)
    assert not job.done
    second.reach()
    assert first.reached
    assert late.rank.wait(job).outcome == "done"


def test_a_signal_that_never_comes_costs_the_job_alone(late: LateRank, daemon: Daemon) -> None:
    job = late.store(late.timeline.signal(), deadline_s=0.2)
    result = late.rank.wait(job)
    assert (result.outcome, result.bytes) == ("expired", 0)
    assert "signal" in result.reason
    assert late.rank.states(late.keys) == [0] * KEYS
    assert daemon.status()["running"]["jobs"] == 0
    assert late.rank.store(late.wanted).outcome == "done"


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_job_that_waits_can_be_cancelled(late: LateRank, what: str) -> None:
    if what == "load":
        late.rank.store(late.wanted)
    late.rank.wipe()
    ready = late.timeline.signal()
    job = late.store(ready) if what == "store" else late.load(ready)
    late.rank.client.cancel(job)
    assert late.rank.wait(job).outcome == "cancelled"
    ready.reach()
    let_it_copy(late)
    assert late.rank.clean()


def test_a_worker_that_goes_while_its_job_waits_leaves_nothing(daemon: Daemon, seed: int) -> None:
    before = daemon.status()["devices"]["host"]["mapped_bytes"]
    late = LateRank(daemon, seed)
    late.store(late.timeline.signal())
    late.rank.client.close(0.0, force=True)
    until(lambda: daemon.status()["devices"]["host"]["mapped_bytes"] == before, "its memory is unmapped")
    assert daemon.status()["running"]["jobs"] == 0


def test_the_signals_memory_goes_with_the_registration(late: LateRank, daemon: Daemon) -> None:
    job = late.store(late.timeline.signal(), deadline_s=0.3)
    late.rank.client.unregister(late.rank.registration)  # waits for the job, which looks at the memory
    assert late.rank.wait(job).outcome == "expired"
    assert daemon.status()["devices"]["host"]["mapped_bytes"] == 0


def test_points_of_a_timeline_that_was_not_registered(late: LateRank) -> None:
    with pytest.raises(UsageError, match="not registered"):
        late.store(Timeline().signal())


@pytest.mark.slow
def test_after_a_reconnect_the_timeline_still_counts(start_daemon: Callable[..., Daemon], seed: int) -> None:
    daemon = start_daemon()
    late = LateRank(daemon, seed)
    late.timeline.signal().reach()
    daemon.kill()
    daemon.start()
    ready = late.timeline.signal()
    late.compute()
    job = late.store(ready)
    ready.reach()
    assert late.rank.wait(job).outcome == "done"
    late.rank.close()
