"""Clearing namespaces: the epoch changes at once, slots are freed, and disks and store record it. Event loop only.

A clear is done when it has taken effect on this host, which is at once. What a disk or the remote store has not
recorded of it yet, the daemon repeats by itself: `Arrivals` at each root, `Eras` in the store, both as long as it runs.
They record the epoch that the clear began, so no repetition clears anything anew.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvoffloadd.cache.disk.catalog import DiskKeyspace
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.cache.remote.namespaceera import NamespaceEra
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.steps import Steps, in_turns
from kvoffloadd.storage.disk.root import Root

REMOTE: Final = "remote"
"""The name of the remote store among the places that record a clear; the others are paths of disk roots."""

COUNTED_MAX: Final = 1024
"""How many clears that are not recorded are counted, the latest of each scope; the oldest are left out."""

Names = frozenset[bytes] | None
"""Fingerprints of the namespaces that a clear reaches; None: of all, whether they are open or not."""


@dataclass(slots=True, eq=False)
class Clearing:
    """A clear that has taken effect: nothing that was stored before it hits."""

    names: Names
    epoch: int
    swept: asyncio.Task[tuple[int, int]]
    """Ends when memory has dropped what was cleared. Its result: (keys, bytes)."""
    tried: asyncio.Task[None]
    """Ends when each place has recorded the clear, or has failed to do so once."""
    roots: list[Root]  # that have not recorded it, as far as known
    eras: list[NamespaceEra]  # that the remote store has not ended, as far as known


class Clearings:
    """All clears of one daemon. `spawn` runs a task that the daemon owns."""

    def __init__(
        self,
        cache: Cache,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._cache = cache
        self._disk = disk
        self._remote = remote
        self._spawn = spawn
        self._open: dict[Names, Clearing] = {}  # the last of each scope, unless it is known to be recorded
        self._running: set[asyncio.Task[Any]] = set()

    def begin(self, names: Names) -> Clearing:
        """Clear these namespaces. It goes on to its end, whatever becomes of who has requested it.

        Raises LimitError: nothing was changed.
        """
        cache = self._cache
        namespaces = [n for n in cache.namespaces.values() if names is None or n.fingerprint in names]
        _check(cache, namespaces, everything=names is None)
        if names is None:
            cache.epochs.advance_all()
        else:
            for name in names:
                cache.epochs.advance(name)
        epoch = cache.epochs.base if names is None else min(map(cache.epochs.of, names))
        eras = self._remote.begin_clear(names) if self._remote else []
        walks, disk_keyspaces = _take_effect(cache, self._disk, names, namespaces)
        swept = self._run(in_turns(_sweep(walks)))
        clearing = Clearing(
            names=names,
            epoch=epoch,
            swept=swept,
            tried=self._run(self._record(swept, disk_keyspaces, eras)),
            roots=list(self._disk.roots) if self._disk else [],
            eras=eras,
        )
        self._count(clearing)
        return clearing

    async def _record(
        self, swept: asyncio.Task[Any], disk_keyspaces: list[DiskKeyspace], eras: Collection[NamespaceEra]
    ) -> None:
        """Neither half waits for the other: a store may take long, or not answer at all."""
        halves: list[Coroutine[Any, Any, None]] = []
        if self._disk:
            halves.append(_finish_on_disk(self._disk, swept, disk_keyspaces))
        if self._remote:
            halves.append(self._remote.record_clear(eras))
        await asyncio.gather(*halves)

    def unrecorded(self, clearing: Clearing) -> list[str]:
        """Which places have not recorded it yet: paths of disk roots, REMOTE."""
        self._look(clearing)
        return [root.name for root in clearing.roots] + [REMOTE] * bool(clearing.eras)

    def _look(self, clearing: Clearing) -> Clearing:
        if self._disk:
            clearing.roots = self._disk.clears.unrecorded(clearing.roots, clearing.names, clearing.epoch)
        if self._remote:
            clearing.eras = self._remote.unrecorded(clearing.eras)
        return clearing

    async def wait_recorded(self, clearing: Clearing, wait_s: float) -> None:
        """Wait until each place has recorded it, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.shield(clearing.tried)
                if self._disk:
                    await self._disk.clears.changes.wait_for(lambda: not self._look(clearing).roots)
                if self._remote:
                    await self._remote.eras.changes.wait_for(lambda: not self._look(clearing).eras)

    async def close(self, deadline_s: float) -> None:
        """Wait for clears that are being recorded for the first time."""
        if self._running:
            await asyncio.wait(self._running, timeout=deadline_s)

    def figures(self) -> dict[str, Any]:
        """For `status`."""
        places: set[str] = set()
        for clearing in list(self._open.values()):
            places.update(self.unrecorded(clearing))
            self._forget_recorded(clearing)
        return {"unrecorded": len(self._open), "places": sorted(places)}

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._spawn(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _count(self, clearing: Clearing) -> None:
        """Whatever records it records what it makes obsolete, too."""
        if clearing.names is None:
            self._open.clear()
        self._open.pop(clearing.names, None)
        self._open[clearing.names] = clearing
        if len(self._open) > COUNTED_MAX:
            del self._open[next(iter(self._open))]
        clearing.tried.add_done_callback(lambda _: self._forget_recorded(clearing))

    def _forget_recorded(self, clearing: Clearing) -> None:
        if self._open.get(clearing.names) is clearing and not self.unrecorded(clearing):
            del self._open[clearing.names]


async def clear_here(cache: Cache, disk: DiskTier | None, fingerprint: bytes, epoch: int | None) -> None:
    """Clear a namespace on this host alone, since another host has done so, by this number; None: by a new one. What a
    disk can't record of it now, it records later.
    """
    namespaces = [n for n in cache.namespaces.values() if n.fingerprint == fingerprint]
    _check(cache, namespaces, everything=True)  # no user's cap stands in the way: elsewhere it is done
    if epoch is None:
        cache.epochs.advance(fingerprint)
    else:
        cache.epochs.follow(fingerprint, epoch)
    walks, disk_keyspaces = _take_effect(cache, disk, {fingerprint}, namespaces)
    await in_turns(_sweep(walks))
    if disk:
        await disk.clears.finish(disk_keyspaces)


def _check(cache: Cache, namespaces: Collection[Namespace], *, everything: bool) -> None:
    """Raises LimitError if these can't be cleared now: their groups get new numbers beside the old ones.

    `everything`: the operator clears them; no user's cap stands in the way.
    """
    needed: Counter[int] = Counter()
    for namespace in namespaces:
        needed[namespace.uid] += len(namespace.keyspaces)
    cache.entries.keyspaces.check_numbers(needed.total())
    for uid, count in ({} if everything else needed).items():
        cache.entries.keyspaces.check_room(uid, count, cleared=True)


_Walks = list[Iterator[tuple[int, int]]]


def _take_effect(
    cache: Cache, disk: DiskTier | None, names: Collection[bytes] | None, namespaces: Collection[Namespace]
) -> tuple[_Walks, list[DiskKeyspace]]:
    """The epochs have advanced. When this returns nothing older hits; what is to be freed is left."""
    cache.forget_clears()
    disk_keyspaces = disk.clears.begin(names) if disk else []
    walks = [cache.clear(namespace) for namespace in namespaces]
    for walk in walks:
        next(walk)
    cache.save_state()
    return walks, disk_keyspaces


def _sweep(walks: _Walks) -> Steps[tuple[int, int]]:
    keys = held_bytes = 0
    for walk in walks:
        for some_keys, some_bytes in walk:
            keys += some_keys
            held_bytes += some_bytes
            yield
    return keys, held_bytes


async def _finish_on_disk(disk: DiskTier, swept: asyncio.Task[Any], disk_keyspaces: list[DiskKeyspace]) -> None:
    """After memory: of keys that are in both, the one that drops them last emits the event."""
    await asyncio.wait([swept])
    await disk.clears.finish(disk_keyspaces)
