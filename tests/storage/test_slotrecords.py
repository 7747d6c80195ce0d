"""What is written down of the slots: against a model, and with flipped bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.model import PAGE_BYTES, U32Array
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.slotrecords import RecoveredSlots, SlotRecords

PAGES, SLAB_PAGES = 101, 16
Entry = tuple[tuple[int, ...], tuple[int, ...], int, int]


def records_of(pool: ArenaFile) -> SlotRecords:
    return SlotRecords(pool.records, pool.slabs, SLAB_PAGES, pool.seed)


def entries(found: RecoveredSlots) -> dict[int, Entry]:
    return {
        int(page): (tuple(key), tuple(digest), int(keyspace), int(part))
        for page, key, digest, keyspace, part in zip(
            found.pages.tolist(),
            found.keys.tolist(),
            found.digests.tolist(),
            found.keyspaces.tolist(),
            found.parts.tolist(),
            strict=True,
        )
    }


def write(slot_records: SlotRecords, pages: U32Array, seed: int) -> dict[int, Entry]:
    """Random records; what was written."""
    rng = np.random.default_rng(seed)
    count = len(pages)
    keys = rng.integers(0, 1 << 64, (count, 4), np.uint64)
    digests = rng.integers(0, 1 << 64, (count, 2), np.uint64)
    keyspaces, parts = rng.integers(0, 1 << 16, (2, count))
    slot_records.write(pages, keys, digests, keyspaces, parts)
    rows = zip(keys.tolist(), digests.tolist(), keyspaces.tolist(), parts.tolist(), strict=True)
    return {page: (tuple(k), tuple(d), s, p) for page, (k, d, s, p) in zip(pages.tolist(), rows, strict=True)}


class Book(RuleBasedStateMachine):
    """Slabs are assigned, written to and emptied; a reader sees what is there at any time."""

    @initialize()
    def begin(self) -> None:
        self.pool = ArenaFile.make(PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES)
        self.slot_records = records_of(self.pool)
        self.sizes: dict[int, int] = {}
        self.held: dict[int, Entry] = {}

    def slots(self, slab: int) -> list[int]:
        first, size = slab * SLAB_PAGES, self.sizes[slab]
        return list(range(first, min(first + SLAB_PAGES, PAGES) - size + 1, size))

    @rule(slab=st.integers(0, 6), size=st.integers(1, 16), seed=st.integers(0, 1 << 16))
    def fill(self, slab: int, size: int, seed: int) -> None:
        if slab not in self.sizes:
            self.sizes[slab] = size
            self.slot_records.assign(slab, size)
        slots = np.array(self.slots(slab), np.uint32)
        filled = slots[np.random.default_rng(seed).random(len(slots)) < 0.5]
        self.held |= write(self.slot_records, filled, seed)

    @rule(seed=st.integers(0, 1 << 16))
    def erase(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        gone = [page for page in self.held if rng.random() < 0.5]
        self.slot_records.erase(np.array(gone, np.uint32))
        for page in gone:
            del self.held[page]

    @rule(slab=st.integers(0, 6))
    def unassign(self, slab: int) -> None:
        if slab in self.sizes:
            gone = [page for page in self.held if page // SLAB_PAGES == slab]
            self.slot_records.erase(np.array(gone, np.uint32))
            for page in gone:
                del self.held[page]
            del self.sizes[slab]
            self.slot_records.assign(slab, 0)

    @invariant()
    def a_successor_reads_what_is_there(self) -> None:
        if hasattr(self, "pool"):
            heir = ArenaFile(os.dup(self.pool.fd), self.pool.capacity_bytes, SLAB_PAGES * PAGE_BYTES, is_old=True)
            found = records_of(heir).read()
            assert entries(found) == self.held
            assert found.damaged == 0
            assert (found.sizes == [self.sizes[page // SLAB_PAGES] for page in found.pages.tolist()]).all()
            heir.close()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@given(st.integers(1, 16), st.integers(0, 1 << 16), st.data())
def test_a_flipped_bit_takes_its_record_alone(size: int, seed: int, data: st.DataObject) -> None:
    """Wherever in the record it is."""
    pool = ArenaFile.make(PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES)
    slot_records = records_of(pool)
    slot_records.assign(1, size)
    pages = np.arange(16, 33 - size, size, dtype=np.uint32)
    written = write(slot_records, pages, seed)
    which = data.draw(st.integers(0, len(pages) - 1))
    word, bit = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 63))
    pool.records[16 + which, word] ^= np.uint64(1 << bit)
    found = slot_records.read()
    del written[int(pages[which])]
    assert entries(found) == written
    assert found.damaged == 1
    assert slot_records.read().damaged == 0, "it is erased"
    pool.close()


def test_a_record_elsewhere_is_none() -> None:
    """Whole, but not where it was written."""
    pool = ArenaFile.make(PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES)
    slot_records = records_of(pool)
    slot_records.assign(0, 1)
    write(slot_records, np.array([3], np.uint32), 0)
    pool.records[4] = pool.records[3]
    assert list(entries(slot_records.read())) == [3]
    pool.close()


def test_later_records_say_so() -> None:
    pool = ArenaFile.make(PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES)
    slot_records = records_of(pool)
    slot_records.assign(0, 1)
    for page in (5, 2, 9):
        write(slot_records, np.array([page], np.uint32), page)
    again = records_of(pool)
    found = again.read()
    assert found.pages[np.argsort(found.orders)].tolist() == [5, 2, 9]
    write(again, np.array([1], np.uint32), 1)
    found = again.read()
    assert found.pages[np.argmax(found.orders)] == 1, "those of a successor come after all others"
    pool.close()


class WatchedRecords(np.ndarray):
    """Records that call `look` after each assignment: the writer may be killed there."""

    look: Callable[[], None]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.look()


@pytest.mark.parametrize("held_before", [False, True])
def test_a_writer_that_is_killed_at_any_point_leaves_whole_records_or_none(held_before: bool) -> None:
    """The check comes last and goes first, also where another record was before."""
    pool = ArenaFile.make(PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES)
    watched = pool.records.view(WatchedRecords)
    slot_records = SlotRecords(watched, pool.slabs, SLAB_PAGES, pool.seed)
    left: list[tuple[int, int]] = []  # whole records and others, after each step

    def look() -> None:
        found = SlotRecords(pool.records.copy(), pool.slabs, SLAB_PAGES, pool.seed).read()
        left.append((len(found), found.damaged))

    watched.look = lambda: None
    slot_records.assign(0, 1)
    pages = np.array([3, 5], np.uint32)
    if held_before:
        write(slot_records, pages, 1)
        slot_records.erase(pages)
    watched.look = look
    write(slot_records, pages, 2)
    assert left[-1] == (2, 0)
    slot_records.erase(pages)
    assert left[-1] == (0, 0)
    assert set(left) == {(2, 0), (0, 0)}
    pool.close()
