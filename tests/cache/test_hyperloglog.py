"""The estimate of how many different hashes there were."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffloadd.cache.stats.hyperloglog import HyperLogLog


def test_nothing_is_nothing() -> None:
    assert HyperLogLog().estimate() == 0


@pytest.mark.parametrize("count", [1, 10, 1000, 30_000, 100_000, 1_000_000])
def test_an_estimate_is_within_five_standard_errors(count: int, seed: int) -> None:
    hashes = np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)
    sketch = HyperLogLog()
    for piece in np.array_split(hashes, 7):
        sketch.add(piece)
    # Of ten hashes two share a register once in 700 times, and then count as one.
    assert sketch.estimate() == pytest.approx(count, rel=5 * 0.0057, abs=1.5 if count > 1 else 0.5)


def test_what_comes_again_changes_nothing(seed: int) -> None:
    hashes = np.random.default_rng(seed).integers(0, 1 << 64, 5000, dtype=np.uint64)
    sketch = HyperLogLog()
    sketch.add(hashes)
    before = sketch.estimate()
    sketch.add(hashes[::-1])
    sketch.add(hashes[:0])
    assert sketch.estimate() == before


def test_extreme_hashes_are_taken() -> None:
    sketch = HyperLogLog()
    sketch.add(np.array([0, (1 << 64) - 1, 1 << 63], np.uint64))
    assert sketch.estimate() == pytest.approx(3, abs=0.01)
