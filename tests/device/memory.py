"""Memory with known bytes, for tests that copy between addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffloadd.model import U8Array, U64Array


def noise(size_bytes: int, seed: int = 0) -> U8Array:
    """Bytes of which no two places look alike."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def address(memory: U8Array) -> int:
    """Where an array's first byte is."""
    return int(memory.ctypes.data)


def u64(values: Sequence[int]) -> U64Array:
    """A u64 array of some integers."""
    return np.array(values, np.uint64)


def same_array(left: U64Array, right: Sequence[int]) -> bool:
    """Whether a u64 array holds these integers."""
    return left.dtype == np.uint64 and left.tolist() == list(right)
