"""What an instance holds: keys to read, slots to write. Ends by release, commit, abort, or the instance's end."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.errors import LeaseError

if TYPE_CHECKING:
    from kvoffloadd.model import I64Array, U32Array


@dataclass(slots=True, eq=False)
class ReadLease:
    """Rows that may not be evicted. A row counts once for each time it is named. While `growing`,
    keys that come from disk are about to join it.
    """

    id: int
    rows: U32Array
    growing: bool = False


@dataclass(slots=True, eq=False)
class WriteLease:
    """Reserved parts that no job fills yet: sorted record numbers. Jobs take theirs out of it."""

    id: int
    parts: I64Array


class Leases:
    """The leases of one instance, by id. Ids begin anywhere: they tell nothing of how many others have, and an id of
    another instance, named by mistake, is most likely none of this one.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1 + secrets.randbits(40))
        self._held: dict[int, ReadLease | WriteLease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add_read(self, rows: U32Array) -> ReadLease:
        """Hold rows; the caller has counted them in the cache."""
        lease = ReadLease(next(self._ids), rows)
        self._held[lease.id] = lease
        return lease

    def add_write(self, parts: I64Array) -> WriteLease:
        """Hold reserved parts."""
        lease = WriteLease(next(self._ids), np.sort(parts))
        self._held[lease.id] = lease
        return lease

    def read(self, lease_id: int) -> ReadLease:
        """Raises LeaseError if this instance holds no such read lease."""
        lease = self._held.get(lease_id)
        if not isinstance(lease, ReadLease):
            raise LeaseError(f"this instance holds no read lease {lease_id}")
        return lease

    def holds(self, lease: ReadLease) -> bool:
        """Whether this lease has not ended."""
        return self._held.get(lease.id) is lease

    def write(self, lease_id: int) -> WriteLease:
        """Raises LeaseError if this instance holds no such write lease."""
        lease = self._held.get(lease_id)
        if not isinstance(lease, WriteLease):
            raise LeaseError(f"this instance holds no write lease {lease_id}")
        return lease

    def pop(self, lease_id: int) -> ReadLease | WriteLease:
        """End a lease. Raises LeaseError if this instance holds no such lease."""
        lease = self._held.pop(lease_id, None)
        if lease is None:
            raise LeaseError(f"this instance holds no lease {lease_id}")
        return lease

    def all(self) -> list[ReadLease | WriteLease]:
        """Every lease held."""
        return list(self._held.values())

    def pop_all(self) -> list[ReadLease | WriteLease]:
        """End all leases; the instance is gone."""
        leases = list(self._held.values())
        self._held.clear()
        return leases
