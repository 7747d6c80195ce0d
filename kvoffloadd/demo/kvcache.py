"""The KV cache of the demo's workers: an engine without a model, in shared memory, with known contents."""

from __future__ import annotations

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, Registration, SharedTensor
from kvoffloadd.model import I64Array, U8Array
from kvoffloadd.testing.oracle import Oracle

MODEL = "gpt-oss-20b"
"""12 layers of full and 12 of sliding attention; here with 2 of its 8 KV heads."""
LAYERS, KV_HEADS, HEAD_DIM, ITEM_BYTES = 12, 2, 64, 2
TOKENS_PER_KEY = 16
WINDOW_KEYS = 128 // TOKENS_PER_KEY
PAGE_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * ITEM_BYTES * TOKENS_PER_KEY
"""Bytes of a block in one group: K and V of all its layers."""
GROUPS = (0, 1)
"""Full attention, sliding attention."""
CACHE_TOKENS = 4608
"""Enough for the longest conversation."""
GUARD_BLOCKS = 4
"""Blocks after the others, which are never named to the daemon."""

_EMPTY, _GUARD = 0xA5, 0x5A


def namespace(seed: int) -> NamespaceSpec:
    """Returns the namespace of the workers that may share keys."""
    return NamespaceSpec(model=MODEL, revision=f"seed {seed}", dtype="bfloat16", layout="cross-layer", key_bytes=32)


def bytes_of(tokens: int) -> int:
    """Returns the bytes that this number of tokens takes in all groups."""
    return len(GROUPS) * (tokens // TOKENS_PER_KEY) * PAGE_BYTES


def first_needed(group: int, keys: int) -> int:
    """Returns the first of these keys that an engine reads to continue."""
    return 0 if group == 0 else max(0, keys - WINDOW_KEYS)


class WorkerCache:
    """One tensor for each group, registered with the daemon. Block n of each group has the n-th key of a prompt."""

    def __init__(self, client: Client, oracle: Oracle, memory_name: str) -> None:
        blocks = CACHE_TOKENS // TOKENS_PER_KEY
        self._oracle = oracle
        self._blocks = blocks
        self._tensors = [
            SharedTensor.allocate(blocks + GUARD_BLOCKS, PAGE_BYTES, name=f"{memory_name}{group}") for group in GROUPS
        ]
        for tensor in self._tensors:
            tensor.array[blocks:] = _GUARD
        kinds = (GroupKind.FULL, GroupKind.SLIDING)
        groups = [
            Group(number, kind, TOKENS_PER_KEY, [Ref(number, 0, PAGE_BYTES)], window_keys=WINDOW_KEYS * number)
            for number, kind in zip(GROUPS, kinds, strict=True)
        ]
        self.registration: Registration = client.register(KvCache(self._tensors, groups))

    def compute(self, group: int, keys: U8Array, blocks: I64Array) -> None:
        """Stands in for a model: fills the blocks with the contents that belong to the keys."""
        self._tensors[group].array[blocks] = self._oracle.contents(group, 0, keys, PAGE_BYTES)

    def forget(self, group: int) -> None:
        """Overwrites the remains of the turn before, which must not look like loaded bytes."""
        self._tensors[group].array[: self._blocks] = _EMPTY

    def wrong_bytes(self, group: int, keys: U8Array, blocks: I64Array) -> int:
        """Counts the bytes of these blocks that are not those of the keys."""
        return int((self._tensors[group].array[blocks] != self._oracle.contents(group, 0, keys, PAGE_BYTES)).sum())

    def stray_bytes(self, group: int, blocks: I64Array) -> int:
        """Counts the bytes of all other blocks that were written since `forget`."""
        array = self._tensors[group].array
        others = np.ones(self._blocks, bool)
        others[blocks] = False
        return int((array[: self._blocks][others] != _EMPTY).sum()) + int((array[self._blocks :] != _GUARD).sum())
