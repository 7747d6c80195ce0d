"""Whole daemons with real stores on hosts of a lab: what one has stored hits on the other, or is a miss, in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.rank import Keys, Rank, new_keys
from tests.remote.site import FULL, Site, await_era, push, remote, states

pytestmark = pytest.mark.remote

HIT, PENDING, MISS = KeyState.HIT, KeyState.PENDING, KeyState.MISS
KEYS = 48
each_engine = pytest.mark.parametrize("kind", ["mooncake", "valkey"])


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), KEYS)


def lives(pid: int) -> bool:
    """A zombie, which its parent has not waited for yet, does not count: it has no memory any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def rank_of(daemon: Daemon) -> Rank:
    """Makes a rank of a namespace whose era is known."""
    rank: Rank = daemon.welcome(Rank(daemon.socket, FULL))
    await_era(daemon)
    return rank


@each_engine
def test_two_hosts_share_and_clear(site: Callable[[str], Site], keys: Keys, kind: str) -> None:
    made = site(kind)
    here, there = made.daemon(0), made.daemon(1)
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:32])
    assert states(b, keys) == [HIT] * 32 + [MISS] * 16
    assert b.loads_right(keys[:32])
    a.client.clear()
    until(lambda: states(b, keys[:32]) == [MISS] * 32, "the other host has cleared, too")
    await_era(here)
    push(here, a, keys[:8])
    until(lambda: states(b, keys[:8]) == [HIT] * 8, "in the new era")
    assert b.loads_right(keys[:8])


@each_engine
def test_a_slow_link_costs_a_deadline(site: Callable[[str], Site], keys: Keys, kind: str) -> None:
    """`ready` comes in time with what is there; the rest is a miss, and no key gets slots that are still written to."""
    made = site(kind)
    lab = made.cluster.lab
    here, there = made.daemon(0), made.daemon(1, "remote.fetch_s=1")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys)
    lab.slow(lab.hosts[2], "4mbit")
    began = time.monotonic()
    assert MISS in states(b, keys)
    assert time.monotonic() - began < HANG_S
    assert b.store_keys(keys).outcome is Outcome.DONE, "in other slots"
    lab.fast(lab.hosts[2])
    until(lambda: remote(there)["quarantined_bytes"] == 0, "the transfer has ended")
    assert b.loads_right(keys)


@each_engine
def test_the_store_is_gone_for_a_while(site: Callable[[str], Site], keys: Keys, kind: str) -> None:
    """Engines lose nothing but what it had; then hosts share again."""
    made = site(kind)
    here, there = made.daemon(0, "remote.lookup_s=0.5"), made.daemon(1, "remote.lookup_s=0.5")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys[:8])
    server = made.cluster.stores[-1]
    server.kill()
    assert states(b, keys[:8]) == [MISS] * 8
    assert states(a, keys[:8]) == [HIT] * 8
    assert b.store_keys(keys[8:16]).outcome is Outcome.DONE
    assert b.loads_right(keys[8:16])
    server.start()
    fresh = keys[16:32]
    until(lambda: _arrives(a, b, fresh), "they share again", every_s=0.5)
    assert b.loads_right(fresh)


def test_keys_expire(site: Callable[[str], Site], keys: Keys) -> None:
    """They expire after the time to live of the config. The era stays."""
    made = site("valkey")
    here, there = made.daemon(0, "valkey.ttl_s=1"), made.daemon(1)
    a, b = rank_of(here), rank_of(there)
    eras = remote(here)["eras"]
    push(here, a, keys)
    singly = iter(range(KEYS))
    until(lambda: states(b, keys[(at := next(singly)) : at + 1]) == [MISS], "they have expired", every_s=0.2)
    assert remote(here)["eras"] == remote(there)["eras"] == eras


def _arrives(a: Rank, b: Rank, keys: Keys) -> bool:
    """What the first one stores anew hits on the other one."""
    if a.client.clear(wait_s=2.0).unrecorded:  # the store has no memory yet
        return False
    a.store_keys(keys)
    time.sleep(0.5)
    return states(b, keys) == [HIT] * len(keys)


def test_a_daemon_is_killed_while_it_fetches(site: Callable[[str], Site], keys: Keys, tmp_path: Path) -> None:
    """The next one takes its memory over only when the agent of the one before is dead."""
    made = site("mooncake")
    lab = made.cluster.lab
    here, there = made.daemon(0), made.daemon(1, f"memory.pool_file={tmp_path / 'pool'}")
    a, b = rank_of(here), rank_of(there)
    push(here, a, keys)
    kept = new_keys(np.random.default_rng(1), 8)
    assert b.store_keys(kept).outcome is Outcome.DONE
    until(lambda: there.status()["cache"]["unsealed"] == 0, "they are sealed")
    lab.slow(lab.hosts[2], "4mbit")
    assert b.client.pin({0: keys}).promoting == KEYS
    until(lambda: remote(there)["gets"]["calls"] > 0, "it fetches")
    agent = int(remote(there)["agent"]["pid"])
    there.leave_guests()
    there.kill()
    there.start()
    assert not lives(agent)
    lab.fast(lab.hosts[2])
    b = rank_of(there)
    assert states(b, kept) == [HIT] * 8, "taken over"
    assert b.loads_right(kept)
    until(lambda: states(b, keys) == [HIT] * KEYS, "fetched again")
    assert b.loads_right(keys)
