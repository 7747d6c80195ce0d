"""Clears across histories: roots and pools meet in any combination, whatever failed, went, came late or was copied.

What was cleared for good is never served again by a daemon that could know; what was not is found again.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import struct
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffloadd.cache.memory import cache as cache_module
from kvoffloadd.cache.memory import epochs as epochs_module
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.errors import NotDurableError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.testing.wait import HANG_S

from .clears import clear
from .disktier import Shape, Tier
from .fakes import keys_of

T = TypeVar("T")

NAMES = [b"a" * 16, b"b" * 16]
ALL = range(6)
ROOTS = ("A", "B", "C")
POOLS = 2
SHAPE = Shape(pages=64, slab_pages=16, segment_pages=16, num_segments=40)
STAMP = struct.Struct("<QQQ")  # namespace, key, the last clear of the namespace before the key was stored

roots = st.sampled_from(["A", "A", "B", "B", "C"])
lists = st.lists(roots, min_size=1, max_size=3).map(lambda names: list(dict.fromkeys(names)))
configs = st.one_of(roots.map(lambda name: [name]), lists)  # histories part where not all roots are there
pools = st.sampled_from([None, None, *range(POOLS)])  # None: a new one, that is lost at the end
some_roots = st.lists(roots, max_size=3, unique=True)
which = st.sampled_from([0, 0, 0, 1])
scopes = st.one_of(which.map(lambda n: [n]), st.just(list(range(len(NAMES)))))
numbers = st.lists(st.sampled_from(list(ALL)), min_size=1, max_size=4, unique=True)
deeds = st.lists(st.one_of(st.tuples(which, numbers), st.tuples(st.just("clear"), scopes)), min_size=1, max_size=5)


class StampedTier(Tier):
    """Payloads record when they were stored. `clears`: the last one so far of each namespace, by place in NAMES."""

    clears: list[int]
    found: dict[tuple[int, int], int]

    def payload(self, keyspace: Keyspace, number: int, part: int) -> bytes:
        n = NAMES.index(keyspace.namespace.fingerprint)
        return STAMP.pack(n, number, self.clears[n]).ljust(keyspace.part_bytes[part], b"\0")

    def check_payload(self, keyspace: Keyspace, number: int, part: int, payload: bytes) -> None:
        n, key, stored_after = STAMP.unpack_from(payload)
        assert (n, key) == (NAMES.index(keyspace.namespace.fingerprint), number), "another key's bytes"
        self.found[n, key] = stored_after


@dataclass
class Place:
    """A root or a pool. `recorded`: for each namespace, the last clear that it has recorded for good. `kept`: records
    that are on it and count, by namespace and key: which clear of the namespace they came after.
    """

    recorded: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    kept: dict[tuple[int, int], int] = field(default_factory=dict)

    def record(self, clears: list[int]) -> None:
        self.recorded = [max(pair) for pair in zip(self.recorded, clears, strict=True)]


class ClearMachine(RuleBasedStateMachine):
    """One daemon at a time, in a world whose clock goes on. Clears are numbered as they are asked for, and each key
    holds the number of the last one that its namespace had seen by then, wherever it was known.
    """

    @initialize(forgetful=st.booleans())
    def begin(self, forgetful: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.forgetful = forgetful
        for module in (epochs_module, cache_module):
            self.patch.setattr(module, "REMEMBERED_MAX", 1 if forgetful else 4096)
        memory = "/dev/shm"
        self.folder = Path(tempfile.mkdtemp(prefix="kvo-", dir=memory if os.access(memory, os.W_OK) else None))
        self.now = 1_000_000
        self.count = 0
        self.clears = [0] * len(NAMES)
        self.places = {name: Place() for name in ROOTS}
        self.pools: dict[int | None, tuple[int, Place]] = {}
        self.opened: list[int] = []
        self.strangers = 0
        self.blocked: set[str] = set()
        self.config: list[str] = []
        self.before: list[str] = []
        self.pool_number: int | None = None
        self.tier: StampedTier | None = None

    def clock(self) -> int:
        self.now += 1
        return self.now

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(HANG_S):
                return await coroutine

        return self.runner.run(bounded())

    @property
    def up(self) -> StampedTier:
        assert self.tier is not None
        return self.tier

    def root(self, name: str) -> Root:
        return self.up.roots[self.config.index(name)]

    def keyspaces(self) -> list[Keyspace]:
        """Returns the keyspaces of the namespaces that engines have opened in this run."""
        return [self.up.keyspace(NAMES[n]) for n in self.opened]

    def keyspace(self, n: int) -> Keyspace:
        self.opened = sorted({*self.opened, n})
        return self.up.keyspace(NAMES[n])

    # --- the daemon ---

    @precondition(lambda self: self.tier is None)
    @rule(config=configs, late=some_roots, pool=pools)
    def start(self, config: list[str], late: list[str], pool: int | None) -> None:
        self.begin_run(config, late, pool)

    @precondition(lambda self: self.tier is None and self.before)
    @rule(pool=pools)
    def start_again(self, pool: int | None) -> None:
        self.begin_run(self.before, [], pool)

    @precondition(lambda self: self.tier is None)
    @rule(config=configs, pool=pools, done=deeds, flush=st.booleans())
    def a_whole_run(self, config: list[str], pool: int | None, done: list[tuple[Any, list[int]]], flush: bool) -> None:
        self.begin_run(config, [], pool)
        for what, chosen in done:
            if what == "clear":
                self.clear(chosen)
            else:
                self.store(what, chosen, waits=True)
        self.look()
        if flush:
            self.end(flush=True)
        else:
            self.crash()

    @precondition(lambda self: self.tier is None)
    @rule(config=configs, name=roots, pool=pools, n=which, keys=numbers)
    def a_run_with_a_late_root(self, config: list[str], name: str, pool: int | None, n: int, keys: list[int]) -> None:
        """What others have is in use when it comes."""
        self.put_back_all_if_down()
        late = [name] if self.path(name).exists() else []
        self.begin_run(list(dict.fromkeys([*config, name])), late, pool)
        self.store(n, keys, waits=True)
        self.look()
        self.arrive(name)
        self.look()
        self.end(flush=True)

    def begin_run(self, config: list[str], late: list[str], pool: int | None) -> None:
        self.put_back_all_if_down()
        late = [name for name in late if name in config and self.path(name).exists()]
        if self.forgetful and (set(config) != set(self.before) or pool not in (None, self.pool_number)):
            self.forget_kept(ROOTS)  # what is put back after a time may be void, and a pool may make it so
        self.runner = asyncio.Runner()
        self.config, self.before = config, config
        for name in late:
            self.path(name).chmod(0o755)  # refused until that is mended
        self.known = [0] * len(NAMES)
        kept_pool = self.take_pool(pool)

        async def main() -> StampedTier:
            paths = [self.path(name) for name in config]
            tier = StampedTier(self.folder, SHAPE, paths=paths, pool=kept_pool, retry_s=0.004)
            tier.clears, tier.found = self.clears, {}
            tier.cache.epochs.clock, tier.cache.epochs.began = self.clock, self.clock()
            await tier.start()
            return tier

        self.tier = self.run(main())
        self.opened = []
        self.keyspace(0)
        self.hear(*(name for name in config if name not in late))
        for name in config:
            self.finds_again(name)

    def hear(self, *names: str) -> None:
        """The daemon has read what these roots know, and has informed all places that it can reach."""
        for name in names:
            self.known = [max(pair) for pair in zip(self.known, self.places[name].recorded, strict=True)]
        self.known = [max(pair) for pair in zip(self.known, self.pool_place.recorded, strict=True)]
        self.pool_place.record(self.known)
        for name in self.config:
            if self.root(name).state == RootState.OK and name not in self.blocked:
                self.places[name].record(self.known)

    def finds_again(self, name: str) -> None:
        """What counted on this root, and was not cleared since, is there."""
        if self.root(name).state != RootState.OK:
            return
        for (n, key), stored_after in self.places[name].kept.items():
            if stored_after == self.clears[n]:
                assert self.up.on_disk(self.keyspace(n), key), f"key {key} of {n} was lost from {name}"

    @precondition(lambda self: self.tier is not None)
    @rule(flush=st.booleans())
    def end(self, flush: bool) -> None:
        if flush:
            self.run(self.up.quiet())
        self.note_kept()
        self.run(self.up.close(flush_s=2.0 if flush else 0.0))
        self.tier = None
        self.runner.close()

    @precondition(lambda self: self.tier is not None)
    @rule()
    def crash(self) -> None:
        self.note_kept()
        self.run(self.up.drop(amid_a_note=True))
        self.tier = None
        self.runner.close()  # its threads end, too: a process that is dead writes nothing

    def note_kept(self) -> None:
        """Remember what is on the roots. Only where the daemon knows of all clears is it sure to count later."""
        tier = self.up
        for name in self.config:
            if self.root(name).state == RootState.OK:
                self.places[name].kept = {}
        for n in range(len(NAMES)):
            keyspace = self.keyspace(n)
            for key in tier.on_disk(keyspace, *ALL):
                place = tier.place_if_there(keyspace, key)
                if place is None:
                    continue
                root, segment, page = place
                with open(root.path / "segments" / segment.name, "rb") as stream:
                    stream.seek((page + 1) * PAGE_BYTES)
                    stamp = STAMP.unpack(stream.read(STAMP.size))
                assert stamp[:2] == (n, key)
                if self.known[n] == self.clears[n] and not root.pool.recycled:
                    self.places[root.path.name].kept[n, key] = stamp[2]

    def forget_kept(self, names: tuple[str, ...] | list[str]) -> None:
        for name in names:
            self.places[name].kept = {}

    # --- engines ---

    @precondition(lambda self: self.tier is not None)
    @rule(n=which, keys=numbers, waits=st.booleans())
    def store(self, n: int, keys: list[int], waits: bool) -> None:
        self.up.store(self.keyspace(n), *keys)
        self.run(self.up.quiet() if waits else asyncio.sleep(0))

    @precondition(lambda self: self.tier is not None)
    @rule()
    def look(self) -> None:
        """All that can be served: nothing from before a clear that the daemon knows of."""
        for n in range(len(NAMES)):
            self.run(self.up.fetch(self.keyspace(n), *ALL))
        self.nothing_cleared_is_served()

    @precondition(lambda self: self.tier is not None)
    @rule(n=which)
    def evict(self, n: int) -> None:
        self.run(self.up.quiet())
        entries, keyspace = self.up.cache.entries, self.keyspace(n)
        rows = self.up.cache.find(keyspace, keys_of(*ALL)).hit_rows
        entries.retire(rows[entries.evictable(rows)])

    # --- clears ---

    @precondition(lambda self: self.tier is not None)
    @rule(scope=scopes)
    def clear(self, scope: list[int]) -> None:
        reached = all(self.root(name).accepted and name not in self.blocked for name in self.config)
        self.number_clear(scope)
        try:
            self.run(clear(self.up.cache, self.up.disk, self.names(scope)))
        except NotDurableError:
            assert not reached
        else:
            # Roots that came in meanwhile have recorded it, too.
            assert all(self.root(name).accepted and name not in self.blocked for name in self.config)
            self.cleared_for_good(scope)
        for n in scope:
            self.known[n] = self.count

    @precondition(lambda self: self.tier is not None and self.forgetful)
    @rule()
    def clear_strangers(self) -> None:
        """More than can be remembered, of namespaces without any keys."""
        self.forget_kept_elsewhere()
        for _ in range(3):
            self.strangers += 1
            with suppress(NotDurableError):
                self.run(clear(self.up.cache, self.up.disk, [self.strangers.to_bytes(16, "big")]))

    @precondition(lambda self: self.tier is not None)
    @rule(scope=scopes, turns=st.integers(0, 60))
    def clear_and_crash(self, scope: list[int], turns: int) -> None:
        """The daemon dies somewhere on the way; whether the clear was answered by then decides."""
        self.note_kept()
        self.number_clear(scope)

        async def main() -> bool:
            task = asyncio.ensure_future(clear(self.up.cache, self.up.disk, self.names(scope)))
            for _ in range(turns):
                await asyncio.sleep(0)
            answered = task.done() and task.exception() is None
            task.cancel()
            with suppress(asyncio.CancelledError, NotDurableError):
                await task
            return answered

        if self.run(main()):
            self.cleared_for_good(scope)
        self.run(self.up.drop(amid_a_note=True))
        self.tier = None
        self.runner.close()

    def names(self, scope: list[int]) -> list[bytes] | None:
        return [NAMES[n] for n in scope] if len(scope) == 1 else None

    def number_clear(self, scope: list[int]) -> None:
        self.count += 1
        for n in scope:
            self.clears[n] = self.count
        self.forget_kept_elsewhere()

    def forget_kept_elsewhere(self) -> None:
        if self.forgetful:
            self.forget_kept(
                [name for name in ROOTS if name not in self.config or self.root(name).state != RootState.OK]
            )

    def cleared_for_good(self, scope: list[int]) -> None:
        for place in [self.pool_place, *(self.places[name] for name in self.config)]:
            for n in scope:
                place.recorded[n] = self.count

    # --- roots ---

    def path(self, name: str) -> Path:
        return self.folder / name

    @precondition(lambda self: self.tier is not None)
    @rule(name=roots)
    def leave(self, name: str) -> None:
        """Its file system goes while the daemon runs."""
        if name in self.config and self.root(name).state == RootState.OK:
            self.run(self.up.quiet())
            self.path(name).rename(self.folder / f"gone-{name}")
            self.run(self.up.until(lambda: self.root(name).state == RootState.OFF and not self.root(name).accepted))

    @precondition(lambda self: self.tier is not None)
    @rule(name=roots)
    def arrive(self, name: str) -> None:
        """It is back, or there at last."""
        self.put_back(name)
        if name not in self.config or self.root(name).accepted:
            return
        root = self.root(name)
        self.run(self.up.until(lambda: root.state == RootState.OK or root.health.reason.startswith("it is a copy")))
        self.run(self.up.until(lambda: root not in self.up.disk.arrivals.coming))
        self.hear(name)
        self.finds_again(name)

    def put_back(self, name: str) -> None:
        gone = self.folder / f"gone-{name}"
        if gone.exists():
            gone.rename(self.path(name))
        if self.path(name).exists():
            self.path(name).chmod(0o700)

    @rule(name=roots)
    def block(self, name: str) -> None:
        """Makes its manifest unwritable, but nothing else; or makes it writable again."""
        self.put_back_all_if_down()
        trap = self.path(name) / "manifest.new"
        if name in self.blocked:
            self.put_back(name)
            shutil.rmtree(trap)
            self.blocked.discard(name)
        elif self.path(name).exists():
            with suppress(FileNotFoundError):
                trap.unlink()
            (trap / "x").mkdir(parents=True)
            self.blocked.add(name)

    @precondition(lambda self: self.tier is None)
    @rule(how=st.sampled_from(["copy", "copy", "swap", "lose"]), name=roots, other=roots)
    def rearrange(self, how: str, name: str, other: str) -> None:
        """What people do with disks: make or put back a backup, mount them at each other's place, put in a new one."""
        self.put_back_all_if_down()
        here, there, aside = self.path(name), self.path(other), self.folder / "aside"
        if how == "lose":
            shutil.rmtree(here, ignore_errors=True)
            self.places[name] = Place()
            self.blocked.discard(name)
        elif name == other or not here.exists():
            pass
        elif how == "copy":
            shutil.rmtree(there, ignore_errors=True)
            shutil.copytree(here, there)
            self.places[other] = Place(list(self.places[name].recorded), dict(self.places[name].kept))
            (self.blocked.add if name in self.blocked else self.blocked.discard)(other)
        elif there.exists():
            here.rename(aside)
            there.rename(here)
            aside.rename(there)
            self.places[name], self.places[other] = self.places[other], self.places[name]
            swapped = {name: other, other: name}
            self.blocked = {swapped.get(one, one) for one in self.blocked}

    def put_back_all_if_down(self) -> None:
        if self.tier is None:
            for name in ROOTS:
                self.put_back(name)

    # --- pools ---

    def take_pool(self, number: int | None) -> ArenaFile:
        """What an earlier daemon left in this one, or a new one."""
        self.pool_number = number
        memory_bytes, slab_bytes = SHAPE.pages * PAGE_BYTES, SHAPE.slab_pages * PAGE_BYTES
        self.lose_pool(None)
        if number in self.pools:
            return ArenaFile(os.dup(self.pools[number][0]), memory_bytes, slab_bytes, is_old=True)
        pool = ArenaFile.make(memory_bytes, slab_bytes)
        self.pools[number] = os.dup(pool.fd), Place()
        return pool

    @property
    def pool_place(self) -> Place:
        return self.pools[self.pool_number][1]

    @precondition(lambda self: self.tier is None)
    @rule(number=st.integers(0, POOLS - 1))
    def lose_pool(self, number: int | None) -> None:
        if number in self.pools:
            os.close(self.pools.pop(number)[0])

    # --- laws ---

    @invariant()
    def nothing_cleared_is_served(self) -> None:
        if getattr(self, "tier", None) is None:
            return
        for n, keyspace in zip(self.opened, self.keyspaces(), strict=True):
            for key in self.up.served(keyspace, *ALL):
                assert self.up.found[n, key] >= self.known[n], f"key {key} of namespace {n} was cleared"

    @invariant()
    def a_root_by_itself_tells_what_counts(self) -> None:
        """Records are only where the manifest knows their epoch."""
        if getattr(self, "tier", None) is None:
            return
        for keyspace in self.keyspaces():
            for key in self.up.on_disk(keyspace, *ALL):
                disk_keyspace = self.up.disk.of(keyspace)
                assert disk_keyspace is not None
                place = self.up.place_if_there(keyspace, key)
                if place is None:
                    continue
                manifest = place[0].directory.manifest
                assert manifest is not None
                assert manifest.epoch_of(disk_keyspace.name.fingerprint) == disk_keyspace.name.epoch

    @invariant()
    def nothing_is_wrong(self) -> None:
        if getattr(self, "tier", None) is not None:
            assert self.up.audit() == []

    def teardown(self) -> None:
        if not hasattr(self, "patch"):
            return
        try:
            if self.tier is not None:
                self.run(self.up.drop())
                self.runner.close()
        finally:
            for number in list(self.pools):
                self.lose_pool(number)
            shutil.rmtree(self.folder)
            self.patch.undo()


class LongClearMachine(ClearMachine):
    """The same, for the soak."""


@pytest.fixture
def collected() -> Iterator[None]:
    """What a crash left open is closed before the next test."""
    yield
    gc.collect()


def crashes(case: Any) -> Any:
    """A file whose write a crash cuts off is closed by the garbage collector alone."""
    return pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")(
        pytest.mark.usefixtures("collected")(case)
    )


TestClears = crashes(pytest.mark.slow(pytest.mark.timeout(300)(ClearMachine.TestCase)))
TestClears.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestManyClears = crashes(pytest.mark.soak(pytest.mark.timeout(24 * 3600)(LongClearMachine.TestCase)))
TestManyClears.settings = settings(max_examples=10_000, stateful_step_count=40, deadline=None)
