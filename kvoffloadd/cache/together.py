"""Keys of several groups of one request as one list, one group behind the other: what they cost is paid once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvoffloadd.cache.namespace import Space
    from kvoffloadd.model import U16Array


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
