"""Clears, and the places that record them: none waits for another."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoffloadd.cache import clearing
from kvoffloadd.cache.clearing import REMOTE, Clearings
from kvoffloadd.cache.remote.namespaceera import NamespaceEra
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.scheduling.changes import Changes

from .conftest import Open


class SlowStore:
    """Has as much of a remote tier as clears need. It records them from `go` on."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.eras = SimpleNamespace(changes=Changes())

    def begin_clear(self, names: Collection[bytes] | None) -> list[NamespaceEra]:
        return [NamespaceEra(name, unmade=True) for name in names or ()]

    async def record_clear(self, eras: Collection[NamespaceEra]) -> None:
        await self.go.wait()
        for known in eras:
            known.unmade = False
        self.eras.changes.notify_all()

    def unrecorded(self, eras: Collection[NamespaceEra]) -> list[NamespaceEra]:
        return [known for known in eras if known.unmade]


@pytest.mark.parametrize("slow", ["disk", "store"])
async def test_no_place_waits_for_another(open_tier: Open, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    tier, store, written = await open_tier(retry_s=3600.0), SlowStore(), asyncio.Event()
    name = tier.keyspace().namespace.fingerprint
    write_epochs = tier.root.directory.write_epochs

    async def write_late(*epochs: Any) -> None:
        await written.wait()
        await write_epochs(*epochs)

    monkeypatch.setattr(tier.root.directory, "write_epochs", write_late)
    clearings = Clearings(tier.cache, tier.disk, cast(RemoteTier, store), asyncio.get_running_loop().create_task)
    clearing = clearings.begin(frozenset([name]))
    path = str(tier.root.path)
    assert clearings.unrecorded(clearing) == [path, REMOTE]
    first, then = (store.go, written) if slow == "disk" else (written, store.go)
    first.set()
    await tier.until(lambda: len(clearings.unrecorded(clearing)) == 1)
    assert clearings.unrecorded(clearing) == [path if slow == "disk" else REMOTE]
    assert not clearing.tried.done()
    then.set()
    await clearings.wait_recorded(clearing, 60.0)
    assert clearings.unrecorded(clearing) == []


async def test_of_those_by_names_each_step_is_recorded_by_itself(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another clear came between the steps: a disk that knows this one, and no later epoch, has not recorded all."""
    monkeypatch.setattr(clearing, "GROUPS_AT_ONCE", 1)
    tier = await open_tier(retry_s=3600.0)
    first, last = (tier.keyspace(name).namespace.fingerprint for name in (b"a" * 16, b"b" * 16))
    clearings = Clearings(tier.cache, tier.disk, None, asyncio.get_running_loop().create_task)
    steps = clearings._begin_in_steps(tier.cache.namespaces.values())
    next(steps)
    between = clearings.begin(frozenset([last]))
    await clearings.wait_recorded(between, 60.0)
    monkeypatch.setattr(tier.root.directory, "write_epochs", refused)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        begun = end.value
    await begun.tried
    assert begun.names == {first, last}
    assert len(begun.epochs) == 2
    assert clearings.unrecorded(between) == []
    assert clearings.unrecorded(begun) == [str(tier.root.path)]


async def refused(*epochs: Any) -> None:
    raise OSError(errno.EIO, "refused")


async def test_disk_keyspaces_are_found_by_their_namespaces(open_tier: Open) -> None:
    tier = await open_tier()
    one, other = tier.keyspace(b"a" * 16), tier.keyspace(b"b" * 16)
    for keyspace in (one, other):
        await tier.store_away(keyspace, 1, 2)
    catalog = tier.disk.catalog
    names = [keyspace.namespace.fingerprint for keyspace in (one, other)]
    assert sorted(found.name.fingerprint for found in catalog.disk_keyspaces.of_namespaces(names)) == sorted(names)
    assert [found.name.fingerprint for found in catalog.disk_keyspaces.of_namespaces(names[:1])] == names[:1]
    clearings = Clearings(tier.cache, tier.disk, None, asyncio.get_running_loop().create_task)
    await clearings.wait_recorded(clearings.begin(frozenset(names[:1])), 60.0)
    await tier.until(lambda: all(found.name.epoch for found in catalog.disk_keyspaces.of_namespaces(names[:1])))
    assert [found.keys for found in catalog.disk_keyspaces.of_namespaces(names[1:])] == [2]


async def test_of_several_namespaces_each_counts(open_tier: Open) -> None:
    tier = await open_tier()
    names = frozenset(tier.keyspace(name).namespace.fingerprint for name in (b"a" * 16, b"b" * 16))
    clearings = Clearings(tier.cache, tier.disk, None, asyncio.get_running_loop().create_task)
    cleared = clearings.begin(names)
    await clearings.wait_recorded(cleared, 60.0)
    assert clearings.unrecorded(cleared) == []
    manifest = tier.root.directory.manifest
    assert manifest is not None
    ((reached, epoch),) = cleared.epochs
    assert reached == names
    assert manifest.has_clear(names, epoch)
    assert not manifest.has_clear(names, epoch + 1)
