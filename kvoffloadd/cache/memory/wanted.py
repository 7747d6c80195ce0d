"""What a request wants slots for (`Wanted`), and the slots that it gets (`Reservation`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.memory.index import Index
from kvoffloadd.cache.memory.keys import join_keys, spans
from kvoffloadd.cache.memory.keytable import numbers_of
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """Parts of some keys: record numbers `parts`; of each the index of its key among those that were asked for, and the
    index `columns` of its part among those that were wanted.
    """

    parts: I64Array
    keys: I64Array
    columns: I64Array

    def only(self, wanted: BoolArray) -> Payloads:
        return Payloads(self.parts[wanted], self.keys[wanted], self.columns[wanted])


@dataclass(frozen=True, slots=True, eq=False)
class Reservation(Payloads):
    """What was reserved, key by key, part by part; `states` per key."""

    states: U8Array


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Parts of some keys of a keyspace, for which slots are asked. `keys` are distinct; `positions`: u32 of each, where
    it stands in its prompt.
    """

    keyspace: Keyspace
    keys: U64Array
    parts: U16Array
    positions: U32Array

    @classmethod
    def from_first(cls, keyspace: Keyspace, keys: U64Array, parts: U16Array, first: int) -> Wanted:
        """Keys that follow one another in their prompt, from this position on."""
        return cls(keyspace, keys, parts, np.arange(first, first + len(keys), dtype=np.uint32))

    def is_like(self, other: Wanted) -> bool:
        """Whether their keys take the same slots."""
        mine, its = self.keyspace, other.keyspace
        return mine.queue is its.queue and mine.part_bytes == its.part_bytes and np.array_equal(self.parts, other.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Groups of one request that are alike, one behind the other: `keyspaces`, and how many of the keys are in each.
    `hashes`: the index's, of each key, for whoever finds, inserts and orders them.
    """

    keyspaces: list[tuple[Keyspace, int]]
    keys: U64Array
    hashes: U64Array
    parts: U16Array
    positions: U32Array

    @classmethod
    def of(cls, some: Sequence[Wanted], index: Index) -> Joined:
        """At least one."""
        keyspaces, first = [(wanted.keyspace, len(wanted.keys)) for wanted in some], some[0]
        keys, positions = first.keys, first.positions
        if len(some) > 1:
            keys = join_keys(wanted.keys for wanted in some)
            positions = np.concatenate([wanted.positions for wanted in some])
        return cls(keyspaces, keys, index.hash(numbers_of(keyspaces), keys), first.parts, positions)

    def counts(self, at: I64Array) -> list[tuple[Keyspace, int]]:
        """How many of the keys at these places, ascending, are in each keyspace."""
        if len(self.keyspaces) == 1:
            return [(self.keyspaces[0][0], len(at))]
        ends = np.cumsum([count for _, count in self.keyspaces])
        numbers = np.diff(np.searchsorted(at, ends), prepend=0).tolist()
        return [(keyspace, number) for (keyspace, _), number in zip(self.keyspaces, numbers, strict=True)]

    def split(self, made: Reservation) -> list[Reservation]:
        """What was reserved of each group."""
        if len(self.keyspaces) == 1:
            return [made]
        keys = spans(count for _, count in self.keyspaces)
        ends = np.searchsorted(made.keys, [at.stop for at in keys]).tolist()
        found = []
        for at, begin, end in zip(keys, [0, *ends], ends, strict=False):
            mine = made.keys[begin:end] - at.start
            found.append(Reservation(made.parts[begin:end], mine, made.columns[begin:end], made.states[at]))
        return found
