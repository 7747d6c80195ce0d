"""Finding very many keys over several turns of the event loop, which serves others in between.

What is found is held until the end, so that it is neither evicted nor given to other keys meanwhile. It may be cleared:
then it counts as not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import I64Array, U32Array, U64Array

STEP_KEYS = 1 << 14
"""Keys that one step finds: a millisecond, or two if the table is large."""


class Finding:
    """`groups`: keyspaces, and keys of each. Run `steps` to the end for `rows` and `results`; `release` it always."""

    def __init__(self, cache: Cache, groups: Sequence[tuple[Keyspace, U64Array]]) -> None:
        self._cache = cache
        self._groups = groups
        self._found: list[list[I64Array]] = [[] for _ in groups]
        self._held: list[U32Array] = []

    @staticmethod
    def is_large(groups: Sequence[tuple[Keyspace, U64Array]]) -> bool:
        """Whether it takes more than one step."""
        return sum(len(keys) for _, keys in groups) > STEP_KEYS

    @property
    def num_held(self) -> int:
        """How often rows are held now."""
        return sum(map(len, self._held))

    def steps(self) -> Iterator[None]:
        """Each finds some keys."""
        for found, (keyspace, keys) in zip(self._found, self._groups, strict=True):
            for begin in range(0, len(keys), STEP_KEYS):
                rows = self._cache.entries.find(keyspace, keys[begin : begin + STEP_KEYS])
                self.hold(rows)
                found.append(rows)
                yield

    def hold(self, rows: I64Array) -> None:
        """Hold these rows, too, but for -1."""
        held = rows[rows >= 0].astype(np.uint32)
        self._cache.hold(held)
        self._held.append(held)

    def rows(self) -> list[I64Array]:
        """Of each group the row of each key, or -1."""
        none, found = np.zeros(0, np.int64), list[I64Array]()
        for (keyspace, _), some in zip(self._groups, self._found, strict=True):
            rows = np.concatenate([none, *some])
            live = (self._cache.entries.state[rows] == RowState.LIVE) & (not keyspace.retired)
            found.append(np.where(live, rows, np.int64(-1)))  # row -1 reads some other row
        return found

    def results(self) -> list[LookupResult]:
        """What `Cache.find_all` says of the groups now."""
        return self._cache.results(self.rows())

    def release(self) -> None:
        """End all holds."""
        held, self._held = self._held, []
        for rows in held:
            self._cache.unhold(rows)
