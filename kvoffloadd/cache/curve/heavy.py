"""Finds the few keys that take more than their share of all references: chance must not decide about them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvoffloadd.model import BoolArray, U64Array

SHARE = 0.001
"""The share of all references above which a key is heavy."""

COUNTED_MAX = 8192
"""The number of keys counted at a time: eight for each that can be heavy."""

JUDGED_FIRST, JUDGED_EVERY = 1 << 12, 1 << 16
"""The number of references after which keys are judged for the first time, and from one time to the next."""


class HeavyKeys:
    """Counts references by the algorithm of Misra and Gries: a key with more than 1 / COUNTED_MAX of them is never
    missed. Older references count half each time that keys are judged.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0.0
        self._next = float(JUDGED_FIRST)
        self.keys: frozenset[int] = frozenset()
        """The hashes of the keys that are heavy now."""
        self.has_judged = False
        self._sorted = np.zeros(0, np.uint64)

    def count(self, hashes: U64Array) -> bool:
        """Counts a reference of each of these keys. Returns whether `keys` has changed."""
        self._counts.update(hashes.tolist())
        self._total += len(hashes)
        if len(self._counts) > COUNTED_MAX:
            self._forget()
        if self._total < self._next:
            return False
        return self._judge()

    def among(self, hashes: U64Array) -> BoolArray:
        """Returns which of these keys are heavy."""
        if not len(self._sorted):
            return np.zeros(len(hashes), bool)
        places = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        found: BoolArray = self._sorted[places] == hashes
        return found

    def _forget(self) -> None:
        """Takes from each key what leaves half of the table, as if as many other keys had cancelled it out."""
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        less = float(np.partition(counts, COUNTED_MAX // 2)[COUNTED_MAX // 2])
        self._counts = Counter({key: count - less for key, count in self._counts.items() if count > less})

    def _judge(self) -> bool:
        before, self.has_judged = self.keys, True
        least = SHARE * self._total
        # Half as much keeps a key where it is: one at the limit does not go to and fro.
        stay = {key for key in before if self._counts[key] > least / 2}
        self.keys = frozenset(stay.union(key for key, count in self._counts.items() if count > least))
        self._sorted = np.sort(np.array(list(self.keys), np.uint64))
        if self._total >= JUDGED_EVERY:
            self._counts = Counter({key: count / 2 for key, count in self._counts.items()})
            self._total /= 2
        self._next = min(2 * self._total, max(self._total + JUDGED_EVERY / 2, JUDGED_EVERY))
        return self.keys != before
