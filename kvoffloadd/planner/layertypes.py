"""Finds the kind of each layer of a model: from a list, from an interval, or from the model's type."""

from __future__ import annotations

from kvoffloadd.layout import LayerKind
from kvoffloadd.planner.fields import Fields
from kvoffloadd.planner.heads import GROUPS
from kvoffloadd.planner.states import LIGHTNING

TYPES = {
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
    "linear_attention": LayerKind.MAMBA,
    "mamba": LayerKind.MAMBA,
    "conv": LayerKind.MAMBA,
    "attention": LayerKind.FULL,
}
"""The values of `layer_types`. Linear attention (Gated DeltaNet) and short convolutions keep states, as Mamba does."""

PATTERN = {"M": (LayerKind.MAMBA,), "*": (LayerKind.FULL,), "-": (), "E": ()}
"""Letters of `hybrid_override_pattern` (Nemotron-H). A layer of experts, or a dense one, keeps nothing."""

BOTH = {"falcon_h1"}
"""Model types in which each layer has attention and a Mamba state."""

DELTA = "kimi_linear"
"""The model type that lists its linear layers in `linear_attn_config`, counted from 1."""

DOUBLE = "longcat_flash"
"""The model type in which each of the `num_layers` layers attends twice (vLLM 0.32, models/longcat_flash.py)."""

INCLUSIVE = {"cohere2", "cohere2_moe"}
"""Model types with a `sliding_window` that counts the tokens before the current one, but not that one (vLLM 0.32,
models/commandr.py).
"""

ALTERNATING = {"gemma2"}
"""Model types that alternate sliding and full layers without a key in the file."""

ALL_SLIDING = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Model types in which `sliding_window` applies to every layer."""


def layer_kinds(fields: Fields) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer that keeps something of the tokens, in the order of the layers.

    Raises ConfigError if the file is ambiguous.
    """
    counted = "num_layers" if fields.model_type == DOUBLE else "num_hidden_layers"
    count = fields.integer(counted)
    _check_softmax(fields, count)
    if fields.get("hybrid_override_pattern") is not None:
        return _patterned(fields, count)
    if fields.model_type == DOUBLE:
        fields.assumed.append("each layer attends twice, which counts as two layers")
        return (LayerKind.FULL,) * 2 * count
    if fields.model_type in BOTH:
        fields.assumed.append("each layer has attention and a state, which count as a layer each")
        return (LayerKind.FULL, LayerKind.MAMBA) * count
    kinds = _all_kinds(fields, count)
    shared = _sharing(fields, count)
    if shared:
        fields.assumed.append(
            f"num_kv_shared_layers: the last {shared} layers use earlier layers' cache, and are left out"
        )
    kinds = kinds[: count - shared]
    crossing = fields.items("cross_attention_layers") or []
    if not all(isinstance(layer, int) and 0 <= layer < count for layer in crossing):
        raise fields.error("cross_attention_layers", f"must be a list of layers, each from 0 to {count - 1}")
    if crossing:
        fields.assumed.append(
            f"cross_attention_layers: {len(set(crossing))} layers that attend to an image are left out; what they keep "
            "is the image's, whatever the number of tokens"
        )
    return tuple(kind for layer, kind in enumerate(kinds) if layer not in crossing)


def _patterned(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    pattern = fields.text("hybrid_override_pattern", "")
    if len(pattern) != count or not set(pattern) <= PATTERN.keys():
        raise fields.error("hybrid_override_pattern", f"must be {count} letters, each one of {' '.join(PATTERN)}")
    return tuple(kind for letter in pattern for kind in PATTERN[letter])


def _sharing(fields: Fields, count: int) -> int:
    """Counts the layers at the end that use the cache of an earlier layer of their kind and keep nothing themselves."""
    if not fields.get("num_kv_shared_layers"):
        return 0
    shared = fields.integer("num_kv_shared_layers")
    if shared >= count:
        raise fields.error("num_kv_shared_layers", f"= {shared} must be less than num_hidden_layers, {count}")
    return shared


def sharing_kinds(fields: Fields) -> tuple[LayerKind, ...]:
    """Returns the kinds of the layers at the end that `layer_kinds` leaves out, since they use the cache of earlier
    ones.
    """
    if not fields.get("num_kv_shared_layers"):
        return ()
    count = fields.integer("num_hidden_layers")
    return _all_kinds(fields, count)[count - _sharing(fields, count) :]


def _check_softmax(fields: Fields, count: int) -> None:
    """Checks that `attn_type_list` is absent or has a 1 for each layer: a 0 marks linear attention of another kind."""
    listed = fields.items("attn_type_list")
    if listed is not None and listed != [1] * count:
        raise fields.error(
            "attn_type_list", f"is not understood, unless it is a list of {count} ones: other layers keep states"
        )


def _all_kinds(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    listed = fields.items("layer_types")
    if listed is not None:
        guessing = fields.model_type == GROUPS  # the list goes on with the layers that guess ahead
        return _listed(fields, listed[:count] if guessing else listed, count)
    if fields.model_type == LIGHTNING:
        return _lightning(fields, count)
    if fields.get("linear_attn_config") is not None:
        return _delta(fields, count)
    if fields.get("full_attn_idxs") is not None:
        full = fields.items("full_attn_idxs") or []
        return tuple(LayerKind.FULL if layer in full else LayerKind.MAMBA for layer in range(count))
    if fields.get("full_attention_interval") is not None:
        return _every(fields.integer("full_attention_interval"), LayerKind.MAMBA, count)
    if fields.get("linear_num_value_heads") is not None:
        raise fields.error("layer_types", "is missing: which layers are linear? Add it, or full_attention_interval")
    if fields.get("attention_chunk_size") is not None:
        return _chunked(fields, count)
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is not False:
        return _windowed(fields, count)
    return (LayerKind.FULL,) * count


def _lightning(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    interval = fields.integer("layer_group_size")
    if count % interval:
        raise fields.unknown("layer_group_size", f"= {interval} is not understood: {count} layers are no whole groups")
    return _every(interval, LayerKind.MAMBA, count)


def _every(interval: int, others: LayerKind, count: int) -> tuple[LayerKind, ...]:
    """Returns the kinds when each `interval`-th layer is full and the others are not."""
    return tuple(others if (layer + 1) % interval else LayerKind.FULL for layer in range(count))


def _listed(fields: Fields, listed: list[object], count: int) -> tuple[LayerKind, ...]:
    if len(listed) != count:
        raise fields.error("layer_types", f"has {len(listed)} entries, num_hidden_layers says {count}")
    for name in listed:
        if not isinstance(name, str) or name not in TYPES:
            raise fields.unknown("layer_types", f"has {name!r}, which is not known; these are: {', '.join(TYPES)}")
    return tuple(TYPES[str(name)] for name in listed)


def _delta(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    inside = fields.inside("linear_attn_config")
    linear, full = (inside.items(key) or [] for key in ("kda_layers", "full_attn_layers"))
    if sorted(map(str, [*linear, *full])) != sorted(map(str, range(1, count + 1))):
        raise inside.error("kda_layers", f"and full_attn_layers must name each layer from 1 to {count} once")
    if inside.get("use_full_rank_gate"):
        raise inside.unknown("use_full_rank_gate", "is not understood: its states are of another kind")
    return tuple(LayerKind.MAMBA if layer in linear else LayerKind.FULL for layer in range(1, count + 1))


def indexed_layers(fields: Fields, count: int) -> tuple[int, ...]:
    """Returns the layers that have an index to choose tokens; others use the choice of the last such layer before them.

    All layers have one, unless a list of letters has S for some layers, or only each `index_topk_freq`-th has one from
    the layer before `index_skip_topk_offset` on.
    """
    pattern = fields.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str | list) or not all(letter in ("F", "S") for letter in pattern):
            raise fields.error("index_topk_pattern", "must be letters, each F or S")
        return tuple(layer for layer in range(count) if list(pattern)[layer : layer + 1] != ["S"])
    every = fields.integer("index_topk_freq", 1)
    first = fields.integer("index_skip_topk_offset", 2) - 1
    return tuple(layer for layer in range(count) if max(0, layer - first) % every == 0)


def sparse_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the layers that choose blocks of tokens by an index (MiniMax M3)."""
    sparse = fields.inside("sparse_attention_config")
    every = sparse.items("sparse_attention_freq") or []
    if len(every) != fields.integer("num_hidden_layers") or not all(flag in (0, 1) for flag in every):
        raise sparse.error("sparse_attention_freq", "must be a list of zeros and ones, one for each layer")
    return tuple(layer for layer, flag in enumerate(every) if flag)


def _chunked(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    """Returns the kinds where layers with rotary positions attend to their chunk, and those without to everything."""
    rotary = fields.items("no_rope_layers")
    if rotary is not None:
        if len(rotary) != count or not all(flag in (0, 1) for flag in rotary):
            raise fields.error("no_rope_layers", f"must be a list of {count} zeros and ones, or absent")
        return tuple(LayerKind.CHUNKED if flag else LayerKind.FULL for flag in rotary)
    if fields.get("no_rope_layer_interval") is not None:
        return _every(fields.integer("no_rope_layer_interval"), LayerKind.CHUNKED, count)
    raise fields.error(
        "attention_chunk_size", "does not say which layers are chunked; add layer_types or no_rope_layers"
    )


def _windowed(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if fields.get(key) is not None:
            return _every(fields.integer(key), LayerKind.SLIDING, count)
    if fields.model_type in ALTERNATING:
        return _every(2, LayerKind.SLIDING, count)
    if fields.get("max_window_layers") is not None and fields.get("use_sliding_window") is True:
        first = fields.get("max_window_layers")
        if not isinstance(first, int) or first < 0:
            raise fields.error("max_window_layers", f"= {first!r} must be a number of layers")
        return tuple(LayerKind.SLIDING if layer >= first else LayerKind.FULL for layer in range(count))
    if fields.model_type in ALL_SLIDING:
        return (LayerKind.SLIDING,) * count
    raise fields.error(
        "sliding_window",
        f"does not say which layers of a model_type {fields.model_type!r} have it; add layer_types "
        f"(one of {', '.join(TYPES)} for each layer) or sliding_window_pattern",
    )
