"""Clears on disk: cleared keys are not found any more, and the new epochs go into the manifests. Event loop only.

The manifests have the tombstones of deleted keys, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.tombstones import TombstoneId
from kvoffloadd.cache.stats.missreasons import Reason
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.storage.disk.files import describe_error
from kvoffloadd.storage.disk.manifest import Manifest
from kvoffloadd.storage.disk.root import Root

log = logging.getLogger(__name__)


class DiskClears:
    """Performs all clears that the disks take part in. A root that takes longer than `stuck_s` to write one does not
    answer.
    """

    def __init__(self, contents: DiskContents, stuck_s: float) -> None:
        self.changes = Changes()
        """Notifies of each root that has recorded clears."""
        self._contents = contents
        self._stuck_s = stuck_s
        self._recorded: dict[Root, Manifest] = {}  # the manifest that each root has recorded, also while it is off
        self._deleted: dict[Root, frozenset[TombstoneId]] = {}  # the tombstones in it
        self._emptying: set[int] = set()

    @changing
    def begin(self, names: Collection[bytes] | None) -> list[DiskKeyspace]:
        """Closes disk keyspaces of older epochs after the epochs of these namespaces (fingerprints; None: of all) have
        advanced, so that their keys are not found any more. Returns them for `finish`.
        """
        old = []
        epochs = self._contents.cache.epochs
        for disk_keyspace in self._contents.catalog.disk_keyspaces.of_namespaces(names):
            if disk_keyspace.id in self._emptying:
                continue  # an earlier clear handles it
            if disk_keyspace.name.epoch != epochs.of(disk_keyspace.name.fingerprint):
                self._contents.catalog.disk_keyspaces.close(disk_keyspace)
                old.append(disk_keyspace)
        return old

    async def finish(self, disk_keyspaces: list[DiskKeyspace]) -> None:
        """Records a clear, then frees what the closed disk keyspaces take."""
        await self.save_epochs(self._contents.roots)
        await self.empty(disk_keyspaces)

    def unrecorded(self, roots: Sequence[Root], epochs: Collection[tuple[Collection[bytes] | None, int]]) -> list[Root]:
        """Returns which of these roots have not recorded a clear: the epochs that it began, each of these namespaces
        (None: of all).
        """
        return [
            root
            for root in roots
            if (manifest := self._recorded.get(root)) is None
            or not all(manifest.has_clear(names, epoch) for names, epoch in epochs)
        ]

    def without(self, roots: Sequence[Root], tombstones: Iterable[TombstoneId]) -> list[Root]:
        """Returns which of these roots have not recorded a deletion: its tombstones, as far as they are needed."""
        needed = {tombstone.id for tombstone in self._contents.cache.tombstones.known(tombstones)}
        return [root for root in roots if not needed <= self._deleted.get(root, frozenset())]

    async def empty(self, disk_keyspaces: list[DiskKeyspace]) -> None:
        """Frees what these closed disk keyspaces take."""
        for disk_keyspace in disk_keyspaces:
            if (
                disk_keyspace.id in self._emptying
                or self._contents.catalog.disk_keyspaces.get(disk_keyspace.id) is not disk_keyspace
            ):
                continue  # another clear has begun with it, or finished it
            with changing:
                self._emptying.add(disk_keyspace.id)
                try:
                    keyspace = self._contents.remove_keyspace(disk_keyspace)
                    for keys in self._contents.catalog.empty(disk_keyspace):
                        self._contents.record_miss_reason(disk_keyspace, keys, Reason.CLEARED)
                        if keyspace is not None and keyspace.namespace.listeners:
                            self._contents.emit_removed(keyspace, keys)
                        await asyncio.sleep(0)
                finally:  # if this task is cancelled, the next clear goes on with it
                    self._emptying.discard(disk_keyspace.id)

    async def save_epochs(self, roots: Sequence[Root]) -> None:
        """Writes the epochs and the tombstones to these roots' manifests. If that fails, `RootLifecycle.check` repeats
        it.
        """
        await asyncio.gather(*map(self._save_at, roots))
        self._contents.numbers.changes.notify_all()  # keys that were stored since may be written now

    async def _save_at(self, root: Root) -> None:
        epochs, confirmed = self._contents.cache.epochs, self._contents.cache.confirmed
        if not root.accepted:
            return
        try:
            async with asyncio.timeout(self._stuck_s):
                await root.directory.write_epochs(
                    epochs.base, epochs.last, dict(epochs.by_namespace), confirmed.at_s,
                    self._contents.cache.tombstones.current(epochs.of),
                )  # fmt: skip
        except (OSError, KvOffloadError, MemoryError) as error:
            why = "it does not answer" if isinstance(error, TimeoutError) else describe_error(error)
            log.warning("disk %s: a clear or a deletion could not be recorded: %s", root.name, why)
        else:
            if root.directory.manifest is not None:  # else it has gone off at this moment
                self._recorded[root] = root.directory.manifest
                self._deleted[root] = frozenset(tombstone.id for tombstone in root.directory.manifest.tombstones)
                self.changes.notify_all()
