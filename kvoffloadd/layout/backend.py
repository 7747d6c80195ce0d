"""Describes how attention backends lay out their KV cache: the dimensions they index, and their order in memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.errors import UsageError

LAYER, BLOCK, KV, TOKEN, HEAD, DIM, PAIR = "layer", "block", "kv", "token", "head", "dim", "pair"
"""Names of dimensions. `kv`: 2, K and V; `dim`: a head's size; `pair`: 2 x dim, K and V of a head side by side."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Dimensions of a KV cache. `shape`: as the backend indexes them. `memory`: the same, outermost in memory first.

    `layered`: the order in memory, `layer` included, where layers may share a tensor; None: the backend has none.
    Raises UsageError for orders that do not have the dimensions of the shape.
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
            raise UsageError(f"backend {self.name}: {self.memory} is not an order of {self.shape}")
        if self.layered is not None and sorted(self.layered) != sorted((LAYER, *self.shape)):
            raise UsageError(f"backend {self.name}: {self.layered} is not an order of layer and {self.shape}")

    @property
    def with_layers(self) -> tuple[str, ...]:
        """The order in memory with layers. Where the backend has none, layers come first: then they can't share a
        tensor, and the order inside one stays the backend's.
        """
        return (LAYER, *self.memory) if self.layered is None else self.layered

    @property
    def shares(self) -> bool:
        """Whether layers can share a tensor: blocks are first in memory, layers somewhere behind them."""
        return self.with_layers[0] == BLOCK

    @property
    def outside_layers(self) -> tuple[str, ...]:
        """The dimensions between block and layer in memory: () by default, (head,) where heads come first."""
        order = self.with_layers
        return order[1 : order.index(LAYER)] if self.shares else ()

    @property
    def block_dim(self) -> int:
        """The index of the dimension that counts blocks."""
        return self.shape.index(BLOCK)


FLASH_NHD = Backend(
    "flash-nhd",
    (KV, BLOCK, TOKEN, HEAD, DIM),
    (KV, BLOCK, TOKEN, HEAD, DIM),
    (BLOCK, LAYER, KV, TOKEN, HEAD, DIM),
)
"""FlashAttention's: K and V apart, tokens before heads."""

FLASH_HND = Backend(
    "flash-hnd",
    (KV, BLOCK, TOKEN, HEAD, DIM),
    (KV, BLOCK, HEAD, TOKEN, DIM),
    (BLOCK, HEAD, LAYER, KV, TOKEN, DIM),
)
"""Has the same indices, but heads before tokens; with layers, heads before those too."""

TRITON_NHD = Backend(
    "triton-nhd",
    (BLOCK, KV, TOKEN, HEAD, DIM),
    (BLOCK, KV, TOKEN, HEAD, DIM),
    (BLOCK, LAYER, KV, TOKEN, HEAD, DIM),
)
"""Triton's and FlashInfer's: blocks first, tokens before heads."""

TRITON_HND = Backend(
    "triton-hnd",
    (BLOCK, KV, TOKEN, HEAD, DIM),
    (BLOCK, KV, HEAD, TOKEN, DIM),
    (BLOCK, HEAD, LAYER, KV, TOKEN, DIM),
)
"""Triton's: blocks first, heads before tokens; with layers, heads before those and before K and V."""

FLASHINFER_HND = Backend(
    "flashinfer-hnd",
    (BLOCK, KV, TOKEN, HEAD, DIM),
    (BLOCK, KV, HEAD, TOKEN, DIM),
    (BLOCK, KV, HEAD, LAYER, TOKEN, DIM),
)
"""FlashInfer's: the same, but with layers K and V stay outermost in a block."""

PACKED_HND = Backend(
    "packed-hnd", (BLOCK, HEAD, TOKEN, PAIR), (BLOCK, HEAD, TOKEN, PAIR), (BLOCK, LAYER, HEAD, TOKEN, PAIR)
)
"""Has four dimensions, K and V of a head side by side."""

PACKED_NHD = Backend(
    "packed-nhd", (BLOCK, HEAD, TOKEN, PAIR), (BLOCK, TOKEN, HEAD, PAIR), (BLOCK, LAYER, TOKEN, HEAD, PAIR)
)
"""Has the same indices, but tokens before heads in memory."""

LATENT = Backend("latent", (BLOCK, TOKEN, DIM), (BLOCK, TOKEN, DIM), (BLOCK, LAYER, TOKEN, DIM))
"""MLA: one latent vector a token."""
