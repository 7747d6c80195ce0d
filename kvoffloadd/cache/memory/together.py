"""Keys of several groups of one request as one list, one group behind the other: what they cost is paid once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import I64Array, U16Array, U64Array


def spans(counts: Iterable[int]) -> list[slice]:
    """Where each of several lists lies that follow one another, by their lengths."""
    found, begin = [], 0
    for count in counts:
        found.append(slice(begin, begin + count))
        begin += count
    return found


def numbers_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> int | U16Array:
    """The number of the keyspace, if it is one; else of each key's: of each keyspace in turn so many keys."""
    if len(keyspaces) == 1:
        return keyspaces[0][0].id
    return np.repeat(np.array([keyspace.id for keyspace, _ in keyspaces], np.uint16), [count for _, count in keyspaces])


def groups_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> int | U64Array:
    """The same with the numbers that groups have in their namespace."""
    if len(keyspaces) == 1:
        return keyspaces[0][0].schema.group
    return np.repeat(
        np.array([keyspace.schema.group for keyspace, _ in keyspaces], np.uint64), [count for _, count in keyspaces]
    )


def begins_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> I64Array | None:
    """Where the keys of each keyspace begin that has some; None: there is one keyspace."""
    if len(keyspaces) == 1:
        return None
    counts = np.array([count for _, count in keyspaces if count], np.int64)
    begins: I64Array = np.cumsum(counts) - counts
    return begins
