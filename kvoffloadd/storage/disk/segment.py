"""A segment as the running daemon knows it, what is written into it, and what all roots count together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.changes import Changes
from kvoffloadd.model import U64Array
from kvoffloadd.storage.disk.format import KeyspaceId, SegmentHeader, encode_spaces

Records = npt.NDArray[Any]
"""Of format.ENTRY or records.READ."""

SEGMENTS_MIN = 8
"""A root has room for at least so many segments, so that giving one up costs an eighth of it at most."""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment file of this run. `ordinal` is never used twice while the daemon runs. Open while `fd` is not -1.

    `keyspaces`: of each its index in the footer, and how records name it (one row of format.SPACE, which never changes:
    threads read it).
    """

    ordinal: int
    name: str
    header: SegmentHeader
    size_bytes: int
    fd: int = -1
    next_page: int = 1
    keyspaces: dict[KeyspaceId, tuple[int, Records]] = field(default_factory=dict)
    entries: list[Records] = field(default_factory=list)
    num_entries: int = 0
    writers: int = 0
    readers: int = 0
    broken: bool = False

    def known(self, keyspace: KeyspaceId) -> tuple[int, Records]:
        """The entry of a keyspace in `keyspaces`, made if it is new."""
        known = self.keyspaces.get(keyspace)
        if known is None:
            known = self.keyspaces[keyspace] = len(self.keyspaces), encode_spaces([keyspace])
        return known


@dataclass(frozen=True, slots=True, eq=False)
class WriteBatch:
    """Payloads of one keyspace to be written: `entries` (format.ENTRY; page and keyspace are filled in here), their
    checksums and their addresses, which stay valid until `done`.
    """

    keyspace: KeyspaceId
    entries: Records
    digests: U64Array
    addresses: U64Array


@dataclass(slots=True)
class SequenceNumbers:
    """What all roots of a tier share: the count of segments of this run, of segments ever, of records ever; and
    `changes`: a root has more room, less to do, or another state.
    """

    changes: Changes = field(default_factory=Changes)
    _ordinal: int = 0
    _number: int = 0
    _sequence: int = 0

    def ordinal(self) -> int:
        """A name for a segment in this run."""
        self._ordinal += 1
        return self._ordinal

    def number(self) -> int:
        """A segment's place in history."""
        self._number += 1
        return self._number

    def sequences(self, count: int) -> U64Array:
        """`count` records' places in history."""
        first = self._sequence + 1
        self._sequence += count
        return np.arange(first, first + count, dtype=np.uint64)

    def seen(self, number: int, sequence: int) -> None:
        """These are in use on disk."""
        self._number = max(self._number, number)
        self._sequence = max(self._sequence, sequence)
