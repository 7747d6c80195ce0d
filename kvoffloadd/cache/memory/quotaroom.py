"""Makes room for keys under a quota: within its maximum, others of its own go; beyond that, no key goes that another
quota's minimum protects. Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.eviction import SPARE_SHARE, Eviction
from kvoffloadd.cache.memory.keytable import KeyTable
from kvoffloadd.cache.memory.quota import Quota
from kvoffloadd.cache.memory.tierclaims import TierClaims
from kvoffloadd.model import BoolArray, U32Array

KEYS_MAX = 1 << 13
"""The number of keys that one call evicts: some milliseconds. What then is beyond the maximum goes in further calls."""


class QuotaRoom:
    """Keeps the keys under each quota within its maximum."""

    def __init__(self, entries: KeyTable, eviction: Eviction, claims: TierClaims) -> None:
        self._entries = entries
        self._eviction = eviction
        self._claims = claims
        self._quotas = entries.keyspaces.quotas

    def make_room(self, quotas: tuple[Quota, ...], wanted: int) -> int:
        """Evicts keys under these quotas until `wanted` pages more are within all of their maximums, and some to spare.
        Returns how many of these pages are.
        """
        for quota in reversed(quotas):  # the namespace's first: what goes there makes room for its user, too
            if quota.room_pages < wanted:
                if owed := self._quotas.begin(quotas):
                    self._quotas.spares_own = True
                    self._shrink(quota, min(wanted, owed))
                    self._quotas.spares_own = False
                self._shrink(quota, wanted + quota.max_pages // SPARE_SHARE)
        return min([wanted, *(quota.room_pages for quota in quotas)])

    def trim(self) -> Iterator[None]:
        """Evicts what is beyond the maximums, some in each step, after these were lowered. Keys that are held stay, and
        go when later ones are stored. A maximum goes before the minimums within it.
        """
        for quota in self._quotas.all:
            for asking in ((quota,), tuple(self._quotas.all)):
                while quota.pages > quota.max_pages:
                    with changing:
                        self._quotas.begin(asking)
                        evicted = self._shrink(quota, 0)
                    if not evicted:
                        break
                    yield

    def _shrink(self, quota: Quota, wanted: int) -> int:
        """Evicts keys under the quota until it has room for `wanted` pages, as far as it can. Returns how many."""
        evicted = 0
        while evicted < KEYS_MAX and (over := min(wanted, quota.max_pages) - quota.max_pages + quota.pages) > 0:
            rows = self._victims(quota, over, KEYS_MAX - evicted)
            if not len(rows):
                break
            evicted += len(rows)
            self._eviction.drop(rows)
        quota.keys_evicted += evicted
        return evicted

    def _victims(self, quota: Quota, pages: int, count: int) -> U32Array:
        """Returns up to `count` keys under a quota to evict, enough to free so many pages; claimed keys only where
        there are no others.
        """
        queues = [
            queue
            for queue in self._eviction.queues.values()
            if quota in queue.quotas and len(queue.policy) and self._quotas.spare_pages(queue.quotas)
        ]
        each = max(1, quota.pages // max(1, sum(len(queue.policy) for queue in queues)))
        rows = self._eviction.victims(queues, min(count, pages // each + 1))
        rows = self._eviction.displaceable(rows)
        if not len(rows) and self._entries.claimed:
            rows = self._claims.victims(self._able, count, lambda claim: self._counts(quota, claim))
            rows = self._eviction.displaceable(rows)
        return rows[: 1 + int(np.searchsorted(self._eviction.pages(rows).cumsum(), pages))]

    def _able(self, rows: U32Array) -> BoolArray:
        return self._entries.evictable(rows)

    def _counts(self, quota: Quota, claim: Claim) -> bool:
        return quota in self._quotas.of(claim.namespace)
