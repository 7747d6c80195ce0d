"""Those who share a cache in a replay: as which user each connects, and how large the payloads of its keys are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.client import GroupKind, NamespaceSpec
from kvoffloadd.model import PAGE_BYTES, BoolArray, GroupSchema, I64Array, U8Array, slot_pages
from kvoffloadd.testing.figures import KEY_BYTES, keys_of
from kvoffloadd.testing.oracle import digest
from scripts.harness.geometry import Geometry
from scripts.harness.groupshape import GroupShape, RefShape

BLOCK_TOKENS = 512
OTHER_UID = 62_000
"""The second tenant's user, where root runs this. The third one's is the next, and so on."""


@dataclass(frozen=True, slots=True)
class RankCache:
    """One rank's KV cache: `tensors` layer slots, in each `token_bytes` of K and V per token. `windows`: of each
    group that shares them, the tokens of its sliding window; 0: full attention.
    """

    tensors: int
    token_bytes: int
    windows: tuple[int, ...]


MODELS = {
    "llama-3.1-8b": RankCache(tensors=32, token_bytes=2 * 8 * 128 * 2, windows=(0,)),
    "gpt-oss-20b": RankCache(tensors=12, token_bytes=2 * 8 * 64 * 2, windows=(0, 128)),
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user of the cache, with one model. Its blocks are those of the trace."""

    number: int
    uid: int
    geometry: Geometry

    @property
    def namespace(self) -> NamespaceSpec:
        """The namespace that its workers name."""
        return NamespaceSpec(model=f"replay-{self.number}", key_bytes=KEY_BYTES)

    @property
    def payload_bytes(self) -> int:
        """The payload of a key; all groups have the same."""
        return self.geometry.groups[0].payload_bytes(0)

    @property
    def slot_bytes(self) -> int:
        """What a key takes in the arena."""
        return slot_pages(self.payload_bytes) * PAGE_BYTES

    @property
    def block_bytes(self) -> int:
        """What the keys of a block take."""
        return len(self.geometry.groups) * self.slot_bytes

    @property
    def schemas(self) -> list[GroupSchema]:
        """What is agreed on of each group."""
        return [
            GroupSchema(group.number, group.kind, group.tokens_per_key, group.window_keys, group.blocks_per_key)
            for group in self.geometry.groups
        ]

    def prefix(self, usable: Sequence[BoolArray]) -> int:
        """The longest prefix, in blocks, that all groups can serve. `usable`: which keys of each group."""
        groups = self.geometry.groups
        for length in range(len(usable[0]), 0, -1):
            if all(usable[group.number][group.first_needed(length) : length].all() for group in groups):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in their order, and the number of each one's tenant."""

    requests: list[I64Array]
    whose: I64Array
    tenants: list[Tenant]

    def requests_of(self, number: int) -> list[I64Array]:
        """A tenant's own."""
        return [self.requests[at] for at in np.flatnonzero(self.whose == number)]


def tenants_of(model: RankCache, scale: float | None, sizes: Sequence[int], count: int) -> list[Tenant]:
    """Makes `count` tenants with a model scaled down. Under root each but the first is another user.

    `scale`: of the rows, 1 is the real size; None: as large as one slot of 4 KiB takes. `sizes`: how many times as
    large those of each tenant are, round and round.
    """
    real, uid = model.token_bytes * BLOCK_TOKENS, os.getuid()
    page_bytes = PAGE_BYTES // model.tensors if scale is None else max(1, round(real * scale))
    return [
        Tenant(number, OTHER_UID + number - 1 if number and not uid else uid, _geometry(model, page_bytes * size))
        for number, size in zip(range(count), [*sizes] * count, strict=False)
    ]


def _geometry(model: RankCache, page_bytes: int) -> Geometry:
    refs = (tuple(RefShape(tensor, page_bytes) for tensor in range(model.tensors)),)
    # A window's keys hold its last `window - 1` tokens.
    groups = tuple(
        GroupShape(number, GroupKind.SLIDING, BLOCK_TOKENS, -(-(window - 1) // BLOCK_TOKENS), 1, refs, (0,))
        if window
        else GroupShape(number, GroupKind.FULL, BLOCK_TOKENS, 0, 1, refs, (0,))
        for number, window in enumerate(model.windows)
    )
    return Geometry("replay", 0, KEY_BYTES, 1, model.tensors, True, groups)


def keys_of_blocks(ids: I64Array, seed: int) -> U8Array:
    """u8 (n, KEY_BYTES): the keys of a trace's blocks."""
    return keys_of(ids, digest(seed, 1))
