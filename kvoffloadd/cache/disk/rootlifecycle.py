"""Takes roots in at start and when they come back: recovers their keys, merges the clears in their manifests.

A root comes in five steps:

1. its directory is taken and its manifest read (`Root.open`);
2. the clears in its manifest are merged, and disk keyspaces of older epochs are closed; so are its deletions, and the
   deleted keys are dropped;
3. all its segments are scanned (`Root.recover`);
4. the clears that its records prove are merged; records of current epochs come into the catalog, and the root is OK;
5. the merged epochs are written to its manifest, and to those of the others.

The odd steps wait for the disk, which may hang for ever: they hold nothing that another root needs. The even steps
change the catalog and the epochs. They wait for no disk, and one root makes them at a time: while one merges, disk
keyspaces of old epochs are closed and the epochs have not risen yet. A record that came in then would be found and
outlive the clear.

The order holds for any event between the steps:

- *A clear.* The epochs rise at once. Some records of a keyspace at a time are compared with them and put into the
  catalog without a pause. So the clear closes the disk keyspaces of records that came before it, and later records do
  not count.
- *Another root's clears are merged.* As a clear; the lock keeps the merge whole.
- *A copy.* A root is accepted at the start of step 2, in the turn of the loop in which it is compared with the roots
  that were accepted before. Of two copies the second is released; the clears in its manifest are merged all the same.
- *The root goes again.* It is OFF before the end of step 4, so that nothing reads or writes there. I/O that fails ends
  the arrival with nothing in the catalog, and the arrival begins anew with step 1. I/O that hangs keeps only this root
  OFF.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import numpy as np

from kvoffloadd.cache.disk.catalog import STEP_RECORDS
from kvoffloadd.cache.disk.clears import DiskClears
from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.demotion import Demotion
from kvoffloadd.cache.disk.promotion import Promotion
from kvoffloadd.cache.disk.reclaim import Reclaim
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.confirmed import UNCONFIRMED_MAX_S
from kvoffloadd.cache.memory.deletion import delete_keys
from kvoffloadd.cache.memory.keys import keys_array
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.scheduling.steps import Steps, in_turns
from kvoffloadd.storage.disk.files import describe_error
from kvoffloadd.storage.disk.format import KeyspaceId
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.manifest import Manifest
from kvoffloadd.storage.disk.recovery import Recovered
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import Segment
from kvoffloadd.storage.tombstone import Tombstone

log = logging.getLogger(__name__)


class RootLifecycle:
    """Takes roots in, and watches them for as long as the daemon runs. Event loop only."""

    def __init__(
        self,
        disk: DiskContents,
        clears: DiskClears,
        demotion: Demotion,
        promotion: Promotion,
        reclaim: Reclaim,
    ) -> None:
        self.coming: set[Root] = set()  # roots between step 1 and the end of step 5
        self.on_claims: Callable[[bytes, str], Awaitable[None]] | None = None  # see `ClaimSaver.read`
        self.on_arrival: Callable[[], object] = lambda: None  # called when a root has come
        self._disk = disk
        self._clears = clears
        self._demotion = demotion
        self._promotion = promotion
        self._reclaim = reclaim
        self._cache = disk.cache
        self._changing = asyncio.Lock()  # the catalog and the epochs: steps 2 and 4

    async def start(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Takes in the roots, in their order: of two copies the first is used. A root that does not answer
        comes later.
        """
        opening = {root: self._disk.loop.create_task(root.open()) for root in self._disk.roots}
        for root, opened in opening.items():
            came = asyncio.Event()
            spawn(self._watch(root, opened, came))
            await root.probe.wait_for(came)

    async def _watch(self, root: Root, opened: Awaitable[Manifest | None], came: asyncio.Event) -> None:
        """Takes a root in, and notices when it goes off and when it comes back, until cancelled."""
        try:
            await self._log_errors(root, self._arrive(root, opened))
        finally:
            came.set()
        while True:
            await root.probe.pause()
            await self._log_errors(root, self.check(root))

    @staticmethod
    async def _log_errors(root: Root, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (OSError, KvOffloadError, MemoryError) as error:
            log.warning("disk %s: %s", root.name, str(error) or type(error).__name__)

    async def check(self, root: Root) -> None:
        """Checks that a root answers and is the same directory. If not, takes it off, and in again when it is back."""
        disk = self._disk
        if await root.probe.check():
            disk.numbers.changes.notify_all()
            await self._clears.save_epochs([root])
            return
        # Before any wait for the disk: the disk may hang.
        self._promotion.give_up(root)
        root.give_up()
        for ordinal in list(root.pool.segments):
            await self._reclaim.forget(ordinal)
            disk.catalog.close_segment(ordinal)
        await root.detach()
        await self._arrive(root, root.open())

    async def _arrive(self, root: Root, opened: Awaitable[Manifest | None]) -> None:
        """Goes through all five steps, or as many as succeed; `opened` is the first."""
        self.coming.add(root)
        try:
            manifest = await opened
            if manifest is None:
                return
            await self._accept(root, manifest)
            if root.accepted:
                if self.on_claims is not None and root.is_trusted:
                    await self.on_claims(await root.directory.recorded_claims(), f"disk {root.name}")
                await self._recover(root)
            await self._clears.save_epochs(
                [other for other in self._disk.roots if other is root or other.state != RootState.OFF]
            )
        finally:
            self.coming.discard(root)

    async def _accept(self, root: Root, manifest: Manifest) -> None:
        """Accepts or rejects an opened root, and merges the clears in its manifest in both cases."""
        if not self._cache.epochs.recalls(manifest.base_epoch, manifest.last_epoch, *manifest.epochs.values()):
            root.health.become(RootState.OFF, "its manifest has clears of the future: is this host's clock right?")
            await root.directory.reject()
            return
        same = [r for r in self._disk.roots if r is not root and r.accepted and r.directory.uuid == manifest.root_uuid]
        if same:
            root.health.become(RootState.OFF, f"it is a copy of {same[0].name}, which is in use")
        else:
            root.directory.accepted = True
            confirmed = self._cache.confirmed
            if confirmed.is_over(manifest.confirmed_s, time.time()):
                self._distrust(root)
            elif manifest.confirmed_s and confirmed.at_s:  # until a round has covered its keys, too
                confirmed.at_s = min(confirmed.at_s, manifest.confirmed_s)
        # At once: from now on, a manifest that is written here has them, too.
        new = self._cache.tombstones.add(manifest.tombstones)
        self._disk.numbers.seen(0, self._cache.tombstones.last)
        async with self._changing:
            await self._merge_epochs(manifest.base_epoch, manifest.last_epoch, manifest.epochs)
            if new:
                await in_turns(self._forget_deleted(new))
        if same:
            await root.directory.reject()  # last: it may wait for the disk

    @staticmethod
    def _distrust(root: Root) -> None:
        """Voids the keys of a root that was last confirmed too long ago: the shared store remembers clears for a
        limited time only, and may have forgotten some since then.
        """
        log.warning(
            "disk %s: what it has was not confirmed by the remote store for more than %d days, and is removed",
            root.name,
            UNCONFIRMED_MAX_S // 86400,
        )
        root.distrust()

    async def _recover(self, root: Root) -> None:
        """Reads what a root holds, and puts it into the catalog: steps 3 and 4."""
        try:
            found = await root.recover()
        except (OSError, KvOffloadError) as error:
            root.health.become(RootState.OFF, describe_error(error))
            await root.detach()
            return
        records = sum(len(recovered.entries) for _, recovered in found)
        async with self._changing:
            # A record of an epoch that no manifest has: its clear could not be saved, but is valid all the same.
            recalls = self._cache.epochs.recalls
            await self._merge_epochs(0, 0, {name: epoch for name, epoch in root.epochs.items() if recalls(epoch)})
            with changing:
                self._disk.catalog.index.expect(records)
            keys, cleared = await in_turns(self._add_all(found))
            root.health.become(RootState.OK)
        self.on_arrival()
        self._disk.numbers.changes.notify_all()
        void = f" ({cleared:,} records are of cleared namespaces)" if cleared else ""
        log.info("disk %s: %s keys in %d segments found%s", root.name, f"{keys:,}", len(found), void)

    def _add_all(self, found: Iterable[tuple[Segment, Recovered]]) -> Steps[tuple[int, int]]:
        """Returns the number of keys that are complete now, and of records whose namespace was cleared."""
        keys = cleared = 0
        for segment, recovered in found:
            more_keys, more_cleared = yield from self._add_to_catalog(segment, recovered)
            keys, cleared = keys + more_keys, cleared + more_cleared
        return keys, cleared

    def _add_to_catalog(self, segment: Segment, recovered: Recovered) -> Steps[tuple[int, int]]:
        """Adds some records of one keyspace in each step: there may be a thousand keyspaces in a segment. Returns the
        counts of `_add_all`.
        """
        keys = cleared = 0
        order = np.argsort(recovered.entries["space"], kind="stable")  # once for all
        starts = np.searchsorted(recovered.entries["space"][order], np.arange(len(recovered.keyspaces) + 1)).tolist()
        for number, name in enumerate(recovered.keyspaces):
            for begin in range(starts[number], starts[number + 1], STEP_RECORDS):
                entries = recovered.entries[order[begin : min(begin + STEP_RECORDS, starts[number + 1])]]
                if name.epoch == self._cache.epochs.of(name.fingerprint):
                    keys += self._add(segment, name, entries)
                else:
                    self._disk.catalog.count_cleared(segment.ordinal, len(entries))
                    cleared += len(entries)
                yield
        return keys, cleared

    @changing
    def _add(self, segment: Segment, name: KeyspaceId, entries: np.ndarray) -> int:
        """Adds records of one keyspace. Returns the number of keys that they complete."""
        disk_keyspace = self._disk.catalog.disk_keyspaces.open(name)
        if disk_keyspace is None:
            return 0
        before = disk_keyspace.keys
        self._disk.put(disk_keyspace, entries, segment.ordinal)
        return disk_keyspace.keys - before

    async def _merge_epochs(self, base: int, last: int, by_namespace: dict[bytes, int]) -> None:
        """Merges clears that a late root has recorded and this daemon does not know. Removes keys that may be older
        than such a clear: keys that came from an arena file or a disk, keys on disk of older epochs, and if another
        daemon has cleared since this run began, keys that were stored in this run.
        """
        cache, catalog = self._cache, self._disk.catalog
        later = cache.epochs.merged(base, last, by_namespace)
        if later == cache.epochs:
            return
        with changing:
            for disk_keyspace in catalog.disk_keyspaces.values():
                if disk_keyspace.name.epoch != later.of(disk_keyspace.name.fingerprint):
                    catalog.disk_keyspaces.close(disk_keyspace)  # no more keys are promoted from it
            cache.epochs.last = later.last  # a clear in the meantime must be later than all merged ones
            cache.epochs.rising = later  # no more keys come from the remote store
            try:
                # Before the new epoch is recorded, since a successor must not find these keys in it.
                for namespace in [n for n in cache.namespaces.values() if n.epoch != later.of(n.fingerprint)]:
                    for _ in cache.drop_older(namespace, later.of(namespace.fingerprint)):
                        await asyncio.sleep(0)
            finally:
                cache.epochs.rising = None
            cache.epochs.merge(base, last, by_namespace)
            for namespace in cache.namespaces.values():
                self._renew(namespace)
            cache.retention.on_change()  # claims of this run are of the new epochs now
            if cache.namespaces:  # at a start the arena file still has the saved state that is adopted next
                cache.save_state()
        await self._clears.empty(self._clears.begin(None))

    def _forget_deleted(self, tombstones: Iterable[Tombstone]) -> Steps[None]:
        """Drops keys that an earlier run has deleted, as this run learns only now. It is not known whether they were
        stored anew since: they are dropped in any case.
        """
        cache = self._cache
        for tombstone in tombstones:
            fingerprint, epoch, group = tombstone.space
            every = keys_array(tombstone.keys, tombstone.key_bytes)
            for begin in range(0, len(every), STEP_RECORDS):
                keys = every[begin : begin + STEP_RECORDS]
                namespace = cache.namespaces.get(fingerprint)
                if namespace is not None and namespace.epoch == epoch and group in namespace.keyspaces:
                    delete_keys(cache, [(namespace.keyspaces[group], keys)])
                self._disk.delete(fingerprint, epoch, [(group, keys)])
                yield
        if cache.namespaces:  # see `_merge_epochs`
            cache.save_state()

    @changing
    def _renew(self, namespace: Namespace) -> None:
        """Continues in the current epoch of the namespace."""
        epoch = self._cache.epochs.of(namespace.fingerprint)
        if namespace.epoch != epoch:
            namespace.epoch = epoch
            for keyspace in namespace.keyspaces.values():
                self._disk.reopen_keyspace(keyspace)
                self._demotion.offer_again(keyspace)  # its keys on disk are void
