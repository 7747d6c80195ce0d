"""Keys of several groups of one request as one list, one group behind the other: what they cost is paid once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvoffloadd.cache.namespace import Space
    from kvoffloadd.model import I64Array, U16Array, U64Array


def spans(counts: Iterable[int]) -> list[slice]:
    """Where each of several lists lies that follow one another, by their lengths."""
    found, begin = [], 0
    for count in counts:
        found.append(slice(begin, begin + count))
        begin += count
    return found


def numbers_of(spaces: Sequence[tuple[Space, int]]) -> int | U16Array:
    """The number of the space, if it is one; else of each key's: of each space in turn so many keys."""
    if len(spaces) == 1:
        return spaces[0][0].id
    return np.repeat(np.array([space.id for space, _ in spaces], np.uint16), [count for _, count in spaces])


def groups_of(spaces: Sequence[tuple[Space, int]]) -> int | U64Array:
    """The same with the numbers that groups have in their namespace."""
    if len(spaces) == 1:
        return spaces[0][0].schema.group
    return np.repeat(np.array([space.schema.group for space, _ in spaces], np.uint64), [count for _, count in spaces])


def begins_of(spaces: Sequence[tuple[Space, int]]) -> I64Array | None:
    """Where the keys of each space begin that has some; None: there is one space."""
    if len(spaces) == 1:
        return None
    counts = np.array([count for _, count in spaces if count], np.int64)
    begins: I64Array = np.cumsum(counts) - counts
    return begins
