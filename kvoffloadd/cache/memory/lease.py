"""Leases of an instance: keys held for reading, slots reserved for writing.

A lease ends by release, or with its instance.
"""

from __future__ import annotations

import itertools
import secrets
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.errors import LeaseError
from kvoffloadd.model import BoolArray, I64Array, U32Array

LEASE_KEYS = 64
"""The charge of a lease in addition to its keys or parts, until it ends. Its objects take about 300 bytes, a key under
it 4 and a part 8: if only keys counted, a user could hold a hundred times as much memory in leases of one key, and any
amount in leases that have been filled.
"""
_NO_ROWS, _NO_PARTS = np.zeros(0, np.uint32), np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class ReadLease:
    """Names rows that may not be evicted."""

    id: int
    rows: U32Array  # a row occurs once for each time it was named
    growing: bool = False  # keys that come from disk are about to join


@dataclass(slots=True, eq=False)
class WriteLease:
    """Names reserved parts that no job fills yet. A store takes its parts out of the lease."""

    id: int
    parts: I64Array  # record numbers, sorted

    def has(self, parts: I64Array) -> BoolArray:
        """Returns which of these parts the lease has. The time hardly grows with the lease: a request may call this for
        each of its groups.
        """
        found: BoolArray = np.zeros(parts.shape, bool)
        if len(self.parts):
            positions = np.minimum(np.searchsorted(self.parts, parts), len(self.parts) - 1)
            found = self.parts[positions] == parts
        return found


@dataclass(slots=True)
class Holdings:
    """Counts what all leases of an instance hold."""

    read: int = 0  # read leases
    keys: int = 0  # keys under them, counted once for each lease
    write: int = 0  # write leases
    parts: int = 0  # parts under them that no job fills yet


class ReleasedLease(NamedTuple):
    """Lists what leases have released: the caller unholds the rows, aborts the parts and refunds the charge."""

    rows: U32Array
    parts: I64Array
    charged: int


class Leases:
    """Keeps the leases of one instance, by id. Ids begin at a random number: they don't show how many leases others
    have, and an id of another instance, named by mistake, is most likely unknown here.

    `held` has the sums over all leases. The caller holds the rows in the cache, and charges the user.
    """

    def __init__(self) -> None:
        self.held = Holdings()
        self._ids = itertools.count(1 + secrets.randbits(40))
        self._leases: OrderedDict[int, ReadLease | WriteLease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    @changing
    def add_read(self, rows: U32Array) -> ReadLease:
        lease = ReadLease(next(self._ids), rows)
        self._leases[lease.id] = lease
        self.held.read += 1
        self.held.keys += len(rows)
        return lease

    @changing
    def add_write(self, parts: I64Array) -> WriteLease:
        lease = WriteLease(next(self._ids), np.sort(parts))
        self._leases[lease.id] = lease
        self.held.write += 1
        self.held.parts += len(parts)
        return lease

    @changing
    def grow(self, lease: ReadLease, rows: U32Array) -> None:
        """Adds rows to a lease that has not ended."""
        lease.rows = np.concatenate([lease.rows, rows])
        self.held.keys += len(rows)

    @changing
    def fill(self, lease: WriteLease, parts: I64Array) -> None:
        """Removes parts that a job takes over from a lease that has not ended. The lease stays until its release, even
        if it is empty: another rank may still name it, for parts that were stored before.
        """
        lease.parts = np.setdiff1d(lease.parts, parts, assume_unique=True)
        self.held.parts -= len(parts)

    def read(self, lease_id: int) -> ReadLease:
        """Raises LeaseError if this instance holds no such read lease."""
        lease = self._leases.get(lease_id)
        if not isinstance(lease, ReadLease):
            raise LeaseError(f"this instance holds no read lease {lease_id}")
        return lease

    def holds(self, lease: ReadLease) -> bool:
        """Returns whether this lease has not ended."""
        return self._leases.get(lease.id) is lease

    def write(self, lease_id: int) -> WriteLease:
        """Raises LeaseError if this instance holds no such write lease."""
        lease = self._leases.get(lease_id)
        if not isinstance(lease, WriteLease):
            raise LeaseError(f"this instance holds no write lease {lease_id}")
        return lease

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def size(self, lease_id: int) -> int:
        """Returns the number of rows or parts of a lease; 0 if it has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return 0
        return len(lease.rows) if isinstance(lease, ReadLease) else len(lease.parts)

    @changing
    def end(self, lease_id: int, most: int = sys.maxsize) -> ReleasedLease:
        """Ends a lease. A lease with more than `most` rows or parts does not end, but loses its last ones. Raises
        LeaseError if this instance holds no such lease.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseError(f"this instance holds no lease {lease_id}")
        if isinstance(lease, ReadLease) and len(lease.rows) <= most:  # like `_cut`, with fewer operations
            del self._leases[lease_id]
            self.held.keys -= len(lease.rows)
            self.held.read -= 1
            return ReleasedLease(lease.rows, _NO_PARTS, len(lease.rows) + LEASE_KEYS)
        return self._cut(lease, most)

    @changing
    def end_some(self, most: int) -> ReleasedLease:
        """Ends the oldest leases that together have at most `most` rows and parts, counting one more for each lease. A
        lease with more than the rest of `most` does not end, but loses its last ones.
        """
        cuts: list[ReleasedLease] = []
        while most > 0 and self._leases:
            cut = self._cut(next(iter(self._leases.values())), most)
            most -= 1 + len(cut.rows) + len(cut.parts)
            cuts.append(cut)
        cuts.reverse()  # the first rows are evicted last: the youngest lease's, and in each the beginning of its prompt
        rows, parts, charged = zip(*cuts, strict=True) if cuts else ((_NO_ROWS,), (_NO_PARTS,), ())
        return ReleasedLease(np.concatenate(rows), np.concatenate(parts), sum(charged))

    def _cut(self, lease: ReadLease | WriteLease, most: int) -> ReleasedLease:
        """Removes up to `most` rows or parts from the lease, the last ones. The lease ends if none is left."""
        rows, parts = _NO_ROWS, _NO_PARTS
        if isinstance(lease, ReadLease):
            rows, lease.rows = lease.rows[-most:], lease.rows[:-most]
            is_over = not len(lease.rows)
            self.held.keys -= len(rows)
            self.held.read -= is_over
        else:
            parts, lease.parts = lease.parts[-most:], lease.parts[:-most]
            is_over = not len(lease.parts)
            self.held.parts -= len(parts)
            self.held.write -= is_over
        if is_over:
            del self._leases[lease.id]
        return ReleasedLease(rows, parts, len(rows) + len(parts) + LEASE_KEYS * is_over)
