"""Moves keys to the queues that fit the quotas after these have changed. Event loop only."""

from __future__ import annotations

import logging

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.config import QuotasConfig
from kvoffloadd.errors import LimitError
from kvoffloadd.model import U32Array
from kvoffloadd.scheduling.steps import Steps

log = logging.getLogger(__name__)


def change_quotas(cache: Cache, config: QuotasConfig) -> Steps[None]:
    """Sets the quotas at the first step. Further ones move the keys of a group at a time to a queue of its own, where a
    quota begins to count it, and evict what is beyond lower maximums.
    """
    with changing:
        quotas = cache.entries.keyspaces.quotas
        quotas.change(config, cache.entries.keyspaces.values())
        cache.retention.memory.keep_all_within()
        for place, queue in cache.eviction.queues.items():
            queue.quotas = quotas.of_place(place.uid, place.pattern)
    yield
    while moving := [keyspace for keyspace in cache.entries.keyspaces.values() if is_misplaced(keyspace)]:
        for keyspace in moving:
            try:
                if is_misplaced(keyspace):
                    _move(cache, keyspace)
            except LimitError as error:
                log.warning("memory: not all quotas hold before the next start: %s", error)
                return
            yield
    yield from cache.quota_room.trim()


def is_misplaced(keyspace: Keyspace) -> bool:
    """Returns whether a keyspace is in a queue with keys that other quotas count."""
    return keyspace.queue is not None and keyspace.queue.quotas != keyspace.quotas


@changing
def _move(cache: Cache, keyspace: Keyspace) -> None:
    """Moves the keys of a keyspace to its own queue, in the order of their worth: what the old queue has learned of
    each is lost, as after a restart. Raises LimitError, with nothing changed.
    """
    old, known = keyspace.queue, [size for size in keyspace.part_bytes if size]
    if old is None:
        return
    cache.eviction.prepare(keyspace.namespace, [known])
    cache.uses.settle()
    rows = _rows_of(cache, keyspace)
    rows = rows[np.argsort(-old.policy.worth(rows), kind="stable")]
    old.policy.remove(rows)
    old.leave(keyspace)
    keyspace.queue, keyspace.slots = None, {}
    cache.eviction.admit(keyspace, known)
    _enter(cache, keyspace, rows)


def _enter(cache: Cache, keyspace: Keyspace, rows: U32Array) -> None:
    """Enters these rows of a keyspace into its queue."""
    if keyspace.queue is None or not len(rows):
        return
    entries, policy = cache.entries, keyspace.queue.policy
    hashes = entries.index.hash(keyspace.id, entries.index.keys.take(rows, axis=0))
    policy.insert(rows, hashes, np.zeros(len(rows), np.uint32))
    if len(lost := rows[entries.lost[rows]]):
        policy.lose(lost)
    cache.set_claimed_aside(rows)


def _rows_of(cache: Cache, keyspace: Keyspace) -> U32Array:
    """Returns the rows of its live keys."""
    entries = cache.entries
    end = entries.index.rows_end
    own = (entries.index.keyspace[:end] == keyspace.id) & (entries.state[:end] == RowState.LIVE)
    rows: U32Array = np.flatnonzero(own).astype(np.uint32)
    return rows
