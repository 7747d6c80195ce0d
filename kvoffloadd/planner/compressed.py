"""DeepSeek V4: layers that keep one entry for several tokens, a window of latents, and states of the compressors."""

from __future__ import annotations

from kvoffloadd.layout import LATENT, Attention, LayerKind
from kvoffloadd.planner.fields import Fields

MODEL_TYPE = "deepseek_v4"

SPARSE, HEAVY = 4, 128
"""Tokens of an entry. Layers with `SPARSE` choose their entries by an index; those with 0 or 1 have only a window."""

WINDOW_TOKENS = 64
"""Tokens of a block of a window's latents."""

STATE_TOKENS = {SPARSE: 4, HEAVY: 8}
"""Tokens of a block of a compressor's states."""

OVERLAP = {SPARSE: 2, HEAVY: 1}
"""The number of entries that each token contributes to."""

HEAD_SIZE = 512
"""Elements of an entry; 64 of them are rotary."""

PACKED_BYTES = 448 + 64 * 2 + 8
"""Bytes of an entry in fp8: 448 of fp8, 64 rotary elements of bfloat16, 8 of scales."""

PACKED_ALIGNMENT, PLAIN_ALIGNMENT = 576, 512
"""Page sizes are multiples of these numbers of bytes."""

INDEX_SCALE = 128
"""Elements of a key in the index that share a scale of 4 bytes."""


def read_ratios(fields: Fields) -> tuple[int, ...]:
    """Reads the ratio of each layer; entries behind the last layer's are those of layers that guess ahead. Raises
    ConfigError.
    """
    count = fields.integer("num_hidden_layers")
    listed = fields.items("compress_ratios") or []
    ratios = tuple(ratio for ratio in listed[:count] if isinstance(ratio, int) and ratio in (0, 1, SPARSE, HEAVY))
    if fields.integer("head_dim") != HEAD_SIZE:
        raise fields.error("head_dim", f"is not understood: only entries of {HEAD_SIZE} elements are known")
    if len(ratios) != count:
        raise fields.error("compress_ratios", f"must have {count} entries or more, each 0, 1, {SPARSE} or {HEAVY}")
    return ratios


def index_bytes(index_size: int) -> int:
    """Returns the bytes of a key in the index: fp8 elements, and their scales."""
    return index_size + index_size // INDEX_SCALE * 4


def compressed_layer(
    name: str, ratio: int, block: int, head_size: int, index_size: int, window: int, packed: bool
) -> dict[str, Attention]:
    """Returns all that a layer keeps, by name. `block`: tokens of a block of entries. `packed`: True for fp8, False for
    bfloat16.
    """
    size, dtype = (PACKED_BYTES, "uint8") if packed else (head_size, "bfloat16")
    alignment = PACKED_ALIGNMENT if packed else PLAIN_ALIGNMENT

    def latents(tokens: int, size: int, dtype: str, ratio: int = 1, window: int = 0) -> Attention:
        bare = Attention(tokens, 1, size, dtype, LATENT, LayerKind.MLA, window, tokens_per_entry=ratio)
        page = -(-bare.payload_bytes // alignment) * alignment
        return Attention(tokens, 1, size, dtype, LATENT, LayerKind.MLA, window, page, tokens_per_entry=ratio)

    def state(size: int) -> Attention:
        reach = OVERLAP[ratio] * ratio
        return latents(STATE_TOKENS[ratio], 2 * OVERLAP[ratio] * size, "float32", window=reach)

    found = {f"{name}.window": latents(WINDOW_TOKENS, size, dtype, window=window)}
    if ratio > 1:
        found[name] = latents(block, size, dtype, ratio)
        found[f"{name}.state"] = state(head_size)
    if ratio == SPARSE:
        found[f"{name}.index"] = latents(block, index_bytes(index_size), "uint8", ratio)
        found[f"{name}.index_state"] = state(index_size)
    return found
