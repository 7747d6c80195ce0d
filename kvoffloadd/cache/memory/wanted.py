"""What a request wants slots for (`Wanted`), and the slots that it gets (`Reservation`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.memory.index import Index
from kvoffloadd.cache.memory.keys import join_keys, spans
from kvoffloadd.cache.memory.keytable import numbers_of
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import I64Array, U8Array, U16Array, U32Array, U64Array


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """Payloads of some keys: three arrays with one item for each payload."""

    parts: I64Array  # its record number
    keys: I64Array  # the index of its key among the keys of the request
    columns: I64Array  # the index of its part among the parts that are wanted


@dataclass(frozen=True, slots=True, eq=False)
class Reservation(Payloads):
    """What was reserved, key by key, part by part."""

    states: U8Array  # a `KeyState` for each key of the request


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Parts of some keys of a keyspace, for which slots are wanted."""

    keyspace: Keyspace
    keys: U64Array  # distinct
    parts: U16Array
    positions: U32Array  # of each key in its prompt

    @classmethod
    def from_first(cls, keyspace: Keyspace, keys: U64Array, parts: U16Array, first: int) -> Wanted:
        """Keys that follow one another in their prompt, from this position on."""
        return cls(keyspace, keys, parts, np.arange(first, first + len(keys), dtype=np.uint32))

    def is_like(self, other: Wanted) -> bool:
        """Whether the keys of both take the same slots."""
        a, b = self.keyspace, other.keyspace
        return a.queue is b.queue and a.part_bytes == b.part_bytes and np.array_equal(self.parts, other.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Groups of one request that are alike, joined into one, one behind the other."""

    keyspaces: list[tuple[Keyspace, int]]  # and how many of the keys are in each
    keys: U64Array
    hashes: U64Array  # of each key, by `Index.hash`: hashed once for finding, inserting and ordering
    parts: U16Array
    positions: U32Array

    @classmethod
    def of(cls, groups: Sequence[Wanted], index: Index) -> Joined:
        """Join at least one group."""
        keyspaces, first = [(wanted.keyspace, len(wanted.keys)) for wanted in groups], groups[0]
        keys, positions = first.keys, first.positions
        if len(groups) > 1:
            keys = join_keys(wanted.keys for wanted in groups)
            positions = np.concatenate([wanted.positions for wanted in groups])
        return cls(keyspaces, keys, index.hash(numbers_of(keyspaces), keys), first.parts, positions)

    def counts(self, indices: I64Array) -> list[tuple[Keyspace, int]]:
        """How many of the keys with these indices, ascending, are in each keyspace."""
        if len(self.keyspaces) == 1:
            return [(self.keyspaces[0][0], len(indices))]
        ends = np.cumsum([count for _, count in self.keyspaces])
        numbers = np.diff(np.searchsorted(indices, ends), prepend=0).tolist()
        return [(keyspace, number) for (keyspace, _), number in zip(self.keyspaces, numbers, strict=True)]

    def split(self, made: Reservation) -> list[Reservation]:
        """The reservation of each group."""
        if len(self.keyspaces) == 1:
            return [made]
        key_spans = spans(count for _, count in self.keyspaces)
        ends = np.searchsorted(made.keys, [span.stop for span in key_spans]).tolist()
        groups = []
        for span, begin, end in zip(key_spans, [0, *ends], ends, strict=False):
            keys = made.keys[begin:end] - span.start
            groups.append(Reservation(made.parts[begin:end], keys, made.columns[begin:end], made.states[span]))
        return groups
