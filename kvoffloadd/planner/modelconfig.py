"""What a model's config.json says of its KV cache, as numbers of the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.layout import LayerKind
from kvoffloadd.planner.compressed import MODEL_TYPE as COMPRESSED
from kvoffloadd.planner.compressed import read_ratios
from kvoffloadd.planner.fields import Fields, read_fields
from kvoffloadd.planner.layertypes import layer_kinds
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
"""Keys that change what the cache is, in ways that the planner does not know: a guess would look like an answer."""

REFUSED_PREFIXES = ("mamba_d_", "mamba_n_", "mamba_num_", "mamba_expand", "ssm_", "rwkv")
"""The same, of state space models that are not known here."""

MAMBA_2 = ("falcon_h1", "granitemoehybrid", "nemotron_h")
"""Model types with Mamba-2 layers that are understood."""

INDEXED = ("deepseek_v32",)
"""Model types with an index beside each latent. `compress_ratios` is understood of `COMPRESSED` alone."""

STATE_MODELS = (
    "bamba", "falcon_mamba", "jamba", "mamba", "plamo2", "recurrent_gemma", "rwkv", "xlstm",
    "zamba",
)  # fmt: skip
"""Beginnings of a `model_type` whose layers keep states, be it said in its file or left to the class."""

DEFAULT_DTYPE = "bfloat16"
"""Of models that do not say theirs: what engines run them in."""

OTHER_KV_HEADS = (
    "attn_config",
    "multi_query",
    "multi_query_group_num",
    "n_head_kv",
    "num_kv_heads",
    "num_query_groups",
)
"""Keys that some models have in place of `num_key_value_heads`, with meanings of their own."""

DRAFTS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Layers that only guess tokens ahead; engines may or may not run them."""

INSTEAD = (
    "so that its groups can't be worked out; ask the engine for them and plan with kvoffloadd.layout (docs/LAYOUTS.md)"
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The whole model. `kinds`: of each layer. `kv_heads`, `head_size`: of attention; with MLA one head, the latent.

    `window`, `chunk`: tokens, 0 where no layer has one. `dtype`: the model's.
    `linear`: states of layers that keep them. `index_size`: elements of a token's key in a latent's index; 0: none.
    `ratios`: DeepSeek V4's, of each layer, how many tokens become one entry; () for other models.
    `kv_quantised`: the checkpoint asks for a KV cache of another dtype. `assumed`: what the file did not say.
    """

    model_type: str
    kinds: tuple[LayerKind, ...]
    query_heads: int
    kv_heads: int
    head_size: int
    window: int
    chunk: int
    dtype: str
    kv_quantised: bool
    linear: Recurrent | None
    index_size: int
    ratios: tuple[int, ...]
    assumed: tuple[str, ...]

    @property
    def is_hybrid(self) -> bool:
        """Some layers keep states."""
        return self.linear is not None

    @property
    def is_mla(self) -> bool:
        """Layers keep a latent, which is the same on all ranks."""
        return LayerKind.MLA in self.kinds

    @property
    def block_multiple(self) -> int:
        """Blocks have a multiple of so many tokens, since kernels read compressed entries and indexes so."""
        if self.ratios:
            return 256
        return 64 if self.index_size else 1

    def count(self, kind: LayerKind) -> int:
        """Layers of this kind."""
        return self.kinds.count(kind)


def read_model(path: Path) -> ModelConfig:
    """From a config.json. Raises ConfigError, naming the key and what would work, for what is not understood."""
    fields = read_fields(path)
    _check_known(fields)
    for key in DRAFTS:
        if fields.get(key):
            fields.assumed.append(f"{key}: layers that only guess tokens ahead are left out")
    ratios = read_ratios(fields) if fields.model_type == COMPRESSED else ()
    kinds = (LayerKind.MLA,) * len(ratios) or layer_kinds(fields)
    if all(kind is LayerKind.MAMBA for kind in kinds):
        raise fields.error("layer_types", f"has no attention layer, {INSTEAD}")
    dtype = read_dtype(fields, "dtype") or read_dtype(fields, "torch_dtype")
    if not dtype:
        dtype = DEFAULT_DTYPE
        fields.assumed.append(f"dtype is not in the file: taken to be {DEFAULT_DTYPE}, which engines choose then")
    linear = read_states(fields, dtype) if LayerKind.MAMBA in kinds else None
    query_heads = fields.integer("num_attention_heads")
    if ratios:
        kv_heads, head_size = 1, fields.integer("head_dim")
    elif fields.get("kv_lora_rank") is not None:
        kinds, kv_heads, head_size = _latent(fields, kinds)
    else:
        kv_heads, head_size = _kv_heads(fields, query_heads), _head_size(fields, query_heads)
    return ModelConfig(
        model_type=fields.model_type or "model",
        kinds=kinds,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        window=fields.integer("sliding_window") if LayerKind.SLIDING in kinds or ratios else 0,
        chunk=fields.integer("attention_chunk_size") if LayerKind.CHUNKED in kinds else 0,
        dtype=dtype,
        kv_quantised=_kv_quantised(fields),
        linear=linear,
        index_size=fields.integer("index_head_dim") if fields.model_type in (*INDEXED, COMPRESSED) else 0,
        ratios=ratios,
        assumed=tuple(fields.assumed),
    )


def _check_known(fields: Fields) -> None:
    """That no key says what the planner does not know. Raises ConfigError."""
    for key, why in REFUSED.items():
        if fields.get(key):
            raise fields.error(key, f"is not understood: {why}, {INSTEAD}")
    if fields.get("compress_ratios") and fields.model_type != COMPRESSED:
        raise fields.error("compress_ratios", f"is not understood: its layers keep compressed tokens, {INSTEAD}")
    if fields.get("index_head_dim") and fields.model_type not in (*INDEXED, COMPRESSED):
        raise fields.error("index_head_dim", f"is not understood: its layers keep an index, {INSTEAD}")
    if fields.model_type.startswith(STATE_MODELS):
        raise fields.error(
            "model_type", f"= {fields.model_type!r} is not understood: its layers keep states, {INSTEAD}"
        )
    for key in fields.keys_beginning(REFUSED_PREFIXES) if fields.model_type not in MAMBA_2 else ():
        raise fields.error(key, f"is not understood: it is of a state space model that is not known here, {INSTEAD}")


def _kv_heads(fields: Fields, query_heads: int) -> int:
    """As many as heads, unless the file says otherwise."""
    if fields.model_type == "falcon":  # the older ones have one head of K and V, whatever `num_kv_heads` says
        if fields.get("new_decoder_architecture"):
            return fields.integer("num_kv_heads", query_heads)
        return 1 if fields.get("multi_query") in (None, True) else query_heads
    for key in OTHER_KV_HEADS if fields.get("num_key_value_heads") is None else ():
        if fields.get(key):
            raise fields.error(key, "is not understood; add num_key_value_heads, the number of heads of K and V")
    return fields.integer("num_key_value_heads", query_heads)


def _head_size(fields: Fields, query_heads: int) -> int:
    key = next((key for key in ("head_dim", "attention_head_dim") if fields.get(key) is not None), None)
    if key is not None:
        size = fields.integer(key)
    else:
        hidden = fields.integer("hidden_size")
        if hidden % query_heads:
            raise fields.error("head_dim", f"is missing, and {hidden} (hidden_size) is not {query_heads} equal heads")
        size = hidden // query_heads
    if fields.integer("v_head_dim", size) != size:
        raise fields.error("v_head_dim", f"is not understood: K has heads of {size}, V of another size, {INSTEAD}")
    return size


def _latent(fields: Fields, kinds: tuple[LayerKind, ...]) -> tuple[tuple[LayerKind, ...], int, int]:
    """MLA: a token is one latent vector, with its rotary part behind it."""
    other = next((kind for kind in kinds if kind is not LayerKind.FULL), None)
    if other is not None:
        raise fields.error("kv_lora_rank", f"with layers of kind {other} is not understood, {INSTEAD}")
    size = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
    return (LayerKind.MLA,) * len(kinds), 1, size


def _kv_quantised(fields: Fields) -> bool:
    """Whether the checkpoint was made for a quantised KV cache, as two common formats say it."""
    found = fields.get("quantization_config")
    return isinstance(found, dict) and bool(found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo"))
