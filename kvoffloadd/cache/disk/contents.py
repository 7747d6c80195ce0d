"""Roots, segments and the catalog, and the disk keyspace of each keyspace in memory.

Event loop only. The modules that move keys between disk and memory build on it: see `disktier`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from kvoffloadd.cache.disk.catalog import Catalog
from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keys import join_keys, pack
from kvoffloadd.cache.memory.namespace import Keyspace, shape_of
from kvoffloadd.cache.stats.missreasons import Reason
from kvoffloadd.config import DiskConfig
from kvoffloadd.model import PAGE_BYTES, BoolArray, I64Array, Tier, U32Array, U64Array
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.format import KeyspaceId, Records
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import Segment, SequenceNumbers

log = logging.getLogger(__name__)

RECORDS_MAX = 1 << 28


class DiskContents:
    """Holds the roots, and the catalog of their records."""

    def __init__(
        self, cache: Cache, config: DiskConfig, files: Files, loop: asyncio.AbstractEventLoop, seed: int
    ) -> None:
        self.cache = cache
        self.config = config
        self.numbers = SequenceNumbers()
        self.roots = [Root(each.path, each.capacity_bytes, config, files, loop, self.numbers) for each in config.roots]
        self.loop = loop
        # The smallest record is a header and one page.
        records = sum(root.capacity_bytes for root in self.roots) // (2 * PAGE_BYTES) + 1
        self.catalog = Catalog(min(records, RECORDS_MAX), seed)
        self.catalog.on_complete = self._came
        self._opened: WeakKeyDictionary[Keyspace, DiskKeyspace] = WeakKeyDictionary()
        self._keyspaces: dict[int, Keyspace] = {}  # by the number of the disk keyspace that was opened last for it
        self._warned_uids: set[int] = set()  # users with too many disk keyspaces

    # --- names ---

    def of(self, keyspace: Keyspace) -> DiskKeyspace | None:
        """Returns the disk keyspace of a keyspace; None before the sizes of all its parts are known, or if its user has
        too many.
        """
        return self._opened.get(keyspace)

    def open_keyspace(self, keyspace: Keyspace) -> None:
        """Finds the disk keyspace of a keyspace, once the sizes of all its parts are known."""
        if keyspace in self._opened or not all(keyspace.part_bytes):
            return
        schema, namespace = keyspace.schema, keyspace.namespace
        name = KeyspaceId(
            namespace.fingerprint, shape_of(keyspace), namespace.epoch, schema.group, schema.parts, namespace.key_bytes
        )
        disk_keyspace = self.catalog.disk_keyspaces.open(name, namespace.uid)
        if disk_keyspace is not None:
            self.catalog.learn_sizes(disk_keyspace, np.arange(schema.parts), np.asarray(keyspace.part_bytes))
            self._opened[keyspace] = disk_keyspace
            self._keyspaces[disk_keyspace.id] = keyspace
            if disk_keyspace.keys:
                self.cache.entries.events.lose(namespace)
        elif namespace.uid not in self._warned_uids:
            self._warned_uids.add(namespace.uid)
            log.warning(
                "disk: uid %d has so many groups on disk that keys of new groups are not written", namespace.uid
            )

    def reopen_keyspace(self, keyspace: Keyspace) -> None:
        """Opens the disk keyspace of a keyspace again when its namespace goes on in another epoch."""
        self._opened.pop(keyspace, None)
        self.open_keyspace(keyspace)

    def close_keyspace(self, keyspace: Keyspace) -> None:
        """Closes a keyspace after its namespace is forgotten; its disk keyspace keeps its keys."""
        disk_keyspace = self.of(keyspace)
        if disk_keyspace is not None and self._keyspaces.get(disk_keyspace.id) is keyspace:
            del self._keyspaces[disk_keyspace.id]
            self.discard_unused(disk_keyspace)

    def discard_unused(self, disk_keyspace: DiskKeyspace) -> None:
        """Frees the number of a disk keyspace that has no keys and no open keyspace in memory."""
        if disk_keyspace.open and not disk_keyspace.rows and disk_keyspace.id not in self._keyspaces:
            self.catalog.disk_keyspaces.discard(disk_keyspace)

    def keyspace_of(self, disk_keyspace: DiskKeyspace) -> Keyspace | None:
        """Returns the keyspace in memory with the keys that this disk keyspace holds, if it is open."""
        keyspace = self._keyspaces.get(disk_keyspace.id)
        if keyspace is None or keyspace.retired or self.of(keyspace) is not disk_keyspace:
            return None
        return keyspace

    def payload_bytes(self, disk_keyspace: DiskKeyspace, records: I64Array) -> I64Array:
        """Returns the size of each record's payload."""
        parts = records - self.catalog.first[self.catalog.row[records]]
        sizes: I64Array = disk_keyspace.part_bytes[parts]
        return sizes

    def namespaces(self) -> set[bytes]:
        """Returns the fingerprints of the namespaces that may have keys on disk."""
        return {
            disk_keyspace.name.fingerprint
            for disk_keyspace in self.catalog.disk_keyspaces.values()
            if disk_keyspace.open
        }

    def segment(self, ordinal: int) -> tuple[Root, Segment] | None:
        """Returns the segment and its root; None if the root is off."""
        for root in self.roots:
            segment = root.pool.segments.get(ordinal)
            if segment is not None and root.holds(segment):
                return root, segment
        return None

    # --- lookups ---

    def holds_keys(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Returns which keys are complete on disk. Includes keys of a disk keyspace that is being emptied, since their
        removal events are emitted there.
        """
        disk_keyspace = self.of(keyspace)
        if disk_keyspace is None or self._keyspaces.get(disk_keyspace.id) is not keyspace:
            return np.zeros(len(keys), bool)
        return self.catalog.complete(disk_keyspace, keys)

    def snapshot(self, keyspace: Keyspace, cursor: int, count: int) -> tuple[bytes, int]:
        """Lists packed keys on disk from the catalog row `cursor` on. Returns them and the next row, 0 at the end.
        Includes keys that memory has, too: otherwise a key that was read since memory was listed would be missing.
        """
        disk_keyspace = self.of(keyspace)
        if disk_keyspace is None or not disk_keyspace.open:
            return b"", 0
        keys = self.catalog.index.keys[self.catalog.listing(disk_keyspace, cursor, count)]
        after = cursor + count
        return pack(keys, keyspace.namespace.key_bytes), after if after < self.catalog.index.rows_end else 0

    # --- records that come ---

    def put(self, disk_keyspace: DiskKeyspace, entries: Records, segment: int) -> None:
        """Enters records of a segment into the catalog, see `Catalog.put`, except those written before their keys were
        deleted.
        """
        name = disk_keyspace.name
        space = name.fingerprint, name.epoch, name.group
        void = self.cache.tombstones.void(space, entries["key"], entries["sequence"])
        if void.any():
            self.catalog.count_cleared(segment, int(np.count_nonzero(void)))
            entries = entries[~void]
        self.catalog.put(disk_keyspace, entries, segment)

    # --- removal ---

    @changing
    def delete(self, fingerprint: bytes, epoch: int, groups: Sequence[tuple[int, U64Array]]) -> int:
        """Drops all records of these keys, by group, from the catalog. Returns how many keys were complete."""
        catalog = self.catalog
        by_group: dict[int, list[DiskKeyspace]] = {}
        for each in catalog.disk_keyspaces.of_namespaces([fingerprint]):
            if each.open and each.name.epoch == epoch:
                by_group.setdefault(each.name.group, []).append(each)
        found = [(each.id, keys) for group, keys in groups for each in by_group.get(group, ())]
        if not found:
            return 0
        numbers = np.repeat(np.array([number for number, _ in found], np.uint16), [len(keys) for _, keys in found])
        rows = catalog.index.find(numbers, join_keys(keys for _, keys in found))
        records = catalog.count_deleted(distinct(rows[rows >= 0].astype(np.uint32)))
        return len(self.lose(records, Reason.CLEARED))

    @changing
    def lose(self, records: I64Array, why: int = Reason.EVICTED) -> U32Array:
        """Drops records that are gone or bad. Returns the catalog rows of the keys that are not on disk any more."""
        catalog = self.catalog
        listened = [s for s in self._keyspaces.values() if s.namespace.listeners]
        keys = {}
        if listened:
            rows = distinct(catalog.row[records[catalog.page[records] != 0]])
            rows = rows[catalog.missing[rows] == 0]
            of_row = catalog.index.keyspace[rows]
            opened = [disk_keyspace for s in listened if (disk_keyspace := self.of(s)) is not None]
            keys = {k.id: catalog.index.keys[rows[of_row == k.id]] for k in opened}
        lost = catalog.forget(records)
        of_lost = catalog.index.keyspace[lost]
        for number in distinct(of_lost).tolist():
            self.record_miss_reason(catalog.disk_keyspaces[number], catalog.index.keys[lost[of_lost == number]], why)
        for number, removed in keys.items():
            self.emit_removed(self._keyspaces[number], removed)
        for number in distinct(of_lost).tolist():
            self.discard_unused(catalog.disk_keyspaces[number])
        return lost

    def remove_keyspace(self, disk_keyspace: DiskKeyspace) -> Keyspace | None:
        """Prepares a disk keyspace for being emptied. Returns the keyspace in memory that has it open, if any."""
        return self._keyspaces.pop(disk_keyspace.id, None)

    def record_miss_reason(self, disk_keyspace: DiskKeyspace, keys: U64Array, why: int) -> None:
        """Records why these keys went. Keys that memory still holds are no misses, and are recorded when they go."""
        ghosts, name = self.cache.entries.ghosts, disk_keyspace.name
        ghosts.went(name.fingerprint, ghosts.hash(name.group, keys), why)

    # --- events ---

    def _came(self, disk_keyspace: DiskKeyspace, rows: U32Array) -> None:
        keyspace = self._keyspaces.get(disk_keyspace.id)
        if keyspace is not None and keyspace.namespace.listeners:
            self.cache.entries.events.changed(keyspace, self.catalog.index.keys[rows], Tier.DISK, added=True)

    def emit_removed(self, keyspace: Keyspace, keys: U64Array) -> None:
        """Reports that these keys are not on disk any more."""
        self.cache.entries.events.changed(keyspace, keys, Tier.DISK, added=False)
