"""Chooses the keys to fetch from the remote store: those that the longest restorable prefix needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.memory.lookup import GroupHits, restorable_boundaries
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import BoolArray, U64Array


@dataclass(frozen=True, slots=True, eq=False)
class RemoteKeys:
    """One group's keys of a request."""

    keyspace: Keyspace
    first: int  # position of the first key in its prompt
    keys: U64Array
    local: BoolArray  # keys that hit in memory, or come from disk
    requested: BoolArray | None  # keys that the store is asked for; None: none


def needed_keys(groups: Sequence[RemoteKeys], there: Sequence[BoolArray], bytes_max: int) -> list[BoolArray]:
    """Returns the keys to fetch, by group: those that the longest prefix needs which local keys and the store's keys
    (`there`) restore together, if they take no more than `bytes_max`. Returns none if local keys restore as much.

    A prefix that ends with the keys of the request may be the whole prompt, whose last token an engine always computes:
    the keys that the next shorter prefix needs come with it. Where all groups have keys of one length, that is one more
    key of each window, and a state.
    """
    local = _boundaries(groups, [group.local for group in groups])
    longest_local = local[0] if local else 0
    together = _boundaries(groups, [group.local | found for group, found in zip(groups, there, strict=True)])
    longer = [tokens for tokens in together if tokens > longest_local]
    end_tokens = min((group.first + len(group.keys)) * group.keyspace.schema.tokens_per_key for group in groups)

    def needed(index: int) -> list[BoolArray]:
        masks = _needed(groups, there, longer[index])
        if longer[index] < end_tokens or index + 1 == len(longer):
            return masks
        return [mask | more for mask, more in zip(masks, _needed(groups, there, longer[index + 1]), strict=True)]

    # A prefix's needs grow with its length, or nearly so: a binary search finds the longest that fits.
    low, high = 0, len(longer)
    while low < high:
        middle = (low + high) // 2
        if _bytes(groups, needed(middle)) <= bytes_max:
            high = middle
        else:
            low = middle + 1
    if low == len(longer):
        return [np.zeros(len(group.keys), bool) for group in groups]
    return needed(low)


def _boundaries(groups: Sequence[RemoteKeys], hits: Sequence[BoolArray]) -> list[int]:
    """Returns the boundaries, longest prefix first."""
    of = [GroupHits(group.keyspace.schema, group.first, mask) for group, mask in zip(groups, hits, strict=True)]
    found: list[int] = restorable_boundaries(of).tolist()
    return found


def _needed(groups: Sequence[RemoteKeys], there: Sequence[BoolArray], tokens: int) -> list[BoolArray]:
    """Returns the store's keys that a prefix of this number of tokens needs."""
    masks = []
    for group, found in zip(groups, there, strict=True):
        schema = group.keyspace.schema
        length = np.array([tokens // schema.tokens_per_key], np.int64)
        begin = int(schema.kind.first_needed(length, schema.window_keys)[0])
        mask = np.zeros(len(group.keys), bool)
        mask[max(0, begin - group.first) : max(0, int(length[0]) - group.first)] = True
        masks.append(mask & found & ~group.local)
    return masks


def _bytes(groups: Sequence[RemoteKeys], masks: Sequence[BoolArray]) -> int:
    return sum(
        int(np.count_nonzero(mask)) * sum(group.keyspace.part_bytes) for group, mask in zip(groups, masks, strict=True)
    )
