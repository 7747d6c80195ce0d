"""Deletes single keys: they are dropped at once, and disks and store record it. Event loop only.

A deletion has the durability of a clear. It is done when it has taken effect on this host, which is at once. Tombstones
keep the older copies of its keys from coming back: in segments, on roots that are off, in the remote store. If a disk
has not recorded them, or the store has not removed the objects yet, the daemon repeats that by itself: `RootLifecycle`
for each root, `Removals` for the store, both as long as it runs, and after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvoffloadd.cache.clearing import COUNTED_MAX, REMOTE
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.deletion import delete_keys
from kvoffloadd.cache.memory.keys import pack
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.model import U64Array
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.tombstone import Tombstone


@dataclass(slots=True, eq=False)
class Deletion:
    """A deletion that has taken effect: none of its keys hits unless it was stored after it."""

    tombstones: list[Tombstone]
    keys: int  # that were in memory
    bytes: int  # of these
    disk_keys: int  # that were on disk
    roots: list[Root]
    tried: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Ends when each disk has recorded the deletion, or has failed to do so once."""


@dataclass(slots=True)
class DeletionCounters:
    """Counts since the start."""

    requests: int = 0
    keys: int = 0
    disk_keys: int = 0


class Deletions:
    """Performs all deletions of one daemon. `spawn` runs a task that the daemon owns."""

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
        self._counters = DeletionCounters()
        self._open: dict[int, Deletion] = {}  # by number, unless they are known as recorded
        self._running: set[asyncio.Future[Any]] = set()

    @changing
    def begin(self, namespace: Namespace, groups: Sequence[tuple[int, U64Array]]) -> Deletion:
        """Deletes these keys of a namespace, by group, in one moment. Some may be in no tier, and groups may not be
        registered in this run. The deletion goes on to its end, even if its client goes away.

        Raises LimitError: nothing was changed.
        """
        tombstones = self._bury(namespace, groups)
        known = namespace.keyspaces
        in_memory = [(known[group], keys) for group, keys in groups if group in known]
        keys, held_bytes = delete_keys(self._cache, in_memory)  # first: see `DiskContents.emit_removed`
        disk_keys = self._disk.delete(namespace.fingerprint, namespace.epoch, groups) if self._disk else 0
        if tombstones:
            self._cache.save_state()
        self._counters.requests += 1
        self._counters.keys += keys
        self._counters.disk_keys += disk_keys
        deletion = Deletion(tombstones, keys, held_bytes, disk_keys, list(self._disk.roots) if self._disk else [])
        self._begin_recording(deletion)
        return deletion

    def _bury(self, namespace: Namespace, groups: Sequence[tuple[int, U64Array]]) -> list[Tombstone]:
        """Adds a tombstone for the keys of each group, if there is a tier below memory. Raises LimitError."""
        if self._disk is None and self._remote is None:
            return []  # only memory had them, and a successor finds no slot records of them
        tombstones, last = self._cache.tombstones, self._disk.numbers.last_sequence if self._disk else 0
        number = tombstones.next_number(last)
        made = [
            Tombstone(
                namespace.fingerprint, namespace.uid, namespace.epoch, group, number,
                namespace.key_bytes, pack(keys, namespace.key_bytes), self._remote is not None,
            )
            for group, keys in groups
            if len(keys)
        ]  # fmt: skip
        tombstones.make_room(namespace.uid, made, self._needless)
        tombstones.supersede(made)
        if self._disk:
            self._disk.numbers.seen(0, number)
        return made

    def _needless(self) -> list[Tombstone]:
        """Returns the tombstones of which no older copy can be left."""
        oldest = self._disk.oldest_sequence if self._disk else 0
        return [
            tombstone
            for tombstone in self._cache.tombstones.current(self._cache.epochs.of)
            if tombstone.number < oldest and not (self._remote and tombstone.in_store)
        ]

    def _begin_recording(self, deletion: Deletion) -> None:
        if not deletion.tombstones:
            deletion.tried.set_result(None)
            return
        if self._remote:
            self._remote.removals.begin()
        if self._disk:
            deletion.tried = self._spawn(self._disk.clears.save_epochs(self._disk.roots))
            self._running.add(deletion.tried)
            deletion.tried.add_done_callback(self._running.discard)
            deletion.tried.add_done_callback(lambda _: self._forget_recorded(deletion))
        else:
            deletion.tried.set_result(None)
        self._open[deletion.tombstones[0].number] = deletion
        if len(self._open) > COUNTED_MAX:
            del self._open[next(iter(self._open))]

    def unrecorded(self, deletion: Deletion) -> list[str]:
        """Returns the places that have not recorded the deletion yet: paths of disk roots; REMOTE if the store may
        still have objects.
        """
        ids = [tombstone.id for tombstone in deletion.tombstones]
        if self._disk:
            deletion.roots = self._disk.clears.without(deletion.roots, ids)
        waits = self._remote is not None and any(t.in_store for t in self._cache.tombstones.known(ids))
        return [root.name for root in deletion.roots] + [REMOTE] * waits

    async def wait_recorded(self, deletion: Deletion, wait_s: float) -> None:
        """Waits until each place has recorded the deletion, at most `wait_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.shield(deletion.tried)
                if self._remote:
                    await self._remote.removals.changes.wait_for(lambda: REMOTE not in self.unrecorded(deletion))
                if self._disk:
                    await self._disk.clears.changes.wait_for(lambda: not self.unrecorded(deletion))

    async def close(self, deadline_s: float) -> None:
        """Waits for deletions that are being recorded for the first time."""
        if self._running:
            await asyncio.wait(self._running, timeout=deadline_s)

    @changing
    def _forget_recorded(self, deletion: Deletion) -> None:
        number = deletion.tombstones[0].number
        if self._open.get(number) is deletion and not self.unrecorded(deletion):
            del self._open[number]

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        places: set[str] = set()
        for deletion in list(self._open.values()):
            places.update(self.unrecorded(deletion))
            self._forget_recorded(deletion)
        tombstones = self._cache.tombstones
        return {
            "requests": self._counters.requests,
            "keys": self._counters.keys,
            "disk_keys": self._counters.disk_keys,
            "unrecorded": len(self._open),
            "places": sorted(places),
            "tombstone_keys": tombstones.num_keys,
            "tombstone_bytes": tombstones.used_bytes,
            "keys_in_store": sum(tombstone.num_keys for tombstone in tombstones.in_store) if self._remote else 0,
        }
