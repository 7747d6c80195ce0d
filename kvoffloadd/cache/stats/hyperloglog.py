"""A HyperLogLog sketch: the number of different keys, to half a percent, in 32 KiB.

The estimator is Ertl's (2017), which needs neither a correction for small numbers nor a table.
"""

from __future__ import annotations

import math

import numpy as np

from kvoffloadd.model import U8Array, U64Array

_BITS = 15
_REGISTERS = 1 << _BITS
_RANK_MAX = 64 - _BITS + 1
_GUARD = np.uint64(1 << (_BITS - 1))  # a hash whose other bits are all 0 has the highest rank


class HyperLogLog:
    """The sketch. It never forgets."""

    def __init__(self) -> None:
        self._ranks: U8Array = np.zeros(_REGISTERS, np.uint8)
        self._estimate: float | None = 0.0  # None: keys were added, and the estimate is out of date

    def add(self, hashes: U64Array) -> None:
        """Adds hashes in which every bit counts."""
        register = (hashes >> np.uint64(64 - _BITS)).astype(np.intp)
        rest = (hashes << np.uint64(_BITS)) | _GUARD
        # The exponent of a float counts the leading zeros of a word.
        ranks = (65 - np.frexp(rest.astype(np.float64))[1]).astype(np.uint8)
        np.maximum.at(self._ranks, register, ranks)
        self._estimate = None

    def estimate(self) -> float:
        """Returns how many different hashes were added, with a standard error of 0.57 %."""
        if self._estimate is None:
            self._estimate = self._count()
        return self._estimate

    def _count(self) -> float:
        counts = np.bincount(self._ranks, minlength=_RANK_MAX + 1).tolist()
        if counts[0] == _REGISTERS:
            return 0.0
        z = _REGISTERS * _tau(1 - counts[_RANK_MAX] / _REGISTERS)
        for count in counts[_RANK_MAX - 1 : 0 : -1]:
            z = 0.5 * (z + count)
        z += _REGISTERS * _sigma(counts[0] / _REGISTERS)
        return _REGISTERS * _REGISTERS / (2 * math.log(2) * z)


def _sigma(x: float) -> float:
    """Returns x + sum of x**(2**k) * 2**(k-1), for 0 <= x < 1."""
    y, z, before = 1.0, x, -1.0
    while z != before:
        x *= x
        before = z
        z += x * y
        y += y
    return z


def _tau(x: float) -> float:
    """Returns (1 - x - sum of (1 - x**(2**-k))**2 * 2**-k) / 3, for 0 <= x <= 1."""
    if x in (0.0, 1.0):
        return 0.0
    y, z, before = 1.0, 1 - x, -1.0
    while z != before:
        x = math.sqrt(x)
        before = z
        y *= 0.5
        z -= (1 - x) ** 2 * y
    return z / 3
