"""A disk whose reads and writes do not end: it keeps limited memory, nothing waits for it, and it comes back.

Gates stand for the disk: a thread at a closed one is inside a system call that can't be ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.cache.disk.promotion import PIECE_SHARE, WINDOW_SHARES
from kvoffloadd.cache.lower.fetches import Fetch, Urgency
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.errors import NotDurableError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.health import LASTING_S, Health, RootState
from kvoffloadd.testing.wait import HANG_S

from .conftest import Open
from .disktier import HIT, MISS, PENDING, Shape, SteeredFiles, Tier
from .fakes import keys_of

BIG = Shape(pages=1024, segment_pages=64, num_segments=16)
HASTY = Shape(pages=1024, segment_pages=64, num_segments=16, stuck_s=0.4)
"""1,024 slots of one page; reads take one piece of 16 of them at most."""

PIECE = BIG.pages // PIECE_SHARE


def used_slots(tier: Tier) -> int:
    return tier.cache.tier.gauges()["used_bytes"] // PAGE_BYTES


def tell(ended: list[list[int]], tier: Tier, keyspace: Keyspace, numbers: range) -> Callable[[], None]:
    """What a fetch calls at its end: notes which of the keys are served."""

    def done() -> None:
        ended.append(tier.served(keyspace, *numbers))

    return done


async def hang(tier: Tier) -> None:
    """The read lane's only thread is at a record of keys 900 and up, and the disk does not answer."""
    keyspace = tier.keyspace(b"h" * 16)
    await tier.store_away(keyspace, 900)
    tier.files.reading.close()
    tier.begin_fetch(keyspace, 900, done=lambda: None)
    await tier.until(tier.files.reading.entered.is_set)


# --- who waits no more ---


async def test_what_nobody_waits_for_gives_its_slots_back_unread(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(100))
    await hang(tier)
    for first in range(0, 60, 20):
        fetch = tier.begin_fetch(keyspace, *range(first, first + 20), done=lambda: None)
        await tier.until(lambda first=first: tier.states(keyspace, first) == [PENDING] and used_slots(tier) == 21)  # type: ignore[misc]
        tier.disk.promotion.cancel(fetch)
        await tier.until(lambda: used_slots(tier) == 1)
        assert tier.root.read_lane.queued == 0
    assert tier.disk.promotion.counters.cancelled == 60
    assert tier.states(keyspace, *range(60)) == [PENDING] * 60, "nothing is known against them: they are on disk"
    tier.files.reading.open()
    await tier.quiet()
    assert await tier.fetch(keyspace, *range(60)) == list(range(60))


async def test_what_another_one_waits_for_is_read(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(8))
    await hang(tier)
    first = tier.begin_fetch(keyspace, *range(8), done=lambda: None)
    ended: list[list[int]] = []
    await tier.until(lambda: tier.root.read_lane.queued)
    tier.begin_fetch(keyspace, 3, done=lambda: ended.append(tier.served(keyspace, 3)))
    await asyncio.sleep(0.01)
    tier.disk.promotion.cancel(first)
    await asyncio.sleep(0.01)
    tier.files.reading.open()
    await tier.quiet()
    assert ended == [[3]]


HALVES = (PIECE * PAGE_BYTES, PIECE * PAGE_BYTES)
"""Each part is a piece of its own."""


async def half_read(tier: Tier, *numbers: int) -> tuple[Keyspace, Fetch]:
    """A thread is at the first part of the first of these keys, all else of them waits."""
    keyspace = tier.keyspace(sizes=HALVES)
    await tier.store_away(keyspace, *numbers)
    tier.files.reading.close()
    fetch = tier.begin_fetch(keyspace, *numbers, done=lambda: None)
    await tier.until(tier.files.reading.entered.is_set)
    return keyspace, fetch


@pytest.mark.parametrize("settles", [False, True])
async def test_what_was_given_up_is_read_for_who_comes_later(open_tier: Open, settles: bool) -> None:
    """Some of it goes on, since a thread is at it: who comes then waits for that, and for the rest as well."""
    tier = await open_tier(BIG)
    keyspace, fetch = await half_read(tier, 1, 2, 3)
    before = sum(tier.files.reads)
    tier.disk.promotion.cancel(fetch)
    if settles:
        await tier.until(lambda: tier.disk.promotion.reserved == 1)
    later = [asyncio.ensure_future(tier.fetch(keyspace, *numbers)) for numbers in ([1, 2, 3], [1], [3, 2])]
    await asyncio.sleep(0.01)
    assert tier.audit() == []
    tier.files.reading.open()
    assert await asyncio.gather(*later) == [[1, 2, 3], [1], [3, 2]]
    await tier.quiet()
    assert sum(tier.files.reads) == before + 6, "each part once"
    assert tier.disk.promotion.holds == 0


async def test_who_gives_up_again_and_again_ends_it(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace, fetch = await half_read(tier, 1)
    promotion = tier.disk.promotion
    for _ in range(5):
        promotion.cancel(fetch)
        fetch = tier.begin_fetch(keyspace, 1, done=lambda: None)
        await tier.until(lambda fetch=fetch: fetch.readings)  # type: ignore[misc]
    promotion.cancel(fetch)
    tier.files.reading.open()
    await tier.quiet()
    assert promotion.holds == 0
    assert tier.states(keyspace, 1) == [PENDING]
    assert await tier.fetch(keyspace, 1) == [1]


async def test_who_waits_for_what_was_given_up_ends_with_its_root(open_tier: Open) -> None:
    """There is nothing to begin anew."""
    tier = await open_tier(Shape(pages=1024, segment_pages=64, num_segments=16, stuck_s=0.4))
    keyspace, fetch = await half_read(tier, 1, 2)
    tier.disk.promotion.cancel(fetch)
    assert await tier.fetch(keyspace, 1, 2) == []
    assert tier.root.state == RootState.OFF
    assert tier.audit() == []


async def test_what_could_not_be_read_is_not_tried_again(open_tier: Open) -> None:
    """It was tried for all who waited, though one had given up before."""
    tier = await open_tier(BIG)
    keyspace, fetch = await half_read(tier, 1)
    tier.disk.promotion.cancel(fetch)
    later = asyncio.ensure_future(tier.fetch(keyspace, 1))
    await asyncio.sleep(0.01)
    tier.files.plant("open=EMFILE")
    tier.files.reading.open()
    assert await later == []
    assert tier.disk.promotion.counters.no_resources == 1
    tier.files.plant("")
    assert await tier.fetch(keyspace, 1) == [1]


# --- bounds ---


@pytest.mark.parametrize("urgent", sorted(WINDOW_SHARES))
async def test_reading_takes_a_share_of_memory_and_the_rest_comes_later(open_tier: Open, urgent: int) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(400))
    await hang(tier)
    share = BIG.pages // WINDOW_SHARES[urgent]
    ended: list[list[int]] = []
    for first in range(0, 400, 100):
        numbers = range(first, first + 100)
        tier.begin_fetch(keyspace, *numbers, urgent=urgent, done=tell(ended, tier, keyspace, numbers))
    for _ in range(200):
        await asyncio.sleep(0)
        assert used_slots(tier) <= 1 + share
    assert used_slots(tier) > share // 2
    assert tier.audit() == []
    tier.files.reading.open()
    await tier.quiet()
    assert sorted(ended) == [list(range(first, first + 100)) for first in range(0, 400, 100)]


async def test_who_waits_for_a_window_is_not_stopped_by_one_who_gave_up(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(300))
    await hang(tier)
    fetches = [tier.begin_fetch(keyspace, *range(first, first + 50), done=lambda: None) for first in range(0, 250, 50)]
    ended: list[int] = []
    tier.begin_fetch(keyspace, *range(250, 300), done=lambda: ended.extend(tier.served(keyspace, *range(250, 300))))
    await asyncio.sleep(0.01)
    for fetch in fetches[1:]:
        tier.disk.promotion.cancel(fetch)
    tier.files.reading.open()
    await tier.quiet()
    assert ended == list(range(250, 300))


async def test_a_payload_larger_than_a_window_comes(open_tier: Open) -> None:
    tier = await open_tier(Shape(pages=64, slab_pages=32, segment_pages=64))
    keyspace = tier.keyspace(sizes=(12 * PAGE_BYTES,))
    await tier.store_away(keyspace, 1, 2, 3)
    assert await tier.fetch(keyspace, 1, 2, 3) == [1, 2, 3]


# --- a root that is stuck goes off ---


async def test_a_read_that_does_not_end_takes_its_root_off_and_keeps_one_piece(open_tier: Open) -> None:
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(200))
    tier.files.reading.close()
    ended: list[list[int]] = []
    for first in (0, 20):
        numbers = range(first, first + 20)
        tier.begin_fetch(keyspace, *numbers, done=tell(ended, tier, keyspace, numbers))
    await tier.until(lambda: tier.root.state == RootState.OFF)
    await tier.until(lambda: len(ended) == 2)
    assert ended == [[], []]
    await tier.until(lambda: not tier.disk.catalog.records)
    assert tier.states(keyspace, *range(200)) == [MISS] * 200
    assert 0 < used_slots(tier) <= PIECE
    assert tier.disk.promotion.quarantined_bytes == used_slots(tier) * PAGE_BYTES
    assert tier.audit() == []
    assert tier.root.health.reason == "the disk does not answer"
    # Its keys can be stored again, in other slots, as if it were not there.
    kept = used_slots(tier)
    tier.store(keyspace, *range(40))
    assert tier.served(keyspace, *range(40)) == list(range(40))
    assert used_slots(tier) == kept + 40
    tier.files.reading.open()
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert tier.disk.promotion.quarantined_bytes == 0
    assert used_slots(tier) == 40
    assert tier.served(keyspace, *range(40)) == list(range(40)), "the late read went into slots that were nobody's"
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(200)) == list(range(200))
    assert await tier.fetch(keyspace, *range(200)) == list(range(200))


async def test_reads_that_wait_for_a_window_end_when_the_root_goes_off(open_tier: Open) -> None:
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(300))
    tier.files.reading.close()
    ended: list[int] = []
    for first in range(0, 300, 50):
        tier.begin_fetch(keyspace, *range(first, first + 50), done=lambda first=first: ended.append(first))  # type: ignore[misc]
    await tier.until(lambda: len(ended) == 6)
    assert tier.root.state == RootState.OFF
    assert used_slots(tier) <= PIECE


async def test_only_the_keys_of_the_root_that_hangs_are_missed(open_tier: Open) -> None:
    tier = await open_tier(Shape(pages=1024, segment_pages=64, num_segments=16, roots=2, stuck_s=0.4))
    keyspace = tier.keyspace()
    for number in range(16):  # one by one, so that both roots get some
        await tier.store_away(keyspace, number)
    lies = {number: tier.place(keyspace, number)[0] for number in range(16)}
    first, second = tier.roots
    bad = [number for number, root in lies.items() if root is first]
    good = [number for number, root in lies.items() if root is second]
    assert bad
    assert good
    tier.files.reading.close()
    fetch = tier.begin_fetch(keyspace, bad[0], done=lambda: None)
    await tier.until(tier.files.reading.entered.is_set)
    tier.files.reading.let_others_pass()
    assert await tier.fetch(keyspace, *good) == good, "at once: the other root has lanes and windows of its own"
    await tier.until(lambda: first.state == RootState.OFF)
    assert second.state == RootState.OK
    await tier.until(lambda: tier.states(keyspace, bad[0]) == [MISS])
    assert tier.states(keyspace, *good) == [HIT] * len(good)
    tier.disk.promotion.cancel(fetch)
    tier.files.reading.open()
    await tier.until(lambda: first.state == RootState.OK)
    assert await tier.fetch(keyspace, *bad) == bad


async def test_a_write_that_does_not_end_takes_its_root_off_and_frees_what_waits(open_tier: Open) -> None:
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace()
    tier.files.writing.close()
    tier.store(keyspace, *range(200))
    await tier.until(lambda: tier.root.state == RootState.OFF)
    await tier.until(lambda: not tier.disk.demotion.backlog_bytes)
    held = tier.disk.demotion.holds
    assert 0 < held <= PIECE, "what the thread is writing"
    assert tier.served(keyspace, *range(200)) == list(range(200)), "and it is served"
    assert sum(tier.not_demoted.values()) == 200 - held
    tier.files.writing.open()
    await tier.until(lambda: tier.root.state == RootState.OK)
    await tier.quiet()
    tier.store(keyspace, *range(300, 310))
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(300, 310)) == list(range(300, 310))


async def test_a_probe_that_does_not_end_takes_the_root_off(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a directory of a server that is gone does this. The descriptors stay open as long as the thread is at
    it.
    """
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    gate = threading.Event()
    left: list[str] = []
    directory = tier.root.directory
    look, close = directory.trouble, directory.close

    def trouble() -> str:
        gate.wait(HANG_S)
        left.append("looked" if directory.segments_fd != -1 else "too late")
        return look()

    monkeypatch.setattr(directory, "trouble", trouble)

    async def close_and_tell() -> None:
        left.append("left")
        await close()

    monkeypatch.setattr(directory, "close", close_and_tell)
    wait_idle, waiting = directory.wait_idle, asyncio.Event()

    async def wait_and_tell() -> None:
        waiting.set()
        await wait_idle()

    monkeypatch.setattr(directory, "wait_idle", wait_and_tell)
    await tier.until(lambda: tier.root.state == RootState.OFF)
    assert tier.root.health.reason == "the disk does not answer"
    await tier.until(lambda: tier.states(keyspace, 1) == [MISS])
    await tier.until(lambda: waiting.is_set() or left)
    assert left == []
    assert len(directory._using) == 1, "what the thread is at, which is waited for"
    gate.set()
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert left[:2] == ["looked", "left"]
    monkeypatch.undo()
    assert await tier.fetch(keyspace, 1) == [1]


async def test_an_inspection_does_not_wait_for_a_root_that_hangs(open_tier: Open) -> None:
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(10))
    await hang(tier)
    count, findings = await tier.disk.scrub.run(repair=True)
    assert count == 0
    assert findings
    assert all("does not answer" in finding for finding in findings)
    tier.files.reading.open()
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert await tier.fetch(keyspace, *range(10)) == list(range(10))


async def test_a_clear_does_not_wait_for_a_manifest_that_can_not_be_written(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    gate = asyncio.Event()

    async def write_epochs(*_: object) -> None:
        await gate.wait()

    with monkeypatch.context() as patch:
        patch.setattr(tier.root.directory, "write_epochs", write_epochs)
        with pytest.raises(NotDurableError):
            await tier.clear(keyspace.namespace)
    assert tier.states(tier.keyspace(), 1) == [MISS]


async def test_a_process_that_was_stopped_does_not_take_its_disks_for_stuck(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that runs looks late then, until it has had time to end."""
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    lane = tier.root.read_lane
    late = [1000.0]
    monkeypatch.setattr(type(lane), "oldest_running_s", lambda _, now: late[0])
    assert not tier.root.probe.hangs()
    late[0] = 0.0
    assert not tier.root.probe.hangs()
    late[0] = 1000.0
    assert not tier.root.probe.hangs(), "late once more, and not still"


async def test_a_root_without_room_stays_full_until_there_is_some(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """That a page can be written is no sign of room for a segment."""
    caplog.set_level("INFO")
    tier = await open_tier()
    tier.files.plant("allocate=ENOSPC")
    tier.root.health.become(RootState.OFF, "to be taken in anew")
    await tier.until(lambda: tier.root.state == RootState.FULL)
    caplog.clear()
    tried = tier.files.planted
    await tier.until(lambda: tier.files.planted > tried + 5)
    assert caplog.text == "", "nothing has changed"
    assert tier.root.state == RootState.FULL
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)


def test_a_root_that_relapses_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    health = Health(Path("/disk"))
    seen = []
    for _ in range(8):
        health.become(RootState.OK)
        assert health.retry_factor() == 1
        now[0] += 1.0
        health.become(RootState.READ_ONLY, "a reason")
        now[0] += 5.0
        seen.append(health.retry_factor())
    assert seen == [1, 2, 4, 8, 16, 16, 16, 16]
    health.become(RootState.OK)
    now[0] += LASTING_S
    health.become(RootState.OFF, "another reason")
    assert health.retry_factor() == 1, "it had recovered"


async def test_a_quarantined_key_of_several_parts(open_tier: Open) -> None:
    """A part that was there already goes with those that must not be read."""
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES))
    await tier.store_away(keyspace, 1, 2)
    tier.seal(tier.write(keyspace, [1], parts=[0]))
    tier.files.reading.close()
    tier.begin_fetch(keyspace, 1, 2, urgent=Urgency.LOAD, done=lambda: None)
    await tier.until(lambda: tier.root.state == RootState.OFF)
    await tier.until(lambda: tier.states(keyspace, 1, 2) == [MISS, MISS])
    tier.store(keyspace, 1, 2)
    assert tier.served(keyspace, 1, 2) == [1, 2]
    rows = tier.cache.find(keyspace, keys_of(1, 2)).hit_rows
    assert np.all(tier.cache.entries.evictable(rows))
    tier.files.reading.open()
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert tier.served(keyspace, 1, 2) == [1, 2]


async def test_keys_in_quarantine_take_no_more_rows_than_slots(open_tier: Open) -> None:
    """Their disk answers while another one is still asked for what the same fetch wants: their slots go, and so do
    their rows, so that there are no more rows than pages.
    """
    tier = await open_tier(Shape(pages=1024, segment_pages=64, num_segments=16, roots=2))
    first, second = tier.roots
    own = SteeredFiles(tier.folder / "first")  # each hangs for itself
    first.reader._files = own
    keyspace = tier.keyspace()
    for begin in range(0, 200, 10):
        tier.store(keyspace, *range(begin, begin + 10))
        await tier.quiet()
    tier.evict(keyspace, *range(200))
    lies = [[n for n in range(200) if tier.place(keyspace, n)[0] is root][:30] for root in (first, second)]
    assert all(lies)
    own.reading.close()
    tier.files.reading.close()
    tier.begin_fetch(keyspace, *(n for pair in zip(*lies, strict=False) for n in pair), done=lambda: None)
    await tier.until(lambda: own.reading.entered.is_set() and tier.files.reading.entered.is_set())
    first.health.become(RootState.OFF, "planted")
    tier.disk.promotion.give_up(first)
    assert tier.disk.promotion.quarantined_bytes
    assert tier.audit() == []
    own.reading.open()
    await tier.until(lambda: not tier.disk.promotion.quarantined_bytes)
    other = tier.keyspace(b"o" * 16)
    tier.store(other, *range(1000, 1000 + tier.cache.tier.gauges()["free_bytes"] // PAGE_BYTES))
    entries = tier.cache.entries
    assert not (entries.state[: entries.index.rows_end] == RowState.RETIRED).any(), "held without a slot"
    assert tier.audit() == []
    tier.files.reading.open()
    await tier.quiet()
