"""Clears on one host while the other one stores, pushes and fetches: what was stored before is never served after.

What a key holds is a function of the key and of a version, as of the weights of a model: each clear begins another one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KeyState, Outcome, Ref
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.lab import Lab, why_not_isolated
from scripts.harness.stores import Etcd, Master, MooncakeStore, why_no_etcd, why_no_mooncake
from tests.e2e.rank import Keys, Rank, new_keys
from tests.remote.cluster import Cluster
from tests.remote.site import Site, Start, await_era, era, remote, states

pytestmark = pytest.mark.remote

HIT, MISS = KeyState.HIT, KeyState.MISS
ROUNDS = 200
FAILOVERS = 3
SHARED_S = 0.3
"""Within this time what one host stores hits on the other one, or else after the next try."""
KEYS, EACH = 24, 8
SMALL = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 4096),)),)


class VersionedHost:
    """A daemon, and a worker of it whose weights have a version."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.rank: Rank = daemon.welcome(Rank(daemon.socket, SMALL))
        self.eras = [await_era(daemon)]

    def store(self, keys: Keys, version: int) -> None:
        """Stores keys of this version, and does not wait for their push."""
        blocks = self.rank.blocks_of(0, 0, len(keys))
        self.rank.fill(0, stamped(keys, version), blocks)
        job = self.rank.client.store(self.rank.registration, {0: (keys, blocks)})
        assert self.rank.wait(job).outcome is Outcome.DONE

    def versions(self, keys: Keys, upto: int) -> set[int]:
        """Returns the versions of all that a pin finds and a load brings. -1: the bytes are of none."""
        rank, client = self.rank, self.rank.client
        found = client.pin({0: keys})
        try:
            if found.promoting:
                found = client.wait_ready(found, 60)
            there = keys[found.states[0] == HIT]
            blocks = rank.blocks_of(0, 0, len(there))
            rank.wipe()
            if not len(there):
                return set()
            result = rank.load({0: (there, blocks)}, lease=found.lease)
            came = [at for at, state in enumerate(result.states[0]) if state == HIT and at not in result.failed[0]]
        finally:
            if found.lease:
                client.release(found.lease)
        return {self._version(there[at : at + 1], blocks[at : at + 1], upto) for at in came}

    def has(self, keys: Keys, version: int) -> bool:
        """Whether anything of this version comes, and nothing else."""
        came = self.versions(keys, version)
        assert came <= {version}
        return bool(came)

    def _version(self, key: Keys, block: np.ndarray, upto: int) -> int:
        for version in range(upto, max(upto - 3, -1), -1):
            if not self.rank.wrong(0, stamped(key, version), block):
                return version
        return -1

    def clear(self) -> None:
        """Clears, and waits until that holds everywhere."""
        token = os.urandom(16)
        clear = partial(self.rank.client.clear, wait_s=1.0, token=token)
        until(lambda: not clear().unrecorded, "the clear holds everywhere", every_s=0.1)

    def look(self) -> str:
        """The era; its generation is never earlier than one that was seen before."""
        now = era(self.daemon)
        if now:
            assert generation(now) >= generation(self.eras[-1]), "generations only rise"
            self.eras.append(now)
        return now

    def await_generation(self, least: int) -> None:
        """Waits until it has heard of a clear."""
        until(lambda: (now := self.look()) and generation(now) >= least, "the host has heard of the clear")


def generation(name: str) -> int:
    return int(name.partition(".")[0], 16)


def stamped(keys: Keys, version: int) -> Keys:
    """Returns the keys that the contents of this version are made of."""
    changed = keys.copy()
    changed[:, :8] ^= np.frombuffer(version.to_bytes(8, "little"), np.uint8)
    return changed


class Traffic:
    """A host's engine that goes on loading, while another host clears. It may hit what its own memory has, until its
    daemon has heard of the clear.
    """

    def __init__(self, host: VersionedHost, keys: Keys, version: int) -> None:
        self._host, self._keys, self._version = host, keys, version
        self._stop = threading.Event()
        self.began = threading.Event()
        self.seen: set[int] = set()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.seen |= self._host.versions(self._keys, self._version)
                self.began.set()
        except BaseException as error:  # noqa: BLE001  the test raises it
            self.error = error
            self.began.set()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive() and self.error is None, self.error
        assert self.seen <= {self._version}


@pytest.mark.parametrize("kind", ["mooncake", "valkey"])
def test_clears_while_the_other_host_is_busy(site: Callable[[str], Site], seed: int, kind: str) -> None:
    made, rng = site(kind), np.random.default_rng(seed)
    hosts = [VersionedHost(made.daemon(number, "remote.era_poll_s=0.1")) for number in (0, 1)]
    keys = new_keys(rng, KEYS)
    for version in range(ROUNDS):
        one, other = hosts if rng.random() < 0.5 else hosts[::-1]
        own, theirs, unseen = keys[:EACH], keys[EACH : 2 * EACH], keys[2 * EACH :]
        one.store(np.concatenate([own, unseen]), version)
        other.store(theirs, version)
        if rng.random() < 0.7:
            until(lambda: not any(remote(h.daemon)["backlog_bytes"] for h in hosts), "all is pushed")
        traffic = Traffic(other, np.concatenate([own, theirs]), version)
        if rng.random() < 0.5:
            traffic.began.wait(60)
        both = rng.random() < 0.2
        if both:
            traffic.end()
        clears = [threading.Thread(target=each.clear) for each in (hosts if both else [one])]
        for each in clears:
            each.start()
        for each in clears:
            each.join(120)
        # It is answered: this host has nothing, and nothing comes from the store to any host.
        assert states(one.rank, keys) == [MISS] * KEYS, "on the host that has cleared"
        traffic.end()
        assert states(other.rank, unseen) == [MISS] * len(unseen), "on the other one, from the store"
        one.await_generation(generation(one.eras[-1]) + (0 if both else 1))
        other.await_generation(generation(one.eras[-1]))
        assert states(other.rank, keys) == [MISS] * KEYS, "its own memory, once it has heard"
        # The next version goes the same way, under the same names.
        one.store(own[:4], version + 1)
        came = other.versions(own, version + 1)
        assert came <= {version + 1}
        if not both and rng.random() < 0.2:
            until(partial(other.has, own, version + 1), "it arrives", every_s=0.05)


@dataclass
class Seen:
    """What two hosts see after a clear (`cleared`: its generation) by the first one, behind which the master died."""

    one: VersionedHost
    other: VersionedHost
    keys: Keys
    version: int
    cleared: int
    rng: np.random.Generator
    stale: int = 0

    def share_again(self) -> bool:
        """Whether what the first one stores anew hits on the other one."""
        one, other, old, new = self.one, self.other, self.version, self.version + 1
        one.look()
        assert one.versions(self.keys, new) <= {new}, "on the host that has cleared"
        heard = other.look() and generation(other.eras[-1]) >= self.cleared
        came = other.versions(self.keys, new)
        assert came <= ({new} if heard else {old, new}), "on the other host, once it has heard"
        self.stale += old in came
        fresh = new_keys(self.rng, 4)  # what could not be pushed is not pushed later
        one.store(fresh, new)
        time.sleep(SHARED_S)
        return other.has(fresh, new)


@pytest.fixture
def failing_over(tmp_path: Path, start_daemon: Start) -> Iterator[tuple[Site, list[Master]]]:
    """A site whose store has two masters."""
    if reason := why_not_isolated() or why_no_mooncake() or why_no_etcd():
        pytest.skip(reason)
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(tmp_path, 3, isolated=True))
        etcd = stack.enter_context(Etcd(lab.hub, tmp_path))
        masters = [Master(lab.hub, tmp_path, *etcd.flags()) for _ in range(2)]
        for master in masters:
            stack.callback(master.kill)
            master.launch()
        stack.enter_context(MooncakeStore(lab.hosts[-1], tmp_path, etcd))
        cluster = Cluster("mooncake", lab, tmp_path, lambda host: {"master": etcd.place, "host": host.address})
        yield Site(cluster, start_daemon, tmp_path), masters


def test_the_master_fails_over_behind_a_clear(failing_over: tuple[Site, list[Master]], seed: int) -> None:
    """The next one may not know of the clear: what was removed is there again, until the host that has cleared removes
    it once more. On that host nothing is ever served that was stored before, and no generation falls.
    """
    made, masters = failing_over
    rng = np.random.default_rng(seed)
    one, other = (VersionedHost(made.daemon(number, "remote.era_poll_s=0.2", "remote.lookup_s=1")) for number in (0, 1))
    keys = new_keys(rng, KEYS)
    for version in range(FAILOVERS):
        one.store(keys, version)
        until(lambda: not remote(one.daemon)["backlog_bytes"], "all is pushed")
        one.clear()
        leader = next(master for master in masters if master.is_ready())
        leader.kill()
        killed_s = time.monotonic()
        cleared = generation(await_era(one.daemon)) if one.look() else generation(one.eras[-1]) + 1
        seen = Seen(one, other, keys, version, cleared, rng)
        until(seen.share_again, "the hosts share again", every_s=0.2)
        print(f"they shared again after {time.monotonic() - killed_s:.1f} s; {seen.stale} stale answers before")
        leader.launch()
        until(lambda: sum(master.alive for master in masters) == 2, "there are two masters again")
