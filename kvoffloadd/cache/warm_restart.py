"""Warm restarts: a daemon takes over the sealed keys that its predecessor left in the arena. Event loop only.

Only sealed keys are taken over, one by one, if all their parts are there. Keys that were being written, retired or
cleared are not. Payloads count as unverified until they have been hashed again: at their first load, or all before
serving.
"""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.savedstate import SavedState
from kvoffloadd.model import I64Array, U32Array
from kvoffloadd.storage.slotrecords import RecoveredSlots


@changing
def adopt(cache: Cache, saved: SavedState | None) -> U32Array:
    """Takes over the sealed keys in the tier's pool; nothing has been stored yet. Returns the rows that were taken
    over.

    The epochs and tombstones of the saved state, and of disks, are known now: keys that were cleared since are left
    behind, and so are those that were deleted.
    """
    tier = cache.tier
    found = tier.slot_records.read()
    owners = np.full(len(found), -1, np.int64)
    all_rows = [np.zeros(0, np.uint32)]
    opened = []
    # Those whose keys the arena may still have: others have deleted them.
    tombstones = cache.tombstones.beyond(saved.tombstones if saved else [])
    for saved_keyspace in saved.keyspaces if saved else []:
        fits = all(saved_keyspace.part_bytes) and max(saved_keyspace.part_bytes) <= tier.payload_bytes_max
        if saved_keyspace.epoch != cache.epochs.of(saved_keyspace.fingerprint) or not fits:
            continue
        namespace = cache.open_namespace(
            saved_keyspace.fingerprint, saved_keyspace.uid, saved_keyspace.label, saved_keyspace.key_bytes
        )
        opened.append(namespace)
        keyspace = cache.declare(namespace, saved_keyspace.schema, saved_keyspace.number)
        keyspace.set_part_bytes(dict(enumerate(saved_keyspace.part_bytes)))
        cache.entries.keyspaces.count_pages(keyspace)
        keyspace.fill_compositions(dict(enumerate(saved_keyspace.compositions)))
        cache.admit(keyspace, saved_keyspace.part_bytes)
        indices = np.flatnonzero(found.keyspaces == saved_keyspace.number)
        if len(tombstones):
            space = saved_keyspace.fingerprint, saved_keyspace.epoch, saved_keyspace.group
            indices = indices[~tombstones.deleted(space, found.keys[indices])]
        rows, records, whole = _insert(cache, keyspace, found.only(indices))
        owners[indices[whole]] = records
        all_rows.append(rows)
    kept = owners >= 0
    tier.slot_records.erase(found.pages[~kept])
    tier.restore(found.pages[kept], owners[kept].astype(np.uint32))
    rows = np.concatenate(all_rows)
    cache.entries.record_change(rows, added=True)
    cache.counters.keys_adopted += len(rows)
    cache.counters.parts_not_adopted += int((~kept).sum()) + found.damaged
    for namespace in opened:
        cache.close_namespace(namespace)
    cache.save_state()
    return rows


def _insert(cache: Cache, keyspace: Keyspace, found: RecoveredSlots) -> tuple[U32Array, I64Array, I64Array]:
    """Inserts the complete keys. Returns their rows, and for each of their parts its record and its index in
    `found`.
    """
    parts = keyspace.schema.parts
    fits = found.parts < parts
    fits[fits] = found.sizes[fits] == keyspace.part_pages[found.parts[fits]]
    indices = np.flatnonzero(fits)
    hashes = cache.entries.index.hash(keyspace.id, found.keys)
    # Groups the parts of each key, in order: a key is complete if its run is 0, 1, 2... It sorts by hash: sorting by
    # the key itself takes three times as long, and two keys of one hash would at worst be left behind.
    indices = indices[np.lexsort((found.parts[indices], hashes[indices]))]
    keys = found.keys[indices]
    begins = np.ones(len(indices), bool)
    begins[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    lengths = np.diff(np.append(np.flatnonzero(begins), len(indices)))
    first = np.flatnonzero(begins)[lengths == parts]
    whole = (found.parts[indices[first[:, None] + np.arange(parts)]] == np.arange(parts)).all(axis=1)
    first = first[whole]
    first = first[: cache.entries.parts.runs.ready(parts, len(first))]
    first = first[np.argsort(found.orders[indices[first]], kind="stable")]  # the keys stored last come last
    sources = indices[first[:, None] + np.arange(parts)]
    first = sources[:, 0]
    positions = np.zeros(len(first), np.uint32)
    rows = cache.entries.insert([(keyspace, len(first))], found.keys[first], hashes[first], positions)
    records = cache.entries.records(rows, np.arange(parts, dtype=np.uint16))
    columns = cache.entries.parts
    columns.page[records] = found.pages[sources]
    columns.digest[records] = found.digests[sources]
    columns.state[records] = PartState.SEALED
    columns.unverified[records] = 1
    cache.entries.missing[rows] = 0
    cache.entries.inherited[rows] = 1
    cache.entries.account(records.ravel(), committed=+1)
    return rows, records.ravel(), sources.ravel()
