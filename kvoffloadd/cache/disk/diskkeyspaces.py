"""The disk keyspaces of a catalog: by number, by name, by namespace, and their counts by user. Event loop only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from kvoffloadd.model import I64Array
from kvoffloadd.storage.disk.format import KeyspaceId

DISK_KEYSPACES_MAX = 1 << 16


@dataclass(slots=True, eq=False)
class DiskKeyspace:
    """Describes the keys of one group in one epoch of a namespace, on disk."""

    id: int
    name: KeyspaceId
    rows: int = 0  # of keys that are complete or not
    keys: int = 0  # complete ones
    open: bool = True  # a closed one takes no more records
    part_bytes: I64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """The payload size of each part, which its name determines; 0 until a record of it or its group's sizes are
    known.
    """
    uid: int | None = None  # its user; None until the group is registered


class DiskKeyspaces(dict[int, DiskKeyspace]):
    """Maps numbers to open and closed disk keyspaces. Only its methods add and remove them."""

    def __init__(self) -> None:
        super().__init__()
        self._by_name: dict[KeyspaceId, DiskKeyspace] = {}  # open ones
        self._by_fingerprint: dict[bytes, dict[int, DiskKeyspace]] = {}
        self._by_uid: Counter[int] = Counter()
        self._next_number = 0

    def open(self, name: KeyspaceId, uid: int | None = None) -> DiskKeyspace | None:
        """Returns the open disk keyspace of this name, and makes it if it is new; None if there are too many. `uid` is
        its user, if known.

        A user has at most as many as are then left for all others. Disk keyspaces stay as long as they have keys, even
        if their namespaces are forgotten, so this limit keeps room for the next user.
        """
        disk_keyspace = self._by_name.get(name)
        left = DISK_KEYSPACES_MAX - 1 - len(self)
        if disk_keyspace is None and left > (0 if uid is None else self._by_uid[uid]):
            while self._next_number in self:
                self._next_number = (self._next_number + 1) % DISK_KEYSPACES_MAX
            disk_keyspace = self._by_name[name] = self[self._next_number] = DiskKeyspace(
                self._next_number, name, part_bytes=np.zeros(name.parts, np.int64)
            )
            self._by_fingerprint.setdefault(name.fingerprint, {})[disk_keyspace.id] = disk_keyspace
        if disk_keyspace is not None and disk_keyspace.uid is None and uid is not None:
            disk_keyspace.uid = uid
            self._by_uid[uid] += 1
        return disk_keyspace

    def of_namespaces(self, names: Collection[bytes] | None) -> list[DiskKeyspace]:
        """Returns the disk keyspaces of these namespaces (fingerprints; None: of all), including closed ones."""
        if names is None:
            return list(self.values())
        return [disk_keyspace for name in names for disk_keyspace in self._by_fingerprint.get(name, {}).values()]

    def close(self, disk_keyspace: DiskKeyspace) -> None:
        """Closes a disk keyspace: its keys are not found from now on. `Catalog.empty` frees what it takes."""
        disk_keyspace.open = False
        self._by_name.pop(disk_keyspace.name, None)

    def discard(self, disk_keyspace: DiskKeyspace) -> None:
        """Forgets a disk keyspace without keys, and releases its number for reuse. A write under way finds it
        closed.
        """
        self.close(disk_keyspace)
        del self[disk_keyspace.id]
        siblings = self._by_fingerprint[disk_keyspace.name.fingerprint]
        del siblings[disk_keyspace.id]
        if not siblings:
            del self._by_fingerprint[disk_keyspace.name.fingerprint]
        if disk_keyspace.uid is not None:
            self._by_uid[disk_keyspace.uid] -= 1
            if not self._by_uid[disk_keyspace.uid]:
                del self._by_uid[disk_keyspace.uid]

    def check(self) -> list[str]:
        """Returns the audit's list of errors."""
        by_uid = Counter(disk_keyspace.uid for disk_keyspace in self.values() if disk_keyspace.uid is not None)
        findings = [] if by_uid == self._by_uid else [f"catalog: users have {by_uid} shelves, counted {self._by_uid}"]
        listed = {
            number: disk_keyspace
            for by_number in self._by_fingerprint.values()
            for number, disk_keyspace in by_number.items()
        }
        if listed != self:
            findings.append(f"catalog: {len(listed)} disk keyspaces are listed by namespace, of {len(self)}")
        return findings
