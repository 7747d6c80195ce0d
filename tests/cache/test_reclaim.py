"""Reclaim: segments that hold the least go first, what is used moves on, and no root outgrows its capacity."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk import segmentpool
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.segment import Segment
from kvoffloadd.storage.disk.writer import OnWritten, WriteBatch

from .conftest import Open
from .disktier import MISS, Shape, Tier, bytes_under
from .fakes import events_of, keys_of

BIG = Shape(pages=512, segment_pages=64)
"""30 records of two pages in a segment; 8 of them are a quarter of it, 16 a half."""

PER_SEGMENT, QUARTER, HALF = 30, 8, 16


async def pour(tier: Tier, keyspace: Keyspace, first: int, count: int, *, step: int = 10) -> list[int]:
    """Store keys and evict them once they are written. Returns their numbers."""
    numbers = list(range(first, first + count))
    for at in range(0, count, step):
        batch = numbers[at : at + step]
        tier.store(keyspace, *batch)
        await tier.quiet()
        tier.evict(keyspace, *batch)
        assert tier.audit() == []
    return numbers


@pytest.mark.slow
async def test_the_oldest_go_first_and_by_whole_segments(open_tier: Open) -> None:
    tier = await open_tier(BIG, rewrite_hot=False)
    keyspace = tier.keyspace()
    lost_at = []
    everything: list[int] = []
    for turn in range(60):
        everything += await pour(tier, keyspace, 10 * turn, 10)
        kept = tier.on_disk(keyspace, *everything)
        assert kept == everything[len(everything) - len(kept) :], "what is left is the latest"
        lost_at.append(len(everything) - len(kept))
    assert set(lost_at) == {PER_SEGMENT * n for n in range(lost_at[-1] // PER_SEGMENT + 1)}
    assert lost_at[-1] >= 10 * PER_SEGMENT
    assert len(kept) > 6 * PER_SEGMENT, "no more is given up than is needed for the next segment"
    assert tier.disk.reclaim.keys_evicted == lost_at[-1]
    assert tier.disk.reclaim.records_rewritten == 0
    assert await tier.fetch(keyspace, *everything) == kept
    assert tier.states(keyspace, *everything[: lost_at[-1]]) == [MISS] * lost_at[-1]


async def test_the_files_never_outgrow_the_capacity(open_tier: Open) -> None:
    tier = await open_tier(Shape(roots=2))
    keyspace, odd = tier.keyspace(), tier.keyspace(b"o" * 16, sizes=(PAGE_BYTES + 1, 9 * PAGE_BYTES))
    largest_bytes = dict.fromkeys(tier.roots, 0)
    turn = 0
    while not all(root.pool.recycled for root in tier.roots):  # the faster of the two takes more
        tier.store(keyspace, *range(200 * turn, 200 * (turn + 1)))
        tier.store(odd, *range(10 * turn, 10 * (turn + 1)))
        while not tier.is_quiet:
            for root in tier.roots:
                size_bytes = bytes_under(root.path)
                largest_bytes[root] = max(largest_bytes[root], size_bytes)
                assert size_bytes <= root.capacity_bytes
                assert size_bytes <= root.pool.used_bytes
            await asyncio.sleep(0.001)
        turn += 1
    assert all(size_bytes > root.capacity_bytes * 3 // 4 for root, size_bytes in largest_bytes.items())


async def test_what_was_read_since_it_was_written_moves_on(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    numbers = await pour(tier, keyspace, 0, 5 * PER_SEGMENT)
    hot = [0, 7, 11, 29]
    assert await tier.fetch(keyspace, *hot) == hot
    tier.evict(keyspace, *hot)
    numbers += await pour(tier, keyspace, 1000, 3 * PER_SEGMENT)
    assert tier.disk.reclaim.keys_evicted == PER_SEGMENT * tier.root.pool.recycled - len(hot)
    assert tier.disk.reclaim.records_rewritten == len(hot)
    assert tier.on_disk(keyspace, *numbers[:PER_SEGMENT]) == hot
    assert await tier.fetch(keyspace, *hot) == hot
    tier.evict(keyspace, *hot)
    evicted = tier.disk.reclaim.keys_evicted
    await pour(tier, keyspace, 2000, 8 * PER_SEGMENT)
    assert tier.disk.reclaim.keys_evicted > evicted
    assert tier.disk.reclaim.records_rewritten == 2 * len(hot), "read again, moved again"


async def test_what_moved_on_and_is_not_read_again_goes(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, PER_SEGMENT)
    assert await tier.fetch(keyspace, 3) == [3]
    tier.evict(keyspace, 3)
    await pour(tier, keyspace, 1000, 18 * PER_SEGMENT, step=30)
    assert tier.disk.reclaim.records_rewritten == 1
    assert tier.on_disk(keyspace, *range(PER_SEGMENT)) == []


async def read(tier: Tier, keyspace: Keyspace, *numbers: int) -> None:
    """Promote these keys, some at a time, and evict them again."""
    for at in range(0, len(numbers), PER_SEGMENT):
        batch = list(numbers[at : at + PER_SEGMENT])
        assert await tier.fetch(keyspace, *batch) == batch
        tier.evict(keyspace, *batch)


async def test_no_more_than_a_quarter_moves_on(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    numbers = await pour(tier, keyspace, 0, 7 * PER_SEGMENT)
    await read(tier, keyspace, *tier.on_disk(keyspace, *numbers))
    recycled = tier.root.pool.recycled
    await pour(tier, keyspace, 1000, PER_SEGMENT)
    turns = tier.root.pool.recycled - recycled
    assert turns >= 1
    rewritten = tier.disk.reclaim.records_rewritten
    assert 0 < rewritten <= turns * QUARTER
    kept = tier.on_disk(keyspace, *numbers[: turns * PER_SEGMENT])
    assert len(kept) == rewritten
    assert await tier.fetch(keyspace, *kept) == kept


async def test_a_segment_of_which_much_was_read_is_spared_until_its_next_turn(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    numbers = await pour(tier, keyspace, 0, 5 * PER_SEGMENT)
    hot = numbers[: 2 * PER_SEGMENT]
    await read(tier, keyspace, *hot)
    more = await pour(tier, keyspace, 1000, 4 * PER_SEGMENT)
    assert tier.root.pool.recycled >= 2
    assert tier.on_disk(keyspace, *hot) == hot, "what nobody has read went in their place"
    assert len(tier.on_disk(keyspace, *numbers, *more)) < len(numbers) + len(more)
    await read(tier, keyspace, *hot[:PER_SEGMENT])
    await pour(tier, keyspace, 2000, 6 * PER_SEGMENT)
    assert tier.on_disk(keyspace, *hot) == hot[:PER_SEGMENT], "they alone were read again"
    await pour(tier, keyspace, 3000, 10 * PER_SEGMENT)
    assert tier.on_disk(keyspace, *hot) == []
    assert tier.audit() == []


async def test_it_is_spared_where_it_holds_a_little_less_than_the_others(open_tier: Open) -> None:
    """What is fuller goes, if it was not read."""
    tier = await open_tier(BIG)
    keyspace, gone, cold = (tier.keyspace(name * 16) for name in (b"k", b"g", b"c"))
    hot = await pour(tier, keyspace, 0, PER_SEGMENT - 2, step=14)
    await pour(tier, gone, 0, 2)
    await tier.clear(gone.namespace)
    await pour(tier, cold, 0, 5 * PER_SEGMENT)
    await read(tier, keyspace, *hot)
    await pour(tier, cold, 1000, 2 * PER_SEGMENT)
    assert tier.root.pool.recycled >= 1
    assert tier.on_disk(keyspace, *hot) == hot


# --- what holds little ---


@pytest.mark.parametrize("how", ["close", "drop"])
async def test_restarts_lose_nothing_while_there_is_room(open_tier: Open, how: str) -> None:
    """Each start stores one key more. A quarter of the root is live, or a little more by and by."""
    tier = await open_tier(BIG)
    numbers = await pour(tier, tier.keyspace(), 0, 2 * PER_SEGMENT)
    for start in range(100):
        await (tier.close() if how == "close" else tier.drop())
        tier = await open_tier(BIG)
        keyspace = tier.keyspace()
        assert tier.on_disk(keyspace, *numbers) == numbers, start
        numbers += await pour(tier, keyspace, 1000 + start, 1)
    assert await tier.fetch(tier.keyspace(), *numbers[::3]) == numbers[::3]
    assert tier.audit() == []


async def test_starts_that_go_on_nowhere_lose_nothing_either(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one leaves a segment that holds little. All of it is written again, whichever groups are registered."""
    monkeypatch.setattr(segmentpool, "RESUME_SHARE", 0.5)
    tier = await open_tier(BIG)
    numbers, others = await pour(tier, tier.keyspace(), 0, PER_SEGMENT), tier.keyspace(b"o" * 16)
    theirs = await pour(tier, others, 0, 10)
    for start in range(30):
        await tier.drop()
        tier = await open_tier(BIG)
        keyspace = tier.keyspace()
        numbers += await pour(tier, keyspace, 1000 + start, 1)
        await tier.quiet()
        assert tier.on_disk(keyspace, *numbers) == numbers, start
    assert tier.on_disk(tier.keyspace(b"o" * 16), *theirs) == theirs
    assert tier.disk.reclaim.records_rewritten > 0


async def test_clears_of_one_namespace_cost_another_nothing(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    numbers = await pour(tier, keyspace, 0, 2 * PER_SEGMENT)
    for turn in range(12):
        other = tier.keyspace(b"o" * 16)
        await pour(tier, other, 1000 * turn, PER_SEGMENT)
        await tier.clear(other.namespace)
        assert tier.on_disk(keyspace, *numbers) == numbers, turn
    assert tier.root.pool.recycled > 0
    assert await tier.fetch(keyspace, *numbers) == numbers
    written = tier.root.writer.written_bytes // PAGE_BYTES
    assert tier.disk.reclaim.records_rewritten <= written / 2, "no more than was gained by it"


async def test_new_keys_do_not_take_the_room_of_what_moves_on(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 6 * PER_SEGMENT + 25)
    hot = list(range(QUARTER))
    await read(tier, keyspace, *hot)
    written = await store_while_a_segment_goes(tier, keyspace, monkeypatch)
    assert written == PER_SEGMENT - QUARTER
    assert tier.disk.reclaim.records_rewritten >= len(hot)
    assert tier.on_disk(keyspace, *hot) == hot
    assert await tier.fetch(keyspace, *hot) == hot


async def test_nor_the_room_of_all_that_a_segment_holds_which_holds_little(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it, exactly. What is written meanwhile leaves just that, and it is not thought over."""
    tier = await open_tier(BIG)
    keyspace, other = tier.keyspace(), tier.keyspace(b"o" * 16)
    numbers = await pour(tier, keyspace, 0, HALF)
    await pour(tier, other, 0, PER_SEGMENT - HALF)
    await tier.clear(other.namespace)
    numbers += await pour(tier, keyspace, 500, 5 * PER_SEGMENT + 25)
    written = await store_while_a_segment_goes(tier, keyspace, monkeypatch)
    assert 0 < written < PER_SEGMENT - HALF + 2
    assert tier.disk.reclaim.records_rewritten == HALF
    assert tier.on_disk(keyspace, *numbers[:HALF]) == numbers[:HALF]


async def test_a_large_record_does_not_end_the_segment_that_is_written_to_again(open_tier: Open) -> None:
    """It waits for the next segment, as long as room is kept in this one."""
    tier = await open_tier(BIG)
    names = (tier.keyspace(name * 16) for name in (b"a", b"b", b"c", b"d"))
    first, second, gone, filler = names
    large = tier.keyspace(b"l" * 16, sizes=(15 * PAGE_BYTES,))
    in_first, in_second = await pour(tier, first, 0, 10), await pour(tier, second, 0, 6)
    await pour(tier, gone, 0, PER_SEGMENT - 16, step=14)
    await tier.clear(gone.namespace)
    await pour(tier, filler, 0, 6 * PER_SEGMENT)
    tier.files.reading.close()
    tier.store(filler, *range(5000, 5014))
    await tier.until(tier.files.reading.entered.is_set)
    writer, append, asked = tier.root.writer, tier.root.writer.append, []

    def note(batch: WriteBatch, done: OnWritten, *, rewrite: bool = False) -> int:
        asked.append(int(batch.entries["payload_bytes"][0]))
        return append(batch, done, rewrite=rewrite)

    writer.append = note  # type: ignore[method-assign]
    tier.store(large, 1)
    await tier.until(lambda: 15 * PAGE_BYTES in asked)
    tier.files.reading.open()
    await tier.quiet()
    assert tier.on_disk(first, *in_first) == in_first
    assert tier.on_disk(second, *in_second) == in_second
    assert tier.on_disk(large, 1) == [1]


@pytest.mark.parametrize("payload_bytes", [100, 2000, PAGE_BYTES])
async def test_what_memory_has_is_not_written_for_ever_however_small(open_tier: Open, payload_bytes: int) -> None:
    """A record takes whole pages: what is offered again may take no more of them than were gained."""
    tier = await open_tier(BIG)
    keyspace = tier.keyspace(sizes=(payload_bytes,))
    for first in range(0, 400, 20):
        tier.store(keyspace, *range(first, first + 20))
        await tier.quiet()
    assert tier.root.pool.recycled > 0
    assert tier.root.writer.written_bytes <= 2 * 400 * payload_bytes


async def store_while_a_segment_goes(tier: Tier, keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch) -> int:
    """Store keys until a segment is about to go and no more of them are written. How many the open segment has then."""
    writer, append, refused = tier.root.writer, tier.root.writer.append, False

    def note(batch: WriteBatch, done: OnWritten) -> int:
        nonlocal refused
        waits_for_writes = bool(writer.writing)
        count = append(batch, done)
        refused = bool(writer.reserved_pages) and not waits_for_writes and not count
        return count

    monkeypatch.setattr(writer, "append", note)
    tier.files.reading.close()
    tier.store(keyspace, *range(1000, 1000 + PER_SEGMENT))
    await tier.until(tier.files.reading.entered.is_set)  # the segment is about to go
    await tier.until(lambda: refused)  # what can be written is written
    segment = tier.root.pool.open_segment
    assert segment is not None
    written = segment.num_entries
    monkeypatch.undo()
    tier.files.reading.open()
    await tier.quiet()
    assert tier.audit() == []
    return written


async def test_what_is_in_memory_too_is_written_again(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    resident = list(range(5))
    tier.store(keyspace, *resident)
    await tier.quiet()
    numbers = await pour(tier, keyspace, 10, 7 * PER_SEGMENT)
    await pour(tier, keyspace, 1000, PER_SEGMENT)
    assert tier.disk.reclaim.keys_evicted >= PER_SEGMENT - len(resident)
    assert tier.disk.reclaim.records_rewritten == 0, "not from disk"
    assert tier.on_disk(keyspace, *resident) == resident
    assert numbers[0] not in tier.on_disk(keyspace, *numbers)
    tier.evict(keyspace, *resident)
    assert await tier.fetch(keyspace, *resident) == resident


async def test_without_rewriting_everything_goes(open_tier: Open) -> None:
    tier = await open_tier(BIG, rewrite_hot=False)
    keyspace = tier.keyspace()
    tier.store(keyspace, *range(3))
    await pour(tier, keyspace, 10, 5 * PER_SEGMENT)
    assert await tier.fetch(keyspace, 10, 11) == [10, 11]
    tier.evict(keyspace, 10, 11)
    await pour(tier, keyspace, 1000, 3 * PER_SEGMENT)
    assert tier.on_disk(keyspace, 0, 1, 2, 10, 11) == []
    assert tier.served(keyspace, 0, 1, 2) == [0, 1, 2]


async def test_what_is_cleared_does_not_move_on(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, PER_SEGMENT)
    assert await tier.fetch(keyspace, 1, 2) == [1, 2]
    await tier.clear(keyspace.namespace)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 1000, 8 * PER_SEGMENT)
    assert tier.disk.reclaim.records_rewritten == 0
    assert tier.on_disk(keyspace, *range(PER_SEGMENT)) == []


async def test_a_damaged_hot_record_does_not_move_on(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 5 * PER_SEGMENT)
    assert await tier.fetch(keyspace, 1, 2, 3) == [1, 2, 3]
    tier.evict(keyspace, 1, 2, 3)
    tier.flip(keyspace, 2, PAGE_BYTES + 100)
    await pour(tier, keyspace, 1000, 3 * PER_SEGMENT)
    assert tier.on_disk(keyspace, 1, 2, 3) == [1, 3]
    assert await tier.fetch(keyspace, 1, 2, 3) == [1, 3]


async def test_what_moves_on_while_its_root_goes_is_not_found_there(open_tier: Open) -> None:
    """The write ends when the root is off already, and its segment belongs to no root: a place there would be wrong."""
    tier = await open_tier(Shape(pages=1024, segment_pages=64, num_segments=16))
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(40))
    root, segment, _ = tier.place(keyspace, 0)
    tier.root.writer.seal_unsealed()  # so that nothing but the move is written
    await tier.quiet()
    disk_keyspace = tier.disk.of(keyspace)
    assert disk_keyspace is not None
    records = tier.disk.catalog.in_segment(segment.ordinal)[:8]
    sizes = np.full(len(records), PAGE_BYTES, np.int64)
    tier.files.writing.close()
    move = asyncio.ensure_future(tier.disk.reclaim._move(root, segment, disk_keyspace, records, sizes))
    await tier.until(tier.files.writing.entered.is_set)
    assert len(tier.disk.reclaim._staging) == 1
    move.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move
    assert len(tier.disk.reclaim._staging) == 1, "a thread writes from there still"
    root.path.rename(on_disk := root.path.with_name("away"))
    await tier.until(lambda: tier.root.state == RootState.OFF and not tier.disk.catalog.records)
    tier.files.writing.open()
    await tier.until(lambda: not tier.disk.reclaim._staging)
    assert tier.disk.catalog.records == 0
    assert tier.states(keyspace, *range(40)) == [MISS] * 40
    on_disk.rename(root.path)
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert tier.disk.check() == []
    assert tier.on_disk(keyspace, *range(40)) == list(range(40))
    assert await tier.fetch(keyspace, *range(40)) == list(range(40))


async def test_what_is_read_while_its_segment_goes_is_right(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not used again before the read has ended."""
    tier = await open_tier(BIG, rewrite_hot=False)
    keyspace = tier.keyspace()
    numbers = await pour(tier, keyspace, 0, 6 * PER_SEGMENT + 20)
    tier.files.reading.close()
    found: list[list[int]] = []
    tier.begin_fetch(keyspace, *numbers[:4], done=lambda: found.append(tier.served(keyspace, *numbers[:4])))
    await tier.until(tier.files.reading.entered.is_set)
    oldest = tier.segments_by_age()[0]
    recycle, recycling = tier.root.pool.recycle, list[Segment]()

    async def note(segment: Segment) -> bool:
        recycling.append(segment)
        return await recycle(segment)

    monkeypatch.setattr(tier.root.pool, "recycle", note)
    tier.store(keyspace, *range(1000, 1000 + 2 * PER_SEGMENT))
    await tier.until(lambda: recycling)
    changed = asyncio.ensure_future(tier.disk.numbers.changes.wait())
    await asyncio.sleep(0)
    tier.disk.numbers.changes.notify_all()
    await changed  # the recycler has waited for longer, so it has looked again before this
    assert recycling == [oldest]
    assert tier.on_disk(keyspace, numbers[0]) == []
    assert oldest.ordinal in tier.root.pool.segments
    assert tier.root.pool.recycled == 0
    assert tier.audit() == []
    tier.files.reading.open()
    await tier.quiet()
    assert tier.root.pool.recycled >= 1
    assert found == [numbers[:4]]


async def test_segments_that_were_recycled_are_not_mistaken_after_a_restart(open_tier: Open) -> None:
    tier = await open_tier(BIG, rewrite_hot=False)
    keyspace = tier.keyspace()
    numbers = await pour(tier, keyspace, 0, 14 * PER_SEGMENT + 7)
    kept = tier.on_disk(keyspace, *numbers)
    await tier.drop()
    again = await open_tier(BIG, rewrite_hot=False)
    keyspace = again.keyspace()
    assert again.on_disk(keyspace, *numbers) == kept
    assert await again.fetch(keyspace, *numbers) == kept
    await pour(again, keyspace, 5000, 3 * PER_SEGMENT)
    left = again.on_disk(keyspace, *numbers)
    assert left == kept[len(kept) - len(left) :], "the oldest of the run before go first"
    assert len(left) < len(kept)


async def test_a_listener_hears_of_what_goes_with_a_segment(open_tier: Open) -> None:
    tier = await open_tier(BIG, rewrite_hot=False)
    keyspace = tier.keyspace()
    keyspace.namespace.listeners = 1
    tier.store(keyspace, *range(3))  # these stay in memory
    numbers = await pour(tier, keyspace, 10, 10 * PER_SEGMENT, step=30)
    events = events_of(tier.cache)
    removed, added = b"".join(event.removed for event in events), b"".join(event.added for event in events)
    gone = [number for number in numbers if number not in tier.on_disk(keyspace, *numbers)]
    assert removed == keys_of(*gone).tobytes()
    assert added == keys_of(*range(3), *numbers).tobytes()
