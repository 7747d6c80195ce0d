"""Eviction policies by name."""

from __future__ import annotations

from kvoffloadd.cache.policy.interim import Interim

POLICIES = {"lru": lambda capacity_rows, max_rows: Interim()}
DEFAULT_POLICY = "lru"


def create_policy(name: str, capacity_rows: int, max_rows: int) -> Interim:
    """The policy."""
    return POLICIES[name](capacity_rows, max_rows)
