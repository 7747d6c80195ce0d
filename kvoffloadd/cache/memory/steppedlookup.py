"""Finds keys in steps: a search for very many keys lets the event loop serve other requests in between.

Rows that are found are held until the end, so that they are neither evicted nor given to other keys in the meantime. A
clear may remove such keys; then they count as not found. Keys without committed parts are not held, since such a row
can lose all its slots, and there are only as many rows as there can be slots. Keys that their user may not hold (see
`HeldMemory`) are not held either, or endless requests would keep other users from all memory. Both kinds are looked up
again at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvoffloadd.cache.memory.cache import NO_ROWS, Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array
from kvoffloadd.scheduling.steps import Steps

STEP_KEYS = 1 << 14
"""The number of keys that one step finds: a millisecond, or two if the table is large."""

GROUP_KEYS = 64
"""The cost of a group in addition to its keys, as a number of keys."""

_ANEW = np.int64(-2)
"""Stands for the row of a key that must be looked up again."""


def find_in_steps(cache: Cache, groups: Sequence[tuple[Keyspace, U64Array]]) -> Steps[list[LookupResult]]:
    """Looks up keys as `Cache.find_all`, in steps. The result holds nothing, and is valid until the loop turns."""
    if sum(len(keys) for _, keys in groups) <= STEP_KEYS:
        return cache.find_all(groups)
    with changing:
        finding = SteppedLookup(cache, groups)
        cache.unfinished.add(finding)
        try:
            yield from finding.steps()
            return finding.results()
        finally:
            cache.unfinished.discard(finding)
            finding.release()


class SteppedLookup:
    """Finds the keys of `groups`: keyspaces, and keys of each. Run `steps` to the end for `rows` and `results`; always
    call `release`.
    """

    def __init__(self, cache: Cache, groups: Sequence[tuple[Keyspace, U64Array]]) -> None:
        self._cache = cache
        self._groups = groups
        self._found: list[list[I64Array]] = [[] for _ in groups]
        self._uid = groups[0][0].namespace.uid if groups else None
        self._held: list[U32Array] = []
        self.pages = 0  # of keys that were not held before

    @property
    def num_reserved(self) -> int:
        """Returns 0: a lookup reserves nothing."""
        return 0

    @property
    def num_held(self) -> int:
        """Returns how often rows are held now."""
        return sum(map(len, self._held))

    def steps(self) -> Iterator[None]:
        """Finds some keys in each step."""
        room = STEP_KEYS
        for found, (keyspace, keys) in zip(self._found, self._groups, strict=True):
            begin = 0
            while begin < len(keys):
                end = min(len(keys), begin + room)
                rows = self._cache.entries.find(keyspace, keys[begin:end])
                found.append(np.where(self.hold(rows), rows, np.where(rows < 0, rows, _ANEW)))
                begin, room = end, room - (end - begin) - GROUP_KEYS
                if room <= 0:
                    yield
                    room = STEP_KEYS
        if room < STEP_KEYS:
            yield

    def hold(self, rows: I64Array) -> BoolArray:
        """Holds those of these rows that have committed parts, as far as their user may hold them. Returns which."""
        kept = rows >= 0
        kept[kept] = self._cache.entries.has_committed(rows[kept])
        if self._uid is not None:
            kept[kept] = self._cache.may_hold(self._uid, rows[kept].astype(np.uint32))
        held = rows[kept].astype(np.uint32)
        self.pages += self._cache.entries.unheld_pages(held)
        self._cache.hold(held)
        self._held.append(held)
        return kept

    def rows(self) -> list[I64Array]:
        """Returns the row of each key, or -1, by group. Rows that are not held are valid until the loop turns."""
        none, found = np.zeros(0, np.int64), list[I64Array]()
        for (keyspace, keys), pieces in zip(self._groups, self._found, strict=True):
            rows = np.concatenate([none, *pieces])
            live = (self._cache.entries.state[rows] == RowState.LIVE) & (not keyspace.retired)
            anew = np.flatnonzero(rows == _ANEW)
            rows = np.where(live & (rows >= 0), rows, np.int64(-1))
            rows[anew] = self._cache.entries.find(keyspace, keys[anew])
            found.append(rows)
        return found

    def results(self) -> list[LookupResult]:
        """Returns the current result of `Cache.find_all` for the groups."""
        return self._cache.results(
            [(keyspace, rows) for (keyspace, _), rows in zip(self._groups, self.rows(), strict=True)]
        )

    def release(self) -> None:
        """Ends all holds."""
        held, self._held, self.pages = self._held, [], 0
        self._cache.unhold(np.concatenate([NO_ROWS, *held]))
