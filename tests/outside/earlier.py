"""What an earlier run has left in memory, and what is made of it. Each function takes something almost right."""

from __future__ import annotations

import asyncio
import os
import struct
from contextlib import suppress
from random import Random

import msgpack
import numpy as np
import xxhash

from kvoffloadd.cache.claimsaver import ClaimSaver
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.composition import Composition
from kvoffloadd.cache.memory.savedstate import pack_state, read_saved_state
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.arenafile import SEQUENCE_MAX, ArenaFile
from kvoffloadd.storage.slotrecords import SlotRecords
from tests.cache.conftest import Open, open_tier  # noqa: F401  a fixture
from tests.cache.fakes import keys_of, make_cache, make_keyspace, store
from tests.outside.changes import EXTREMES, changed_bytes, changed_tree

FINGERPRINT = b"n" * 16
PAGES, SLAB_PAGES = 64, 16
NAMES_HEADER_BYTES = 32


def estate() -> Cache:
    """A cache with keys of two groups, as its killed process leaves it."""
    cache = make_cache(PAGES, SLAB_PAGES)
    compositions = {0: Composition("bfloat16", b"layers 0")}
    for group, pages in enumerate([(1,), (1, 2)]):
        keyspace = make_keyspace(cache, FINGERPRINT, group=group, pages=pages)[1]
        cache.set_part_bytes(keyspace, {}, compositions if group else {})
        store(cache, keyspace, keys_of(1, 2, 3))
    cache.epochs.advance(b"o" * 16)
    cache.save_state()
    return cache


def taken_over(cache: Cache, names: bytes) -> None:
    """Takes memory over as a daemon does that finds these names next to the arena."""
    pool = ArenaFile(os.dup(cache.tier.pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
    after = make_cache(PAGES, SLAB_PAGES, pool)
    saved = read_saved_state(names)
    if saved is not None and after.epochs.recalls(saved.base, saved.last, *saved.epochs.values()):
        after.epochs.merge(saved.base, saved.last, saved.epochs)
        adopt(after, saved)
    else:
        adopt(after, None)
    assert check(after, 0, 0) == []
    after.epochs.advance(FINGERPRINT)
    again = read_saved_state(pack_state(after.namespaces.values(), after.epochs, 1 << 20)[0])
    assert again is not None, "what it saves is read again"
    for one in (after, cache):
        one.tier.close()


def saved_states(rng: Random) -> None:
    cache = estate()
    names = cache.tier.pool.names()
    tree = msgpack.unpackb(names, strict_map_key=False)
    with suppress(OverflowError, ValueError):  # what can't be packed can't come
        changed = changed_bytes(rng, names) if rng.random() < 0.2 else msgpack.packb(changed_tree(rng, tree))
        taken_over(cache, changed)


def saved_claims(rng: Random) -> None:
    cache = estate()
    cache.retention.memory.share = 0.5
    for keyspace in cache.namespaces[FINGERPRINT].keyspaces.values():
        for numbers in ((1, 2), (2, 9)):
            prompt = [(keyspace, 3, keys_of(*numbers))]
            cache.retention.retain(keyspace.namespace, prompt, priority=5, seconds=60.0, name=f"{numbers}")
    asyncio.run(ClaimSaver(cache, None, 1.0).save())
    whole = cache.saved_claims
    tree = msgpack.unpackb(whole)
    cache.tier.close()
    after = make_cache(PAGES, SLAB_PAGES)
    after.retention.memory.share = 0.5
    with suppress(OverflowError, ValueError):  # what can't be packed can't come
        changed = changed_bytes(rng, whole) if rng.random() < 0.2 else msgpack.packb(changed_tree(rng, tree))
        saver = ClaimSaver(after, None, 1.0)
        asyncio.run(saver.inherit(changed))
        asyncio.run(saver.restore())
        after.retention.expire()
        assert check(after, 0, 0) + after.namespaces.check() == []
        asyncio.run(saver.save())
        again = make_cache(PAGES, SLAB_PAGES)
        again.retention.memory.share = 0.5
        heir = ClaimSaver(again, None, 1.0)
        asyncio.run(heir.inherit(after.saved_claims))
        asyncio.run(heir.restore())
        saved, read = ([claim.number for claim in one.retention.claims] for one in (after, again))
        assert saved == read, "what it saves is read again"
        again.tier.close()
    after.tier.close()


def slot_records(rng: Random) -> None:
    cache = estate()
    pool = cache.tier.pool
    places = np.flatnonzero(pool.records[:, -1])
    for at in rng.sample(places.tolist(), 3):
        word = rng.randrange(7)
        pool.records[at, word] = rng.choice([*EXTREMES, *map(int, pool.records[rng.choice(places.tolist())])])
        if rng.random() < 0.5:  # keyspace and part alone
            order = rng.choice(EXTREMES) % (1 << 32)
            pool.records[at, 6] = rng.randrange(3) | rng.randrange(3) << 16 | order << 32
        where = np.array([at])
        pool.records[at, 7] = SlotRecords(pool.records, pool.slabs, SLAB_PAGES, pool.seed)._checks(
            where, pool.records[where, :7]
        )[0]
    if rng.random() < 0.3:
        pool.slabs[rng.randrange(len(pool.slabs))] = rng.choice(EXTREMES) % (1 << 32)
    taken_over(cache, pool.names())


def names_of_the_arena(rng: Random) -> None:
    """Whatever the last state's number is, the next one is found."""
    pool = ArenaFile.make(PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES)
    sequence = rng.choice([*EXTREMES, SEQUENCE_MAX - 1, SEQUENCE_MAX - 2])
    head = struct.pack("<QQ", sequence, rng.choice([3, 3, 3, *EXTREMES]))
    whole = head + xxhash.xxh3_128_digest(head + b"old") + b"old"
    at = PAGE_BYTES + sequence % 2 * (pool.names_bytes_max + NAMES_HEADER_BYTES)
    pool._whole[at : at + len(whole)] = np.frombuffer(whole, np.uint8)
    heir = ArenaFile(os.dup(pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
    assert heir.names() in (b"", b"old")
    for names in (b"new", b"newer", b"newest"):
        assert heir.save_names(names)
        assert heir.names() == names
    heir.close()
    pool.close()
