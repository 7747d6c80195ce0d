"""Random operations on memory and disk together, restarts, damage and faults included. Whatever is served is right."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffloadd.cache.disk import demotion
from kvoffloadd.cache.lower.fetches import Fetch, Urgency
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.model import PAGE_BYTES, U32Array
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.testing.wait import HANG_S

from .disktier import Shape, Sums, Tier, flip_byte
from .fakes import keys_of

T = TypeVar("T")

SIZES = [(PAGE_BYTES,), (5000, 1), (3 * PAGE_BYTES,)]
NAMES = [bytes([1 + n]) * 16 for n in range(len(SIZES))]
ALL = range(40)
FAULTS = ["write=EIO", "read=EIO", "write=ENOSPC", "sync=EIO", "allocate=ENOSPC", "open=EACCES", "read_delay_s=0.002"]

numbers = st.lists(st.sampled_from(list(ALL)), min_size=1, max_size=14, unique=True)
which = st.integers(0, len(SIZES) - 1)
seeds = st.integers(0, 1 << 32)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no segment on a disk that fails is given up soon."""
    monkeypatch.setattr(demotion, "ROOM_S", 0.1)


class DiskMachine(RuleBasedStateMachine):
    """The model: which keys were stored in this epoch, so that no other is ever served. Their bytes follow from their
    names and the epoch: `Tier.served` and `Tier.fetch` compare each of them.
    """

    @initialize(
        rewrite_hot=st.booleans(),
        demote=st.sampled_from(["seal", "evict"]),
        admit=st.sampled_from(["always", "second-use"]),
        roots=st.integers(1, 2),
    )
    def begin(self, rewrite_hot: bool, demote: str, admit: str, roots: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvo-"))
        self.runner = asyncio.Runner()
        self.shape = Shape(pages=48, slab_pages=16, segment_pages=16, roots=roots, threads=2)
        self.settings: dict[str, Any] = {"rewrite_hot": rewrite_hot, "demote": demote, "admit": admit}
        self.stored: list[set[int]] = [set() for _ in SIZES]
        self.is_sound = True  # no damage and no faults so far
        self.fails = False
        self.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(HANG_S):
                return await coroutine

        return self.runner.run(bounded())

    def start(self) -> None:
        async def main() -> Tier:
            return await Tier(self.folder, self.shape, **self.settings).start()

        self.tier = self.run(main())
        self.held: list[U32Array] = []
        self.unsealed: list[Sums] = []
        self.waiting: list[Fetch] = []

    def keyspace(self, n: int) -> Keyspace:
        return self.tier.keyspace(NAMES[n], sizes=SIZES[n])

    # --- memory ---

    @rule(n=which, keys=numbers, seals=st.booleans())
    def store(self, n: int, keys: list[int], seals: bool) -> None:
        parts = self.tier.write(self.keyspace(n), keys)
        self.stored[n] |= set(keys)
        if seals:
            self.tier.seal(parts)
        else:
            self.unsealed.append(self.tier.hash(parts))

    @rule(seed=seeds)
    def seal(self, seed: int) -> None:
        """Checksums come late, maybe after their keys have gone."""
        if self.unsealed:
            self.tier.take(self.unsealed.pop(seed % len(self.unsealed)))

    @rule(n=which, keys=numbers, part=st.integers(0, 1))
    def store_a_part(self, n: int, keys: list[int], part: int) -> None:
        """Another rank has not come yet."""
        self.tier.seal(self.tier.write(self.keyspace(n), keys, parts=[part % len(SIZES[n])]))
        self.stored[n] |= set(keys)

    @rule(n=which, keys=numbers)
    def give_up_a_store(self, n: int, keys: list[int]) -> None:
        keyspace = self.keyspace(n)
        wanted = np.arange(keyspace.schema.parts, dtype=np.uint16)
        reserved = reserve(self.tier.cache, keyspace, keys_of(*keys), wanted, 0).parts
        self.tier.cache.abort(reserved)

    @rule(n=which, keys=numbers)
    def use(self, n: int, keys: list[int]) -> None:
        keyspace = self.keyspace(n)
        self.tier.cache.uses.add([(keyspace, self.tier.cache.find(keyspace, keys_of(*keys)), 0)])

    @rule(n=which, keys=numbers)
    def hold(self, n: int, keys: list[int]) -> None:
        rows = self.tier.cache.find(self.keyspace(n), keys_of(*keys[:4])).hit_rows
        if len(self.held) < 3:
            self.tier.cache.hold(rows)
            self.held.append(rows)
            self.tier.holds += len(rows)

    @rule()
    def let_go(self) -> None:
        while self.held:
            rows = self.held.pop()
            self.tier.cache.unhold(rows)
            self.tier.holds -= len(rows)

    @rule(n=which, keys=numbers, priority=st.integers(0, 100), name=st.sampled_from(["", "a"]))
    def retain(self, n: int, keys: list[int], priority: int, name: str) -> None:
        keyspace = self.keyspace(n)
        prompt = [(keyspace, 0, keys_of(*keys))]
        self.tier.cache.retention.retain(keyspace.namespace, prompt, priority=priority, seconds=600.0, name=name)

    @rule(seed=seeds, memory=st.sampled_from([0.0, 0.25, 1.0]), disk=st.sampled_from([0.0, 0.25, 0.5]))
    def let_claims_go(self, seed: int, memory: float, disk: float) -> None:
        retention = self.tier.cache.retention
        if claims := retention.claims:
            retention.forget([claims[seed % len(claims)]])
        retention.change_shares(memory, disk)

    @rule(n=which, keys=numbers)
    def evict(self, n: int, keys: list[int]) -> None:
        entries = self.tier.cache.entries
        rows = self.tier.cache.find(self.keyspace(n), keys_of(*keys)).hit_rows
        entries.retire(rows[entries.evictable(rows)])

    # --- disk ---

    @rule(n=which, keys=numbers, urgent=st.sampled_from([Urgency.LOAD, Urgency.PIN, Urgency.PREFETCH]))
    def fetch(self, n: int, keys: list[int], urgent: int) -> None:
        """Whatever was on disk and has room comes, unless it is damaged or its disk fails, or goes before its turn."""
        keyspace = self.keyspace(n)
        self.quiet()
        resident = self.tier.served(keyspace, *keys)
        known, counters = set(self.tier.on_disk(keyspace, *keys)), self.tier.disk.promotion.counters
        before = counters.without_space + self.tier.disk.reclaim.keys_evicted
        served = self.run(self.tier.fetch(keyspace, *keys, urgent=urgent))
        assert set(served) <= self.stored[n]
        if self.is_sound and counters.without_space + self.tier.disk.reclaim.keys_evicted == before:
            assert known <= set(served) <= set(resident) | known

    @rule(n=which, keys=numbers)
    def begin_to_fetch(self, n: int, keys: list[int]) -> None:
        keyspace = self.keyspace(n)

        def done() -> None:
            assert set(self.tier.served(keyspace, *keys)) <= self.stored[n]

        self.waiting.append(self.tier.begin_fetch(keyspace, *keys, done=done))

    @rule(seed=seeds)
    def cancel(self, seed: int) -> None:
        if self.waiting:
            self.tier.disk.promotion.cancel(self.waiting.pop(seed % len(self.waiting)))

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.002]))
    def turn(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule()
    def settle(self) -> None:
        self.quiet()

    def quiet(self) -> None:
        """Faults may keep what waits for the disk waiting for long."""
        self.run(asyncio.sleep(0.005) if self.fails else self.tier.quiet())

    @rule(repair=st.booleans())
    def inspect(self, repair: bool) -> None:
        _, findings = self.run(self.tier.disk.scrub.run(repair=repair))
        assert not findings or not self.is_sound

    # --- clears ---

    @rule(n=which)
    def clear(self, n: int) -> None:
        self.clear_namespaces(n)

    @rule()
    def clear_everything(self) -> None:
        self.clear_namespaces()

    def clear_namespaces(self, *which_ones: int) -> None:
        for n in range(len(SIZES)):
            self.keyspace(n)
        usable = all(root.accepted for root in self.tier.roots) and not self.fails
        if usable:  # with a root that is off or fails it would not be durable, and is refused
            self.run(self.tier.clear(*(self.keyspace(n).namespace for n in which_ones)))
            for n in which_ones or range(len(SIZES)):
                self.stored[n] = set()

    @rule(n=which, keys=numbers)
    def delete(self, n: int, keys: list[int]) -> None:
        keyspace = self.keyspace(n)
        usable = all(root.accepted for root in self.tier.roots) and not self.fails
        if usable:  # otherwise it would not be durable
            self.run(self.tier.delete(keyspace, *keys))
            self.stored[n] -= set(keys)

    # --- ends ---

    @rule(flush=st.booleans())
    def end(self, flush: bool) -> None:
        """Ends in order: what was in memory or on disk before is on disk after it."""
        self.recover_from_faults()
        self.let_go()
        self.run(self.tier.quiet())
        keyspaces = [self.keyspace(n) for n in range(len(SIZES))]
        before = [set(self.tier.on_disk(keyspace, *ALL)) for keyspace in keyspaces]
        if flush and self.settings["admit"] == "always" and not self.unsealed:
            for keyspace, known in zip(keyspaces, before, strict=True):
                known |= set(self.tier.served(keyspace, *ALL))
        self.run(self.tier.close(flush_s=10.0 if flush else 0.0))
        given_up = sum(root.pool.recycled for root in self.tier.roots)
        lost = self.tier.not_demoted
        self.start()
        after = [set(self.tier.on_disk(self.keyspace(n), *ALL)) for n in range(len(SIZES))]
        if self.is_sound and not given_up and not lost:
            assert all(old <= new for old, new in zip(before, after, strict=True))

    @rule()
    def crash(self) -> None:
        self.run(self.tier.drop())
        self.tier.files.plant("")
        self.fails = False
        self.start()

    # --- damage ---

    @rule(seed=seeds)
    @precondition(lambda self: self.may_rot)
    def rot(self, seed: int) -> None:
        """A byte anywhere in the segments' files."""
        self.recover_from_faults()
        self.quiet()
        files = sorted(self.folder.glob("root*/segments/*"))
        if files:
            self.is_sound = False
            rng = np.random.default_rng(seed)
            path = files[int(rng.integers(len(files)))]
            flip_byte(path, int(rng.integers(path.stat().st_size)))

    @rule(fault=st.sampled_from(FAULTS))
    @precondition(lambda self: self.may_rot)
    def fail(self, fault: str) -> None:
        self.is_sound, self.fails = False, True
        self.tier.files.plant(fault)

    @rule()
    def recover_from_faults(self) -> None:
        self.tier.files.plant("")
        self.fails = False
        self.run(self.tier.until(lambda: all(root.state == RootState.OK for root in self.tier.roots)))

    may_rot = False

    # --- laws ---

    @invariant()
    def what_is_served_is_right(self) -> None:
        if hasattr(self, "tier"):
            for n in range(len(SIZES)):
                keyspace = self.keyspace(n)
                assert set(self.tier.served(keyspace, *ALL)) <= self.stored[n]
                assert set(self.tier.on_disk(keyspace, *ALL)) <= self.stored[n], "a cleared key is back"

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.audit() == []

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            try:
                self.run(self.tier.drop())
            finally:
                self.runner.close()
                shutil.rmtree(self.folder)


class RottenDiskMachine(DiskMachine):
    """The same with bytes that change by themselves, and calls that fail."""

    may_rot = True


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
TestRottenDisk = RottenDiskMachine.TestCase
TestRottenDisk.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
