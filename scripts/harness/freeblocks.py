"""Blocks of a KV cache that are not in use."""

from __future__ import annotations

import numpy as np

from kvoffloadd.model import I64Array


class FreeBlocks:
    """All blocks at first, in an order drawn at random."""

    def __init__(self, blocks: int, rng: np.random.Generator) -> None:
        self._blocks = rng.permutation(blocks)
        self._count = blocks

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> I64Array:
        """Takes `count` blocks. The caller has made sure that there are enough."""
        self._count -= count
        return self._blocks[self._count : self._count + count].copy()

    def give(self, blocks: I64Array) -> None:
        """They are free again; what they hold stays, and is still compared."""
        self._blocks[self._count : self._count + len(blocks)] = blocks
        self._count += len(blocks)
