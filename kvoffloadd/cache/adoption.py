"""What a daemon leaves in its arena, and what its successor takes over from it: warm restarts. Event loop only.

Only what was sealed is taken over, key by key, if all parts are there; what was being written, retired or cleared is
not. Payloads count as unverified until they have been hashed again: at their first load, or all before serving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from kvoffloadd.cache.parts import PartState
from kvoffloadd.model import GroupKind, GroupSchema, slot_pages

if TYPE_CHECKING:
    from kvoffloadd.cache.cache import Cache
    from kvoffloadd.cache.namespace import Space
    from kvoffloadd.model import I64Array, U32Array
    from kvoffloadd.tiers.ledger import Survivors


_ARRAYS_BYTES = 10
"""Headers of two arrays, at most."""


@dataclass(frozen=True, slots=True)
class Estate:
    """What a predecessor noted of namespaces. `spaces`: as `names_of` lists them."""

    base: int
    last: int
    epochs: dict[bytes, int]
    spaces: list[list[Any]]


def names_of(cache: Cache, bytes_max: int) -> tuple[bytes, list[int]]:
    """Whose the keys in memory are, for `estate_of`; and users of whom nothing is told, since it is too much."""
    by_uid: dict[int, list[bytes]] = {}
    for namespace in cache.namespaces.values():
        told = by_uid.setdefault(namespace.uid, [])
        told += filter(None, map(_noted, namespace.spaces.values()))
    packer, epochs = msgpack.Packer(), cache.epochs
    head = b"".join(map(packer.pack, (epochs.base, epochs.last, epochs.by_namespace)))
    sizes = {uid: sum(map(len, told)) for uid, told in by_uid.items()}
    left_out = []
    while sizes and len(head) + _ARRAYS_BYTES + sum(sizes.values()) > bytes_max:
        left_out.append(max(sizes, key=sizes.__getitem__))
        del sizes[left_out[-1]]
    spaces = [one for uid in sizes for one in by_uid[uid]]
    return b"".join([packer.pack_array_header(4), head, packer.pack_array_header(len(spaces)), *spaces]), left_out


def _noted(space: Space) -> bytes:
    """One of the spaces, packed: once, since there may be tens of thousands that have not changed. Nothing of one whose
    sizes are not all known: no key of it could be taken over.
    """
    namespace, schema = space.namespace, space.schema
    if space.noted is None or space.noted[0] != namespace.epoch:
        if not all(space.part_bytes):
            return b""
        facts = [
            *(space.id, namespace.fingerprint, namespace.uid, namespace.label, namespace.key_bytes, namespace.epoch),
            *(schema.group, str(schema.kind), schema.tokens_per_key, schema.window_keys),
            *(schema.blocks_per_key, schema.parts, space.part_bytes),
        ]
        space.noted = namespace.epoch, msgpack.packb(facts)
    return space.noted[1]


def estate_of(names: bytes) -> Estate | None:
    """What `names_of` has packed, with its checksum right; None: nothing was."""
    return Estate(*msgpack.unpackb(names, strict_map_key=False)) if names else None


def adopt(cache: Cache, estate: Estate | None) -> U32Array:
    """Take over what the tier's pool holds; nothing has been stored yet. The rows that were taken over.

    The epochs of the estate, and of disks, are known by now: what was cleared since is left behind.
    """
    tier = cache.tier
    found = tier.ledger.read()
    owners = np.full(len(found), -1, np.int64)
    all_rows = [np.zeros(0, np.uint32)]
    opened = []
    for number, fingerprint, uid, label, key_bytes, epoch, group, kind, *schema, part_bytes in (
        estate.spaces if estate else []
    ):
        if epoch != cache.epochs.of(fingerprint) or not all(part_bytes):
            continue
        namespace = cache.open_namespace(fingerprint, uid, label, key_bytes)
        opened.append(namespace)
        tokens_per_key, window_keys, blocks_per_key, parts = schema
        shape = GroupSchema(group, GroupKind(kind), tokens_per_key, window_keys, blocks_per_key, parts)
        space = cache.declare(namespace, shape, number)
        space.part_bytes[:] = part_bytes
        cache.admit(space, part_bytes)
        at = np.flatnonzero(found.spaces == number)
        rows, records, whole = _insert(cache, space, found.only(at))
        owners[at[whole]] = records
        all_rows.append(rows)
    kept = owners >= 0
    tier.ledger.erase(found.pages[~kept])
    tier.restore(found.pages[kept], owners[kept].astype(np.uint32))
    rows = np.concatenate(all_rows)
    cache.entries.tell(rows, added=True)
    cache.counters.keys_adopted += len(rows)
    cache.counters.parts_not_adopted += int((~kept).sum()) + found.damaged
    for namespace in opened:
        cache.close_namespace(namespace)
    cache.remember()
    return rows


def _insert(cache: Cache, space: Space, found: Survivors) -> tuple[U32Array, I64Array, I64Array]:
    """Rows of the keys that are whole; of each of their parts its record, and its index in `found`."""
    parts = space.schema.parts
    sizes = np.array([slot_pages(size) for size in space.part_bytes], np.int64)
    fits = found.parts < parts
    fits[fits] = found.sizes[fits] == sizes[found.parts[fits]]
    at = np.flatnonzero(fits)
    hashes = cache.entries.index.hash(space.id, found.keys)
    # Part by part of each key, together: a key is whole if its run is 0, 1, 2... By its hash: to sort by the key itself
    # takes three times as long, and two keys of one hash would at worst be left behind.
    at = at[np.lexsort((found.parts[at], hashes[at]))]
    keys = found.keys[at]
    begins = np.ones(len(at), bool)
    begins[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    lengths = np.diff(np.append(np.flatnonzero(begins), len(at)))
    first = np.flatnonzero(begins)[lengths == parts]
    whole = (found.parts[at[first[:, None] + np.arange(parts)]] == np.arange(parts)).all(axis=1)
    first = first[whole]
    first = first[: cache.entries.parts.ready(parts, len(first))]
    first = first[np.argsort(found.orders[at[first]], kind="stable")]  # what was stored last goes last
    mine = at[first[:, None] + np.arange(parts)]
    first = mine[:, 0]
    positions = np.zeros(len(first), np.uint32)
    rows = cache.entries.insert([(space, len(first))], found.keys[first], hashes[first], positions)
    records = cache.entries.records(rows, np.arange(parts, dtype=np.uint16))
    columns = cache.entries.parts
    columns.page[records] = found.pages[mine]
    columns.digest[records] = found.digests[mine]
    columns.state[records] = PartState.SEALED
    columns.unverified[records] = 1
    cache.entries.missing[rows] = 0
    cache.entries.inherited[rows] = 1
    cache.entries.account(records.ravel(), +1)
    return rows, records.ravel(), mine.ravel()
