"""KV cache geometries: what the sessions of a namespace agree on, as a pure function of the seed.

Where the bytes lie in a worker's rows (offsets, gaps, row strides) is no part of it: each worker arranges that itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvoffloadd.client import GroupKind, NamespaceSpec
from scripts.harness.arrangement import RANDOM, Arrangement, Gaps, scattered
from scripts.harness.groupshape import GroupShape, RefShape

BLOCK_TOKENS = 16
REF_BYTES_MAX = 96 << 10
BLOCKS_MIN, BLOCKS_MAX = 64, 1024
"""Of a rank."""
PROMPT_TOKENS = 24 * BLOCK_TOKENS
"""Of a conversation at its longest."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One namespace. `overlaid`: the groups' bytes lie on each other in the same rows, at different block ids."""

    name: str
    number: int
    key_bytes: int
    ranks: int
    tensors: int
    overlaid: bool
    groups: tuple[GroupShape, ...]
    prompt_tokens: int = PROMPT_TOKENS

    @property
    def layouts(self) -> tuple[str, ...]:
        """What `arrange` may be asked for."""
        return (RANDOM,)

    @property
    def step_tokens(self) -> int:
        """Every prefix that can be restored is a multiple of this many tokens."""
        return math.lcm(*(group.tokens_per_key for group in self.groups))

    def arrange(
        self, rank: int, memory_bytes: int, rng: np.random.Generator, *, padded: bool = True, layout: str = ""
    ) -> Arrangement:
        """Tensors of about `memory_bytes` for a rank. `padded`: refs, runs and rows lie apart by random gaps."""
        widest = max(
            sum(ref.payload_bytes for ref in group.parts[group.part_of_rank[rank] or 0]) for group in self.groups
        )
        num_blocks = blocks_in(memory_bytes, widest)
        return scattered(self.groups, self.tensors, rank, num_blocks, Gaps(rng, padded), overlaid=self.overlaid)

    def namespace(self) -> NamespaceSpec:
        """Names the namespace as sessions do."""
        return NamespaceSpec(model=self.name, layout=f"geometry-{self.number}", key_bytes=self.key_bytes)

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a prompt fills in each rank, all groups together, at most."""
        return sum(-(-tokens // group.tokens_per_key) * group.blocks_per_key for group in self.groups)

    def bytes_of(self, tokens: int) -> int:
        """Payload bytes of a prompt, all groups and parts together."""
        return sum(
            tokens // group.tokens_per_key * group.payload_bytes(part)
            for group in self.groups
            for part in range(len(group.parts))
        )


def blocks_in(memory_bytes: int, block_bytes: int) -> int:
    """Returns how many blocks a rank has in about `memory_bytes`."""
    return int(np.clip(memory_bytes // block_bytes, BLOCKS_MIN, BLOCKS_MAX))


def random_geometry(seed: int, number: int) -> Geometry:
    """The geometry of namespace `number`. The first few cover what must not be left to chance."""
    rng = np.random.default_rng([seed, number, 1])
    ranks = 2 if number % 2 else int(rng.integers(1, 3))
    tensors = int(rng.integers(1, 4))
    kinds = [[GroupKind.FULL, GroupKind.SLIDING, GroupKind.MAMBA], [GroupKind.FULL, GroupKind.CHUNKED]][number % 2]
    kinds = [*kinds, *rng.choice(np.array(list(GroupKind)), int(rng.integers(0, 2))).tolist()]
    numbers = rng.permutation(2 * len(kinds))[: len(kinds)].tolist()  # neither in order nor without gaps
    groups = tuple(
        _random_group(rng, int(at), GroupKind(kind), ranks, tensors) for at, kind in zip(numbers, kinds, strict=True)
    )
    key_bytes = 16 if number % 2 else 32
    return Geometry(f"model-{number}", number, key_bytes, ranks, tensors, bool(rng.integers(0, 2)), groups)


def _random_group(rng: np.random.Generator, number: int, kind: GroupKind, ranks: int, tensors: int) -> GroupShape:
    blocks_per_key = int(rng.choice([1, 1, 2, 4]))
    tokens_per_key = BLOCK_TOKENS * (blocks_per_key if kind is not GroupKind.MAMBA else int(rng.choice([1, 2])))
    windowed = kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
    # How two ranks share a group: each has half of it (tensor parallel), both have it all (MLA), or one has none of it.
    held: tuple[tuple[int | None, ...], ...] = ((0,),) if ranks == 1 else ((0, 1), (0, 1), (1, 0), (0, 0), (0, None))
    part_of_rank = held[int(rng.integers(0, len(held)))]
    num_parts = max(part for part in part_of_rank if part is not None) + 1
    return GroupShape(
        number=number,
        kind=kind,
        tokens_per_key=tokens_per_key,
        window_keys=int(rng.integers(1, 7)) if windowed else 0,
        blocks_per_key=blocks_per_key,
        parts=tuple(_random_refs(rng, tensors, blocks_per_key) for _ in range(num_parts)),
        part_of_rank=part_of_rank,
    )


def _random_refs(rng: np.random.Generator, tensors: int, blocks_per_key: int) -> tuple[RefShape, ...]:
    """Mostly one run in each tensor; now and then two refs in a row, heads apart, odd lengths."""
    refs = []
    for tensor in range(tensors):
        for _ in range(int(rng.choice([1, 1, 1, 2]))):
            size = int(np.exp(rng.uniform(np.log(64), np.log(REF_BYTES_MAX // blocks_per_key))))
            count = int(rng.choice([1, 1, 1, 2, 8]))
            align = int(rng.choice([1, 64, 512]))
            length = max(size // count // align, 1) * align
            refs.append(RefShape(tensor, length, count))
    return tuple(refs)
