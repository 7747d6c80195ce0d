"""What a request asks slots for, and what it is given. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.cache.keys import join_keys
from kvoffloadd.cache.together import numbers_of, spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffloadd.cache.index import Index
    from kvoffloadd.cache.namespace import Space
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
        """Those of the mask."""
        return Payloads(self.parts[wanted], self.keys[wanted], self.columns[wanted])


@dataclass(frozen=True, slots=True, eq=False)
class Reservation(Payloads):
    """What was reserved, key by key, part by part; `states` per key."""

    states: U8Array


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Parts of some keys of a space, for which slots are asked. `keys` are distinct; `positions`: u32 of each, where it
    stands in its prompt.
    """

    space: Space
    keys: U64Array
    parts: U16Array
    positions: U32Array

    @classmethod
    def from_first(cls, space: Space, keys: U64Array, parts: U16Array, first: int) -> Wanted:
        """Keys that follow one another in their prompt, from this position on."""
        return cls(space, keys, parts, np.arange(first, first + len(keys), dtype=np.uint32))

    def is_like(self, other: Wanted) -> bool:
        """Whether their keys take the same slots."""
        mine, its = self.space, other.space
        return mine.queue is its.queue and mine.part_bytes == its.part_bytes and np.array_equal(self.parts, other.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Groups of one request that are alike, one behind the other: `spaces`, and how many of the keys are in each.
    `hashes`: the index's, of each key, for whoever finds, inserts and orders them.
    """

    spaces: list[tuple[Space, int]]
    keys: U64Array
    hashes: U64Array
    parts: U16Array
    positions: U32Array

    @classmethod
    def of(cls, some: Sequence[Wanted], index: Index) -> Joined:
        """At least one."""
        spaces, first = [(wanted.space, len(wanted.keys)) for wanted in some], some[0]
        keys, positions = first.keys, first.positions
        if len(some) > 1:
            keys = join_keys(wanted.keys for wanted in some)
            positions = np.concatenate([wanted.positions for wanted in some])
        return cls(spaces, keys, index.hash(numbers_of(spaces), keys), first.parts, positions)

    def counts(self, at: I64Array) -> list[tuple[Space, int]]:
        """How many of the keys at these places, ascending, are in each space."""
        if len(self.spaces) == 1:
            return [(self.spaces[0][0], len(at))]
        ends = np.cumsum([count for _, count in self.spaces])
        numbers = np.diff(np.searchsorted(at, ends), prepend=0).tolist()
        return [(space, number) for (space, _), number in zip(self.spaces, numbers, strict=True)]

    def split(self, made: Reservation) -> list[Reservation]:
        """What was reserved of each group."""
        if len(self.spaces) == 1:
            return [made]
        keys = spans(count for _, count in self.spaces)
        ends = np.searchsorted(made.keys, [at.stop for at in keys]).tolist()
        found = []
        for at, begin, end in zip(keys, [0, *ends], ends, strict=False):
            mine = made.keys[begin:end] - at.start
            found.append(Reservation(made.parts[begin:end], mine, made.columns[begin:end], made.states[at]))
        return found
