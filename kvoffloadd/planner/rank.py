"""Derives one tensor-parallel rank's part of a model: its layers as specs, for a block size, a pack size and a
backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.errors import ConfigError, NoPlanError
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
from kvoffloadd.layout.packing import KERNEL_TOKENS
from kvoffloadd.planner.compressed import WINDOW_TOKENS, compressed_layer, index_bytes
from kvoffloadd.planner.fields import INSTEAD
from kvoffloadd.planner.heads import Heads
from kvoffloadd.planner.modelconfig import ModelConfig

KV_DTYPES = {
    "auto": "",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Maps the engines' names of KV-cache dtypes to torch's. "auto": the model's dtype."""

PACKED_LATENT_SIZE, PACKED_LATENT_BYTES = 512 + 64, 656
"""A token's latent with an index: elements, and bytes in fp8 (512 of fp8, 16 of scales, 64 elements of bfloat16)."""


LATENT_TOKENS = 128
"""Blocks are a multiple of this where latents and states share pages: kernels of MLA require it."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's terms. `block_size`: the requested number of tokens. `kv_dtype`: a name of KV_DTYPES. `hybrid` False:
    windows and chunks count as full attention, as in engines with the hybrid cache manager off.

    Raises ConfigError for a number that does not divide, and for an unknown dtype.
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
        needs = {
            "layers that keep states": model.is_hybrid,
            "layers that compress tokens": bool(model.ratios),
            "layers with heads of two sizes": model.full_heads is not None,
        }
        if not self.hybrid and any(needs.values()):
            which = next(layers for layers, found in needs.items() if found)
            raise ConfigError(f"{which} need the hybrid cache manager: leave --no-hybrid out")
        if not _divides(model, self.tp):
            works = ", ".join(str(tp) for tp in range(1, 65) if _divides(model, tp))
            raise ConfigError(f"{_describe_heads(model)} can't be split over {self.tp} ranks; --tp {works} would work")
        sizes = {self._kept(kind) for kind in model.attention_kinds}
        if max(sizes) % min(sizes):
            raise NoPlanError(
                f"layers keep {min(sizes)} or {max(sizes)} elements of K for a token: blocks of whole tokens can't "
                f"make their pages equal, {INSTEAD}"
            )
        self._check_dtype()

    def _check_dtype(self) -> None:
        """Checks that engines keep this model's cache in this dtype. Raises ConfigError."""
        model = self.model
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f'--kv-dtype "{self.kv_dtype}" is not known; these are: {", ".join(KV_DTYPES)}')
        if self.kv_dtype == "auto" and model.kv_quantised:
            raise ConfigError(
                "quantization_config asks for a quantised KV cache: name the dtype that the engine uses, "
                "like --kv-dtype fp8"
            )
        if self.is_packed and not model.ratios and model.head_size != PACKED_LATENT_SIZE:
            raise ConfigError(
                f"--kv-dtype {self.kv_dtype}: engines keep only latents of 512 + 64 elements in this dtype"
            )
        if model.ratios and KV_DTYPES[self.kv_dtype] not in ("", "bfloat16", "float8_e4m3fn"):
            raise ConfigError(f"--kv-dtype {self.kv_dtype}: engines keep this model's cache in fp8 or bfloat16")

    @property
    def dtype(self) -> str:
        """Returns the dtype of keys and values, as torch calls it."""
        return KV_DTYPES[self.kv_dtype] or self.model.dtype

    @property
    def is_packed(self) -> bool:
        """Returns whether latents are bytes: fp8 elements, with scales and a part in bfloat16. DeepSeek V4's are by
        default.
        """
        model = self.model
        fp8 = self.dtype.startswith("float8")
        return (fp8 and model.is_mla and model.index_size > 0) or (bool(model.ratios) and self.kv_dtype == "auto")

    @property
    def kept_dtype(self) -> str:
        """Returns the dtype of the tensors that hold keys and values, or latents."""
        return "uint8" if self.is_packed else self.dtype

    def heads(self, kind: LayerKind) -> Heads:
        """Returns the heads of attention layers of this kind; with more ranks than heads several have the same one."""
        heads = self.model.heads(kind)
        return Heads(1 if self.model.is_mla else max(1, heads.count // self.tp), heads.size)

    def _kept(self, kind: LayerKind) -> int:
        """Returns the elements of K that a layer of this kind keeps for a token."""
        heads = self.heads(kind)
        return heads.count * heads.size

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of a token in one attention layer, without its index; with compressed tokens, the bytes of
        an entry. Where full layers have other heads, the layer is one of those that keep the most.
        """
        if self.model.ratios:
            return next(iter(self._compressed("", 0).values())).payload_bytes // WINDOW_TOKENS
        return max(self._attention(kind, 1, TRITON_NHD).payload_bytes for kind in self.model.attention_kinds)

    @property
    def states(self) -> tuple[State, ...]:
        """Returns the states of each layer that keeps any: convolution, recurrent state if it has one; () if there is
        no such layer.
        """
        linear = self.model.linear
        return () if linear is None else linear.states(self.tp, self.model.dtype)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of one layer that keeps states; 0 if there is none."""
        return sum(state.bytes for state in self.states)

    def block_tokens(self, pack_size: int = 1) -> int:
        """Returns the block size: the requested one, rounded up to a multiple that kernels can read.

        It is larger where `pack_size` attention layers would not fill the page that a state needs: a multiple of the
        requested size.
        """
        if self.model.block_multiple > 1:
            return -(-self.block_size // self.model.block_multiple) * self.model.block_multiple
        if self.block_size * self.token_bytes * pack_size >= self.state_bytes:
            return self.block_size
        step = max(LATENT_TOKENS if self.model.is_mla else KERNEL_TOKENS, self.block_size)
        return packed_block_size(self.state_bytes, self.token_bytes, pack_size, step)

    def specs(self, backend: Backend, pack_size: int = 1) -> dict[str, LayerSpec]:
        """Returns all layers by name, in order. MLA has a separate backend. States that are alone on a page are padded
        to its size.

        Layers with smaller heads get longer blocks, so that all pages are equal.
        """
        block = self.block_tokens(pack_size)
        page = block * self.token_bytes
        if self.model.ratios:
            layers = (self._compressed(f"layers.{index}", ratio) for index, ratio in enumerate(self.model.ratios))
            return {name: spec for layer in layers for name, spec in layer.items()}
        found: dict[str, LayerSpec] = {}
        for index, kind in enumerate(self.model.kinds):
            found[f"layers.{index}"] = self._layer(kind, block, page if pack_size == 1 else 0, backend)
            if index in self.model.indexed:
                found[f"layers.{index}.index"] = self._index(block)
        return found

    def parts(self, kind: LayerKind) -> int:
        """Returns the number of parts of a key of a group of this kind."""
        if kind is LayerKind.MAMBA:
            return self.tp
        return share_of(kind, self.model.heads(kind).count, 0, self.tp).parts

    def _compressed(self, name: str, ratio: int) -> dict[str, LayerSpec]:
        model = self.model
        return dict(
            compressed_layer(
                name, ratio, self.block_tokens(), model.head_size, model.index_size, model.window, self.is_packed
            )
        )

    def _index(self, block: int) -> Attention:
        """Returns the keys of a layer's index: in fp8 with latents, in bfloat16 with heads."""
        size = self.model.index_size
        size, dtype = (index_bytes(size), "uint8") if self.model.is_mla else (size, "bfloat16")
        return Attention(block, 1, size, dtype, LATENT, LayerKind.MLA)

    def _layer(self, kind: LayerKind, block: int, padded_bytes: int, backend: Backend) -> LayerSpec:
        if kind is LayerKind.MAMBA:
            return Mamba(block, self.states, padded_bytes)
        most = max(map(self._kept, self.model.attention_kinds))
        return self._attention(kind, most // self._kept(kind) * block, backend)

    def _attention(self, kind: LayerKind, block: int, backend: Backend) -> Attention:
        model, heads = self.model, self.heads(kind)
        window = 0
        if model.is_mla:
            if self.is_packed:
                return Attention(block, 1, PACKED_LATENT_BYTES, "uint8", LATENT, LayerKind.MLA)
            kind, backend = LayerKind.MLA, LATENT
        elif not self.hybrid:
            kind = LayerKind.FULL
        elif kind is LayerKind.SLIDING:
            window = model.window
        elif kind is LayerKind.CHUNKED:
            window = model.chunk
        return Attention(block, heads.count, heads.size, self.dtype, backend, kind, window)


def _divides(model: ModelConfig, tp: int) -> bool:
    counts = {model.heads(kind).count for kind in model.attention_kinds}
    heads = model.is_mla or all(count % tp == 0 or tp % count == 0 for count in counts)
    states = model.linear.divided.values() if model.linear is not None else ()
    return heads and model.query_heads % tp == 0 and all(number % tp == 0 for number in states)


def _describe_heads(model: ModelConfig) -> str:
    counts = [f"{model.query_heads} heads (num_attention_heads)"]
    if not model.is_mla:
        counts.append(f"{model.kv_heads} KV heads (num_key_value_heads)")
    if model.full_heads is not None:
        counts.append(f"{model.full_heads.count} KV heads of full layers")
    if model.linear is not None:
        counts += [f"{number} {name}" for name, number in model.linear.divided.items()]
    return ", ".join(counts)
