"""Deleted keys do not come back: not from disk, not from what was under way, not after restarts. Later ones do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.cache.memory import tombstones
from kvoffloadd.errors import LimitError
from kvoffloadd.model import KeyState
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.manifest import read_manifest
from kvoffloadd.storage.tombstone import Tombstone

from .conftest import Open
from .disktier import Shape, Tier
from .fakes import keys_of

MISS, HIT, PENDING = KeyState.MISS, KeyState.HIT, KeyState.PENDING


async def test_what_is_deleted_is_gone_and_the_rest_stays(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.store(keyspace, *range(6))
    await tier.quiet()
    tier.evict(keyspace, 0, 1)
    deletion = await tier.delete(keyspace, 0, 2, 99)
    assert (deletion.keys, deletion.bytes, deletion.disk_keys) == (1, 4096, 2)
    assert tier.states(keyspace, *range(6)) == [MISS, PENDING, MISS, HIT, HIT, HIT]
    assert tier.disk.catalog.cleared_records == 2
    await tier.drop()
    again = await open_tier()
    keyspace = again.keyspace()
    assert again.states(keyspace, *range(6)) == [MISS, PENDING, MISS, PENDING, PENDING, PENDING]
    assert again.disk.catalog.cleared_records == 2


async def test_what_is_stored_after_it_counts(open_tier: Open) -> None:
    tier = await open_tier()
    await tier.store_away(tier.keyspace(), 1, 2)
    await tier.delete(tier.keyspace(), 1, 2)
    await tier.store_away(tier.keyspace(), 2)
    for _ in range(2):
        await tier.drop()
        tier = await open_tier()
        assert tier.on_disk(tier.keyspace(), 1, 2) == [2]
        assert await tier.fetch(tier.keyspace(), 1, 2) == [2]


async def test_it_may_be_deleted_and_stored_again_and_again(open_tier: Open) -> None:
    """Each root of two has old copies of it."""
    tier = await open_tier(Shape(roots=2))
    for turn in range(4):
        await tier.store_away(tier.keyspace(), *range(6))
        await tier.delete(tier.keyspace(), *range(turn, 6))
        if turn % 2:
            await tier.drop()
            tier = await open_tier(Shape(roots=2))
        assert tier.on_disk(tier.keyspace(), *range(6)) == list(range(turn))
    assert len(tier.cache.tombstones) == 4


async def test_the_same_deletion_again_takes_no_more_room(open_tier: Open) -> None:
    tier = await open_tier()
    for _ in range(3):
        await tier.delete(tier.keyspace(), 1, 2)
    assert tier.cache.tombstones.num_keys == 2
    await tier.delete(tier.keyspace(), 1)
    assert len(tier.cache.tombstones) == 2


async def test_a_key_that_is_deleted_while_it_is_written(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    tier.files.writing.close()
    tier.store(keyspace, 1, 2)
    await tier.until(tier.files.writing.entered.is_set)
    await tier.delete(keyspace, 1)
    assert tier.audit() == []
    assert tier.cache.tier.gauges()["used_bytes"] == 2 * 4096, "its slot is being read"
    tier.files.writing.open()
    await tier.quiet()
    assert tier.states(keyspace, 1, 2) == [MISS, HIT]
    assert tier.cache.tier.gauges()["used_bytes"] == 4096
    tier.store(keyspace, 1)
    await tier.quiet()
    await tier.drop()
    again = await open_tier()
    assert again.on_disk(again.keyspace(), 1, 2) == [1, 2]


@pytest.mark.parametrize("stored_again", [False, True])
async def test_a_key_that_is_deleted_before_its_write_begins(open_tier: Open, stored_again: bool) -> None:
    """The budget lets it wait, with its place in history. No byte of it is written then."""
    tier = await open_tier(write_ops_per_s=4)
    keyspace = tier.keyspace()
    tier.store(keyspace, 9)
    await tier.until(lambda: tier.disk.demotion.counters.keys)
    tier.store(keyspace, 1, 2)
    await tier.until(lambda: tier.disk.demotion.holds)
    await tier.delete(keyspace, 1, 2)
    if stored_again:
        tier.store(keyspace, 2)
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2) == [2] * stored_again
    assert tier.disk.demotion.counters.records == 1 + stored_again
    await tier.drop()
    again = await open_tier()
    assert again.on_disk(again.keyspace(), 1, 2) == [2] * stored_again


async def test_a_key_that_is_deleted_while_it_is_read_is_a_miss(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(4))
    tier.files.reading.close()
    ended: list[int] = []
    tier.begin_fetch(keyspace, *range(4), done=lambda: ended.append(1))
    await tier.until(tier.files.reading.entered.is_set)
    await tier.delete(keyspace, 0, 1)
    assert tier.states(keyspace, *range(4)) == [MISS, MISS, PENDING, PENDING]
    tier.begin_fetch(keyspace, *range(4), done=lambda: ended.append(2))
    assert tier.audit() == []
    tier.files.reading.open()
    await tier.quiet()
    assert sorted(ended) == [1, 2]
    assert tier.served(keyspace, *range(4)) == [2, 3]
    assert tier.cache.tier.gauges()["used_bytes"] == 2 * 4096


async def test_a_key_that_is_deleted_while_it_moves_on(open_tier: Open) -> None:
    """Its segment is reclaimed: it is read, deleted, and written again."""
    tier = await open_tier(Shape(pages=512))
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(6))
    await tier.fetch(keyspace, 0, 1)  # in use: they move on
    tier.evict(keyspace, 0, 1)
    tier.files.reading.close()
    for number in range(100, 200):
        tier.store(keyspace, number)
        await asyncio.sleep(0.002)
        await tier.until(lambda: not tier.disk.demotion.holds or tier.files.reading.entered.is_set())
        if tier.files.reading.entered.is_set():
            break
    await tier.delete(keyspace, 0)
    tier.files.reading.open()
    await tier.quiet()
    assert tier.disk.reclaim.records_rewritten == 2
    assert tier.on_disk(keyspace, 0, 1) == [1]
    await tier.drop()
    again = await open_tier(Shape(pages=512))
    assert again.on_disk(again.keyspace(), 0, 1) == [1]


async def test_a_key_that_is_held_or_being_stored(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = tier.keyspace(sizes=(4096, 4096))
    tier.store(keyspace, 1)
    tier.write(keyspace, [2], parts=[0])
    rows = tier.cache.find(keyspace, keys_of(1)).hit_rows
    tier.cache.hold(rows)
    tier.holds = len(rows)
    deletion = await tier.delete(keyspace, 1, 2)
    assert (deletion.keys, deletion.bytes) == (1, 8192)
    assert tier.states(keyspace, 1, 2) == [MISS, MISS]
    assert tier.cache.tier.gauges()["used_bytes"] == 8192
    tier.cache.unhold(rows)
    tier.holds = 0
    assert tier.cache.tier.gauges()["used_bytes"] == 0
    await tier.quiet()
    assert tier.on_disk(keyspace, 1, 2) == []


# --- roots that come and go ---


def move(path: Path, to: Path) -> None:
    path.rename(to)


async def gone(tier: Tier, path: Path) -> None:
    move(path, path.with_name("away"))
    root = next(root for root in tier.roots if root.path == path)
    await tier.until(lambda: root.state == RootState.OFF)


async def back(tier: Tier, path: Path) -> None:
    path.with_name("away").rename(path)
    await tier.until(lambda: all(root.state == RootState.OK for root in tier.roots))


async def spread(tier: Tier, numbers: Sequence[int]) -> list[int]:
    """Stores keys on both roots. Returns those on the last one."""
    keyspace = tier.keyspace()
    for number in numbers:
        await tier.store_away(keyspace, number)
    there = [number for number in numbers if tier.place(keyspace, number)[0] is tier.roots[-1]]
    assert 0 < len(there) < len(numbers)
    return there


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_root_that_was_off_does_not_bring_it_back(open_tier: Open, restarts: bool) -> None:
    """The other root remembers the deletion for it. What was stored meanwhile, there, stays."""
    shape = Shape(roots=2)
    tier = await open_tier(shape)
    there = await spread(tier, range(8))
    path = tier.roots[-1].path
    await gone(tier, path)
    keyspace = tier.keyspace()
    deletions, deletion = tier.begin_delete(keyspace, *range(8))
    await deletion.tried
    assert deletions.unrecorded(deletion) == [str(path)]
    assert deletions.figures()["places"] == [str(path)]
    await tier.store_away(keyspace, there[0])
    if restarts:
        await tier.drop()
        path.with_name("away").rename(path)
        tier = await open_tier(shape)
    else:
        await back(tier, path)
        await deletions.wait_recorded(deletion, 60.0)
        assert deletions.unrecorded(deletion) == []
        assert deletions.figures()["unrecorded"] == 0
    assert tier.on_disk(tier.keyspace(), *range(8)) == there[:1]
    await tier.until(lambda: all(root.directory.manifest and root.directory.manifest.tombstones for root in tier.roots))
    await tier.drop()
    tier = await open_tier(shape, paths=[path])
    assert tier.on_disk(tier.keyspace(), *range(8)) == [], "this root alone knows of it, too"


async def test_a_late_root_tells_of_a_deletion(open_tier: Open, tmp_path: Path) -> None:
    """Another run deleted with that root alone: what this one has of the keys, in memory or on disk, goes."""
    paths = [tmp_path / name for name in ("one", "two")]
    tier = await open_tier(paths=paths[:1])
    await tier.store_away(tier.keyspace(), *range(4))
    await tier.drop()
    tier = await open_tier(paths=paths[1:])
    await tier.delete(tier.keyspace(), 0, 1)
    await tier.drop()
    paths[1].rename(tmp_path / "away")
    paths[1].touch()  # so that no root begins there
    tier = await open_tier(Shape(roots=2), paths=paths)
    keyspace = tier.keyspace()
    assert await tier.fetch(keyspace, 0) == [0]
    paths[1].unlink()
    await back(tier, paths[1])
    assert tier.states(keyspace, *range(4)) == [MISS, MISS, PENDING, PENDING]
    await tier.drop()
    tier = await open_tier(paths=paths[:1])
    assert tier.on_disk(tier.keyspace(), *range(4)) == [2, 3]


async def test_a_memory_that_comes_late_tells_nothing_it_has_lost(tmp_path: Path) -> None:
    """The arena is that of a run before the deletion, which the disk has recorded."""
    shape, root = Shape(), [tmp_path / "root"]
    old = ArenaFile.make(shape.pages * 4096, shape.slab_pages * 4096)
    fd = os.dup(old.fd)
    tier = await Tier(tmp_path, shape, paths=root, pool=old).start()
    tier.store(tier.keyspace(), 1, 2)
    await tier.quiet()
    await tier.drop()
    tier = await Tier(tmp_path, shape, paths=root).start()
    await tier.delete(tier.keyspace(), 1)
    await tier.drop()
    tier = await Tier(
        tmp_path, shape, paths=root, pool=ArenaFile(fd, shape.pages * 4096, shape.slab_pages * 4096, is_old=True)
    ).start()
    assert tier.states(tier.keyspace(), 1, 2) == [MISS, HIT]
    assert tier.audit() == []
    await tier.drop()


# --- manifests ---


async def test_the_manifest_of_a_root_with_deleted_keys_is_of_another_version(open_tier: Open) -> None:
    """A program that does not know of deletions does not use the root; a clear makes it an old one again."""
    tier = await open_tier()
    path = tier.root.path
    assert '"version": 1' in (path / "manifest").read_text()
    await tier.delete(tier.keyspace(), 1)
    assert '"version": 3' in (path / "manifest").read_text()
    manifest = await read_manifest(path)
    assert manifest is not None
    assert [tombstone.num_keys for tombstone in manifest.tombstones] == [1]
    await tier.clear(tier.keyspace().namespace)
    assert '"version": 1' in (path / "manifest").read_text()
    assert len(tier.cache.tombstones) == 0


async def test_a_deletion_that_can_not_be_recorded_is_told(open_tier: Open) -> None:
    tier = await open_tier()
    await tier.store_away(tier.keyspace(), 1)
    (tier.root.path / "manifest.new").mkdir()
    deletions, deletion = tier.begin_delete(tier.keyspace(), 1)
    await deletion.tried
    assert deletions.unrecorded(deletion) == [str(tier.root.path)]
    assert deletions.figures()["unrecorded"] == 1
    (tier.root.path / "manifest.new").rmdir()
    await deletions.wait_recorded(deletion, 60.0)
    assert deletions.unrecorded(deletion) == []
    assert deletions.figures()["unrecorded"] == 0


# --- room ---


async def test_without_room_nothing_is_deleted(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made of what no segment can have any more, no more than it takes."""
    monkeypatch.setattr(tombstones, "BYTES_MAX", 4 * (tombstones.TOMBSTONE_BYTES + 2 * 32))
    tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(4))
    await tier.delete(keyspace, 0, 1)
    await tier.delete(keyspace, 2, 3)
    await tier.store_away(keyspace, 5, 6)
    before = tier.cache.tombstones.last
    with pytest.raises(LimitError, match="no room for more"):
        tier.begin_delete(keyspace, 5, 6)
    assert tier.on_disk(keyspace, 5, 6) == [5, 6]
    assert tier.cache.tombstones.last == before
    number = 100
    while min(segment.oldest_sequence for segment in tier.root.pool.segments.values()) < before:
        await tier.store_away(keyspace, number)
        number += 1
    await tier.store_away(keyspace, 5, 6)
    await tier.delete(keyspace, 5, 6)
    assert [each.num_keys for each in tier.cache.tombstones.current(tier.cache.epochs.of)] == [2, 2]
    await tier.drop()
    tier = await open_tier()
    assert tier.on_disk(tier.keyspace(), 5, 6) == []


async def test_nothing_is_forgotten_while_it_may_be_somewhere(open_tier: Open) -> None:
    """A write under way, and a root that is off."""
    tier = await open_tier()
    keyspace = tier.keyspace()
    assert tier.disk.oldest_sequence > 1 << 60
    tier.files.writing.close()
    tier.store(keyspace, 1)
    await tier.until(tier.files.writing.entered.is_set)
    assert tier.disk.oldest_sequence == 1
    tier.files.writing.open()
    await tier.quiet()
    assert tier.disk.oldest_sequence == 1
    await gone(tier, tier.root.path)
    assert tier.disk.oldest_sequence == 0


# --- claims ---


async def test_claims_end_before_what_is_deleted(open_tier: Open) -> None:
    tier = await open_tier()
    tier.cache.retention.change_shares(0.5, 0.5)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, *range(8))
    retention = tier.cache.retention
    long, other, gone_whole = (
        retention.retain(keyspace.namespace, [(keyspace, 0, keys_of(*numbers))], priority=50, seconds=600.0)
        for numbers in (range(8), (0, 1), (5, 6))
    )
    assert long is not None
    assert other is not None
    assert gone_whole is not None
    await tier.delete(keyspace, 5)
    assert [tier.num_keys(claim) for tier in retention.tiers for claim in (long, other, gone_whole)] == [5, 2, 0] * 2
    assert retention.claims == [long, other]
    assert retention.check() == []
    assert tier.audit() == []


# --- numbers ---


async def test_a_clock_that_was_set_back_makes_no_deletion_earlier(open_tier: Open) -> None:
    tier = await open_tier()
    tier.cache.tombstones.clock = lambda: 1
    await tier.store_away(tier.keyspace(), 1, 2)
    for _ in range(2):
        await tier.delete(tier.keyspace(), 1)
        await tier.store_away(tier.keyspace(), 1)
    await tier.delete(tier.keyspace(), 2)
    await tier.drop()
    tier = await open_tier()
    assert tier.on_disk(tier.keyspace(), 1, 2) == [1]


async def test_each_step_of_a_kill(open_tier: Open) -> None:
    """It dies before the manifest is written, or after it: what was told as recorded holds."""
    for turns in range(12):
        tier = await open_tier()
        keyspace = tier.keyspace()
        await tier.store_away(keyspace, turns)
        deletions, deletion = tier.begin_delete(keyspace, turns)
        for _ in range(turns):
            await asyncio.sleep(0.001 if turns > 6 else 0)
        recorded = deletions.unrecorded(deletion) == []
        await tier.drop(amid_a_note=True)
        tier = await open_tier()
        if recorded:
            assert tier.on_disk(tier.keyspace(), turns) == []
        await tier.drop()


def test_numbers_of_keys_are_found_by_all_of_their_bytes() -> None:
    known = tombstones.Tombstones()
    keys = keys_of(*range(50))
    keys[:, 0], keys[:, 1:3], keys[:, 3] = np.arange(50) % 25, 7, np.arange(50) // 25
    one = Tombstone(b"f" * 16, 0, 3, 1, 1000, 32, keys[:30].tobytes())
    assert known.add([one]) == [one]
    assert known.add([one]) == []
    space = one.space
    assert known.deleted(space, keys).tolist() == [True] * 30 + [False] * 20
    assert known.void(space, keys, np.full(50, 1000, np.uint64)).tolist() == [True] * 30 + [False] * 20
    assert not known.void(space, keys, np.full(50, 1001, np.uint64)).any()
    assert not known.void((b"f" * 16, 4, 1), keys, np.zeros(50, np.uint64)).any()
    known.forget([one])
    assert not known.deleted(space, keys).any()
    assert known.check() == []


def test_what_is_kept_of_a_group_whose_deletions_come_and_go_is_bounded() -> None:
    """One deletion stays, so that the group's tables are never empty."""
    known = tombstones.Tombstones()
    known.add([Tombstone(b"f" * 16, 0, 3, 1, 1, 32, keys_of(7).tobytes())])
    space = known.current(lambda _: 3)[0].space
    for number in range(2, 50):
        keys = keys_of(*range(100 * number, 100 * number + 100))
        deleted = Tombstone(b"f" * 16, 0, 3, 1, number, 32, keys.tobytes())
        known.add([deleted])
        assert known.deleted(space, np.concatenate([keys, keys_of(7)])).all()
        known.forget([deleted])
        assert not known.deleted(space, keys).any()
        assert known.deleted(space, keys_of(7)).all()
        assert len(known._graves[space].heads) <= 2
