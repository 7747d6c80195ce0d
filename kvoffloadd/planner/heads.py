"""Reads the number and size of the K and V heads of a model's attention layers, or the size of the latent that replaces
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.planner.fields import Fields

TWO_HEADS = "gemma4_text"
"""The model type in which full layers have other heads than sliding ones."""

GROUPS = "step3p5"
"""The model type that calls heads of K and V groups (vLLM 0.32, models/step3p5.py)."""

EXPANDED = "minicpm3"
"""The model type for which vLLM keeps K and V of all heads, computed from the latent (0.32, models/minicpm3.py)."""

OTHER_KV_HEADS = (
    "attn_config",
    "multi_query",
    "multi_query_group_num",
    "n_head_kv",
    "num_kv_heads",
    "num_query_groups",
)
"""Keys that some models have in place of `num_key_value_heads`, with different meanings."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Describes the heads of K and V in an attention layer. `size`: elements of a head, or with MLA of the latent, the
    one head.
    """

    count: int
    size: int


def kv_heads(fields: Fields, query_heads: int) -> int:
    """Returns the number of KV heads: that of the query heads, unless the file has another."""
    if fields.model_type == "falcon":  # older ones have one head of K and V, and `num_kv_heads` is ignored
        if fields.get("new_decoder_architecture"):
            return fields.integer("num_kv_heads", query_heads)
        return 1 if fields.get("multi_query") in (None, True) else query_heads
    if fields.model_type == GROUPS:
        return _groups(fields)
    if fields.model_type == EXPANDED:
        return query_heads
    for key in OTHER_KV_HEADS if fields.get("num_key_value_heads") is None else ():
        if fields.get(key):
            raise fields.error(key, "is not understood; add num_key_value_heads, the number of heads of K and V")
    return fields.integer("num_key_value_heads", query_heads)


def _groups(fields: Fields) -> int:
    """Returns the number of groups. Sliding layers have other queries in `attention_other_setting`, but as many groups
    of the same size.
    """
    groups = fields.integer("num_attention_groups")
    if fields.get("attention_other_setting") is not None:
        others = fields.inside("attention_other_setting")
        same = others.integer("num_attention_groups"), others.integer("head_dim")
        if same != (groups, fields.integer("head_dim")):
            raise others.unknown("num_attention_groups", "and head_dim are not understood: other layers have others")
    return groups


def head_size(fields: Fields, query_heads: int) -> int:
    """Returns the elements of a head. Raises ConfigError if K and V differ."""
    if fields.model_type == EXPANDED:
        return fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
    key = next((key for key in ("head_dim", "attention_head_dim") if fields.get(key) is not None), None)
    if key is not None:
        size = fields.integer(key)
    else:
        hidden = fields.integer("hidden_size")
        if hidden % query_heads:
            raise fields.error("head_dim", f"is missing, and {hidden} (hidden_size) is not {query_heads} equal heads")
        size = hidden // query_heads
    if fields.integer("v_head_dim", size) != size:
        raise fields.unknown("v_head_dim", f"is not understood: K has heads of {size}, V of another size")
    return size


def full_heads(fields: Fields, others: int) -> Heads | None:
    """Returns the heads of full layers, where they differ from the `others`: in size, and in number where K is V as
    well. Such layers keep both all the same.
    """
    if fields.model_type != TWO_HEADS:
        return None
    count = fields.integer("num_global_key_value_heads", others) if fields.get("attention_k_eq_v") else others
    return Heads(count, fields.integer("global_head_dim"))


def latent_size(fields: Fields) -> int:
    """Returns the size of MLA's latent: a token is one latent vector, followed by its rotary part."""
    return fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
