"""The door of the disk tier: names, clears, snapshots, and what happens when two things happen at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvoffloadd.cache.disk import catalog as catalog_module
from kvoffloadd.cache.disk import diskkeyspaces, scrub
from kvoffloadd.cache.memory import keytable
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.errors import NotDurableError
from kvoffloadd.model import PAGE_BYTES, BoolArray, U32Array
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.segment import Segment

from .conftest import Open
from .disktier import HIT, MISS, PENDING, Shape, Tier
from .fakes import events_of, keys_of


def listed(tier: Tier, keyspace: Keyspace) -> list[int]:
    """What a snapshot names, step by step."""
    found, cursor = list[int](), 0
    for _ in range(100):
        packed, cursor = tier.cache.snapshot(keyspace, cursor)
        found += np.frombuffer(packed, np.uint64).reshape(-1, 4)[:, 1].tolist()
        if not cursor:
            return found
    raise AssertionError("it does not end")


def removed(tier: Tier) -> list[int]:
    """Keys whose removal is due to be reported to listeners, in order, since the last call."""
    packed = b"".join(event.removed for event in events_of(tier.cache))
    numbers: list[int] = np.frombuffer(packed, np.uint64).reshape(-1, 4)[:, 1].tolist()
    return numbers


async def test_a_snapshot_names_what_is_in_memory_and_what_is_on_disk(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    assert listed(tier, keyspace) == []
    await tier.store_away(keyspace, 1, 2)
    tier.store(keyspace, 3)
    tier.write(keyspace, [4])
    await tier.quiet()
    await tier.store_away(tier.keyspace(b"o" * 16), 9)
    assert set(listed(tier, keyspace)) == {1, 2, 3, 4}
    await tier.clear(keyspace.namespace)
    assert listed(tier, tier.keyspace()) == []


async def test_another_layout_is_another_key(open_tier: Open) -> None:
    tier = await open_tier()
    await tier.store_away(tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES)), 1, 2)
    await tier.close()
    for sizes in ((2 * PAGE_BYTES,), (PAGE_BYTES, PAGE_BYTES - 1), (PAGE_BYTES,)):
        again = await open_tier()
        assert again.states(again.keyspace(sizes=sizes), 1, 2) == [MISS, MISS]
        await again.close()
    last = await open_tier()
    assert last.states(last.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES)), 1, 2) == [PENDING, PENDING]


async def test_nothing_is_known_before_all_sizes_are(open_tier: Open) -> None:
    tier = await open_tier()
    wide = tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES))
    await tier.store_away(wide, 1)
    await tier.drop()
    again = await open_tier()
    namespace = again.cache.open_namespace(b"n" * 16, 0, "test", 32)
    keyspace = again.cache.declare(namespace, wide.schema)
    assert again.states(keyspace, 1) == [MISS]
    again.cache.set_part_bytes(keyspace, {1: PAGE_BYTES})
    assert again.states(keyspace, 1) == [MISS]
    again.cache.set_part_bytes(keyspace, {0: PAGE_BYTES})
    assert again.states(keyspace, 1) == [PENDING]
    assert await again.fetch(keyspace, 1) == [1]


# --- clears ---


@pytest.mark.parametrize("everything", [False, True])
async def test_a_clear_that_was_answered_outlives_a_crash(open_tier: Open, everything: bool) -> None:
    tier = await open_tier(Shape(roots=2))
    keyspace, other = tier.keyspace(), tier.keyspace(b"o" * 16)
    await tier.store_away(keyspace, *range(20))
    await tier.store_away(other, *range(20))
    await (tier.clear() if everything else tier.clear(keyspace.namespace))
    await tier.store_away(tier.keyspace(), 5)
    await tier.drop()
    again = await open_tier(Shape(roots=2))
    assert again.on_disk(again.keyspace(), *range(20)) == [5]
    assert again.on_disk(again.keyspace(b"o" * 16), *range(20)) == ([] if everything else list(range(20)))
    assert await again.fetch(again.keyspace(), *range(20)) == [5], "with the bytes of the new epoch"


async def test_a_clear_of_everything_reaches_what_nobody_has_opened(open_tier: Open) -> None:
    tier = await open_tier()
    await tier.store_away(tier.keyspace(), 1, 2)
    await tier.close()
    second = await open_tier()
    assert second.disk.catalog.keys == 2
    await second.clear()
    assert second.disk.catalog.keys == 0
    assert second.states(second.keyspace(), 1, 2) == [MISS, MISS]
    await second.drop()
    third = await open_tier()
    assert third.states(third.keyspace(), 1, 2) == [MISS, MISS]


async def test_a_clear_that_a_root_can_not_note_says_so_and_holds_until_the_end(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    tier.store(keyspace, 2)
    await tier.quiet()
    tier.root.path.rename(tier.folder / "elsewhere")
    # Until its directory is closed, the clear can be recorded there, wherever it is now.
    await tier.until(lambda: not (tier.root.accepted or tier.disk.catalog.records))
    with pytest.raises(NotDurableError):
        await tier.clear(keyspace.namespace)
    assert tier.states(tier.keyspace(), 1, 2) == [MISS, MISS]
    (tier.folder / "elsewhere").rename(tier.root.path)
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert tier.states(tier.keyspace(), 1, 2) == [MISS, MISS], "the root has learned of it"
    await tier.until(lambda: tier.root.directory.manifest and tier.root.directory.manifest.last_epoch)
    await tier.drop()
    again = await open_tier()
    assert again.states(again.keyspace(), 1, 2) == [MISS, MISS]


async def test_listeners_hear_of_each_key_once_when_it_is_in_no_tier_any_more(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    keyspace.namespace.listeners = 1
    await tier.store_away(keyspace, 1, 2, 3)
    tier.store(keyspace, 4)
    await tier.quiet()
    assert await tier.fetch(keyspace, 2) == [2]
    assert removed(tier) == []
    tier.flip(keyspace, 3, PAGE_BYTES)
    assert await tier.fetch(keyspace, 3) == []
    assert removed(tier) == [3]
    await tier.clear(keyspace.namespace)
    assert sorted(removed(tier)) == [1, 2, 4]


async def test_a_user_with_many_groups_on_disk_leaves_room_for_others(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when their namespaces are forgotten: what is there stays."""
    monkeypatch.setattr(diskkeyspaces, "DISK_KEYSPACES_MAX", 9)
    tier = await open_tier()
    refused = []
    for number in range(1, 9):
        namespace = tier.cache.open_namespace(bytes([number]) * 16, 1001, "test", 32)
        keyspace = tier.keyspace(namespace.fingerprint)
        if tier.disk.of(keyspace) is None:
            refused.append(number)
        else:
            await tier.store_away(keyspace, 1)
        tier.cache.close_namespace(namespace)
    assert refused == [5, 6, 7, 8]
    assert caplog.text.count("uid 1001 has so many groups") == 1
    await tier.store_away(tier.keyspace(b"o" * 16), 1)
    assert tier.states(tier.keyspace(bytes([2]) * 16), 1) == [PENDING]


async def test_two_clears_at_once_end_well(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "STEP_RECORDS", 2)
    tier = await open_tier()
    keyspace, other = tier.keyspace(), tier.keyspace(b"o" * 16)
    await tier.store_away(keyspace, *range(15))
    await tier.store_away(other, *range(15))
    await asyncio.gather(tier.clear(keyspace.namespace), tier.clear(), tier.clear(other.namespace))
    assert tier.disk.catalog.records == 0
    assert tier.states(tier.keyspace(), *range(15)) == tier.states(tier.keyspace(b"o" * 16), *range(15)) == [MISS] * 15
    assert len(tier.disk.catalog.disk_keyspaces) == 2
    tier.store(tier.keyspace(), 3)
    await tier.quiet()
    assert tier.on_disk(tier.keyspace(), 3) == [3]


async def test_two_clears_at_once_tell_of_each_key(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "STEP_RECORDS", 2)
    tier = await open_tier()
    keyspace = tier.keyspace()
    keyspace.namespace.listeners = 1
    await tier.store_away(keyspace, *range(20))
    await asyncio.gather(tier.clear(keyspace.namespace), tier.clear(keyspace.namespace))
    assert sorted(removed(tier)) == list(range(20))


async def test_a_clear_tells_once_of_keys_in_memory_and_on_disk(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the disk is done with its part while memory still has many keys to drop."""
    monkeypatch.setattr(keytable, "STEP_ROWS", 1)
    tier = await open_tier()
    keyspace = tier.keyspace()
    keyspace.namespace.listeners = 1
    tier.store(keyspace, *range(20))
    await tier.quiet()
    assert tier.on_disk(keyspace, *range(20)) == list(range(20))

    async def save_epochs(_roots: object) -> None:
        pass

    monkeypatch.setattr(tier.disk.clears, "save_epochs", save_epochs)
    with pytest.raises(NotDurableError):
        await tier.clear(keyspace.namespace)
    assert sorted(removed(tier)) == list(range(20))


async def test_a_segment_that_goes_while_its_keys_are_cleared(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "STEP_RECORDS", 2)
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(20))
    oldest = tier.segments_by_age()[0]
    await asyncio.gather(tier.clear(keyspace.namespace), tier.disk.reclaim.give_up(oldest, []))
    assert tier.disk.catalog.records == 0
    assert tier.audit() == []


# --- figures ---


async def test_figures_say_what_there_is(open_tier: Open) -> None:
    tier = await open_tier(backlog_bytes=10 * PAGE_BYTES)
    keyspace = tier.keyspace(sizes=(PAGE_BYTES, PAGE_BYTES))
    tier.store(keyspace, *range(7))
    assert tier.disk.figures()["backlog_bytes"] == 10 * PAGE_BYTES
    await tier.quiet()
    tier.evict(keyspace, 1, 2)
    assert await tier.fetch(keyspace, 1, 2) == [1, 2]
    figures = tier.disk.figures()
    assert (figures["keys"], figures["records"], figures["backlog_bytes"]) == (5, 10, 0)
    assert figures["demoted"] == {"keys": 5, "records": 10, "bytes": 10 * PAGE_BYTES}
    assert figures["promoted"]["keys"] == 2
    assert figures["promoted"]["bytes"] == 4 * PAGE_BYTES
    assert figures["not_demoted"]["backlog"] == 2
    assert figures["index_bytes"] > 0
    root = figures["roots"][0]
    assert root["state"] == "ok"
    assert root["used_bytes"] <= root["capacity_bytes"]
    assert root["written_bytes"] == 10 * PAGE_BYTES
    assert tier.states(keyspace, *range(8)) == [HIT] * 7 + [MISS]
    assert len(tier.cache.find(keyspace, keys_of(*range(8))).hit_rows) == 7


async def test_an_inspection_finds_what_is_damaged_and_repairs_it(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(10))
    assert await tier.disk.scrub.run(repair=False) == (10, [])
    tier.flip(keyspace, 4, PAGE_BYTES + 1)
    tier.flip(keyspace, 8, 100)
    count, findings = await tier.disk.scrub.run(repair=False)
    assert (count, len(findings)) == (10, 2)
    assert tier.on_disk(keyspace, 4, 8) == [4, 8], "looking changes nothing"
    assert len((await tier.disk.scrub.run(repair=True))[1]) == 2
    assert tier.on_disk(keyspace, *range(10)) == [0, 1, 2, 3, 5, 6, 7, 9]
    assert await tier.disk.scrub.run(repair=True) == (8, [])


async def test_an_inspection_reads_so_many_bytes_a_turn(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose sizes were never declared count as well; each turn costs at least what it reads."""
    monkeypatch.setattr(scrub, "PIECE_BYTES", 8 * PAGE_BYTES)
    shape = Shape(pages=512, slab_pages=32, segment_pages=256)
    tier = await open_tier(shape)
    await tier.store_away(tier.keyspace(sizes=(7 * PAGE_BYTES,)), *range(10))
    await tier.store_away(tier.keyspace(b"o" * 16), *range(8))
    await tier.close()
    again = await open_tier(shape)
    inspect, turns = again.root.reader.inspect, list[tuple[int, int]]()

    async def watched(segment: Segment, pages: U32Array, cost_bytes: int) -> BoolArray:
        turns.append((len(pages), cost_bytes // PAGE_BYTES))
        return await inspect(segment, pages, cost_bytes)

    monkeypatch.setattr(again.root.reader, "inspect", watched)
    assert await again.disk.scrub.run(repair=False) == (18, [])
    assert turns[:11] == [(1, 8)] * 10 + [(4, 8)]
    assert sum(count for count, _ in turns) == 18
    assert sum(pages for _, pages in turns) < shape.segment_pages


async def test_a_forgotten_namespace_keeps_its_disk_and_not_its_number(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace(b"a" * 16)
    await tier.store_away(keyspace, 1)
    disk_keyspace, number = tier.disk.of(keyspace), keyspace.id
    assert disk_keyspace is not None
    tier.cache.close_namespace(keyspace.namespace)
    del keyspace
    # Who wrote it away may still be about to end, with a reference to it.
    await tier.until(lambda: number not in tier.cache.entries.keyspaces._referred)
    tier.cache.entries.keyspaces._next = number
    other = tier.keyspace(b"b" * 16)
    assert other.id == number
    records = tier.disk.catalog.places(disk_keyspace, np.arange(1, dtype=np.uint32)).ravel()
    sizes = tier.disk.payload_bytes(disk_keyspace, records)
    assert sizes is not None
    assert sizes.tolist() == [PAGE_BYTES]
    assert tier.disk.keyspace_of(disk_keyspace) is None
    assert await tier.fetch(tier.keyspace(b"a" * 16), 1) == [1]


async def test_of_what_lost_its_head_nothing_is_written_again(open_tier: Open) -> None:
    """It counts as not read, until it is read or used again."""
    tier = await open_tier()
    keyspace, numbers = tier.keyspace(), range(6)
    await tier.store_away(keyspace, *numbers)
    assert await tier.fetch(keyspace, *numbers) == list(numbers)
    disk_keyspace = tier.disk.of(keyspace)
    assert disk_keyspace is not None
    catalog = tier.disk.catalog

    def used() -> list[int]:
        rows = catalog.find(disk_keyspace, keys_of(*numbers))
        return [number for number, row in zip(numbers, rows.tolist(), strict=True) if catalog.used[row]]

    assert used() == list(numbers)
    tier.evict(keyspace, 1)
    found = tier.cache.find(keyspace, keys_of(*numbers))
    tier.cache.uses.add_prompt([(keyspace, found, 0)], keyspace.schema.tokens_per_key)
    tier.cache.uses.settle()
    assert used() == [0, 1]
    tier.disk.touch(keyspace, keys_of(3))
    assert used() == [0, 1, 3]
    tier.store(keyspace, *numbers)  # names those that were lost
    assert used() == list(numbers)
