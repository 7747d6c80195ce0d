"""Reads SGLang's description of the pages that it wants."""

from __future__ import annotations

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer

from kvoffloadd.integrations.sglang.prefixes import Needed


def needed_of(transfer: PoolTransfer, pool: str) -> Needed:
    """Returns the part of a pool that a prefix needs. Raises ValueError for a rule that is not known."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return Needed(pool)
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return Needed(pool, max(1, len(transfer.keys or ())))
    raise ValueError(f"the hit policy of {pool} is unknown: {transfer.hit_policy}")
