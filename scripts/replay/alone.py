"""The daemon's cache alone, in this process: what a replay must hit, where no byte moves and no request waits.

It serves each request as a daemon does that has one at a time. With the same secret its hashes are the daemon's, so
that both have the same luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keys import keys_array
from kvoffloadd.cache.memory.reservation import Wanted, reserve_all
from kvoffloadd.cache.policy import create_policy
from kvoffloadd.cache.policy.base import Clock
from kvoffloadd.model import I64Array
from kvoffloadd.storage.memory import MemoryTier
from kvoffloadd.testing.figures import KEY_BYTES
from scripts.replay.tenants import BLOCK_TOKENS, Tenant, Trace, keys_of_blocks

_PARTS = np.zeros(1, np.uint16)


class CacheAlone:
    """A cache of `capacity_bytes`, in which all tenants have registered, one after the other."""

    def __init__(self, tenants: Sequence[Tenant], policy: str, capacity_bytes: int, slab_bytes: int, seed: int) -> None:
        self._tenants = tenants
        self._seed = seed
        tier = MemoryTier(capacity_bytes, slab_bytes)
        self._cache = Cache(tier, partial(create_policy, policy, clock=Clock()), seed)
        self._keyspaces = []
        for tenant in tenants:
            namespace = self._cache.open_namespace(
                tenant.number.to_bytes(16, "little"), tenant.uid, tenant.namespace.model, KEY_BYTES
            )
            self._keyspaces.append([self._cache.declare(namespace, schema) for schema in tenant.schemas])
            for keyspace in self._keyspaces[-1]:
                self._cache.set_part_bytes(keyspace, {0: tenant.payload_bytes})

    def close(self) -> None:
        """Give the memory back."""
        self._cache.tier.close()

    def hits(self, trace: Trace) -> list[int]:
        """Serve all requests of these tenants. Returns how many blocks hit, of each of them."""
        hits = [0] * len(self._tenants)
        for number, ids in zip(trace.whose.tolist(), trace.requests, strict=True):
            hits[number] += self._serve(number, ids)
        return hits

    def _serve(self, number: int, ids: I64Array) -> int:
        """Pin the blocks of a request, and store those behind the prefix that hits. Returns how many hit."""
        cache, keyspaces = self._cache, self._keyspaces[number]
        keys = keys_array(keys_of_blocks(ids, self._seed).tobytes(), KEY_BYTES)
        found = cache.find_all([(keyspace, keys) for keyspace in keyspaces])
        prefix = self._tenants[number].prefix([lookup.hits for lookup in found])
        held = np.concatenate([lookup.hit_rows for lookup in found])
        cache.hold(held)
        used = [(keyspace, lookup, 0) for keyspace, lookup in zip(keyspaces, found, strict=True)]
        cache.uses.add_prompt(used, prefix * BLOCK_TOKENS)
        if prefix < len(ids):
            wanted = [Wanted.from_first(keyspace, keys[prefix:], _PARTS, prefix) for keyspace in keyspaces]
            for reserved in reserve_all(cache, wanted):
                cache.commit(reserved.parts)
        cache.unhold(held)
        cache.uses.settle()
        return prefix
