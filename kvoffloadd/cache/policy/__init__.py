"""Eviction policies (LRU, S3-FIFO, hit density) by name."""

from __future__ import annotations

from collections.abc import Callable

from kvoffloadd.cache.policy.base import Clock, Policy
from kvoffloadd.cache.policy.hitdensity import HitDensityPolicy
from kvoffloadd.cache.policy.lru import Lru
from kvoffloadd.cache.policy.s3fifo import S3Fifo
from kvoffloadd.errors import ConfigError

POLICIES: dict[str, Callable[[int, int, Clock | None], Policy]] = {
    "hit-density": HitDensityPolicy,
    "lru": Lru,
    "s3-fifo": S3Fifo,
}
"""Name to constructor: `(capacity_rows, max_rows, clock)`."""

DEFAULT_POLICY = "hit-density"
"""The policy with the most hits on the traces in docs/benchmarks/policies.md."""


def create_policy(name: str, capacity_rows: int, max_rows: int, clock: Clock | None = None) -> Policy:
    """Returns a policy without rows. `capacity_rows`: the expected number of rows; `max_rows`: row numbers are below
    it; `clock`: shared with the policies that its keys are compared with.
    """
    try:
        make = POLICIES[name]
    except KeyError:
        raise ConfigError(f"memory.policy: {name!r} is not one of {', '.join(sorted(POLICIES))}") from None
    return make(capacity_rows, max_rows, clock)
