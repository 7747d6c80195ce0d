"""Reads what a model's config.json specifies about its KV cache, as numbers of the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.layout import LayerKind
from kvoffloadd.planner.compressed import INDEX_SCALE, read_ratios
from kvoffloadd.planner.compressed import MODEL_TYPE as COMPRESSED
from kvoffloadd.planner.fields import Fields, read_fields
from kvoffloadd.planner.heads import EXPANDED, TWO_HEADS, Heads, full_heads, head_size, kv_heads, latent_size
from kvoffloadd.planner.layertypes import DELTA, INCLUSIVE, indexed_layers, layer_kinds, sharing_kinds, sparse_layers
from kvoffloadd.planner.modeltypes import check_type
from kvoffloadd.planner.states import Recurrent, read_dtype, read_states

REFUSED = {
    "attention_types": "its layers are of kinds that are not known here",
    "block_configs": "its layers have different numbers of heads",
    "block_types": "its layers are of kinds that are not known here",
    "global_head_dim": "its full layers have heads of another size than the sliding ones",
    "hybrid_layer_pattern": "its layers are of kinds that are not known here",
    "indexer_kv_heads": "its layers keep an index beside their heads",
    "is_encoder_decoder": "it has cross attention",
    "layers_block_type": "its layers are of kinds that are not known here",
    "linear_attn_config": "its linear layers are of a kind that is not known here",
    "num_global_key_value_heads": "its full layers have another number of heads than the sliding ones",
    "swa_head_dim": "its sliding layers have heads of another size than the full ones",
    "swa_num_key_value_heads": "its sliding layers have another number of heads than the full ones",
}
"""Keys that change the cache in ways that the planner does not know: a guess would look like an answer."""

INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Model types with an index in addition to latents. `compress_ratios` is understood only for `COMPRESSED`."""

SPARSE = "minimax_m3_text"
"""The model type with an index in addition to heads, in the layers that `sparse_attention_config` names (vLLM 0.32,
models/minimax_m3).
"""

UNDERSTOOD = {
    "global_head_dim": TWO_HEADS,
    "linear_attn_config": DELTA,
    "num_global_key_value_heads": TWO_HEADS,
}
"""Keys of `REFUSED` that are understood for this model type."""

DEFAULT_DTYPE = "bfloat16"
"""The dtype of models that name none: engines run them in this one."""

DRAFTS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Keys that count layers which only guess tokens ahead; engines may or may not run them."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The whole model. `kinds`: the kind of each layer. `kv_heads`, `head_size`: those of attention; with MLA one head,
    the latent. `full_heads`: those of full layers, where they differ (Gemma 4).

    `sharing`: the kinds of the layers after these, which keep no cache.

    `window`, `chunk`: tokens, 0 where no layer has one. `dtype`: the model's. `linear`: the states of layers that keep
    any; `state_dtype`: the file's `mamba_ssm_dtype`, "" where it has none. `index_size`: elements of a token's key in
    an index; 0: none. `indexed`: the layers that have an index; () with DeepSeek V4, where the ratios decide. `ratios`:
    for each layer of DeepSeek V4, how many tokens become one entry; () for other models. `kv_quantised`: the checkpoint
    asks for a KV cache of another dtype. `assumed`: values that the file does not have.
    """

    model_type: str
    kinds: tuple[LayerKind, ...]
    sharing: tuple[LayerKind, ...]
    query_heads: int
    kv_heads: int
    head_size: int
    full_heads: Heads | None
    window: int
    chunk: int
    dtype: str
    kv_quantised: bool
    linear: Recurrent | None
    state_dtype: str
    index_size: int
    indexed: tuple[int, ...]
    ratios: tuple[int, ...]
    assumed: tuple[str, ...]

    @property
    def is_hybrid(self) -> bool:
        """Returns whether some layers keep states."""
        return self.linear is not None

    @property
    def is_mla(self) -> bool:
        """Returns whether layers keep a latent, which is the same on all ranks."""
        return LayerKind.MLA in self.kinds

    @property
    def block_multiple(self) -> int:
        """Returns the number of tokens that blocks must be a multiple of: kernels read compressed entries and indexes
        in such units.
        """
        if self.ratios:
            return 256
        return (64 if self.is_mla else 128) if self.index_size else 1

    @property
    def attention_kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kinds of layers that keep something of each token, in the order of their first layers."""
        return tuple(kind for kind in dict.fromkeys(self.kinds) if kind is not LayerKind.MAMBA)

    def heads(self, kind: LayerKind) -> Heads:
        """Returns the heads of attention layers of this kind."""
        if kind is LayerKind.FULL and self.full_heads is not None:
            return self.full_heads
        return Heads(self.kv_heads, self.head_size)

    def count(self, kind: LayerKind) -> int:
        """Returns the number of layers of this kind."""
        return self.kinds.count(kind)


def read_model(path: Path) -> ModelConfig:
    """Reads a model from a config.json. Raises NoPlanError for a model that is not known or keeps nothing, and
    ConfigError for a value that is missing or invalid; both name the key and what would work.
    """
    fields = read_fields(path)
    _check_known(fields)
    for key in DRAFTS:
        if fields.get(key):
            fields.assumed.append(f"{key}: layers that only guess tokens ahead are left out")
    ratios = read_ratios(fields) if fields.model_type == COMPRESSED else ()
    kinds = (LayerKind.MLA,) * len(ratios) or layer_kinds(fields)
    if all(kind is LayerKind.MAMBA for kind in kinds):
        raise fields.unknown("layer_types", "has no attention layer")
    dtype = read_dtype(fields, "dtype") or read_dtype(fields, "torch_dtype")
    if not dtype:
        dtype = DEFAULT_DTYPE
        fields.assumed.append(f"dtype is not in the file: taken to be {DEFAULT_DTYPE}, which engines choose then")
    linear = read_states(fields, dtype) if LayerKind.MAMBA in kinds else None
    query_heads = fields.integer("num_attention_heads")
    if ratios:
        count, size = 1, fields.integer("head_dim")
    elif (fields.get("kv_lora_rank") is not None or fields.model_type in INDEXED) and fields.model_type != EXPANDED:
        kinds, count, size = _latent_kinds(fields, kinds), 1, latent_size(fields)
    else:
        count, size = kv_heads(fields, query_heads), head_size(fields, query_heads)
    return ModelConfig(
        model_type=fields.model_type or "model",
        kinds=kinds,
        sharing=sharing_kinds(fields),
        query_heads=query_heads,
        kv_heads=count,
        head_size=size,
        full_heads=full_heads(fields, count),
        window=_window(fields) if LayerKind.SLIDING in kinds or ratios else 0,
        chunk=fields.integer("attention_chunk_size") if LayerKind.CHUNKED in kinds else 0,
        dtype=dtype,
        kv_quantised=_kv_quantised(fields),
        linear=linear,
        state_dtype=read_dtype(fields, "mamba_ssm_dtype") if linear is not None else "",
        index_size=_index_size(fields),
        indexed=_indexed(fields, len(kinds)),
        ratios=ratios,
        assumed=tuple(fields.assumed),
    )


def _check_known(fields: Fields) -> None:
    """Checks that the model's type is known, and that no key has a meaning unknown to the planner. Raises
    NoPlanError.
    """
    check_type(fields)
    for key, why in REFUSED.items():
        if UNDERSTOOD.get(key) != fields.model_type and fields.get(key):
            raise fields.unknown(key, f"is not understood: {why}")
    if fields.get("compress_ratios") and fields.model_type != COMPRESSED:
        raise fields.unknown("compress_ratios", "is not understood: its layers keep compressed tokens")
    if fields.get("index_head_dim") and fields.model_type not in (*INDEXED, COMPRESSED):
        raise fields.unknown("index_head_dim", "is not understood: its layers keep an index")


def _index_size(fields: Fields) -> int:
    """Returns the elements of a key in the index. With latents, engines quantise it in pieces that share a scale, and
    accept no other sizes.
    """
    if fields.model_type == SPARSE:
        return fields.inside("sparse_attention_config").integer("sparse_index_dim")
    if fields.model_type not in (*INDEXED, COMPRESSED):
        return 0
    size = fields.integer("index_head_dim")
    if size % INDEX_SCALE:
        raise fields.error("index_head_dim", f"= {size} must be a multiple of {INDEX_SCALE}: those share a scale")
    return size


def _indexed(fields: Fields, count: int) -> tuple[int, ...]:
    """Returns the layers that have an index."""
    if fields.model_type == SPARSE:
        return sparse_layers(fields)
    return indexed_layers(fields, count) if fields.model_type in INDEXED else ()


def _window(fields: Fields) -> int:
    """Returns the tokens that a token of a sliding layer attends to, including itself."""
    return fields.integer("sliding_window") + (fields.model_type in INCLUSIVE)


def _latent_kinds(fields: Fields, kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Returns the kinds with latents in place of full attention; some layers may keep states."""
    other = next((kind for kind in kinds if kind not in (LayerKind.FULL, LayerKind.MAMBA)), None)
    if other is not None:
        raise fields.unknown("kv_lora_rank", f"with layers of kind {other} is not understood")
    return tuple(LayerKind.MLA if kind is LayerKind.FULL else kind for kind in kinds)


def _kv_quantised(fields: Fields) -> bool:
    """Returns whether the checkpoint was made for a quantised KV cache, in either of two common formats."""
    found = fields.get("quantization_config")
    return isinstance(found, dict) and bool(found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo"))
