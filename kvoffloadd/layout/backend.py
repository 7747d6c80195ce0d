"""How an attention backend wants its KV cache: the dimensions it indexes, and their order in memory. Data, no code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoffloadd.errors import UsageError

LAYER, BLOCK, KV, TOKEN, HEAD, DIM, PAIR = "layer", "block", "kv", "token", "head", "dim", "pair"
"""Names of dimensions. `kv`: 2, K and V; `dim`: a head's size; `pair`: 2 x dim, K and V of a head side by side."""

SENTINEL_BLOCKS = 1_000_003
"""A number of blocks that is no other dimension of anything."""


@dataclass(frozen=True, slots=True)
class Backend:
    """`shape`: dimensions as the backend indexes them. `memory`: the same, outermost in memory first.

    `layered`: the order in memory, `layer` included, where layers may share a tensor; None: the backend has none.
    Raises UsageError for orders that are none of the shape's.
    """

    name: str
    shape: tuple[str, ...]
    memory: tuple[str, ...]
    layered: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        known = {BLOCK, KV, TOKEN, HEAD, DIM, PAIR}
        if len(set(self.shape)) != len(self.shape) or BLOCK not in self.shape or not set(self.shape) <= known:
            raise UsageError(f"backend {self.name}: {self.shape} must name each of its dimensions once, block included")
        if sorted(self.memory) != sorted(self.shape):
            raise UsageError(f"backend {self.name}: {self.memory} is no order of {self.shape}")
        if self.layered is not None and sorted(self.layered) != sorted((LAYER, *self.shape)):
            raise UsageError(f"backend {self.name}: {self.layered} is no order of layer and {self.shape}")

    @classmethod
    def from_orders(
        cls, name: str, shape: Sequence[str], order: Sequence[int], layered: Sequence[int] | None = None
    ) -> Backend:
        """From permutations, as engines write them: `order[i]` is the dimension that is i-th in memory.

        `layered` permutes (layer, *shape). Raises UsageError.
        """
        return cls(
            name,
            tuple(shape),
            _permuted(name, shape, order),
            None if layered is None else _permuted(name, (LAYER, *shape), layered),
        )

    @classmethod
    def probe(cls, name: str, shape: Sequence[str], order: Callable[[bool], Sequence[int]]) -> Backend:
        """Ask a backend: `order(False)` is its order, `order(True)` the one with layers.

        A backend that raises AttributeError, NotImplementedError, TypeError or ValueError for the latter has none.
        Raises UsageError.
        """
        try:
            layered = tuple(order(True))
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            layered = None
        return cls.from_orders(name, shape, tuple(order(False)), layered)

    @property
    def with_layers(self) -> tuple[str, ...]:
        """Order in memory with layers. Where the backend has none, layers come first: then they can't share a tensor,
        and the order of what lies inside one stays the backend's.
        """
        return (LAYER, *self.memory) if self.layered is None else self.layered

    @property
    def shares(self) -> bool:
        """Whether layers can share a tensor: blocks are first in memory, layers somewhere behind them."""
        return self.with_layers[0] == BLOCK

    @property
    def outside_layers(self) -> tuple[str, ...]:
        """What lies between block and layer in memory: () by default, (head,) where heads come first."""
        order = self.with_layers
        return order[1 : order.index(LAYER)] if self.shares else ()

    @property
    def block_dim(self) -> int:
        """Which dimension counts blocks."""
        return self.shape.index(BLOCK)


def _permuted(name: str, shape: Sequence[str], order: Sequence[int]) -> tuple[str, ...]:
    if sorted(order) != list(range(len(shape))):
        raise UsageError(f"backend {name}: {tuple(order)} is no order of the {len(shape)} dimensions {tuple(shape)}")
    return tuple(shape[at] for at in order)


def probe_block_dim(shape_of: Callable[[int], Sequence[int]]) -> int:
    """Which dimension of `shape_of(num_blocks)` counts blocks: asked with a number that nothing else has.

    A search in the real shape would be fooled: two blocks look like K and V, 16 like the tokens of a block.
    Raises UsageError unless the number occurs exactly once.
    """
    shape = tuple(shape_of(SENTINEL_BLOCKS))
    if shape.count(SENTINEL_BLOCKS) != 1:
        raise UsageError(f"no single dimension counts blocks: with {SENTINEL_BLOCKS} blocks the shape is {shape}")
    return shape.index(SENTINEL_BLOCKS)


FLASH_NHD = Backend(
    "flash-nhd",
    (KV, BLOCK, TOKEN, HEAD, DIM),
    (KV, BLOCK, TOKEN, HEAD, DIM),
    (BLOCK, LAYER, KV, TOKEN, HEAD, DIM),
)
"""K and V apart, tokens before heads."""

FLASH_HND = Backend(
    "flash-hnd",
    (KV, BLOCK, TOKEN, HEAD, DIM),
    (KV, BLOCK, HEAD, TOKEN, DIM),
    (BLOCK, HEAD, LAYER, KV, TOKEN, DIM),
)
"""The same indices, heads before tokens; with layers, heads before those too."""

TRITON_NHD = Backend(
    "triton-nhd",
    (BLOCK, KV, TOKEN, HEAD, DIM),
    (BLOCK, KV, TOKEN, HEAD, DIM),
    (BLOCK, LAYER, KV, TOKEN, HEAD, DIM),
)
"""Blocks first, tokens before heads."""

TRITON_HND = Backend(
    "triton-hnd",
    (BLOCK, KV, TOKEN, HEAD, DIM),
    (BLOCK, HEAD, KV, TOKEN, DIM),
    (BLOCK, HEAD, LAYER, KV, TOKEN, DIM),
)
"""Blocks first, heads first in memory."""

PACKED_HND = Backend(
    "packed-hnd", (BLOCK, HEAD, TOKEN, PAIR), (BLOCK, HEAD, TOKEN, PAIR), (BLOCK, LAYER, HEAD, TOKEN, PAIR)
)
"""Four dimensions, K and V of a head side by side."""

PACKED_NHD = Backend(
    "packed-nhd", (BLOCK, HEAD, TOKEN, PAIR), (BLOCK, TOKEN, HEAD, PAIR), (BLOCK, LAYER, TOKEN, HEAD, PAIR)
)
"""The same indices, tokens before heads in memory."""

LATENT = Backend("latent", (BLOCK, TOKEN, DIM), (BLOCK, TOKEN, DIM), (BLOCK, LAYER, TOKEN, DIM))
"""MLA: one latent vector a token."""
