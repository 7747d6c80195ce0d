"""Describes what layers keep in place of keys and values: states of linear attention, Mamba-2 and short
convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.layout import State
from kvoffloadd.planner.fields import Fields

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes that a model may be computed in."""

LIGHTNING = "bailing_moe_linear"
"""The model type with lightning attention in all layers except each `layer_group_size`-th (Ring linear; SGLang 0.5.23,
models/bailing_moe_linear.py).
"""

SSM_DTYPES = {"nemotron_h": "float32"}
"""The dtype of the recurrent state, by `model_type`, where the file has none. Other models use the model's dtype."""


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """Describes the heads of layers with linear attention (Gated DeltaNet), over all ranks. `dtype`: that of the
    recurrent state.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_kernel: int
    dtype: str

    @property
    def conv_channels(self) -> int:
        """Returns the channels of queries, keys and values that pass through the convolution."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def divided(self) -> dict[str, int]:
        """Returns the config keys with numbers that must be split over the ranks, and these numbers."""
        return {"linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.value_heads}

    def states(self, tp: int, dtype: str) -> tuple[State, ...]:
        """Returns the states of a layer on one of `tp` ranks: convolution, recurrent state. `dtype`: the model's."""
        conv = State((self.conv_kernel - 1, self.conv_channels // tp), dtype)
        return conv, State((self.value_heads // tp, self.value_size, self.key_size), self.dtype)


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """Describes the heads of Mamba-2 layers, over all ranks. `inner`: channels of all heads; `dtype`: that of the
    recurrent state.
    """

    heads: int
    head_size: int
    state_size: int
    groups: int
    inner: int
    conv_kernel: int
    dtype: str

    @property
    def divided(self) -> dict[str, int]:
        """Returns the config keys with numbers that must be split over the ranks, and these numbers."""
        groups = {} if self.groups == 1 else {"Mamba groups": self.groups}
        return {"Mamba heads": self.heads, "channels of Mamba heads": self.inner, **groups}

    def states(self, tp: int, dtype: str) -> tuple[State, ...]:
        """Returns the states of a layer on one of `tp` ranks: convolution, recurrent state. `dtype`: the model's.

        Engines put a single group on each rank, and split several groups over the ranks.
        """
        groups = tp if self.groups == 1 else self.groups
        conv = State((self.conv_kernel - 1, (self.inner + 2 * groups * self.state_size) // tp), dtype)
        return conv, State((self.heads // tp, self.head_size, self.state_size), self.dtype)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Describes the states of layers that are a short convolution (LFM2), over all ranks."""

    channels: int
    conv_kernel: int

    @property
    def divided(self) -> dict[str, int]:
        """Returns the config keys with numbers that must be split over the ranks, and these numbers."""
        return {"channels of the convolution": self.channels}

    def states(self, tp: int, dtype: str) -> tuple[State, ...]:
        """Returns the state of a layer on one of `tp` ranks: the convolution. `dtype`: the model's."""
        return (State((self.conv_kernel - 1, self.channels // tp), dtype),)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Describes the heads of layers with Kimi's delta attention, over all ranks. Queries, keys and values have heads of
    one size.
    """

    heads: int
    head_size: int
    conv_kernel: int

    @property
    def divided(self) -> dict[str, int]:
        """Returns the config keys with numbers that must be split over the ranks, and these numbers."""
        return {"linear_attn_config.num_heads": self.heads}

    def states(self, tp: int, dtype: str) -> tuple[State, ...]:
        """Returns the states of a layer on one of `tp` ranks: convolution in the model's `dtype`, recurrent state in
        float32.
        """
        heads = self.heads // tp
        conv = State((self.conv_kernel - 1, 3 * heads * self.head_size), dtype)
        return conv, State((heads, self.head_size, self.head_size), "float32")


@dataclass(frozen=True, slots=True)
class LightningHeads:
    """Describes the heads of layers with lightning attention (Ring), over all ranks. Queries, keys and values have
    heads of one size.
    """

    heads: int
    head_size: int

    @property
    def divided(self) -> dict[str, int]:
        """Returns the config keys with numbers that must be split over the ranks, and these numbers."""
        return {"num_attention_heads": self.heads}

    def states(self, tp: int, dtype: str) -> tuple[State, ...]:
        """Returns the state of a layer on one of `tp` ranks: the recurrent state. `dtype`: the model's."""
        return (State((self.heads // tp, self.head_size, self.head_size), dtype),)


Recurrent = DeltaHeads | LightningHeads | LinearHeads | MambaHeads | ShortConv


def read_states(fields: Fields, dtype: str) -> Recurrent:
    """Reads the states of the layers that keep any. `dtype`: the model's. Raises ConfigError for a missing key."""
    if fields.model_type == LIGHTNING:
        fields.assumed.append("states of lightning attention are taken to be in the model's dtype, as vLLM has them")
        return LightningHeads(fields.integer("num_attention_heads"), fields.integer("head_dim"))
    if fields.get("conv_L_cache") is not None:
        channels = "hidden_size" if fields.get("conv_dim") is None else "conv_dim"
        return ShortConv(fields.integer(channels), fields.integer("conv_L_cache"))
    if fields.get("linear_attn_config") is not None:
        delta = fields.inside("linear_attn_config")
        return DeltaHeads(*(delta.integer(key) for key in ("num_heads", "head_dim", "short_conv_kernel_size")))
    if fields.get("mamba_num_heads") is not None:
        heads, size = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
        return MambaHeads(
            heads, size, fields.integer("ssm_state_size"), fields.integer("n_groups"), heads * size,
            fields.integer("conv_kernel"), _state_dtype(fields, dtype),
        )  # fmt: skip
    if fields.get("mamba_n_heads") is not None:
        return _mamba_2(fields, dtype)
    return LinearHeads(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_size=fields.integer("linear_key_head_dim"),
        value_size=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
        dtype=_state_dtype(fields, dtype),
    )


def _mamba_2(fields: Fields, dtype: str) -> MambaHeads:
    """Reads the fields under the names that Granite 4 and Falcon-H1 use."""
    heads = fields.integer("mamba_n_heads")
    if fields.get("mamba_d_ssm") is not None:
        inner = fields.integer("mamba_d_ssm")
    else:
        inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    auto = fields.get("mamba_d_head") in (None, "auto")
    head_size = inner // heads if auto else fields.integer("mamba_d_head")
    if heads * head_size != inner:
        raise fields.error("mamba_n_heads", f"is {heads}: heads of {head_size} do not make the layer's {inner}")
    return MambaHeads(
        heads=heads,
        head_size=head_size,
        state_size=fields.integer("mamba_d_state"),
        groups=fields.integer("mamba_n_groups"),
        inner=inner,
        conv_kernel=fields.integer("mamba_d_conv"),
        dtype=_state_dtype(fields, dtype),
    )


def _state_dtype(fields: Fields, dtype: str) -> str:
    found = read_dtype(fields, "mamba_ssm_dtype") or read_dtype(fields, "mamba_ssm_cache_dtype")
    if not found:
        found = SSM_DTYPES.get(fields.model_type, dtype)
        why = "which engines choose then" if found != dtype else "as the model is"
        fields.assumed.append(f"mamba_ssm_dtype is not in the file: recurrent states are taken to be {found}, {why}")
    return found


def read_dtype(fields: Fields, key: str) -> str:
    """Reads a dtype without "torch."; "" where it is absent. Raises ConfigError for one that no
    model is computed in.
    """
    found = fields.text(key, "").removeprefix("torch.")
    if found and found not in DTYPES:
        raise fields.error(key, f"= {found!r} is not known; these are: {', '.join(DTYPES)}")
    return found
