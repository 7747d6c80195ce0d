"""Deletes keys from memory. Event loop only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keys import join_keys
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.stats.missreasons import Reason
from kvoffloadd.model import U64Array


@changing
def delete_keys(cache: Cache, groups: Sequence[tuple[Keyspace, U64Array]]) -> tuple[int, int]:
    """Deletes keys of several keyspaces of a namespace, also those that are being written or read: none hits from now
    on, and a successor finds none. Claims that name them end before them. Returns how many complete keys there were,
    and their bytes.
    """
    if not groups:
        return 0, 0
    entries = cache.entries
    counts = [(keyspace, len(keys)) for keyspace, keys in groups]
    rows = entries.find_all(counts, join_keys(keys for _, keys in groups))
    live = entries.live(distinct(rows[rows >= 0].astype(np.uint32)))
    gone = live[entries.complete(live)]
    held_bytes = sum(len(those) * sum(keyspace.part_bytes) for keyspace, those in entries.by_keyspace(gone))
    entries.retire(live, Reason.CLEARED)
    cache.retention.forget_keys(groups)
    cache.counters.keys_deleted += len(gone)
    return len(gone), held_bytes
