"""Describes an engine's layers and groups as plain data of no engine: kinds, sizes, dtypes."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.backend import BLOCK, DIM, HEAD, KV, PAIR, TOKEN, Backend
from kvoffloadd.model import GroupKind

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Dtypes by torch's names, where the bytes of an element have the same meaning anywhere."""


class LayerKind(enum.StrEnum):
    """Kinds of layers. `OPAQUE`: any other; only the bytes of its blocks are known."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    MAMBA = "mamba"
    OPAQUE = "opaque"


ATTENTION_KINDS = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.MLA)


def layer_kind(name: str) -> LayerKind:
    """Returns the kind of that name. Raises UsageError for one that is not known."""
    try:
        return LayerKind(name)
    except ValueError:
        known = ", ".join(LayerKind)
        raise UsageError(
            f"layers of kind {name!r} are not known; these are: {known}. An Opaque layer may be of any kind"
        ) from None


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element. Raises UsageError for a dtype that is not known."""
    found = ITEM_BYTES.get(dtype)
    if found is None:
        raise UsageError(f"dtype {dtype!r} is not known; these are: {', '.join(ITEM_BYTES)}")
    return found


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer with K and V, or with one latent vector a token (MLA: one head, `head_size` is the vector's).

    `block_size`, `window`: tokens; `window` is that of sliding attention (MLA may have one) or a chunk's size.
    `backend`: its dimensions and their order, or only which dimension of the layer's tensor counts blocks.
    `padded_bytes`: bytes of a block with padding behind it; 0: no padding. `kernel_blocks`: number of blocks that the
    kernels see in one. `tokens_per_entry`: number of tokens that a vector stands for, where the layer compresses them.
    Raises UsageError for values that make no layer.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    backend: Backend | int
    kind: LayerKind = LayerKind.FULL
    window: int = 0
    padded_bytes: int = 0
    kernel_blocks: int = 1
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        kind = layer_kind(self.kind)
        if kind not in ATTENTION_KINDS:
            raise UsageError(f"an attention layer can't be of kind {kind}")
        if min(self.block_size, self.num_kv_heads, self.head_size, self.kernel_blocks, self.tokens_per_entry) < 1:
            raise UsageError(f"sizes of a layer must be positive: {self}")
        if self.block_size % (self.kernel_blocks * self.tokens_per_entry):
            raise UsageError(
                f"{self.block_size} tokens are not {self.kernel_blocks} equal kernel blocks of whole entries"
            )
        if (self.window > 0) != (kind in (LayerKind.SLIDING, LayerKind.CHUNKED)) and kind is not LayerKind.MLA:
            raise UsageError(f"a layer of kind {kind} with a window of {self.window} tokens")
        if kind is LayerKind.MLA and self.num_kv_heads != 1:
            raise UsageError(f"MLA has one head, not {self.num_kv_heads}")
        if self.padded_bytes and self.padded_bytes < self.payload_bytes:
            raise UsageError(f"a page of {self.payload_bytes} bytes can't be padded to {self.padded_bytes}")
        if self.page_bytes % self.kernel_blocks:
            raise UsageError(f"a page of {self.page_bytes} bytes is not {self.kernel_blocks} equal kernel pages")
        if isinstance(self.backend, Backend):
            sizes = self.axes(1)
            elements = math.prod(sizes[axis] for axis in self.backend.shape) * item_bytes(self.dtype)
            if elements != self.payload_bytes:
                raise UsageError(f"backend {self.backend.name} {self.backend.shape} does not hold a layer of {kind}")

    @property
    def payload_bytes(self) -> int:
        """Returns the bytes of one block, without padding."""
        vectors = 1 if self.kind == LayerKind.MLA else 2
        return (
            vectors
            * (self.block_size // self.tokens_per_entry)
            * self.num_kv_heads
            * self.head_size
            * item_bytes(self.dtype)
        )

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of one block, with padding."""
        return self.padded_bytes or self.payload_bytes

    @property
    def group_kind(self) -> GroupKind:
        """What the layer needs of the keys before a boundary."""
        if self.kind == LayerKind.CHUNKED:
            return GroupKind.CHUNKED
        return GroupKind.SLIDING if self.window else GroupKind.FULL

    def window_keys(self, tokens_per_key: int) -> int:
        """Returns the number of keys that a lookup at a boundary needs: those with the last `window - 1` tokens, or a
        whole chunk's.
        """
        tokens = self.window if self.kind == LayerKind.CHUNKED else max(0, self.window - 1)
        return -(-tokens // tokens_per_key)

    def axes(self, num_blocks: int) -> dict[str, int]:
        """Returns sizes by the dimensions' names."""
        return {
            BLOCK: num_blocks * self.kernel_blocks,
            KV: 2,
            TOKEN: self.block_size // self.tokens_per_entry // self.kernel_blocks,
            HEAD: self.num_kv_heads,
            DIM: self.head_size,
            PAIR: 2 * self.head_size,
        }

    def shape(self, num_blocks: int) -> tuple[int, ...] | None:
        """Returns the shape of the layer's tensor; None if the backend is not known."""
        if not isinstance(self.backend, Backend):
            return None
        sizes = self.axes(num_blocks)
        return tuple(sizes[axis] for axis in self.backend.shape)

    @property
    def block_dim(self) -> int:
        """The dimension of the layer's tensor that counts (kernel) blocks."""
        return self.backend.block_dim if isinstance(self.backend, Backend) else self.backend


@dataclass(frozen=True, slots=True)
class State:
    """One state of a Mamba layer, of one block."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Returns the bytes of one block."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Mamba:
    """A layer with a page that holds states, one behind the other. Its tensors: (num_blocks, *shape) for each state.

    `block_size`: tokens. `padded_bytes`: as for Attention. Raises UsageError for values that make no layer.
    """

    block_size: int
    states: tuple[State, ...]
    padded_bytes: int = 0
    kind: LayerKind = LayerKind.MAMBA

    def __post_init__(self) -> None:
        if self.block_size < 1 or not self.states or min(state.bytes for state in self.states) < 1:
            raise UsageError(f"sizes of a layer must be positive: {self}")
        if layer_kind(self.kind) is not LayerKind.MAMBA:
            raise UsageError(f"a Mamba layer can't be of kind {self.kind}")
        if self.padded_bytes and self.padded_bytes < self.payload_bytes:
            raise UsageError(f"a page of {self.payload_bytes} bytes can't be padded to {self.padded_bytes}")

    @property
    def payload_bytes(self) -> int:
        """Returns the bytes of one block, without padding."""
        return sum(state.bytes for state in self.states)

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of one block, with padding."""
        return self.padded_bytes or self.payload_bytes

    @property
    def group_kind(self) -> GroupKind:
        """What the layer needs of the keys before a boundary."""
        return GroupKind.MAMBA

    @property
    def kernel_blocks(self) -> int:
        """Returns 1: Mamba has no kernel blocks."""
        return 1

    def window_keys(self, tokens_per_key: int) -> int:
        """Returns 0: Mamba has no window."""
        return 0


@dataclass(frozen=True, slots=True)
class Opaque:
    """A layer of a kind that is not known here: its blocks are stored and loaded as they are, in the order in which
    they lie in memory. It has a separate tensor.

    `block_size`: tokens. `block_bytes`: all bytes of a block, whatever they mean. `window`: tokens that the layer looks
    back, at most; 0: the whole prefix, which is enough for any kind that finds all it needs in its blocks. `block_dim`:
    the dimension of its tensors that counts (kernel) blocks. Raises UsageError for values that make no layer.
    """

    block_size: int
    block_bytes: int
    window: int = 0
    block_dim: int = 0
    kernel_blocks: int = 1
    kind: LayerKind = LayerKind.OPAQUE

    def __post_init__(self) -> None:
        if min(self.block_size, self.block_bytes, self.kernel_blocks) < 1 or min(self.window, self.block_dim) < 0:
            raise UsageError(f"sizes of a layer must be positive: {self}")
        if layer_kind(self.kind) is not LayerKind.OPAQUE:
            raise UsageError(f"an opaque layer can't be of kind {self.kind}")
        if self.block_bytes % self.kernel_blocks:
            raise UsageError(f"a page of {self.block_bytes} bytes is not {self.kernel_blocks} equal kernel pages")

    @property
    def payload_bytes(self) -> int:
        """Returns the bytes of one block."""
        return self.block_bytes

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of one block, which needs no padding in a separate tensor."""
        return self.block_bytes

    @property
    def group_kind(self) -> GroupKind:
        """What the layer needs of the keys before a boundary."""
        return GroupKind.SLIDING if self.window else GroupKind.FULL

    def window_keys(self, tokens_per_key: int) -> int:
        """Returns the number of keys that a lookup at a boundary needs: those with the last `window - 1` tokens."""
        return -(-max(0, self.window - 1) // tokens_per_key)


LayerSpec = Attention | Mamba | Opaque


def attention(layer: str, spec: LayerSpec) -> Attention:
    """Returns the spec if it is one of attention. Raises UsageError otherwise."""
    if not isinstance(spec, Attention):
        raise UsageError(f"layer {layer} is not an attention layer")
    return spec


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables, and this rank's part of each key: as in `client.Group`.

    `held`: the number of parts that the rank holds, from `part` on: equal ranges of its heads, in order.
    """

    group: int
    layers: tuple[str, ...]
    blocks_per_key: int = 1
    parts: int = 1
    part: int = 0
    held: int = 1


def nth_layers(groups: Sequence[LayerGroup]) -> tuple[tuple[str, ...], ...]:
    """Returns the first layers of all groups, the second ones, and so on, until no group has more."""
    most = max((len(group.layers) for group in groups), default=0)
    return tuple(tuple(group.layers[index] for group in groups if index < len(group.layers)) for index in range(most))


def check_blocks(num_blocks: int) -> None:
    """Checks that there are blocks. Raises UsageError."""
    if num_blocks < 1:
        raise UsageError(f"a cache needs at least 1 block, not {num_blocks}")


def check_groups(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> None:
    """Checks that each layer is in one group, with layers of its kind, window and block size, and that parts exist.
    Raises UsageError.
    """
    seen: dict[str, int] = {}
    for group in groups:
        if not group.layers:
            raise UsageError(f"group {group.group} has no layers")
        if group.part < 0 or group.held < 1 or group.part + group.held > group.parts:
            raise UsageError(f"group {group.group}: {group.held} parts from {group.part} of {group.parts}")
        for layer in group.layers:
            if layer not in specs:
                raise UsageError(f"group {group.group}: layer {layer} is not described")
            if layer in seen:
                raise UsageError(f"layer {layer} is in group {seen[layer]} and in group {group.group}")
            seen[layer] = group.group
            _check_equal(group.group, (group.layers[0], specs[group.layers[0]]), (layer, specs[layer]))
    missing = sorted(specs.keys() - seen.keys())
    if missing:
        raise UsageError(f"layers {', '.join(missing)} are in no group: they would never be stored")


def _check_equal(group: int, one: tuple[str, LayerSpec], other: tuple[str, LayerSpec]) -> None:
    needs = [(spec.group_kind, getattr(spec, "window", 0), spec.block_size) for _, spec in (one, other)]
    if needs[0] != needs[1]:
        described = [
            f"{name} ({kind}, window {window}, {size} tokens a block)"
            for (name, _), (kind, window, size) in zip((one, other), needs, strict=True)
        ]
        raise UsageError(f"group {group}: layers {' and '.join(described)} can't share block tables")
