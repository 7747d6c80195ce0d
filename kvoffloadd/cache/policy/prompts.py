"""Operations on several prompts in one array, one after another, all at once. Pure.

`begins`: where each begins, the first one at 0; none is empty.
"""

from __future__ import annotations

import numpy as np

from kvoffloadd.model import BoolArray, I64Array, U8Array


def lengths(begins: I64Array, count: int) -> I64Array:
    """Returns the length of each prompt in an array of `count` values."""
    return np.diff(begins, append=count)


def backwards(begins: I64Array, count: int) -> I64Array:
    """Returns an index that reverses each prompt in its place."""
    many = lengths(begins, count)
    turned: I64Array = np.repeat(2 * begins + many - 1, many) - np.arange(count)
    return turned


def highest_from_here(values: U8Array, begins: I64Array) -> U8Array:
    """Returns, for each value, the highest from it to the end of its prompt."""
    # Every value in an earlier prompt is above all of a later one: seen from the end, each prompt begins anew.
    above = np.repeat(np.arange(len(begins) - 1, -1, -1) << 8, lengths(begins, len(values)))
    return (np.maximum.accumulate((values + above)[::-1])[::-1] - above).astype(np.uint8)


def changes(values: U8Array, begins: I64Array) -> BoolArray:
    """Returns which values differ from the previous one, in their prompt."""
    found = np.ones(len(values), bool)
    found[1:] = values[1:] != values[:-1]
    found[begins] = False
    return found
