"""The miss-ratio curve of one workload: what caches of other sizes would have hit of the same requests.

Each size is simulated in miniature, with the policy that really runs: Waldspurger et al., "Cache Modeling and
Optimization using Miniature Simulations" (2017), with the sampling of SHARDS (2015).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.curve.heavy import HeavyKeys
from kvoffloadd.cache.curve.miniature import PORTIONS, ROWS, Miniature
from kvoffloadd.cache.curve.prompt import AskedKeys, measuring
from kvoffloadd.cache.policy.base import Policy

TIMES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""The sizes of memory, as multiples of today's."""

DISK_TIMES = (1.0, 2.0)
"""The sizes of the disk, as multiples of today's."""

REFERENCES_MIN = 2000
"""The number of sampled references without which there is no estimate."""

ERROR_MAX = 0.025
"""The standard error above which there is no estimate."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Says what a cache of this size would have hit. `hit_ratio`: the share of the tokens asked for that it could have
    restored; None: too little was seen. `error`: the standard error of that from sampling. `filled`: whether it was
    ever full; otherwise a larger one would have had the same hits. `rate`: the share of all keys in the sample.
    """

    memory_bytes: int
    disk_bytes: int
    hit_ratio: float | None
    error: float
    filled: bool
    rate: float


class Curve:
    """Runs a miniature for each size. Not safe for threads."""

    def __init__(
        self,
        make_policy: Callable[[int, int], Policy],
        memory_bytes: int,
        disk_bytes: int = 0,
        *,
        times: Sequence[float] = TIMES,
        rows_max: int = ROWS,
    ) -> None:
        """`make_policy`: as `create_policy`, from `(capacity_rows, max_rows)`, with a new clock each time."""
        sizes = [(round(many * memory_bytes), 0) for many in times]
        if disk_bytes:
            sizes += [(memory_bytes, round(many * disk_bytes)) for many in DISK_TIMES]
        self._miniatures = [Miniature(make_policy, memory, disk, rows_max) for memory, disk in sizes]
        self._heavy = HeavyKeys()
        self._heavy_key_bytes = 0
        # The first prompts wait until it is known which keys are heavy, with what was done with each.
        self._early: list[tuple[Sequence[AskedKeys], bool]] | None = []

    def ask(self, groups: Sequence[AskedKeys]) -> None:
        """Counts a lookup of a prompt's keys."""
        at = measuring(groups)
        before = self._heavy.keys
        if self._heavy.count(groups[at].hashes):
            self._heavy_key_bytes = sum(group.key_bytes for group in groups)
            self._leave_out(before)
        if self._early is None:
            self._ask(groups)
            return
        self._early.append((groups, False))
        if self._heavy.has_judged:
            self._catch_up()

    def store(self, groups: Sequence[AskedKeys]) -> None:
        """Stores a prompt's keys, as far as they are not held."""
        if self._early is None:
            self._store(groups)
        else:
            self._early.append((groups, True))

    def _catch_up(self) -> None:
        early, self._early = self._early or [], None
        for groups, stored in early:
            (self._store if stored else self._ask)(groups)

    def _ask(self, groups: Sequence[AskedKeys]) -> None:
        heavy = [self._heavy.among(group.hashes) for group in groups]
        for miniature in self._miniatures:
            miniature.ask(groups, heavy)

    def _store(self, groups: Sequence[AskedKeys]) -> None:
        heavy = [self._heavy.among(group.hashes) for group in groups]
        for miniature in self._miniatures:
            miniature.store(groups, heavy)

    def fade(self, share: float) -> None:
        """Leaves this share of all counts, so that what is seen from now on weighs more."""
        self._catch_up()
        for miniature in self._miniatures:
            miniature.tally.fade(share)

    def estimates(self) -> list[Estimate]:
        """Returns an estimate for each size: memory alone, ascending, then memory with disk."""
        self._catch_up()
        return [_estimate(miniature) for miniature in self._miniatures]

    def _leave_out(self, before: frozenset[int]) -> None:
        heavy_bytes = len(self._heavy.keys) * self._heavy_key_bytes
        new = self._heavy.keys - before
        for miniature in self._miniatures:
            miniature.leave_out(new, heavy_bytes)


def _estimate(miniature: Miniature) -> Estimate:
    tally, rate = miniature.tally, miniature.rate
    ratio, error = None, 1.0
    asked = float(tally.asked.sum())
    if asked and tally.total:
        share = float(tally.hit.sum()) / asked
        light = 1 - tally.exact / tally.total
        spread = tally.hit - share * tally.asked
        # Portions of a sample that has all keys differ, too, but nothing is left to chance.
        error = light * np.sqrt((1 - rate) * PORTIONS / (PORTIONS - 1) * float(spread @ spread)) / asked
        if (tally.references >= REFERENCES_MIN or rate == 1) and error <= ERROR_MAX:
            ratio = tally.exact / tally.total + light * share
    return Estimate(miniature.memory_bytes, miniature.disk_bytes, ratio, float(error), miniature.filled, rate)
