"""Lookup results, and the prefixes of a prompt that can be restored from the keys that hit. Pure."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from kvoffloadd.model import BoolArray, GroupKind, GroupSchema, I64Array, U8Array, U32Array

TOKENS_MAX = (1 << 32) - 1
_FEW = 32
"""Up to this number of boundaries, Python packs faster than numpy."""


class LookupResult(NamedTuple):
    """The result of a lookup: three arrays with one item for each key."""

    rows: I64Array  # -1: the key has no row
    states: U8Array  # `model.KeyState`
    hits: BoolArray

    @property
    def num_hits(self) -> int:
        """Returns the number of keys that hit."""
        return int(np.count_nonzero(self.hits))

    @property
    def hit_rows(self) -> U32Array:
        """Returns the rows of the keys that hit, in order."""
        rows = self.rows if self.num_hits == len(self.rows) else self.rows[self.hits]
        return rows.astype(np.uint32)


class GroupHits(NamedTuple):
    """Describes one group's share of a lookup."""

    schema: GroupSchema
    first: int  # position of the first key in its prompt; the engine has the keys before it
    hits: BoolArray  # whether key `first + i` hits


def restorable_boundaries(groups: list[GroupHits]) -> U32Array:
    """Returns every prefix length, in tokens up to TOKENS_MAX, that all the groups can serve, longest first.

    A boundary lies after a whole number of keys of every group, and after the keys that the engine holds. Full
    attention needs every key before it; a sliding window the last `window_keys` before it; chunked attention those
    since the start of its chunk; Mamba the one state right before it.
    """
    if len(groups) == 1 and groups[0].schema.kind is GroupKind.FULL:
        found = _full_boundaries(groups[0])
        return np.arange(found.start, found.stop, found.step, dtype=np.int64).astype(np.uint32)
    common: I64Array | None = None
    for group in groups:
        lengths = _servable_lengths(group) * group.schema.tokens_per_key  # below 2**56
        lengths = lengths[lengths <= TOKENS_MAX]
        if common is None:
            common = lengths
        elif not np.array_equal(common, lengths):  # groups are often alike, and the comparison is much faster
            common = np.intersect1d(common, lengths, assume_unique=True)
        if not len(common):
            break
    if common is None:
        return np.zeros(0, np.uint32)
    return common[::-1].astype(np.uint32)


def packed_boundaries(groups: list[GroupHits]) -> bytes:
    """Returns `restorable_boundaries` as little-endian u32."""
    if len(groups) == 1 and groups[0].schema.kind is GroupKind.FULL:
        found = _full_boundaries(groups[0])
        if len(found) <= _FEW:
            return struct.pack(f"<{len(found)}I", *found)
    return restorable_boundaries(groups).astype("<u4").tobytes()


def _full_boundaries(group: GroupHits) -> range:
    """Returns `restorable_boundaries` of full attention alone: most lookups ask for nothing else."""
    tokens, keys = group.schema.tokens_per_key, len(group.hits)
    if np.count_nonzero(group.hits) < keys:
        keys = int(group.hits.argmin())
    end = min(group.first + keys, TOKENS_MAX // tokens)
    return range(end * tokens, group.first * tokens, -tokens)


def _servable_lengths(group: GroupHits) -> I64Array:
    """Returns the prefix lengths in keys, ascending, above `first`, for which this group's hits are sufficient."""
    end = group.first + len(group.hits)
    lengths = np.arange(group.first + 1, end + 1, dtype=np.int64)
    misses = np.where(group.hits, np.int64(-1), lengths - 1)
    last_miss = np.maximum.accumulate(misses) if len(misses) else misses
    return lengths[last_miss < group.schema.kind.first_needed(lengths, group.schema.window_keys)]
