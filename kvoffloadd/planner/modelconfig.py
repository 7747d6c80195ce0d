"""What a model's config.json says of its KV cache, as numbers of the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.layout import LayerKind
from kvoffloadd.planner.fields import Fields, read_fields
from kvoffloadd.planner.layertypes import layer_kinds

DTYPES = ("bfloat16", "float16", "float32")
"""What a model may be computed in."""

REFUSED = {
    "attention_types": "its layers are of kinds that are not known here",
    "block_configs": "its layers have different numbers of heads",
    "block_types": "its layers are of kinds that are not known here",
    "compress_ratios": "its layers keep compressed tokens",
    "global_head_dim": "its full layers have heads of another size than the sliding ones",
    "hybrid_layer_pattern": "its layers are of kinds that are not known here",
    "hybrid_override_pattern": "its layers are of kinds that are not known here",
    "index_head_dim": "its layers keep an index beside their latents",
    "indexer_kv_heads": "its layers keep an index beside their heads",
    "is_encoder_decoder": "it has cross attention",
    "layers_block_type": "its layers are of kinds that are not known here",
    "linear_attn_config": "its linear layers are of a kind that is not known here",
    "num_global_key_value_heads": "its full layers have another number of heads than the sliding ones",
    "num_kv_shared_layers": "some of its layers use another layer's cache",
    "swa_head_dim": "its sliding layers have heads of another size than the full ones",
    "swa_num_key_value_heads": "its sliding layers have another number of heads than the full ones",
}
"""Keys that change what the cache is, in ways that the planner does not know: a guess would look like an answer."""

REFUSED_PREFIXES = ("mamba_d_", "mamba_n_", "mamba_num_", "mamba_expand", "ssm_", "rwkv")
"""The same, of state space models other than Gated DeltaNet."""

STATE_MODELS = (
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "nemotron_h", "plamo2", "recurrent_gemma", "rwkv", "xlstm",
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
class LinearHeads:
    """Of layers with linear attention (Gated DeltaNet), over all ranks. `dtype`: of the recurrent state."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int
    dtype: str

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values that pass through the convolution."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The whole model. `kinds`: of each layer. `kv_heads`, `head_size`: of attention; with MLA one head, the latent.

    `window`, `chunk`: tokens, 0 where no layer has one. `dtype`: the model's.
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
    linear: LinearHeads | None
    assumed: tuple[str, ...]

    @property
    def is_hybrid(self) -> bool:
        """Some layers keep states."""
        return self.linear is not None

    @property
    def is_mla(self) -> bool:
        """Layers keep a latent, which is the same on all ranks."""
        return LayerKind.MLA in self.kinds

    def count(self, kind: LayerKind) -> int:
        """Layers of this kind."""
        return self.kinds.count(kind)


def read_model(path: Path) -> ModelConfig:
    """From a config.json. Raises ConfigError, naming the key and what would work, for what is not understood."""
    fields = read_fields(path)
    for key, why in REFUSED.items():
        if fields.get(key):
            raise fields.error(key, f"is not understood: {why}, {INSTEAD}")
    if fields.model_type.startswith(STATE_MODELS):
        raise fields.error(
            "model_type", f"= {fields.model_type!r} is not understood: its layers keep states, {INSTEAD}"
        )
    for key in fields.keys_beginning(REFUSED_PREFIXES):
        raise fields.error(key, f"is not understood: it is of a state space model that is not known here, {INSTEAD}")
    kinds = layer_kinds(fields)
    if all(kind is LayerKind.MAMBA for kind in kinds):
        raise fields.error("layer_types", f"has no attention layer, {INSTEAD}")
    dtype = _dtype(fields, "dtype") or _dtype(fields, "torch_dtype")
    if not dtype:
        dtype = DEFAULT_DTYPE
        fields.assumed.append(f"dtype is not in the file: taken to be {DEFAULT_DTYPE}, which engines choose then")
    linear = _linear(fields, dtype) if LayerKind.MAMBA in kinds else None
    query_heads = fields.integer("num_attention_heads")
    if fields.get("kv_lora_rank") is not None:
        kinds, kv_heads, head_size = _latent(fields, kinds)
    else:
        kv_heads, head_size = _kv_heads(fields, query_heads), _head_size(fields, query_heads)
    for key in DRAFTS:
        if fields.get(key):
            fields.assumed.append(f"{key}: layers that only guess tokens ahead are left out")
    return ModelConfig(
        model_type=fields.model_type or "model",
        kinds=kinds,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        window=fields.integer("sliding_window") if LayerKind.SLIDING in kinds else 0,
        chunk=fields.integer("attention_chunk_size") if LayerKind.CHUNKED in kinds else 0,
        dtype=dtype,
        kv_quantised=_kv_quantised(fields),
        linear=linear,
        assumed=tuple(fields.assumed),
    )


def _dtype(fields: Fields, key: str) -> str:
    found = fields.text(key, "").removeprefix("torch.")
    if found and found not in DTYPES:
        raise fields.error(key, f"= {found!r} is not known; these are: {', '.join(DTYPES)}")
    return found


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
    if fields.get("head_dim") is not None:
        size = fields.integer("head_dim")
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


def _linear(fields: Fields, dtype: str) -> LinearHeads:
    state = _dtype(fields, "mamba_ssm_dtype")
    if not state:
        state = dtype
        fields.assumed.append(
            f"mamba_ssm_dtype is not in the file: recurrent states are taken to be {dtype}, as the model is"
        )
    return LinearHeads(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_size=fields.integer("linear_key_head_dim"),
        value_size=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
        dtype=state,
    )


def _kv_quantised(fields: Fields) -> bool:
    """Whether the checkpoint was made for a quantised KV cache, as two common formats say it."""
    found = fields.get("quantization_config")
    return isinstance(found, dict) and bool(found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo"))
