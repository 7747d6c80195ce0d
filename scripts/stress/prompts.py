"""What the workers of a namespace ask for: prompts of conversations, some of them popular, as their keys."""

from __future__ import annotations

import numpy as np

from kvoffloadd.model import U8Array
from kvoffloadd.testing.oracle import Oracle
from scripts.harness.geometry import BLOCK_TOKENS, Geometry
from scripts.harness.groupshape import GroupShape

ROOTS = 4
"""Conversations share one of this many beginnings."""
ROOT_TOKENS = 4 * BLOCK_TOKENS
ZIPF = 0.7


class Prompts:
    """Popular conversations come often; each one's length varies, so that prompts extend others."""

    def __init__(self, rng: np.random.Generator, oracle: Oracle, geometry: Geometry, conversations: int) -> None:
        self._rng = rng
        self._oracle = oracle
        self._geometry = geometry
        self._weights = np.cumsum(1.0 / np.arange(1, conversations + 1) ** ZIPF)

    def _draw(self) -> tuple[int, int]:
        """A conversation, and of how many tokens of it the prompt is."""
        draw = self._rng.random() * self._weights[-1]
        blocks = int(self._rng.integers(1, self._geometry.prompt_tokens // BLOCK_TOKENS + 1))
        return int(np.searchsorted(self._weights, draw)), blocks * BLOCK_TOKENS

    def keys(self, group: GroupShape) -> U8Array:
        """All keys of a prompt in a group."""
        return self._keys(group, *self._draw())

    def all_keys(self) -> dict[int, U8Array]:
        """All keys of a prompt, by group."""
        conversation, tokens = self._draw()
        return {group.number: self._keys(group, conversation, tokens) for group in self._geometry.groups}

    def _keys(self, group: GroupShape, conversation: int, tokens: int) -> U8Array:
        return self._oracle.keys(conversation, group.tokens_per_key, tokens // group.tokens_per_key)
