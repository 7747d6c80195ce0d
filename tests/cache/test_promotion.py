"""Promotion: what comes back from disk is right or does not come, in the order in which it is needed."""

from __future__ import annotations

import asyncio
import errno
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.disk.promotion import PIECE_BYTES, PIECE_RECORDS, pieces
from kvoffloadd.cache.lower import fetches
from kvoffloadd.cache.lower.fetches import SLICE_KEYS, Fetch, KeysBelow, Urgency, keys_below
from kvoffloadd.cache.lower.window import Window
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling import turns
from kvoffloadd.scheduling.lanes import Flow
from kvoffloadd.scheduling.steps import TURN_S
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.probe import READ_FAILURES_MAX
from kvoffloadd.storage.disk.records import READ

from .conftest import Open
from .disktier import HIT, MISS, PENDING, Shape, Tier
from .fakes import entries_of, keys_of


async def blocked(tier: Tier) -> Tier:
    """The read lane's only thread is at key 99 of a separate keyspace, and stays there until the gate opens."""
    keyspace = tier.keyspace(b"b" * 16)
    await tier.store_away(keyspace, 99)
    tier.files.reading.close()
    tier.begin_fetch(keyspace, 99, done=lambda: None)
    await tier.until(tier.files.reading.entered.is_set)
    return tier


# --- order ---


async def test_the_more_urgent_is_read_first(open_tier: Open) -> None:
    tier = await open_tier(retry_s=60.0)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(6))
    await blocked(tier)
    order: list[int] = []
    urgencies = [Urgency.PREFETCH, Urgency.PIN, Urgency.LOAD, Urgency.PREFETCH, Urgency.PIN, Urgency.LOAD]
    for number, urgent in enumerate(urgencies):
        tier.begin_fetch(keyspace, number, urgent=urgent, done=lambda number=number: order.append(number))  # type: ignore[misc]
    await tier.until(lambda: tier.root.read_lane.queued == 6)
    tier.files.reading.open()
    await tier.quiet()
    assert order == [2, 5, 1, 4, 0, 3]
    assert tier.served(keyspace, *range(6)) == list(range(6))


async def test_a_load_hastens_what_a_prefetch_has_begun(open_tier: Open) -> None:
    tier = await open_tier(retry_s=60.0)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(4))
    await blocked(tier)
    order: list[str] = []
    tier.begin_fetch(keyspace, 0, urgent=Urgency.PREFETCH, done=lambda: order.append("prefetch 0"))
    tier.begin_fetch(keyspace, 1, urgent=Urgency.PREFETCH, done=lambda: order.append("prefetch 1"))
    tier.begin_fetch(keyspace, 2, urgent=Urgency.PIN, done=lambda: order.append("pin 2"))
    await tier.until(lambda: tier.root.read_lane.queued == 3)
    reads = len(tier.files.reads)
    tier.begin_fetch(keyspace, 1, urgent=Urgency.LOAD, done=lambda: order.append("load 1"))
    await asyncio.sleep(0.01)
    assert tier.root.read_lane.queued == 3, "it is not read twice"
    tier.files.reading.open()
    await tier.quiet()
    assert order == ["prefetch 1", "load 1", "pin 2", "prefetch 0"]
    assert len(tier.files.reads) == reads + 4


async def test_a_long_fetch_takes_one_slice_a_turn(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ROUND_S", 0.0)  # a turn of the loop for each
    count = 2 * SLICE_KEYS + 40
    tier = await open_tier(Shape(pages=16_384, slab_pages=1024, segment_pages=512))
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(count))
    await blocked(tier)
    ended: list[int] = []
    tier.begin_fetch(keyspace, *range(count), done=lambda: ended.append(1))
    reserved = []
    for _ in range(5):
        await asyncio.sleep(0)
        reserved.append(tier.disk.promotion.reserved - 1)
    assert reserved[:3] == [SLICE_KEYS, 2 * SLICE_KEYS, count]
    assert tier.states(keyspace, 0, count - 1) == [PENDING, PENDING]
    assert ended == []
    tier.files.reading.open()
    await tier.quiet()
    assert ended == [1]
    assert tier.served(keyspace, *range(count)) == list(range(count))
    assert max(tier.files.reads) <= PIECE_RECORDS


@pytest.mark.parametrize("other", [Flow(1002, 2), Flow(1001, 2)])
async def test_users_and_engines_take_turns_with_their_slices(
    open_tier: Open, other: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many fetches one of them has under way, also where none of them waits for a window."""
    monkeypatch.setattr(fetches, "SLICE_KEYS", 1)
    ticks = itertools.count()
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: next(ticks) * TURN_S))  # all cost the same
    tier = await open_tier()
    keyspace, promotion = tier.keyspace(), tier.disk.promotion
    tier.store(keyspace, *range(10))
    await tier.quiet()
    order, start = list[Flow](), promotion._start

    def note(fetch: Fetch, wanted: KeysBelow, woken: Window[Fetch] | None) -> Window[Fetch] | None:
        order.append(fetch.flow)
        return start(fetch, wanted, woken)

    monkeypatch.setattr(promotion, "_start", note)
    ended: list[int] = []
    wanted = keys_below(keyspace, keys_of(*range(10)), 0, np.ones(10, bool))
    for flow in (*[Flow(1001, 1)] * 30, other):
        promotion.fetch([wanted], Urgency.PREFETCH, lambda: ended.append(1), flow)
    await tier.until(lambda: len(ended) == 31)
    assert len(order) == 310
    at = [number for number, flow in enumerate(order) if flow == other]
    assert at[0] <= 2
    assert max(later - earlier for earlier, later in itertools.pairwise(at)) <= 3


# --- who waits ---


async def test_several_waiters_and_one_read(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(8))
    before = sum(tier.files.reads)
    asked = [range(8), range(4), range(2, 8), [7], [7]]
    found = await asyncio.gather(*(tier.fetch(keyspace, *numbers) for numbers in asked))
    assert found == [list(numbers) for numbers in asked]
    assert sum(tier.files.reads) == before + 8
    counters = tier.disk.promotion.counters
    assert (counters.keys, counters.bytes) == (8, 8 * PAGE_BYTES)


async def test_what_came_is_held_until_everybody_has_heard(open_tier: Open) -> None:
    tier = await open_tier(Shape(pages=16))
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(4))
    found: list[list[int]] = []

    def fill_then_look() -> None:
        """A pin takes its lease here; one that was woken first may have needed room."""
        tier.write(keyspace, range(100, 130))
        found.append(tier.served(keyspace, *range(4)))

    for _ in range(3):
        tier.begin_fetch(keyspace, *range(4), done=fill_then_look)
    await tier.quiet()
    assert found == [[0, 1, 2, 3]] * 3
    tier.write(keyspace, range(200, 230))
    assert tier.served(keyspace, *range(4)) == [], "and not any longer"


async def test_a_fetch_ends_when_the_last_of_its_keys_has_come(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1, 2)
    tier.store(keyspace, 3)
    await blocked(tier)
    ended: list[list[int]] = []
    tier.begin_fetch(keyspace, 1, done=lambda: None)
    tier.begin_fetch(keyspace, 3, 1, 2, 50, done=lambda: ended.append(tier.served(keyspace, 1, 2, 3, 50)))
    await asyncio.sleep(0.01)
    assert ended == []
    tier.files.reading.open()
    await tier.quiet()
    assert ended == [[1, 2, 3]]


async def test_nothing_to_fetch_ends_later_too(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.store(keyspace, 1)
    ended: list[int] = []
    tier.begin_fetch(keyspace, 1, 2, done=lambda: ended.append(1))
    tier.disk.promotion.fetch([], Urgency.PIN, lambda: ended.append(2))
    assert ended == []
    await tier.quiet()
    assert ended == [1, 2]


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_a_fetch_that_is_cancelled_tells_nobody_and_holds_nothing(
    open_tier: Open, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffloadd.scheduling.turns.ROUND_S", 60.0)  # both begin in one turn of the loop
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1, 2)
    tier.files.reading.close()
    ended: list[str] = []
    fetch = tier.begin_fetch(keyspace, 1, 2, done=lambda: ended.append("cancelled"))
    other = tier.begin_fetch(keyspace, 2, done=lambda: ended.append("other"))
    for _ in range(turns):
        await asyncio.sleep(0)
    tier.disk.promotion.cancel(fetch)
    assert tier.audit() == []
    tier.files.reading.open()
    await tier.quiet()
    assert ended == ["other"]
    assert tier.disk.promotion.holds == 0
    assert tier.served(keyspace, 1, 2) == ([1, 2] if turns else [2]), "what was being read has come all the same"
    tier.disk.promotion.cancel(other)
    tier.disk.promotion.cancel(fetch)
    assert tier.audit() == []


# --- parts ---


async def test_only_the_parts_that_lack_are_read(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace(sizes=(PAGE_BYTES, 5000, 3))
    await tier.store_away(keyspace, 1, 2)
    tier.seal(tier.write(keyspace, [1], parts=[1]))
    before = sum(tier.files.reads)
    assert await tier.fetch(keyspace, 1, 2) == [1, 2]
    assert sum(tier.files.reads) == before + 2 + 3


async def test_a_key_that_somebody_is_storing_is_not_waited_for(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1, 2)
    reserved = reserve(tier.cache, keyspace, keys_of(1), np.zeros(1, np.uint16), 0)
    tier.reserved = 1
    assert await tier.fetch(keyspace, 1, 2) == [2]
    tier.cache.abort(reserved.parts)
    tier.reserved = 0
    assert tier.states(keyspace, 1) == [PENDING], "it is on disk still"
    assert await tier.fetch(keyspace, 1) == [1]


# --- no room ---


async def test_what_finds_no_room_stays_on_disk(open_tier: Open) -> None:
    tier = await open_tier(Shape(pages=16))
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(6))
    tier.write(keyspace, range(100, 113))
    held = tier.cache.find(keyspace, keys_of(*range(100, 113))).hit_rows
    tier.cache.hold(held)
    tier.holds = len(held)
    assert await tier.fetch(keyspace, *range(6)) == [0, 1, 2]
    assert tier.disk.promotion.counters.without_space == 3
    assert tier.states(keyspace, *range(6)) == [HIT, HIT, HIT, PENDING, PENDING, PENDING]
    tier.cache.unhold(held)
    tier.holds = 0
    assert await tier.fetch(keyspace, *range(6)) == list(range(6))


# --- damage ---


@pytest.mark.parametrize("offset", [8, 60, PAGE_BYTES - 3, PAGE_BYTES, 2 * PAGE_BYTES - 1])
async def test_a_damaged_record_is_dropped_counted_and_a_miss(open_tier: Open, offset: int) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(6))
    tier.flip(keyspace, 2, offset)
    assert await tier.fetch(keyspace, *range(6)) == [0, 1, 3, 4, 5]
    counters = tier.disk.promotion.counters
    assert (counters.damaged, counters.unreadable, counters.keys) == (1, 0, 5)
    assert tier.states(keyspace, 2) == [MISS]
    assert tier.cache.tier.gauges()["used_bytes"] == 5 * PAGE_BYTES, "its slot is free again"
    tier.store(keyspace, 2)
    await tier.quiet()
    tier.evict(keyspace, 2)
    assert await tier.fetch(keyspace, 2) == [2], "stored again, it is as good as any"


async def test_one_bad_part_makes_its_key_a_miss_and_no_other(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES))
    await tier.store_away(keyspace, 1, 2)
    tier.flip(keyspace, 1, PAGE_BYTES + 17, part=1)
    assert await tier.fetch(keyspace, 1, 2) == [2]
    assert tier.states(keyspace, 1) == [MISS]
    assert tier.disk.catalog.records == 3, "the good part is known still"
    tier.seal(tier.write(keyspace, [1], parts=[1]))
    assert tier.served(keyspace, 1) == [1], "the good part came to memory as well"


async def test_a_record_that_another_one_lies_over_is_not_taken_for_it(open_tier: Open) -> None:
    """Whole pages in the wrong place: each has a good checksum, but is not what was wanted."""
    tier = await open_tier()
    keyspace, other = tier.keyspace(), tier.keyspace(b"o" * 16)
    await tier.store_away(keyspace, 1, 2, 3)
    await tier.store_away(other, 1)
    root, segment, _ = tier.place(keyspace, 1)
    path = root.path / "segments" / segment.name
    content, size = path.read_bytes(), 2 * PAGE_BYTES
    first, second, third = (tier.place(keyspace, number)[2] * PAGE_BYTES for number in (1, 2, 3))
    foreign = tier.place(other, 1)[2] * PAGE_BYTES
    with path.open("r+b") as stream:
        for here, there in ((first, foreign), (foreign, second), (third, second)):
            stream.seek(here)
            stream.write(content[there : there + size])
    assert await tier.fetch(keyspace, 1, 2, 3) == [2]
    assert await tier.fetch(other, 1) == []
    assert tier.disk.promotion.counters.damaged == 3


async def test_what_the_disk_can_not_read_is_a_miss(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(4))
    tier.store(keyspace, 50)
    await tier.quiet()
    tier.files.plant("read=EIO")
    assert await tier.fetch(keyspace, 0, 1, 50) == [50]
    counters = tier.disk.promotion.counters
    assert (counters.damaged, counters.unreadable) == (0, 2)
    assert tier.states(keyspace, 0, 1, 2) == [MISS, MISS, PENDING]
    assert tier.cache.tier.gauges()["used_bytes"] == PAGE_BYTES
    tier.files.plant("")
    assert await tier.fetch(keyspace, *range(4)) == [2, 3]
    assert tier.root.state == RootState.OK


@pytest.mark.parametrize("fault", ["open=EMFILE", "open=ENFILE", "read=ENOMEM"])
async def test_what_the_system_is_too_poor_to_read_stays_on_disk(open_tier: Open, fault: str) -> None:
    """It proves nothing about the records, nor about the disk."""
    tier = await open_tier(retry_s=60.0)
    keyspace = tier.keyspace()
    numbers = range(READ_FAILURES_MAX + 4)
    await tier.store_away(keyspace, *numbers)
    tier.files.plant(fault)
    assert await tier.fetch(keyspace, *numbers) == []
    counters = tier.disk.promotion.counters
    assert (counters.no_resources, counters.unreadable, counters.damaged) == (len(numbers), 0, 0)
    assert tier.root.reader.read_errors == 0
    assert tier.root.health.reads_failed == 0
    assert tier.on_disk(keyspace, *numbers) == list(numbers)
    assert tier.cache.tier.gauges()["used_bytes"] == 0
    tier.files.plant("")
    assert await tier.fetch(keyspace, *numbers) == list(numbers)


async def test_a_root_that_comes_back_while_the_system_is_poor_loses_nothing(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that can't be opened for want of descriptors is not given up, nor the rest served without it."""
    tier = await open_tier()
    keyspace = tier.keyspace()
    for first in (0, 5, 10, 15):
        await tier.store_away(keyspace, *range(first, first + 5))
    _, segment, _ = tier.place(keyspace, 0)
    open_file = tier.files.open

    def poor(dir_fd: int, name: str, **options: bool) -> int:
        if name == segment.name:
            raise OSError(errno.EMFILE, "planted")
        return open_file(dir_fd, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tier.files, "open", poor)
        tier.root.health.become(RootState.OFF, "as if its file system had gone for a moment")
        await tier.until(lambda: "out of descriptors" in tier.root.health.reason)
        assert tier.root.state == RootState.OFF
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert tier.on_disk(keyspace, *range(20)) == list(range(20))


@pytest.mark.slow
async def test_writes_that_the_system_is_too_poor_for_do_not_make_a_disk_read_only(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.files.plant("write=ENOMEM open=EMFILE".replace(" ", "\n"))
    tier.store(keyspace, *range(20))
    await tier.until(lambda: not tier.disk.demotion.backlog_bytes and not tier.disk.demotion.holds)
    assert tier.root.health.write_errors
    assert tier.root.state in (RootState.OK, RootState.FULL)
    tier.files.plant("")
    await tier.quiet()
    tier.store(keyspace, *range(30, 40))
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(30, 40)) == list(range(30, 40))


async def test_keys_that_do_not_come_make_room_for_the_next_at_once(open_tier: Open) -> None:
    """There are as many rows as slots: those of a slice may not pile up while its last record is awaited."""
    tier = await open_tier(Shape(pages=64, slab_pages=16, num_segments=64, threads=4))
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(60))
    await tier.store_away(keyspace, *range(60, 120))
    tier.files.plant("read=EIO")
    assert await tier.fetch(keyspace, *range(120)) == []
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)


async def test_a_root_that_reads_nothing_is_taken_off_and_comes_back(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    numbers = range(READ_FAILURES_MAX + 4)
    await tier.store_away(keyspace, *numbers)
    tier.files.plant("read=EIO")
    assert await tier.fetch(keyspace, *numbers[:-4]) == []
    await tier.until(lambda: tier.root.state == RootState.OFF)
    await tier.until(lambda: not tier.disk.catalog.records)
    assert tier.states(keyspace, *numbers[-4:]) == [MISS] * 4
    assert await tier.fetch(keyspace, *numbers) == []
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert tier.on_disk(keyspace, *numbers) == list(numbers), "what it holds is found again"
    assert await tier.fetch(keyspace, *numbers) == list(numbers)


# --- what changes meanwhile ---


async def test_a_key_that_is_cleared_while_it_is_read_is_a_miss(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(4))
    tier.files.reading.close()
    ended: list[int] = []
    tier.begin_fetch(keyspace, *range(4), done=lambda: ended.append(1))
    await tier.until(tier.files.reading.entered.is_set)
    await tier.clear(keyspace.namespace)
    new = tier.keyspace()
    assert tier.states(new, *range(4)) == [MISS] * 4
    tier.begin_fetch(keyspace, *range(4), done=lambda: ended.append(2))
    assert tier.audit() == []
    tier.files.reading.open()
    await tier.quiet()
    assert sorted(ended) == [1, 2]
    assert tier.states(new, *range(4)) == [MISS] * 4
    assert tier.cache.tier.gauges()["used_bytes"] == 0


async def test_a_bad_record_that_has_moved_on_meanwhile_is_kept_where_it_is_now(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    disk_keyspace = tier.disk.of(keyspace)
    assert disk_keyspace is not None
    tier.flip(keyspace, 1, PAGE_BYTES + 5)
    tier.files.reading.close()
    tier.begin_fetch(keyspace, 1, done=lambda: None)
    await tier.until(tier.files.reading.entered.is_set)
    _, segment, page = tier.place(keyspace, 1)
    catalog = tier.disk.catalog
    catalog.put(disk_keyspace, entries_of(keys_of(1), [0], [page + 2]), segment.ordinal)
    tier.files.reading.open()
    await tier.quiet()
    assert tier.on_disk(keyspace, 1) == [1]


# --- what one ticket reads ---


def reads_of(segments: list[int], pages: list[int], sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    reads = np.zeros(len(segments), READ)
    reads["page"], reads["payload_bytes"] = pages, sizes
    return np.array(segments, np.uint32), reads


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 700),
    num_segments=st.integers(1, 4),
    size=st.sampled_from([1, PAGE_BYTES, 100_000, 3 << 20, 9 << 20]),
)
def test_pieces_cover_each_record_once_in_order_and_within_bounds(
    seed: int, count: int, num_segments: int, size: int
) -> None:
    rng = np.random.default_rng(seed)
    places = rng.permutation(num_segments * 1000)[:count]
    segments, reads = reads_of((places // 1000).tolist(), (1 + places % 1000).tolist(), [size] * count)
    found = pieces(segments, reads)
    assert sorted(np.concatenate([piece for _, piece in found]).tolist()) == list(range(count))
    last: dict[int, int] = {}
    for segment, piece in found:
        assert (segments[piece] == segment).all()
        pages = reads["page"][piece].astype(int).tolist()
        assert pages == sorted(pages)
        assert pages[0] > last.get(segment, 0)
        last[segment] = pages[-1]
        assert len(piece) <= PIECE_RECORDS
        assert size * (len(piece) - 1) < PIECE_BYTES
    whole = max(1, min(PIECE_RECORDS, PIECE_BYTES // size))
    assert len(found) <= 2 * (count // whole) + num_segments, "and not in crumbs"


def test_pieces_are_bounded_when_parts_differ_in_size() -> None:
    sizes = [PIECE_BYTES] * 3 + [PAGE_BYTES] * 380
    segments, reads = reads_of([1] * len(sizes), list(range(1, 1 + len(sizes))), sizes)
    assert max(len(piece) for _, piece in pieces(segments, reads)) <= PIECE_RECORDS


async def test_a_row_that_is_used_again_is_not_under_way(open_tier: Open) -> None:
    """Whatever the tier has noted of it was of the key before."""
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.disk.promotion._reading[:] = 7
    tier.store(keyspace, 1)
    rows = tier.cache.find(keyspace, keys_of(1)).rows
    assert (rows >= 0).all()
    assert not tier.disk.promotion.under_way(rows).any()
