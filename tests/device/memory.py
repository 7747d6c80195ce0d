"""Memory with known bytes, for tests that copy between addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvoffloadd.device.plan import Copies
from kvoffloadd.device.work import Piece
from kvoffloadd.model import Direction, U8Array, U64Array


class Made:
    """Work whose copies are made already: a `base.Work`."""

    small = True

    def __init__(self, copies: Copies) -> None:
        self.total_bytes = copies.total_bytes
        self.descriptors = copies.descriptors
        self._copies = copies

    def pieces(self, most_descriptors: int, most_bytes: int) -> Iterator[Piece]:
        """One: all of it."""
        yield Piece(0, 0, most_descriptors, 0, most_bytes)

    def make(self, direction: Direction, piece: Piece) -> Copies:
        """All of it, whatever the piece."""
        del direction, piece
        return self._copies

    def make_all(self, direction: Direction) -> Copies:
        """All of it."""
        del direction
        return self._copies

    def hashed(self, most_descriptors: int, most_bytes: int) -> None:
        """Copies without payloads."""
        del most_descriptors, most_bytes


def noise(size_bytes: int, seed: int = 0) -> U8Array:
    """Bytes in which no two places look alike."""
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
