"""A prompt thinned to the keys of a sample, and which of these a restore could use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.curve.prompt import AskedKeys, measuring
from kvoffloadd.model import BoolArray, GroupKind, I64Array, U64Array


@dataclass(frozen=True, slots=True, eq=False)
class Thinned:
    """Has the sampled keys of one group. `indices`: their places among the group's keys, ascending."""

    keys: AskedKeys
    indices: I64Array
    hashes: U64Array

    @property
    def names(self) -> list[int]:
        """Returns a number for each key that no key of another group has."""
        named: list[int] = (self.hashes ^ np.uint64(self.keys.group)).tolist()
        return named


def restorable(groups: Sequence[Thinned], held: Sequence[BoolArray]) -> BoolArray:
    """Returns, of the sampled keys of the `measuring` group, which lie before the longest boundary that can be served.

    `held`: of the sampled keys of each group, whether a cache has them. The rule is that of `restorable_boundaries`,
    with the boundaries after sampled keys, and as if the cache had all keys that are not in the sample.
    """
    measured = groups[measuring([group.keys for group in groups])]
    if len(groups) == 1 and measured.keys.kind is GroupKind.FULL:
        found: BoolArray = np.logical_and.accumulate(held[0])
        return found
    ends = (measured.keys.first + measured.indices + 1) * measured.keys.tokens_per_key
    served = np.ones(len(ends), bool)
    for group, has in zip(groups, held, strict=True):
        served &= _serves(group, has, ends)
    reached: BoolArray = np.logical_or.accumulate(served[::-1])[::-1]
    return reached


def _serves(group: Thinned, held: BoolArray, ends: I64Array) -> BoolArray:
    """Returns which boundaries, in tokens, this group can serve."""
    keys = group.keys
    lengths = ends // keys.tokens_per_key
    missing = keys.first + group.indices[~held]
    before = np.concatenate((np.array([-1], np.int64), missing))
    last_missing = before[np.searchsorted(missing, lengths)]
    whole = (ends % keys.tokens_per_key == 0) & (lengths > keys.first) & (lengths <= keys.first + len(keys.hashes))
    enough: BoolArray = whole & (last_missing < keys.kind.first_needed(np.maximum(lengths, 1), keys.window_keys))
    return enough
