"""What the KV of a prompt is: bytes that show where they belong, so that each block that comes back can be judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scripts.peers.system import I64Array, ModelGeometry, Prompt, U8Array

SCRAMBLED = 0xA5
NEEDLE_BYTES = 64
_WORD = 8


class Content:
    """Makes the content of blocks: a row of random words of this geometry, each combined with a number of prompt, block
    and layer.
    """

    def __init__(self, geometry: ModelGeometry) -> None:
        self._geometry = geometry
        rng = np.random.default_rng(geometry.block_bytes)
        self._row = rng.integers(0, 1 << 63, geometry.block_bytes // _WORD, np.uint64)

    def write(self, memory: Sequence[U8Array], prompt: Prompt, blocks: I64Array) -> None:
        """The whole prompt, into these blocks."""
        for layer, array in enumerate(memory):
            array.view(np.uint64)[blocks] = self._of(prompt, np.arange(len(blocks)), layer)

    def wrong(self, memory: Sequence[U8Array], prompt: Prompt, blocks: I64Array) -> int:
        """How many of these blocks, which should hold the prompt's first ones, differ in any byte of any layer."""
        good = np.ones(len(blocks), np.bool_)
        for layer, array in enumerate(memory):
            expected = self._of(prompt, np.arange(len(blocks)), layer)
            good &= (array.view(np.uint64)[blocks] == expected).all(axis=1)
        return int(len(blocks) - good.sum())

    def scramble(self, memory: Sequence[U8Array]) -> None:
        """No block holds anything of a prompt any more."""
        for array in memory:
            array.fill(SCRAMBLED)

    def needle(self, prompt: Prompt, chunk: int) -> bytes:
        """Bytes that only this chunk of this prompt has, within one token's K of its first block in the first layer."""
        first = chunk * self._geometry.chunk_blocks
        return bytes(self._of(prompt, np.array([first]), 0)[0].tobytes()[:NEEDLE_BYTES])

    def _of(self, prompt: Prompt, blocks: I64Array, layer: int) -> np.ndarray:
        """u64 (blocks, words)."""
        stamp = (np.uint64(prompt.number) << np.uint64(40)) | (blocks.astype(np.uint64) << np.uint64(16))
        stamp = (stamp | np.uint64(layer)) * np.uint64(0x9E3779B97F4A7C15)
        words: np.ndarray = self._row[None, :] ^ stamp[:, None]
        return words
