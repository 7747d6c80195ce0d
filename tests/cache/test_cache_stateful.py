"""Random operations on several namespaces, every byte in the arena checked, audited after each step."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.memory.savedstate import SavedState, read_saved_state
from kvoffloadd.cache.policy import POLICIES
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.model import PAGE_BYTES, I64Array, KeyState, U32Array, U64Array
from kvoffloadd.storage.arenafile import ArenaFile

from .fakes import keys_of, make_cache, make_keyspace

SHAPES = [(1,), (1, 1), (3,), (2, 1, 1)]
numbers = st.lists(st.integers(0, 30), min_size=1, max_size=10, unique=True)
which = st.integers(0, len(SHAPES) - 1)


def pool_arena(cache: Cache) -> U64Array:
    """(pages, words) of the arena."""
    return cache.tier.pool.arena.reshape(-1, PAGE_BYTES).view(np.uint64)


class CacheMachine(RuleBasedStateMachine):
    """The model: what each committed part's slot must hold, and who holds what."""

    @initialize(policy=st.sampled_from(["", *sorted(POLICIES)]))
    def begin(self, policy: str) -> None:
        self.cache = make_cache(pages=48, slab_pages=8, policy=policy)
        made = [make_keyspace(self.cache, bytes([n]) * 16, pages=shape) for n, shape in enumerate(SHAPES)]
        self.namespaces = [namespace for namespace, _ in made]
        self.reserved: list[tuple[int, I64Array]] = []
        self.held: list[tuple[int, U32Array, dict[int, int]]] = []
        self.stamp = 0
        self.content: dict[int, int] = {}  # slot page -> stamp written into it
        self.arena = pool_arena(self.cache)

    def keyspace(self, n: int) -> Keyspace:
        return self.namespaces[n].keyspaces[0]

    @rule(n=which, keys=numbers, seed=st.integers(0, 9))
    def reserve(self, n: int, keys: list[int], seed: int) -> None:
        keyspace = self.keyspace(n)
        parts = np.random.default_rng(seed).permutation(keyspace.schema.parts)[: 1 + seed % keyspace.schema.parts]
        wanted = np.sort(parts).astype(np.uint16)
        before = self.cache.find(keyspace, keys_of(*keys)).states
        answer = reserve(self.cache, keyspace, keys_of(*keys), wanted, 0)
        assert (answer.states[before == KeyState.HIT] == KeyState.HIT).all()
        if len(answer.parts):
            self.reserved.append((n, answer.parts))

    @rule(seed=st.integers(0, 1 << 16), commits=st.booleans())
    def settle(self, seed: int, commits: bool) -> None:
        if not self.reserved:
            return
        n, parts = self.reserved.pop(seed % len(self.reserved))
        cut = seed % (len(parts) + 1)
        if cut < len(parts):
            self.reserved.append((n, parts[cut:]))
        parts = parts[:cut]
        if not len(parts):
            return
        self.stamp += 1
        for page in self.cache.entries.parts.page[parts].tolist():
            self.arena[page] = self.stamp  # one stamp: the copy's bytes, whole or not at all
            self.content[page] = self.stamp
        if commits:
            kept = self.cache.commit(parts)
            columns = self.cache.entries.parts
            self.cache.seal(kept, columns.generation[kept], np.zeros((len(kept), 2), np.uint64))
        else:
            self.cache.abort(parts)

    @rule(n=which, keys=numbers)
    def pin(self, n: int, keys: list[int]) -> None:
        keyspace = self.keyspace(n)
        found = self.cache.find(keyspace, keys_of(*keys))
        rows = found.hit_rows
        if len(rows):
            self.cache.hold(rows)
            self.cache.uses.add([(keyspace, found, 0)])
            records = self.cache.entries.first[rows].astype(np.int64) + keyspace.schema.parts - 1
            pages = self.cache.entries.parts.page[records].tolist()
            self.held.append((n, rows, {page: self.content[page] for page in pages}))

    @rule()
    def count_uses(self) -> None:
        self.cache.uses.settle()

    @rule(seed=st.integers(0, 1 << 16))
    def unpin(self, seed: int) -> None:
        if self.held:
            _, rows, _ = self.held.pop(seed % len(self.held))
            self.cache.unhold(rows)

    @rule(n=which, keys=numbers)
    def drop(self, n: int, keys: list[int]) -> None:
        self.cache.drop(self.cache.find(self.keyspace(n), keys_of(*keys)).hit_rows)
        assert not self.cache.find(self.keyspace(n), keys_of(*keys)).hits.any()

    @rule(n=which)
    def clear(self, n: int) -> None:
        for _ in self.cache.clear(self.namespaces[n]):
            pass
        assert self.keyspace(n).keys == 0

    @rule()
    def die_and_restart(self) -> None:
        """A successor serves what was complete, and nothing else, wherever the predecessor was killed."""
        before = [self.served(n) for n in range(len(SHAPES))]
        pool = self.cache.tier.pool
        successor = ArenaFile(os.dup(pool.fd), pool.capacity_bytes, 8 * PAGE_BYTES, is_old=True)
        saved = read_saved_state(successor.names()) or SavedState(0, 0, {}, [])
        self.cache.tier.close()
        self.cache = make_cache(pages=48, slab_pages=8, pool=successor)
        self.cache.epochs.merge(saved.base, saved.last, saved.epochs)
        rows = adopt(self.cache, saved)
        assert self.cache.entries.parts.unverified.sum() == sum(
            len(pages) for keys in before for pages in keys.values()
        )
        assert len(rows) == sum(map(len, before))
        made = [make_keyspace(self.cache, bytes([n]) * 16, pages=shape) for n, shape in enumerate(SHAPES)]
        self.namespaces = [namespace for namespace, _ in made]
        self.arena = pool_arena(self.cache)
        assert [self.served(n) for n in range(len(SHAPES))] == before
        self.reserved, self.held = [], []

    def served(self, n: int) -> dict[int, list[int]]:
        """Key -> what lies in the slots of its parts, of all that a lookup would find."""
        keyspace = self.keyspace(n)
        found = self.cache.find(keyspace, keys_of(*range(31)))
        records = self.cache.entries.records(found.hit_rows, np.arange(keyspace.schema.parts, dtype=np.uint16))
        stamps = self.arena[self.cache.entries.parts.page[records], 0].tolist()
        return dict(zip(np.flatnonzero(found.hits).tolist(), stamps, strict=True))

    @invariant()
    def held_bytes_do_not_change(self) -> None:
        for _, _, pages in getattr(self, "held", []):
            for page, stamp in pages.items():
                assert self.arena[page, 0] == stamp

    @invariant()
    def the_laws_hold(self) -> None:
        if hasattr(self, "cache"):
            holds = sum(len(rows) for _, rows, _ in self.held)
            reserved = sum(len(parts) for _, parts in self.reserved)
            assert check(self.cache, holds, reserved) == []

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.tier.close()


def test_a_successor_finds_what_was_stored_behind_a_clear() -> None:
    """It finds them though the state was not saved since: the group has another number than in the saved state."""
    machine = CacheMachine()
    machine.begin(policy="")
    machine.reserve(keys=[0], n=0, seed=0)
    machine.settle(commits=True, seed=1)
    machine.clear(n=2)
    machine.reserve(keys=[0], n=2, seed=0)
    machine.settle(commits=True, seed=1)
    machine.die_and_restart()
    assert machine.served(2)
    machine.teardown()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
