"""Demotion: what is written to disk, what is not and why, and that nothing is evicted while it is written."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.disk.demotion import BATCH_SHARE, DemotionWrite
from kvoffloadd.cache.lower.backlog import LOOK_AHEAD_S, OFFERS_PER_TURN, Budget
from kvoffloadd.errors import NotDurableError
from kvoffloadd.model import PAGE_BYTES, U8Array, U32Array, U64Array
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.disk import format as disk_format
from kvoffloadd.storage.disk import segment, writer
from kvoffloadd.storage.disk.format import KeyspaceId
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.writer import OnWritten, WriteBatch
from kvoffloadd.testing.wait import HANG_S

from .conftest import Open
from .disktier import HIT, MISS, PENDING, Shape, Tier
from .fakes import keys_of

N = b"n" * 16


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


SMALL = Shape(pages=32)
"""8 slots of 4 at a time are looked at before eviction."""


# --- what is written ---


async def test_what_is_sealed_is_written_and_comes_back_whole(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace(sizes=(5000, 1, 2 * PAGE_BYTES))
    tier.store(keyspace, *range(7))
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(8)) == list(range(7))
    counters = tier.disk.demotion.counters
    assert (counters.keys, counters.records, counters.bytes) == (7, 21, 7 * (5001 + 2 * PAGE_BYTES))
    tier.evict(keyspace, *range(7))
    assert tier.states(keyspace, 3, 7) == [PENDING, MISS]
    assert await tier.fetch(keyspace, *range(8)) == list(range(7))
    assert tier.not_demoted == {}


async def test_only_what_is_complete_and_sealed_is_written(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES))
    tier.seal(tier.write(keyspace, [1, 2], parts=[0]))
    unsealed = tier.write(keyspace, [2, 3])
    tier.disk.demotion.backlog.offer(tier.cache.find(keyspace, keys_of(2, 3)).hit_rows)
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2, 3) == []
    tier.seal(unsealed)
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2, 3) == [2, 3]
    tier.seal(tier.write(keyspace, [1], parts=[1]))
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2, 3) == [1, 2, 3]


async def test_nothing_is_written_twice(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.store(keyspace, 1, 2)
    rows = tier.cache.find(keyspace, keys_of(1, 2)).hit_rows
    tier.disk.demotion.backlog.offer(rows)  # while they wait
    await tier.quiet()
    tier.disk.demotion.backlog.offer(rows)  # and when they are there
    tier.cache.uses.add([(keyspace, tier.cache.find(keyspace, keys_of(1, 2)), 0)])
    tier.cache.uses.settle()
    await tier.quiet()
    tier.evict(keyspace, 1, 2)
    assert await tier.fetch(keyspace, 1, 2) == [1, 2]
    await tier.quiet()
    assert tier.disk.demotion.counters.records == 2
    assert sum(tier.files.writes) == 2


async def test_several_keys_go_in_one_write_but_never_more_than_a_share_of_memory(open_tier: Open) -> None:
    tier = await open_tier(Shape(pages=2048, segment_pages=512))
    small, large = tier.keyspace(), tier.keyspace(b"l" * 16, sizes=(8 * PAGE_BYTES,))
    tier.store(small, *range(400))
    tier.store(large, *range(10))
    await tier.quiet()
    share = 2048 // BATCH_SHARE
    assert max(tier.files.writes) == share
    assert len(tier.files.writes) <= 400 // share + 1 + 3 + 2, "two more where a segment ended"
    assert tier.files.writes[-3:] == [share // 8, share // 8, 10 - 2 * (share // 8)]
    assert sum(tier.files.writes) == 410


async def test_two_roots_share_the_work(open_tier: Open) -> None:
    tier = await open_tier(Shape(roots=2))
    keyspace = tier.keyspace()
    tier.files.writing.close()
    tier.store(keyspace, *range(40))
    await tier.until(lambda: all(root.writer.writing == root.writer.depth for root in tier.roots))
    tier.files.writing.open()
    await tier.quiet()
    written = [root.writer.written_bytes // PAGE_BYTES for root in tier.roots]
    assert sum(written) == 40
    assert min(written) > 0
    tier.evict(keyspace, *range(40))
    assert await tier.fetch(keyspace, *range(40)) == list(range(40))


# --- before eviction ---


class LookAhead:
    """Decides when demotion inspects memory's next victims, in place of the clock."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._changes = tier.disk.demotion.backlog.changes
        self._wait_for_change = self._changes.wait
        self._is_awaited = self._is_due = False
        self._changes.wait = self._wait  # type: ignore[method-assign]

    async def _wait(self, deadline_s: float | None = None) -> bool:
        assert deadline_s == LOOK_AHEAD_S
        self._is_awaited = True
        await self._wait_for_change()
        was_due = self._is_due
        self._is_awaited = self._is_due = False
        return not was_due

    async def once(self) -> None:
        """Demotion inspects them once. Returns when it has written what it found, and waits again."""
        await self._tier.until(lambda: self._is_awaited)
        self._is_due = True
        self._changes.notify_all()
        await self._tier.until(lambda: self._is_awaited and not self._is_due)
        await self._tier.quiet()


async def before_eviction(open_tier: Open, **settings: Any) -> tuple[Tier, LookAhead]:
    """A tier that writes only what memory evicts next."""
    looks: list[LookAhead] = []
    tier = await open_tier(SMALL, lambda tier: looks.append(LookAhead(tier)), demote="evict", **settings)
    return tier, looks[0]


async def test_with_evict_only_the_next_victims_are_written(open_tier: Open) -> None:
    tier, look_ahead = await before_eviction(open_tier)
    keyspace = tier.keyspace()
    tier.store(keyspace, *range(28))
    await look_ahead.once()
    assert tier.on_disk(keyspace, *range(28)) == [], "there is room for more"
    tier.store(keyspace, *range(28, 32))
    await look_ahead.once()
    assert tier.on_disk(keyspace, *range(32)) == list(range(4))
    await look_ahead.once()
    assert tier.on_disk(keyspace, *range(32)) == list(range(4)), "the next victims are the same"
    tier.store(keyspace, 40, 41, 42, 43)
    assert tier.states(keyspace, 0, 3, 4) == [PENDING, PENDING, HIT]
    for _ in range(2):
        await look_ahead.once()
        assert tier.on_disk(keyspace, *range(50)) == list(range(8)), "and no others"
    assert sum(tier.files.writes) == 8


# --- second use ---


async def test_second_use_leaves_out_what_was_used_once(open_tier: Open) -> None:
    tier = await open_tier(admit="second-use")
    keyspace = tier.keyspace()
    tier.store(keyspace, *range(10))
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(10)) == []
    tier.cache.uses.add([(keyspace, tier.cache.find(keyspace, keys_of(3, 5, 99)), 0)])
    tier.cache.uses.settle()
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(10)) == [3, 5]
    tier.evict(keyspace, 7, 8)
    tier.store(keyspace, 7)  # what comes a second time was wanted a second time
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(10)) == [3, 5, 7]


async def test_second_use_before_eviction_and_at_the_end(open_tier: Open) -> None:
    tier, look_ahead = await before_eviction(open_tier, admit="second-use")
    keyspace = tier.keyspace()
    tier.store(keyspace, *range(32))
    tier.cache.uses.add([(keyspace, tier.cache.find(keyspace, keys_of(1, 2, 20)), 0)])
    tier.cache.uses.settle()
    for _ in range(2):
        await look_ahead.once()
        assert tier.on_disk(keyspace, *range(32)) == [1, 2], "of the next four victims, those used twice"
    await tier.close()
    again = await open_tier(SMALL)
    assert again.on_disk(again.keyspace(), *range(32)) == [1, 2, 20]


async def test_second_use_counts_keys_not_parts(open_tier: Open) -> None:
    """Two ranks store their parts of the same key, one after the other: that is one use."""
    tier = await open_tier(admit="second-use")
    keyspace = tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES))
    tier.seal(tier.write(keyspace, [1, 2], parts=[0]))
    tier.seal(tier.write(keyspace, [1, 2], parts=[1]))
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2) == []


# --- budgets ---


def test_a_budget_spreads_batches_over_time() -> None:
    budget = Budget(1000, 10)
    assert budget.delay_s(5.0) == 0
    budget.spend(500, 1, 5.0)
    assert budget.delay_s(5.0) == pytest.approx(0.5), "bytes bind"
    assert budget.delay_s(5.2) == pytest.approx(0.3)
    budget.spend(10, 20, 5.5)
    assert budget.delay_s(5.5) == pytest.approx(2.0), "operations bind"
    budget.spend(1000, 1, 6.0)
    assert budget.delay_s(6.0) == pytest.approx(2.5), "what is spent ahead of time adds up"
    assert budget.delay_s(100.0) == 0
    budget.spend(1000, 1, 100.0)
    assert budget.delay_s(100.0) == pytest.approx(1.0), "idle time is not saved up"


def test_a_budget_of_nothing_is_no_limit() -> None:
    budget = Budget(0, 0)
    budget.spend(1 << 40, 1 << 20, 1.0)
    assert budget.delay_s(1.0) == 0
    only_ops = Budget(0, 4)
    only_ops.spend(1 << 40, 2, 1.0)
    assert only_ops.delay_s(1.0) == pytest.approx(0.5)


class SleepClock:
    """Demotion's time: a sleep moves it on, and ends at once."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s
        await asyncio.sleep(0)


@pytest.mark.parametrize("budget", [{"write_ops_per_s": 40}, {"write_bytes_per_s": 40 * PAGE_BYTES}])
async def test_writing_keeps_to_its_budget(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, budget: dict[str, int]
) -> None:
    tier = await open_tier(Shape(segment_pages=64), **budget)  # no segment ends within a batch
    clock, keyspace, append = SleepClock(), tier.keyspace(), tier.root.writer.append
    begun: list[tuple[float, int]] = []

    def note(batch: WriteBatch, done: OnWritten) -> int:
        if count := append(batch, done):
            begun.append((round(clock.now_s, 6), count))
        return count

    monkeypatch.setattr("kvoffloadd.cache.disk.demotion.asyncio", clock)
    monkeypatch.setattr(tier.disk, "loop", clock)
    monkeypatch.setattr(tier.root.writer, "append", note)
    batch = 256 // BATCH_SHARE
    clock.now_s = 100.0
    tier.store(keyspace, *range(3 * batch))
    await tier.quiet()
    assert begun == [(100.0, batch), (100.1, batch), (100.2, batch)]
    clock.now_s = 200.0
    tier.store(keyspace, *range(100, 100 + 2 * batch))
    await tier.quiet()
    assert begun[3:] == [(200.0, batch), (200.1, batch)], "idle time is not saved up"


# --- what is not written, and why ---


async def test_a_backlog_is_bounded_and_what_does_not_fit_is_counted(open_tier: Open) -> None:
    tier = await open_tier(backlog_bytes=6 * PAGE_BYTES + 100)
    keyspace = tier.keyspace()
    tier.store(keyspace, *range(20))
    assert tier.disk.demotion.backlog_bytes == 6 * PAGE_BYTES
    assert tier.not_demoted == {"backlog": 14}
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(20)) == list(range(6))
    assert tier.served(keyspace, *range(20)) == list(range(20)), "memory has them all the same"
    tier.store(keyspace, 30)
    await tier.quiet()
    assert tier.on_disk(keyspace, 30) == [30]


async def test_what_is_evicted_before_its_turn_is_counted(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.store(keyspace, 1, 2, 3)
    tier.evict(keyspace, 2)
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2, 3) == [1, 3]
    assert tier.not_demoted == {"evicted": 1}


@pytest.mark.parametrize("demote", ["seal", "evict"])
async def test_what_is_evicted_before_it_has_a_checksum_is_counted(open_tier: Open, demote: str) -> None:
    """Keys that are not complete, that are on disk, or that were not asked for twice would not have been written."""
    tier = await open_tier(demote=demote)
    keyspace = tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES))
    tier.write(keyspace, [1, 2])
    tier.write(keyspace, [3], parts=[0])
    tier.evict(keyspace, 1, 2)
    assert tier.not_demoted == {"evicted": 2}
    tier.cache.eviction.drop(tier.cache.find(keyspace, keys_of(3)).rows.astype(np.uint32))
    assert tier.not_demoted == {"evicted": 2}


async def test_what_is_evicted_before_the_look_ahead_comes_to_it_is_counted(open_tier: Open) -> None:
    """Where eviction decides what is written, this was never offered. What is on disk already is not lost."""
    tier = await open_tier(demote="evict")
    keyspace = tier.keyspace()
    tier.store(keyspace, 1)
    tier.evict(keyspace, 1)
    assert tier.not_demoted == {"evicted": 1}
    tier.store(keyspace, 2)
    tier.disk.demotion.backlog.offer(tier.cache.find(keyspace, keys_of(2)).hit_rows)
    await tier.quiet()
    tier.evict(keyspace, 2)
    assert tier.on_disk(keyspace, 1, 2) == [2]
    assert tier.not_demoted == {"evicted": 1}


async def test_what_was_used_once_was_not_to_be_written(open_tier: Open) -> None:
    tier = await open_tier(admit="second-use")
    keyspace = tier.keyspace()
    tier.write(keyspace, [1])
    tier.evict(keyspace, 1)
    assert tier.not_demoted == {}


@pytest.mark.parametrize("history", range(12))
async def test_each_key_is_written_or_counted_whatever_rows_and_records_change_hands(
    open_tier: Open, history: int
) -> None:
    """A row may come to another key of the same keyspace, with another record that has the same generation."""
    rng = np.random.default_rng(history)
    tier = await open_tier(Shape(num_segments=60))
    keyspace = tier.keyspace()
    held: list[int] = []
    stored = 0
    for _ in range(12):
        new = range(stored, stored + int(rng.integers(1, 4)))
        tier.store(keyspace, *new)
        stored += len(new)
        held += new
        gone = rng.permutation([number for number in held if rng.random() < 0.4]).tolist()
        tier.evict(keyspace, *gone)
        held = [number for number in held if number not in gone]
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(stored)) == held, "nothing was written before"
    assert tier.not_demoted["evicted"] == stored - len(held)


async def test_a_row_that_changed_hands_before_its_turn_is_not_taken_for_the_old_key(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace, other = tier.keyspace(), tier.keyspace(b"o" * 16)
    tier.store(keyspace, 1, 2)
    old = set(tier.cache.find(keyspace, keys_of(1, 2)).rows.tolist())
    tier.evict(keyspace, 1, 2)
    kept = tier.write(keyspace, [3])  # not sealed: not to be written
    tier.store(other, 4)
    new = [tier.cache.find(keyspace, keys_of(3)).rows[0], tier.cache.find(other, keys_of(4)).rows[0]]
    assert set(map(int, new)) == old
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2, 3) == []
    assert tier.on_disk(other, 4) == [4]
    assert tier.not_demoted == {"evicted": 2}
    tier.seal(kept)
    await tier.quiet()
    tier.evict(keyspace, 3)
    tier.evict(other, 4)
    assert await tier.fetch(keyspace, 1, 2, 3) == [3]
    assert await tier.fetch(other, 4) == [4]


async def test_an_offer_dies_with_its_space(open_tier: Open) -> None:
    """Its rows and their records may be another namespace's by then: that must not be written under the old name,
    where it would be served with a checksum that is right. The number means no other one while the offer waits.
    """
    tier = await open_tier()
    slow = tier.keyspace(b"z" * 16)
    await tier.until(lambda: tier.root.pool.open_segment and tier.root.pool._clean)
    tier.files.writing.close()
    for held, number in enumerate((100, 101, 102), 1):
        tier.store(slow, number)
        await tier.until(lambda held=held: tier.disk.demotion.holds == held)  # type: ignore[misc]
    assert tier.root.writer.writing == tier.root.writer.depth, "the third waits here, others in the backlog"
    old = tier.keyspace(b"a" * 16)
    # So that row and first record of what comes later are those of an offer that waits, and generations agree.
    tier.store(old, 1)
    tier.store(old, 2)
    tier.evict(old, 2)
    tier.store(old, 3)
    tier.evict(old, 1, 3)
    tier.cache.close_namespace(old.namespace)
    tier.cache.entries.keyspaces._next = old.id  # as after all numbers have been given
    number = old.id
    del old
    new = tier.keyspace(b"y" * 16)
    assert new.id != number
    tier.store(new, 77)
    tier.files.writing.open()
    await tier.quiet()
    assert tier.on_disk(tier.keyspace(b"a" * 16), 1, 2, 3, 77) == []
    assert tier.on_disk(new, 77) == [77]


async def test_many_offers_that_are_void_are_passed_over_several_turns(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after a clear, while a disk lagged behind many small stores."""
    tier = await open_tier(Shape(pages=1024))
    keyspace, demotion = tier.keyspace(), tier.disk.demotion
    await tier.until(lambda: tier.root.pool.open_segment and tier.root.pool._clean)
    tier.files.writing.close()
    for number in range(500):
        tier.store(keyspace, number)
    await tier.until(lambda: tier.files.writing.entered.is_set())
    tier.evict(keyspace, *range(400, 500))
    waiting: list[int] = []

    def look() -> None:
        waiting.append(len(demotion.backlog.queue))
        if demotion.backlog.queue:
            tier.loop.call_soon(look)

    look()  # from here on: a clear that takes many turns has them passed over before it ends
    await tier.clear(keyspace.namespace)
    tier.files.writing.open()
    await tier.quiet()
    assert waiting[0] > 400
    assert max(before - after for before, after in pairwise(waiting)) <= 2 * OFFERS_PER_TURN
    assert tier.disk.demotion.backlog_bytes == 0
    tier.store(tier.keyspace(), 1)
    await tier.quiet()
    assert tier.on_disk(tier.keyspace(), 1) == [1]


async def test_what_no_segment_can_hold_is_counted(open_tier: Open) -> None:
    tier = await open_tier(Shape(segment_pages=16, slab_pages=16))
    fits, large = tier.keyspace(sizes=(12 * PAGE_BYTES,)), tier.keyspace(b"l" * 16, sizes=(12 * PAGE_BYTES + 1,))
    tier.store(fits, 1, 2)
    tier.store(large, 1, 2, 3)
    await tier.quiet()
    assert tier.on_disk(fits, 1, 2) == [1, 2]
    assert tier.on_disk(large, 1, 2, 3) == []
    assert tier.not_demoted == {"too large": 3}
    tier.evict(fits, 1, 2)
    assert await tier.fetch(fits, 1, 2) == [1, 2]


async def test_a_write_that_fails_is_tried_once_more_elsewhere(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.store(keyspace, 1)
    await tier.quiet()
    _, first, _ = tier.place(keyspace, 1)
    tier.files.failing_writes = 1
    tier.store(keyspace, 2)
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2) == [1, 2]
    assert tier.place(keyspace, 2)[1] is not first
    assert tier.not_demoted == {}
    tier.evict(keyspace, 1, 2)
    assert await tier.fetch(keyspace, 1, 2) == [1, 2], "what the broken segment held stays readable"


async def test_a_disk_that_does_not_write_costs_nothing_but_the_demotion(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.store(keyspace, 1)
    await tier.quiet()
    tier.files.plant("write=EIO")
    tier.store(keyspace, *range(2, 8))
    await tier.until(lambda: tier.root.state == RootState.READ_ONLY)
    await tier.quiet()
    lost = tier.not_demoted
    assert sum(lost.values()) == 6
    assert lost.keys() <= {"write failed", "no room", "no disk"}
    assert tier.served(keyspace, *range(8)) == list(range(1, 8))
    tier.evict(keyspace, 1)
    assert await tier.fetch(keyspace, 1) == [1], "it is read on"
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)
    tier.store(keyspace, 9)
    await tier.quiet()
    await tier.until(lambda: tier.on_disk(keyspace, *range(10)) == [*range(1, 8), 9])
    assert tier.not_demoted == lost, "each of them was offered again"


# --- what is offered again ---


async def with_a_late_root(open_tier: Open, paths: list[Path], **settings: int) -> Tier:
    """Opens a tier with the first root; the second, which is refused so far, knows of a clear of N."""
    second = await open_tier(paths=[paths[1]])
    await second.clear(second.keyspace(N).namespace)
    await second.close()
    paths[1].chmod(0o755)
    return await open_tier(Shape(num_segments=64), paths=paths, **settings)


async def test_what_a_late_root_makes_void_is_written_once_more(open_tier: Open, paths: list[Path]) -> None:
    """It stays within the budget for what waits, however much it is."""
    tier = await with_a_late_root(open_tier, paths, backlog_bytes=6 * PAGE_BYTES)
    keyspace, other = tier.keyspace(N), tier.keyspace(b"o" * 16)
    for first in range(0, 40, 5):
        tier.store(keyspace, *range(first, first + 5))
        await tier.quiet()
    await tier.store_away(other, 1)
    old, writes = tier.disk.of(keyspace), sum(tier.files.writes)
    waiting: list[int] = []
    offer = tier.disk.demotion.backlog.offer

    def watched(rows: U32Array) -> None:
        offer(rows)
        waiting.append(tier.disk.demotion.backlog_bytes)

    tier.disk.demotion.backlog.offer = watched  # type: ignore[method-assign]
    paths[1].chmod(0o700)
    await tier.until(lambda: tier.disk.of(keyspace) is not old and len(tier.on_disk(keyspace, *range(40))) == 40)
    await tier.quiet()
    await tier.until(lambda: not tier.disk.demotion._again)
    assert sum(tier.files.writes) == writes + 40
    assert max(waiting) <= 6 * PAGE_BYTES
    assert tier.not_demoted == {}
    await tier.drop()
    alone = await open_tier(paths=paths)
    assert alone.on_disk(alone.keyspace(N), *range(40)) == list(range(40))


async def test_what_is_being_written_when_it_becomes_void(open_tier: Open, paths: list[Path]) -> None:
    tier = await with_a_late_root(open_tier, paths)
    keyspace = tier.keyspace(N)
    tier.files.writing.close()
    tier.store(keyspace, *range(12))  # more than one batch
    await tier.until(tier.files.writing.entered.is_set)
    old = tier.disk.of(keyspace)
    paths[1].chmod(0o700)
    await tier.until(lambda: tier.disk.of(keyspace) is not old and not tier.disk.demotion._again)
    assert tier.audit() == []
    tier.files.writing.open()
    await tier.until(lambda: len(tier.on_disk(keyspace, *range(12))) == 12)
    await tier.quiet()
    assert tier.disk.demotion.counters.keys == 12
    await tier.drop()
    alone = await open_tier(paths=paths)
    assert alone.on_disk(alone.keyspace(N), *range(12)) == list(range(12))


async def test_what_fell_out_while_a_clear_was_not_noted_is_offered_again(open_tier: Open) -> None:
    tier = await open_tier()
    trap = tier.root.path / "manifest.new"
    (trap / "x").mkdir(parents=True)
    with pytest.raises(NotDurableError):
        await tier.clear(tier.keyspace(N).namespace)
    keyspace = tier.keyspace(N)
    tier.store(keyspace, *range(10))
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(10)) == []
    assert tier.not_demoted == {"clear not noted": 10}
    shutil.rmtree(trap)
    await tier.until(lambda: tier.on_disk(keyspace, *range(10)) == list(range(10)))
    await tier.quiet()
    assert sum(tier.files.writes) == 10


@pytest.mark.parametrize("demote", ["seal", "evict"])
async def test_what_fell_out_while_no_root_was_there_is_offered_again(open_tier: Open, demote: str) -> None:
    """If all that is stored is written, not only what is evicted next."""
    tier = await open_tier(demote=demote)
    keyspace, on_disk = tier.keyspace(), tier.folder / "away"
    tier.root.path.rename(on_disk)
    await tier.until(lambda: tier.root.state == RootState.OFF and not tier.root.accepted)
    tier.store(keyspace, *range(10))
    tier.disk.demotion.backlog.offer(tier.cache.find(keyspace, keys_of(*range(10))).hit_rows)
    await tier.quiet()
    assert tier.not_demoted == {"no disk": 10}
    on_disk.rename(tier.root.path)
    await tier.until(lambda: tier.root.state == RootState.OK)
    if demote == "seal":
        await tier.until(lambda: tier.on_disk(keyspace, *range(10)) == list(range(10)))
    assert not tier.disk.demotion._again
    await tier.quiet()
    assert sum(tier.files.writes) == (0 if demote == "evict" else 10)


async def test_a_write_of_which_a_part_found_no_root_is_offered_again_when_the_rest_has_ended(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier(Shape(pages=1024))
    demotion, keyspace, writes = tier.disk.demotion, tier.keyspace(), list[DemotionWrite]()

    async def append(write: DemotionWrite, batch: WriteBatch) -> int:
        if not writes:
            writes.append(write)
            return 6  # which are under way
        monkeypatch.undo()
        tier.root.health.become(RootState.OFF, "planted")
        return 0

    monkeypatch.setattr(demotion, "_append", append)
    tier.store(keyspace, *range(10))
    await tier.until(lambda: tier.not_demoted == {"no disk": 10})
    assert demotion.holds == 10
    await tier.until(lambda: tier.root.state == RootState.OK and not demotion._again)
    other = tier.keyspace(b"o" * 16)
    demotion.offer_again(other)
    await tier.until(lambda: not demotion._again)  # its turn came: all that had to be offered before it has been
    assert (demotion.backlog_bytes, demotion.holds) == (0, 10), "the write that is under way, and nothing else"
    assert tier.on_disk(keyspace, *range(10)) == []
    demotion._settle(writes[0], 6, failed=True)
    await tier.until(lambda: tier.on_disk(keyspace, *range(10)) == list(range(10)), 10)
    await tier.quiet()


async def test_a_bug_in_a_write_is_no_trouble_of_the_disk(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who could provoke it must not take the disk from all others."""
    tier = await open_tier(Shape(segment_pages=128))
    keyspace, other = tier.keyspace(), tier.keyspace(b"o" * 16)
    tier.store(other, 1)
    await tier.quiet()
    encode, tries = disk_format.encode_records, []

    def fail(out: U8Array, uuid: bytes, entries: Any, keyspaces: Any, digests: U64Array, now_s: int) -> None:
        if keyspaces["fingerprint"][0].tobytes() == b"n" * 16:
            tries.append(len(entries))
            raise ValueError("planted")
        encode(out, uuid, entries, keyspaces, digests, now_s)

    monkeypatch.setattr(writer, "encode_records", fail)
    for number in range(5):
        tier.store(keyspace, number)
        await tier.quiet()
        tier.store(other, 10 + number)
        await tier.quiet()
    assert tries == [1] * 10, "once more each"
    assert tier.not_demoted == {"write failed": 5}
    assert (tier.root.state, tier.root.health.write_errors) == (RootState.OK, 0)
    assert len([message for message in caplog.messages if "because of a bug in the daemon" in message]) == 10
    assert tier.on_disk(other, 1, *range(10, 15)) == [1, *range(10, 15)]
    assert {tier.place(other, number)[1] for number in (1, *range(10, 15))} == {tier.root.pool.open_segment}, (
        "one segment"
    )
    monkeypatch.undo()
    tier.store(keyspace, 9)
    await tier.close()
    again = await open_tier(Shape(segment_pages=128))
    assert again.on_disk(again.keyspace(), *range(10)) == [*range(5), 9], "the end has tried once more"
    assert again.on_disk(again.keyspace(b"o" * 16), 1, *range(10, 15)) == [1, *range(10, 15)]


async def test_what_a_write_says_of_its_space_is_made_once_and_not_in_a_thread(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keyspaces come to a segment while it is written, and there may be tens of thousands."""
    made: list[tuple[int, bytes]] = []
    encode = disk_format.encode_spaces

    def note(keyspaces: list[KeyspaceId]) -> Any:
        made.extend((threading.get_ident(), keyspace.fingerprint) for keyspace in keyspaces)
        return encode(keyspaces)

    for module in (disk_format, segment):
        monkeypatch.setattr(module, "encode_spaces", note)
    tier = await open_tier(Shape(segment_pages=128))
    keyspaces = [tier.keyspace(bytes([letter]) * 16) for letter in b"abc"]
    for number in range(4):
        for keyspace in keyspaces:
            tier.store(keyspace, number)
            await tier.quiet()
    assert made == [(threading.get_ident(), keyspace.namespace.fingerprint) for keyspace in keyspaces]
    for keyspace in keyspaces:
        tier.evict(keyspace, *range(4))
        assert await tier.fetch(keyspace, *range(4)) == list(range(4))


# --- while it is written ---


async def test_what_is_being_written_is_not_evicted_and_pressure_does_not_change_it(open_tier: Open) -> None:
    tier = await open_tier(Shape(pages=16))
    keyspace = tier.keyspace()
    tier.files.writing.close()
    tier.store(keyspace, 1)
    await tier.until(tier.files.writing.entered.is_set)
    tier.write(keyspace, range(100, 116))
    assert tier.served(keyspace, 1) == [1]
    assert len(tier.served(keyspace, *range(100, 116))) == 15
    assert tier.audit() == []
    tier.files.writing.open()
    await tier.quiet()
    tier.evict(keyspace, 1)
    assert await tier.fetch(keyspace, 1) == [1]


async def test_a_key_that_is_cleared_while_it_is_written_does_not_come_back(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.files.writing.close()
    tier.store(keyspace, 1, 2, 3, 4, 5, 6)
    await tier.until(tier.files.writing.entered.is_set)
    await tier.clear(keyspace.namespace)
    new = tier.keyspace()
    assert new is not keyspace
    assert tier.audit() == []
    tier.files.writing.open()
    await tier.quiet()
    assert tier.states(new, *range(1, 7)) == [MISS] * 6
    assert tier.disk.catalog.records == 0
    await tier.drop()
    again = await open_tier()
    assert again.states(again.keyspace(), *range(1, 7)) == [MISS] * 6


async def test_a_key_dropped_while_it_is_written_leaves_no_slot_behind(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.files.writing.close()
    tier.store(keyspace, 1)
    await tier.until(tier.files.writing.entered.is_set)
    tier.cache.drop(tier.cache.find(keyspace, keys_of(1)).hit_rows)
    assert tier.cache.tier.gauges()["used_bytes"] == PAGE_BYTES
    tier.files.writing.open()
    await tier.quiet()
    assert tier.cache.tier.gauges()["used_bytes"] == 0
    assert np.count_nonzero(tier.cache.entries.leases) == 0


# --- the end ---


async def test_an_orderly_end_writes_what_is_in_memory_alone(open_tier: Open) -> None:
    tier = await open_tier(demote="evict")
    keyspace, wide = tier.keyspace(), tier.keyspace(b"w" * 16, sizes=(PAGE_BYTES, 5000))
    tier.store(keyspace, *range(20))
    tier.store(wide, *range(5))
    half = tier.write(wide, [7], parts=[0])
    unsealed = tier.write(keyspace, [30])
    assert tier.on_disk(keyspace, *range(20)) == []
    await tier.close()
    again = await open_tier()
    keyspace, wide = again.keyspace(), again.keyspace(b"w" * 16, sizes=(PAGE_BYTES, 5000))
    assert again.on_disk(keyspace, *range(31)) == list(range(20))
    assert again.on_disk(wide, *range(8)) == list(range(5))
    assert await again.fetch(keyspace, *range(20)) == list(range(20))
    assert await again.fetch(wide, *range(5)) == list(range(5))
    assert len(half) == len(unsealed) == 1


async def test_an_orderly_end_writes_more_than_may_wait_at_once(open_tier: Open) -> None:
    roomy = Shape(num_segments=64)
    tier = await open_tier(roomy, demote="evict", backlog_bytes=6 * PAGE_BYTES)
    keyspace, large = tier.keyspace(), tier.keyspace(b"l" * 16, sizes=(5 * PAGE_BYTES,))
    tier.store(keyspace, *range(40))
    tier.store(large, *range(3))
    await tier.close()
    again = await open_tier(roomy)
    assert again.on_disk(again.keyspace(), *range(40)) == list(range(40))
    assert again.on_disk(again.keyspace(b"l" * 16, sizes=(5 * PAGE_BYTES,)), *range(3)) == [0, 1, 2]


async def test_an_end_in_time_loses_what_the_disk_is_too_slow_for(open_tier: Open) -> None:
    tier = await open_tier(demote="evict", write_ops_per_s=20)
    keyspace = tier.keyspace()
    tier.store(keyspace, *range(100))
    async with asyncio.timeout(HANG_S):
        await tier.close(flush_s=0.3)
    again = await open_tier()
    keyspace = again.keyspace()
    left = again.on_disk(keyspace, *range(100))
    assert 1 <= len(left) <= 20, "it did not wait until all was written"
    assert await again.fetch(keyspace, *left) == left


async def test_an_end_in_time_tells_of_what_was_never_offered(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """The backlog is small, so that most of it never waited."""
    tier = await open_tier(demote="evict", write_ops_per_s=20, backlog_bytes=6 * PAGE_BYTES)
    tier.store(tier.keyspace(), *range(100))
    await tier.close(flush_s=0.3)
    again = await open_tier()
    written = len(again.on_disk(again.keyspace(), *range(100)))
    (logged,) = [int(r.message.split()[0]) for r in caplog.records if "were not written to disk in time" in r.message]
    assert (100 - written - 20) * PAGE_BYTES <= logged <= (100 - written + 20) * PAGE_BYTES, "what ends meanwhile aside"


async def test_an_end_tells_of_what_no_root_took(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace, on_disk = tier.keyspace(), tier.folder / "away"
    tier.store(keyspace, 100, 101)
    await tier.quiet()
    tier.root.path.rename(on_disk)
    await tier.until(lambda: tier.root.state == RootState.OFF and not tier.root.accepted)
    tier.store(keyspace, *range(10))
    await tier.quiet()
    at_hand = 12 - len(tier.on_disk(keyspace, 100, 101))
    assert await tier.disk.demotion.flush(0.3) == at_hand * PAGE_BYTES
    on_disk.rename(tier.root.path)
    await tier.until(lambda: tier.on_disk(keyspace, *range(10)) == list(range(10)))
    assert await tier.disk.demotion.flush(5) == 0


async def test_keys_that_were_adopted_are_written_though_the_backlog_is_small(tmp_path: Path) -> None:
    shape = Shape(num_segments=64)
    pool = ArenaFile.make(shape.pages * PAGE_BYTES, shape.slab_pages * PAGE_BYTES)
    kept = os.dup(pool.fd)
    first = await Tier(tmp_path, shape, pool=pool, demote="evict").start()
    first.store(first.keyspace(), *range(60))
    await first.close(flush_s=0.0)
    old = ArenaFile(kept, shape.pages * PAGE_BYTES, shape.slab_pages * PAGE_BYTES, is_old=True)
    second = await Tier(tmp_path, shape, pool=old, backlog_bytes=6 * PAGE_BYTES).start()
    try:
        assert second.served(second.keyspace(), *range(60)) == list(range(60))
        await second.until(lambda: len(second.on_disk(second.keyspace(), *range(60))) == 60)
        assert second.not_demoted == {}
        assert second.audit() == []
    finally:
        await second.close()


async def test_what_is_written_while_its_root_goes_is_not_found(open_tier: Open, tmp_path: Path) -> None:
    """A thread was writing it, and the catalog had already dropped everything of the root."""
    tier = await open_tier(retry_s=3600.0)
    keyspace = tier.keyspace()
    tier.files.writing.close()
    tier.store(keyspace, 1)
    await tier.until(tier.files.writing.entered.is_set)
    tier.root.path.rename(tmp_path / "away")
    going = asyncio.ensure_future(tier.disk.arrivals.check(tier.root))
    await tier.until(lambda: tier.root.writer._sealing)  # it waits for the write alone
    assert tier.root.state == RootState.OFF
    tier.files.writing.open()
    with suppress(OSError):
        await going
    assert not tier.disk.demotion.holds
    assert tier.on_disk(keyspace, 1) == []
    assert tier.served(keyspace, 1) == [1]


async def test_a_payload_that_fills_a_segment_is_written_in_a_batch_of_many(open_tier: Open) -> None:
    """The footer needs room for the records that the segment gets, not for all of the batch."""
    tier = await open_tier(Shape(pages=1024, num_segments=32))
    keyspace = tier.keyspace(sizes=(tier.root.writer.payload_bytes_max, *[PAGE_BYTES] * 80))
    await tier.store_away(keyspace, 1)
    assert await tier.fetch(keyspace, 1) == [1]
