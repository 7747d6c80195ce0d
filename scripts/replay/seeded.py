"""`python -m scripts.replay.seeded serve ...`: the daemon, with the secret of its hashes from the environment.

What keys displace each other in the ghost tables of eviction is luck, another one in each run of a daemon. With the
same secret, a simulator has the same luck.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from kvoffloadd import daemon
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.cli import main
from kvoffloadd.storage.memory import MemoryTier

VARIABLE = "KVO_SEED"
PROGRAM = ("-m", "scripts.replay.seeded")


class _SeededCache(Cache):
    def __init__(self, tier: MemoryTier, make_policy: Callable[[int, int], Policy], seed: int) -> None:
        super().__init__(tier, make_policy, int(os.environ[VARIABLE]))


if __name__ == "__main__":
    daemon.Cache = _SeededCache  # type: ignore[attr-defined]
    sys.exit(main())
