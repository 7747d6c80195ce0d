"""How many hits a slot earns per unit of time, learned per class of key and age."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffloadd.model import BoolArray, I64Array, U32Array

NUM_BUCKETS = 64
"""Ages are told apart by half powers of two; these cover 32 bits."""

WINDOW_SLOTS = 1 << 16
"""Keys observed at a time. More would sharpen the estimates a little and make `refresh` slower."""

REFRESH_EVENTS_MIN, REFRESH_EVENTS_MAX = 256, 8192

# What is believed before anything was seen, and in ages where nothing is ever seen: in each bucket one key of twenty
# comes back, whatever its class. That falls as 1 / age, so that the order is LRU until there is evidence. The weights
# are in keys: how many must be seen to count as much as the belief, and as what all classes together show.
PRIOR_RETURNS = 0.05
PRIOR_WEIGHT = 500.0
POOLED_WEIGHT = 20.0

_EDGES = 2.0 ** (np.arange(NUM_BUCKETS + 1) / 2)
_LATER = np.triu(np.ones((NUM_BUCKETS, NUM_BUCKETS + 1), np.bool_), 1)
_MANTISSA_BITS, _EXPONENT_BIAS = 52, 1023  # of a float64


def bucket(age: int) -> int:
    """The bucket of an age below 2**32: two buckets per power of two."""
    return max(1, age * age).bit_length() - 1


class HitDensity:
    """Watches a sample of keys and estimates, for each class and age, the hits that keeping such a key is worth.

    A watched slot holds the class and time of its key's last use. The key's return is a hit at some age; being
    overwritten by another key, and waiting still, say only that it did not return until now. These give the share of
    keys that return at each age (a life table, with the keys lost from sight counted as far as they were seen), and
    that gives the density: the best ratio, over all times one might keep the key for, of the chance of a hit within
    that time to the slot time spent until then. Old observations fade: after as many uses of watched keys as the
    window has slots they count half.
    """

    def __init__(self, num_classes: int) -> None:
        # By whether the key came back (1) or was lost from sight (0), by class + 1, and by the bucket of its age then.
        # What is counted for class + 1 = 0, the slots where no key was watched, means nothing.
        self._ends = np.zeros((2, num_classes + 1, NUM_BUCKETS))
        self._events = 0
        self._events_refreshed = 0
        self.forget_window()
        self.refresh(0)

    def forget_window(self) -> None:
        """Stop watching the keys of now; what was learned stays."""
        self._code = np.zeros(WINDOW_SLOTS, np.uint8)  # class + 1; 0 = nothing watched
        self._stamp = np.zeros(WINDOW_SLOTS, np.uint32)

    def record(self, slots: U32Array, known: BoolArray, classes: npt.NDArray[np.uint8], now: int | U32Array) -> None:
        """Keys were used at `now` (all, or each), and are of these classes from now on.

        Slots beyond the window are not watched. `known`: the slot is the key's own from an earlier use.
        """
        watched = np.flatnonzero(slots < WINDOW_SLOTS)
        if len(watched) < len(slots):
            if not len(watched):
                return
            slots, known, classes = slots[watched], known[watched], classes[watched]
            now = now[watched] if isinstance(now, np.ndarray) else now
        cells = self._cells(slots, now) + known * (self._ends.size // 2)
        np.add.at(self._ends.reshape(-1), cells, 1.0)
        self._code[slots] = classes + np.uint8(1)
        self._stamp[slots] = now
        self._events += len(slots)
        due = self._events_refreshed + min(max(self._events // 4, REFRESH_EVENTS_MIN), REFRESH_EVENTS_MAX)
        if self._events >= due:
            self.refresh(int(now[-1]) if isinstance(now, np.ndarray) else now)

    def density(self, key_class: int, age: int) -> float:
        """Hits per unit of time that a slot earns with such a key; comparable between classes and ages."""
        return self._density[key_class][bucket(age)]

    def refresh(self, now: int) -> None:
        """Work the densities out anew; takes about 1 ms, whatever the capacity."""
        fade = 0.5 ** ((self._events - self._events_refreshed) / WINDOW_SLOTS)
        self._events_refreshed = self._events
        self._ends *= fade
        waiting = self._cells(slice(None), now)
        counts = np.bincount(waiting, minlength=self._ends.size // 2).reshape(self._ends[0].shape)
        hits, unreturned = self._ends[1, 1:], (self._ends[0] + counts)[1:]
        self._density: list[list[float]] = _densities(_returns(hits, unreturned)).tolist()

    def _cells(self, slots: U32Array | slice, now: int | U32Array) -> I64Array:
        """Class + 1 and age of what is watched in these slots, as an index into one half of `_ends`."""
        ages = np.maximum(np.uint32(now) - self._stamp[slots], 1).astype(np.float64)
        ages *= ages
        # The exponent of the square, as in `bucket`: exact, where a logarithm may round across an edge.
        buckets: I64Array = (ages.view(np.int64) >> _MANTISSA_BITS) - _EXPONENT_BIAS
        return buckets + self._code[slots] * np.int64(NUM_BUCKETS)


def _returns(hits: npt.NDArray[np.float64], unreturned: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The share of keys which return in each bucket of age, of those that reach it; by class.

    `unreturned`: keys that were seen up to this age, and had not come back.
    """
    ended = hits + unreturned
    older = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    at_risk = older + hits + unreturned / 2
    pooled = (hits.sum(0) + PRIOR_WEIGHT * PRIOR_RETURNS) / (at_risk.sum(0) + PRIOR_WEIGHT)
    return np.asarray((hits + POOLED_WEIGHT * pooled) / (at_risk + POOLED_WEIGHT))


def _densities(returns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    ones = np.ones((len(returns), 1))
    absent = np.concatenate((ones, np.cumprod(1 - returns, axis=1)), axis=1)  # not returned up to each edge
    slot_time = np.diff(_EDGES) * (absent[:, :-1] + absent[:, 1:]) / 2
    spent = np.concatenate((0 * ones, np.cumsum(slot_time, axis=1)), axis=1)
    hits = absent[:, :-1, None] - absent[:, None, :]
    cost = spent[:, None, :] - spent[:, :-1, None]
    ratio = np.divide(hits, cost, out=np.zeros_like(hits), where=_LATER & (cost > 0))
    return np.asarray(ratio.max(axis=2))
