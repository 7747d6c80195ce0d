"""Slots and slabs: nothing is lost, nothing is held twice, whatever the order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.errors import UsageError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.memory import MemoryTier
from kvoffloadd.testing.wait import HANG_S


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier(capacity_bytes=37 * PAGE_BYTES, slab_bytes=8 * PAGE_BYTES)
    yield made
    made.close()


def test_any_capacity_is_used_whole(tier: MemoryTier) -> None:
    assert tier.num_free(1) == 37
    pages = tier.take(1, np.arange(37, dtype=np.uint32))
    assert sorted(pages.tolist()) == list(range(37))
    with pytest.raises(UsageError):
        tier.take(1, np.zeros(1, np.uint32))


def test_fresh_slots_ascend_so_that_copies_coalesce(tier: MemoryTier) -> None:
    pages = tier.take(2, np.arange(4, dtype=np.uint32))
    assert np.diff(pages.astype(np.int64)).tolist() == [2, 2, 2]


def test_a_short_last_slab_is_left_to_sizes_that_fit(tier: MemoryTier) -> None:
    assert tier.num_free(8) == 4
    assert tier.num_free(5) == 5
    assert len(tier.take(8, np.arange(4, dtype=np.uint32))) == 4
    assert tier.num_free(5) == 1


def test_a_slab_moves_between_sizes_only_when_it_is_empty(tier: MemoryTier) -> None:
    slots = tier.take(4, np.array([7, 8], np.uint32))
    slab = int(slots[0]) // tier.slab_pages
    assert not tier.unassign(slab)
    assert sorted(tier.owners_in(slab).tolist()) == [7, 8]
    before = tier.num_free(8)
    tier.give(slots)
    assert tier.unassign(slab)
    assert tier.num_free(8) == before + 1


class SlotsMachine(RuleBasedStateMachine):
    """Random takes and gives of several sizes, audited after each step."""

    @initialize()
    def begin(self) -> None:
        self.tier = MemoryTier(101 * PAGE_BYTES, 16 * PAGE_BYTES)
        self.held: dict[int, tuple[int, int]] = {}
        self.owner = 0

    @rule(size=st.integers(1, 16), count=st.integers(1, 20))
    def take(self, size: int, count: int) -> None:
        count = min(count, self.tier.num_free(size))
        owners = np.arange(self.owner, self.owner + count, dtype=np.uint32)
        self.owner += count
        for page, owner in zip(self.tier.take(size, owners).tolist(), owners.tolist(), strict=True):
            self.held[page] = (size, owner)

    @rule(seed=st.integers(0, 1 << 16), share=st.floats(0, 1))
    def give(self, seed: int, share: float) -> None:
        rng = np.random.default_rng(seed)
        pages = [page for page in self.held if rng.random() < share]
        self.tier.give(np.array(pages, np.uint32))
        for page in pages:
            del self.held[page]

    @rule(slab=st.integers(0, 6))
    def unassign(self, slab: int) -> None:
        used = [p for p in self.held if p // self.tier.slab_pages == slab]
        assigned = int(self.tier._slab_size[slab]) != 0
        if assigned:
            assert self.tier.unassign(slab) == (not used)

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        if not hasattr(self, "tier"):
            return
        taken = np.zeros(101, int)
        for page, (size, _) in self.held.items():
            taken[page : page + size] += 1
        assert taken.max(initial=0) <= 1
        pages = np.array(list(self.held), np.uint32)
        sizes = np.array([size for size, _ in self.held.values()], np.int64)
        owners = np.array([owner for _, owner in self.held.values()], np.uint32)
        assert self.tier.check_slots(pages, sizes, owners) + self.tier.check_pools() == []
        taken_pages, taken_by = self.tier.owned(range(self.tier.num_slabs))
        order = np.argsort(pages)
        assert (taken_pages.tolist(), taken_by.tolist()) == (pages[order].tolist(), owners[order].tolist())
        gauges = self.tier.gauges()
        assert gauges["used_bytes"] == sum(sizes.tolist()) * PAGE_BYTES

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_arena_that_is_closed_is_not_prefaulted() -> None:
    """The thread that does this may not have run until then."""
    tier = MemoryTier(1 << 20, 1 << 20)
    tier.close()
    tier.prefault(2)


def test_closing_ends_prefaulting() -> None:
    """No page is touched once the arena is gone: another mapping may be there by then."""
    with ThreadPoolExecutor(1) as pool:
        for delay_s in (0.0, 0.001, 0.01):
            tier = MemoryTier(256 << 20, 1 << 20)
            prefault = pool.submit(tier.prefault, 2)
            time.sleep(delay_s)
            tier.close()
            prefault.result(HANG_S)
