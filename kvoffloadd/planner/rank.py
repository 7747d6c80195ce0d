"""What one tensor-parallel rank has of a model: its layers as specs, for a block size, a pack size and a backend."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.errors import ConfigError
from kvoffloadd.layout import (
    LATENT,
    TRITON_NHD,
    Attention,
    Backend,
    LayerKind,
    LayerSpec,
    Mamba,
    State,
    packed_block_size,
    share_of,
)
from kvoffloadd.planner.modelconfig import LinearHeads, ModelConfig

KV_DTYPES = {
    "auto": "",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""What engines call dtypes of the KV cache -> torch's names. "auto": the model's."""


@dataclass(frozen=True, slots=True)
class Rank:
    """`block_size`: tokens, as asked for. `kv_dtype`: a name of KV_DTYPES. `hybrid` False: windows and chunks count as
    full attention, as engines do whose hybrid cache manager is off.

    Raises ConfigError for what does not divide, and for a dtype that is not known.
    """

    model: ModelConfig
    tp: int
    block_size: int
    kv_dtype: str = "auto"
    hybrid: bool = True

    def __post_init__(self) -> None:
        model = self.model
        if min(self.tp, self.block_size) < 1:
            raise ConfigError(f"{self.tp} ranks, blocks of {self.block_size} tokens: both must be 1 or more")
        if not self.hybrid and model.is_hybrid:
            raise ConfigError("layers that keep states need the hybrid cache manager: leave --no-hybrid out")
        if not _divides(model, self.tp):
            works = ", ".join(str(tp) for tp in range(1, 65) if _divides(model, tp))
            raise ConfigError(f"{_heads_said(model)} can't be split over {self.tp} ranks; --tp {works} would work")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f'--kv-dtype "{self.kv_dtype}" is not known; these are: {", ".join(KV_DTYPES)}')
        if self.kv_dtype == "auto" and model.kv_quantised:
            raise ConfigError(
                "quantization_config asks for a quantised KV cache: say which dtype the engine gives it, "
                "like --kv-dtype fp8"
            )

    @property
    def dtype(self) -> str:
        """Of keys and values, as torch calls it."""
        return KV_DTYPES[self.kv_dtype] or self.model.dtype

    @property
    def kv_heads(self) -> int:
        """Of each attention layer; with more ranks than heads several have the same one."""
        return 1 if self.model.is_mla else max(1, self.model.kv_heads // self.tp)

    @property
    def token_bytes(self) -> int:
        """Of a token in one attention layer."""
        return self._attention(LayerKind.FULL, 1, TRITON_NHD).payload_bytes

    @property
    def states(self) -> tuple[State, ...]:
        """Of each layer with linear attention: convolution, recurrent state; () if there is none."""
        linear = self.model.linear
        if linear is None:
            return ()
        conv = State((linear.conv_kernel - 1, linear.conv_channels // self.tp), self.model.dtype)
        recurrent = State((linear.value_heads // self.tp, linear.value_size, linear.key_size), linear.dtype)
        return conv, recurrent

    @property
    def state_bytes(self) -> int:
        """Of one layer with linear attention; 0 if there is none."""
        return sum(state.bytes for state in self.states)

    def block_tokens(self, pack_size: int = 1) -> int:
        """As asked for; larger where `pack_size` attention layers would not fill the page that a state needs."""
        if self.block_size * self.token_bytes * pack_size >= self.state_bytes:
            return self.block_size
        return packed_block_size(self.state_bytes, self.token_bytes, pack_size)

    def specs(self, backend: Backend, pack_size: int = 1) -> dict[str, LayerSpec]:
        """All layers by name, in order. MLA has a backend of its own. Alone on a page, states are padded to it."""
        block = self.block_tokens(pack_size)
        page = block * self.token_bytes
        return {f"layers.{at}": self._layer(kind, block, page if pack_size == 1 else 0, backend)
                for at, kind in enumerate(self.model.kinds)}  # fmt: skip

    def parts(self, kind: LayerKind) -> int:
        """Of a key of a group of this kind."""
        if kind is LayerKind.MAMBA:
            return self.tp
        return share_of(kind, self.model.kv_heads, 0, self.tp).parts

    def _layer(self, kind: LayerKind, block: int, padded_bytes: int, backend: Backend) -> LayerSpec:
        if kind is LayerKind.MAMBA:
            return Mamba(block, self.states, padded_bytes)
        return self._attention(kind, block, backend)

    def _attention(self, kind: LayerKind, block: int, backend: Backend) -> Attention:
        model = self.model
        window = 0
        if model.is_mla:
            kind, backend = LayerKind.MLA, LATENT
        elif not self.hybrid:
            kind = LayerKind.FULL
        elif kind is LayerKind.SLIDING:
            window = model.window
        elif kind is LayerKind.CHUNKED:
            window = model.chunk
        return Attention(block, self.kv_heads, model.head_size, self.dtype, backend, kind, window)


def _divides(model: ModelConfig, tp: int) -> bool:
    heads = model.is_mla or model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return heads and model.query_heads % tp == 0 and (model.linear is None or _linear_divides(model.linear, tp))


def _linear_divides(linear: LinearHeads, tp: int) -> bool:
    return linear.value_heads % tp == 0 and linear.key_heads % tp == 0


def _heads_said(model: ModelConfig) -> str:
    said = [f"{model.query_heads} heads (num_attention_heads)"]
    if not model.is_mla:
        said.append(f"{model.kv_heads} KV heads (num_key_value_heads)")
    if model.linear is not None:
        said.append(f"{model.linear.key_heads} linear_num_key_heads")
        said.append(f"{model.linear.value_heads} linear_num_value_heads")
    return ", ".join(said)
