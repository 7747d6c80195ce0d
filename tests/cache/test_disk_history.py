"""Roots, pools and daemons that meet again: which clears they know of, and what counts then. One case each; a model of
all of them together is in test_clears_stateful.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.memory import cache as cache_module
from kvoffloadd.cache.memory import epochs as epochs_module
from kvoffloadd.cache.memory import keyspaces
from kvoffloadd.errors import LimitError, NotDurableError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk import rootdirectory
from kvoffloadd.storage.disk.files import DiskError, Files
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.manifest import Manifest, read_manifest, write_manifest
from kvoffloadd.storage.disk.root import Root

from .clears import clear
from .conftest import Open
from .disktier import HIT, MISS, PENDING, Shape, Tier

A, B = (bytes([n]) * 16 for n in (1, 2))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


def blocked(path: Path) -> Path:
    """A manifest can't be written here until this is removed."""
    at = path / "manifest.new"
    (at / "x").mkdir(parents=True)
    return at


async def comes_late(tier: Tier, path: Path) -> None:
    """A root that was refused."""
    os.chmod(path, 0o700)
    root = next(root for root in tier.roots if root.path == path)
    await tier.until(lambda: root.state == RootState.OK and root not in tier.disk.arrivals.coming)


# --- what was taken out and put back ---


async def test_a_clear_holds_for_a_root_that_was_out(open_tier: Open, paths: list[Path]) -> None:
    first = await open_tier(paths=[paths[1]])
    await first.store_away(first.keyspace(A), 1, 2)
    await first.close()
    second = await open_tier(paths=[paths[0]])
    await second.clear(second.keyspace(A).namespace)
    await second.close()
    third = await open_tier(paths=[paths[0]])
    await third.close()
    both = await open_tier(paths=paths)
    assert both.states(both.keyspace(A), 1, 2) == [MISS, MISS]


@pytest.mark.parametrize("order", [1, -1])
async def test_the_later_clear_holds_not_the_one_of_many(open_tier: Open, paths: list[Path], order: int) -> None:
    first = await open_tier(paths=[paths[1]])
    for _ in range(5):
        await first.clear(first.keyspace(A).namespace)
    await first.store_away(first.keyspace(A), 1)
    await first.close()
    second = await open_tier(paths=[paths[0]])
    await second.clear(second.keyspace(A).namespace)
    await second.store_away(second.keyspace(A), 2)
    await second.close()
    both = await open_tier(paths=paths[::order])
    assert both.states(both.keyspace(A), 1, 2) == [MISS, PENDING]
    await both.drop()
    alone = await open_tier(paths=[paths[1]])
    assert alone.states(alone.keyspace(A), 1, 2) == [MISS, MISS], "it has learned of the clear"


async def test_the_second_root_with_one_uuid_is_off(open_tier: Open, paths: list[Path]) -> None:
    first = await open_tier(paths=[paths[0]])
    await first.store_away(first.keyspace(A), 1)
    await first.close()
    shutil.copytree(paths[0], paths[1])
    alone = await open_tier(paths=[paths[1]])
    await alone.clear(alone.keyspace(A).namespace)
    await alone.close()
    both = await open_tier(paths=paths)
    assert [root.state for root in both.roots] == [RootState.OK, RootState.OFF]
    assert both.roots[1].health.reason == f"it is a copy of {paths[0]}, which is in use"
    assert both.states(both.keyspace(A), 1) == [MISS], "what the copy knows of clears counts"
    with pytest.raises(NotDurableError):
        await both.clear(both.keyspace(A).namespace)
    paths[1].rename(paths[1].with_name("removed"))  # at once: a probe makes and removes files in it
    paths[1].mkdir(mode=0o700)
    await both.until(lambda: both.roots[1].state == RootState.OK)


async def test_a_root_that_another_daemon_cleared_meanwhile(open_tier: Open, paths: list[Path]) -> None:
    """It may have been cleared after what this one has stored since it went, which can't be known."""
    here = await open_tier(paths=[paths[0]])
    keyspace = here.keyspace(A)
    here.store(keyspace, 1)
    await here.quiet()
    paths[0].rename(paths[1])
    await here.until(lambda: here.root.state == RootState.OFF and not here.root.accepted)
    here.store(keyspace, 2)
    there = await open_tier(paths=[paths[1]])
    await there.clear(there.keyspace(A).namespace)
    await there.store_away(there.keyspace(A), 3)
    await there.close()
    paths[1].rename(paths[0])
    await here.until(lambda: here.root.state == RootState.OK and not here.disk.arrivals.coming)
    assert here.states(here.keyspace(A), 1, 2, 3) == [MISS, MISS, PENDING]
    here.store(here.keyspace(A), 4)
    await here.quiet()
    await here.close()
    after = await open_tier(paths=[paths[0]])
    assert after.states(after.keyspace(A), 1, 2, 3, 4) == [MISS, MISS, PENDING, PENDING]


async def test_another_root_at_the_place_of_one_that_went(open_tier: Open, paths: list[Path]) -> None:
    """It is not used, and its manifest stays what it is, also by a clear before this is noticed."""
    for path, name in zip(paths, (A, B), strict=True):
        tier = await open_tier(paths=[path])
        await tier.clear(tier.keyspace(name).namespace)
        await tier.store_away(tier.keyspace(name), 1)
        await tier.close()
    tier = await open_tier(paths=[paths[0]], retry_s=3600.0)
    other = await read_manifest(paths[1])
    on_disk = paths[0].with_name("away")
    paths[0].rename(on_disk)
    paths[1].rename(paths[0])
    await clear(tier.cache, tier.disk, [tier.keyspace(A).namespace.fingerprint])
    assert await read_manifest(paths[0]) == other
    manifest = await read_manifest(on_disk)
    assert manifest is not None
    assert manifest.epoch_of(A) == tier.keyspace(A).namespace.epoch
    await tier.disk.arrivals.check(tier.root)
    assert "is not the same root as before" in tier.root.health.reason
    assert tier.states(tier.keyspace(B), 1) == [MISS]
    assert await read_manifest(paths[0]) == other


async def test_records_of_an_epoch_that_is_over_are_not_taken_in(open_tier: Open, paths: list[Path]) -> None:
    """They lie in segments until those are used again, but take no room in the catalog."""
    tier = await open_tier(paths=[paths[0]])
    await tier.store_away(tier.keyspace(A), 1, 2, 3)
    await tier.clear(tier.keyspace(A).namespace)
    await tier.store_away(tier.keyspace(A), 4)
    await tier.close()
    again = await open_tier(paths=[paths[0]])
    assert again.disk.catalog.records == 1
    assert again.states(again.keyspace(A), 1, 4) == [MISS, PENDING]


# --- what comes late ---


async def test_a_late_root_retires_what_it_knows_was_cleared(open_tier: Open, paths: list[Path]) -> None:
    """Keys that came from a disk go, from memory and from that disk; what was stored in this run stays."""
    first = await open_tier(paths=[paths[0]])
    await first.store_away(first.keyspace(A), 1, 2, 3)
    await first.store_away(first.keyspace(B), 1)
    await first.close()
    second = await open_tier(paths=[paths[1]])
    await second.clear(second.keyspace(A).namespace)
    await second.store_away(second.keyspace(A), 7)
    await second.close()
    paths[1].chmod(0o755)
    tier = await open_tier(paths=paths)
    keyspace = tier.keyspace(A)
    assert sorted(await tier.fetch(keyspace, 1, 2)) == [1, 2]
    assert await tier.fetch(tier.keyspace(B), 1) == [1]
    old = tier.disk.of(keyspace)
    assert old is not None
    tier.store(keyspace, 5)
    await tier.quiet()
    await comes_late(tier, paths[1])
    assert tier.states(keyspace, 1, 2, 3, 5, 7) == [MISS, MISS, MISS, HIT, PENDING]
    assert tier.served(tier.keyspace(B), 1) == [1]
    assert not old.open
    assert old.id not in tier.disk.catalog.disk_keyspaces, "what it took is free"
    assert tier.cache.counters.keys_cleared == 2
    await tier.close()
    alone = await open_tier(paths=[paths[0]])
    assert alone.states(alone.keyspace(A), 1, 2, 3) == [MISS] * 3, "the others have learned of the clear"


async def test_keys_that_are_being_read_when_a_late_root_knows_better(open_tier: Open, paths: list[Path]) -> None:
    first = await open_tier(paths=[paths[0]])
    await first.store_away(first.keyspace(A), 1)
    await first.close()
    second = await open_tier(paths=[paths[1]])
    await second.clear()
    await second.close()
    paths[1].chmod(0o755)
    tier = await open_tier(paths=paths)
    tier.files.reading.close()
    fetched = asyncio.ensure_future(tier.fetch(tier.keyspace(A), 1))
    await tier.until(tier.files.reading.entered.is_set)
    await comes_late(tier, paths[1])
    tier.files.reading.open()
    assert await fetched == []
    assert tier.states(tier.keyspace(A), 1) == [MISS]


# --- what could not be noted ---


async def test_nothing_goes_where_its_clear_is_not_noted(open_tier: Open, paths: list[Path]) -> None:
    tier = await open_tier(paths=paths)
    tier.store(tier.keyspace(A), 1)
    await tier.quiet()
    trap = blocked(paths[0])
    with pytest.raises(NotDurableError):
        await tier.clear(tier.keyspace(A).namespace)
    tier.store(tier.keyspace(A), *range(2, 8))
    await tier.quiet()
    assert {tier.place(tier.keyspace(A), number)[0].path for number in range(2, 8)} == {paths[1]}
    trap_too = blocked(paths[1])
    with pytest.raises(NotDurableError):
        await tier.clear()
    tier.store(tier.keyspace(A), 8)
    await tier.quiet()
    assert tier.on_disk(tier.keyspace(A), 8) == []
    assert tier.not_demoted == {"clear not noted": 1}
    tier.store(tier.keyspace(B), 8)
    for at in (trap, trap_too):
        shutil.rmtree(at)
    keyspace = tier.disk.of(tier.keyspace(A))
    assert keyspace is not None
    await tier.until(lambda: all(root.directory.has_epoch(keyspace.name) for root in tier.roots))
    tier.store(tier.keyspace(A), 9)
    await tier.quiet()
    assert tier.on_disk(tier.keyspace(A), 9) == [9]
    await tier.close()
    again = await open_tier(paths=paths)
    assert again.states(again.keyspace(A), 1, 2, 8, 9) == [MISS, MISS, PENDING, PENDING]


async def test_a_record_of_a_clear_that_no_manifest_knows_proves_it(open_tier: Open, paths: list[Path]) -> None:
    """An older manifest was put back."""
    tier = await open_tier(paths=[paths[0]])
    await tier.store_away(tier.keyspace(A), 1)
    old = (paths[0] / "manifest").read_bytes()
    await tier.clear(tier.keyspace(A).namespace)
    await tier.store_away(tier.keyspace(A), 2)
    epoch = tier.keyspace(A).namespace.epoch
    await tier.close()
    (paths[0] / "manifest").write_bytes(old)
    again = await open_tier(paths=[paths[0]])
    assert again.states(again.keyspace(A), 1, 2) == [MISS, PENDING]
    assert again.keyspace(A).namespace.epoch == again.cache.epochs.last == epoch
    now = await read_manifest(paths[0])
    assert now is not None
    assert now.epoch_of(A) == epoch
    await again.clear(again.keyspace(A).namespace)
    assert again.keyspace(A).namespace.epoch > epoch


async def test_a_manifest_that_was_counted_is_gone_on_with(open_tier: Open, paths: list[Path]) -> None:
    """An earlier version wrote numbers from 1 on."""
    tier = await open_tier(paths=[paths[0]])
    await tier.close()
    manifest = await read_manifest(paths[0])
    assert manifest is not None
    await write_manifest(paths[0], replace(manifest, base_epoch=2, last_epoch=3, epochs={A: 3}))
    second = await open_tier(paths=[paths[0]])
    assert (second.keyspace(A).namespace.epoch, second.keyspace(B).namespace.epoch) == (3, 2)
    await second.store_away(second.keyspace(A), 1)
    await second.store_away(second.keyspace(B), 1)
    await second.clear(second.keyspace(B).namespace)
    await second.close()
    third = await open_tier(paths=[paths[0]])
    assert third.states(third.keyspace(A), 1) == [PENDING]
    assert third.states(third.keyspace(B), 1) == [MISS]


async def test_a_manifest_is_only_ever_raised(open_tier: Open, paths: list[Path]) -> None:
    """A root that has just come knows of clears that a clear elsewhere must not write over."""
    tier = await open_tier(paths=[paths[0]], retry_s=3600.0)
    await tier.clear(tier.keyspace(A).namespace)
    before = await read_manifest(paths[0])
    assert before is not None
    there, later = tier.root.directory, before.last_epoch + 5
    for base, epochs in ((0, {}), (0, {A: before.last_epoch - 1}), (0, {B: later})):
        with pytest.raises(DiskError, match="has a record of later clears"):
            await there.write_epochs(base, later, epochs)
    assert await read_manifest(paths[0]) == before
    await there.write_epochs(later, later, {A: before.last_epoch, B: 0})
    with pytest.raises(DiskError, match="has a record of later clears"):
        await there.write_epochs(0, later, {A: later})


class SlowWrites:
    """Each write of the root's manifest waits until the test lets it `go`. `asked`: for how many clears."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Root) -> None:
        self.began: list[Manifest] = []
        self.asked = 0
        self.go = asyncio.Semaphore(0)
        self._ask = root.directory.write_epochs
        monkeypatch.setattr(rootdirectory, "write_manifest", self._write)
        monkeypatch.setattr(root.directory, "write_epochs", self._count)

    async def _write(self, path: Path, manifest: Manifest, executor: Executor, files: Files) -> None:
        self.began.append(manifest)
        await self.go.acquire()
        await write_manifest(path, manifest, executor, files)

    async def _count(self, *manifest: Any) -> None:
        self.asked += 1
        await self._ask(*manifest)


async def test_clears_that_come_while_a_manifest_is_written_share_the_next_one(
    open_tier: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is answered by one that had begun before it came: it would not be durable."""
    tier = await open_tier(paths=[paths[0]], retry_s=3600.0)
    names = [bytes([number]) * 16 for number in range(1, 9)]
    namespaces = [tier.keyspace(name).namespace for name in names]
    writes = SlowWrites(monkeypatch, tier.root)
    first = asyncio.ensure_future(tier.clear(namespaces[0]))
    await tier.until(lambda: writes.began)
    others = [asyncio.ensure_future(tier.clear(namespace)) for namespace in namespaces[1:]]
    await tier.until(lambda: writes.asked == 8)
    others.pop(0).cancel()  # the one that the others have joined
    writes.go.release()
    await first
    await tier.until(lambda: len(writes.began) == 2)
    late = asyncio.ensure_future(tier.clear(namespaces[0]))
    await tier.until(lambda: writes.asked == 9)
    assert not any(other.done() for other in others)
    writes.go.release()
    await asyncio.gather(*others)
    there = await read_manifest(paths[0])
    assert there is not None
    assert [there.epoch_of(name) for name in names[1:]] == [tier.cache.epochs.of(name) for name in names[1:]]
    assert not late.done()
    writes.go.release()
    await late
    assert len(writes.began) == 3
    assert await read_manifest(paths[0]) == writes.began[-1]


async def test_a_manifest_that_can_not_be_written_fails_for_all_who_wait_for_it(
    open_tier: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier(paths=[paths[0]], retry_s=3600.0)
    namespaces = [tier.keyspace(bytes([number]) * 16).namespace for number in range(1, 5)]
    writes = SlowWrites(monkeypatch, tier.root)
    first = asyncio.ensure_future(tier.clear(namespaces[0]))
    await tier.until(lambda: writes.began)
    others = [asyncio.ensure_future(tier.clear(namespace)) for namespace in namespaces[1:]]
    await tier.until(lambda: writes.asked == 4)
    writes.go.release()
    await first
    at = blocked(paths[0])
    writes.go.release()
    failed = await asyncio.gather(*others, return_exceptions=True)
    assert [type(error) for error in failed] == [NotDurableError] * 3
    shutil.rmtree(at)
    writes.go.release()
    await tier.clear(namespaces[0])
    there = await read_manifest(paths[0])
    assert there is not None
    assert [there.epoch_of(n.fingerprint) for n in namespaces] == [n.epoch for n in namespaces]


# --- what can't be read for a while ---


@pytest.mark.parametrize("how", ["an error", "garbage"])
async def test_a_segment_that_reads_badly_once(open_tier: Open, paths: list[Path], how: str) -> None:
    """There are two: nothing of the namespace is seen at a start, and it stays cleared when all of
    it is there again.
    """
    shape = Shape(segment_pages=16)
    tier = await open_tier(shape, paths=[paths[0]])
    await tier.store_away(tier.keyspace(A), 1)
    hidden = paths[0] / "segments" / tier.place(tier.keyspace(A), 1)[1].name
    await tier.store_away(tier.keyspace(B), *range(12))
    seen = {tier.place(tier.keyspace(B), number)[1].name for number in range(12)} - {hidden.name}
    await tier.clear(tier.keyspace(A).namespace)
    await tier.close()
    good = hidden.read_bytes()
    if how == "garbage":
        page = b"\x5a" * PAGE_BYTES
        hidden.write_bytes(good[:8] + page[8:] + good[PAGE_BYTES:-PAGE_BYTES] + page)  # one of our headers, damaged
    second = Tier(paths[0].parent, shape, paths=[paths[0]])
    second.files.unreadable = {hidden.name} if how == "an error" else set()
    await second.start()
    assert second.root.state == RootState.OK
    assert seen & {segment.name for segment in second.root.pool.segments.values()}
    await second.drop()
    hidden.write_bytes(good)
    third = await open_tier(shape, paths=[paths[0]])
    assert third.states(third.keyspace(A), 1) == [MISS]
    assert third.states(third.keyspace(B), 11) == [PENDING]


# --- what is forgotten ---


async def test_too_many_clears_become_one(open_tier: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a root that was out has of a forgotten namespace is void; what is left anywhere here stays."""
    for module in (epochs_module, cache_module):
        monkeypatch.setattr(module, "REMEMBERED_MAX", 3)
    out = await open_tier(paths=[paths[1]])
    await out.store_away(out.keyspace(A), 1)
    await out.store_away(out.keyspace(b"z" * 16), 1)
    await out.close()
    before = await open_tier(paths=[paths[0]])
    await before.store_away(before.keyspace(b"q" * 16), 1)
    await before.close()
    tier = await open_tier(paths=[paths[0]])
    await tier.store_away(tier.keyspace(B), 1)
    await tier.clear(tier.keyspace(A).namespace)
    for n in range(8):
        await clear(tier.cache, tier.disk, [bytes([100 + n]) * 16])
    assert tier.cache.epochs.base, "they were forgotten"
    assert len(tier.cache.epochs.by_namespace) < 8
    await tier.close()
    both = await open_tier(paths=paths)
    assert both.states(both.keyspace(B), 1) == [PENDING]
    assert both.states(both.keyspace(b"q" * 16), 1) == [PENDING], "nobody had opened it"
    assert both.states(both.keyspace(A), 1) == [MISS]


async def test_a_clear_that_finds_no_numbers_changes_nothing(
    open_tier: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier(paths=[paths[0]])
    await tier.store_away(tier.keyspace(A), 1)
    tier.keyspace(B)
    monkeypatch.setattr(keyspaces, "NUMBERS", 3)
    before = (paths[0] / "manifest").read_bytes()
    with pytest.raises(LimitError):
        await tier.clear()
    assert tier.states(tier.keyspace(A), 1) == [PENDING]
    assert (tier.cache.epochs.last, (paths[0] / "manifest").read_bytes()) == (0, before)
    await tier.clear(tier.keyspace(A).namespace)
    assert tier.states(tier.keyspace(A), 1) == [MISS]


async def test_a_clear_of_everything_does_not_take_away_what_is_being_noted(open_tier: Open, paths: list[Path]) -> None:
    """A clear of one namespace is on its way to the manifest when another session clears all: what is written knows of
    one of them at least.
    """
    tier = await open_tier(paths=[paths[0]])
    epochs = tier.cache.epochs
    epochs.advance(A)
    cleared = epochs.of(A)
    noting = asyncio.ensure_future(tier.disk.clears.save_epochs(tier.roots))
    asyncio.get_running_loop().call_soon(epochs.advance_all)
    await noting
    manifest = await read_manifest(paths[0])
    assert manifest is not None
    assert manifest.epoch_of(A) >= cleared


async def test_no_user_s_cap_stops_a_clear_of_everything(open_tier: Open) -> None:
    """A user whose groups are at the cap, held after that user's clear, can't keep the operator from clearing."""
    tier = await open_tier()
    keyspace = tier.keyspace(A)
    tier.store(keyspace, 1)
    rows = tier.cache.entries.live(np.arange(tier.cache.entries.index.rows_end, dtype=np.uint32))
    tier.cache.hold(rows)
    tier.cache.entries.keyspaces.groups_max = 1
    await clear(tier.cache, tier.disk, {A})
    with pytest.raises(LimitError):
        await clear(tier.cache, tier.disk, {A})
    await clear(tier.cache, tier.disk, None)
    tier.cache.unhold(rows)


async def test_disk_keyspaces_that_nobody_needs_are_given_back(open_tier: Open) -> None:
    """Namespaces that came and went without keys on disk; those with keys stay until these are lost."""
    tier = await open_tier()
    disk_keyspaces = tier.disk.catalog.disk_keyspaces
    for number in range(5):
        tier.cache.close_namespace(tier.keyspace(bytes([9, number]) * 8).namespace)
    assert len(disk_keyspaces) == 0
    keyspace = tier.keyspace(A)
    await tier.store_away(keyspace, 1)
    disk_keyspace = tier.disk.of(keyspace)
    assert disk_keyspace is not None
    tier.cache.close_namespace(keyspace.namespace)
    assert list(disk_keyspaces.values()) == [disk_keyspace]
    tier.disk.lose(tier.disk.catalog.places(disk_keyspace, np.arange(1, dtype=np.uint32)).ravel())
    assert (len(disk_keyspaces), disk_keyspace.open) == (0, False)
