"""Derives the host pools that SGLang makes for a model; its storage stores their pages. `integrations/sglang/hostpool`
reads them from a running engine; this module works them out in advance.

Source: SGLang 0.5.23, `srt/mem_cache/kv_cache_configurator.py`, `hybrid_cache/hybrid_pool_assembler.py`, `pool_host`
and `srt/configs`. `tests/sglang/test_pools.py` compares each published model with SGLang itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvoffloadd.layout import LayerKind
from kvoffloadd.layout.spec import item_bytes
from kvoffloadd.planner.compressed import MODEL_TYPE as COMPRESSED
from kvoffloadd.planner.compressed import index_bytes
from kvoffloadd.planner.heads import EXPANDED, GROUPS
from kvoffloadd.planner.layertypes import DOUBLE
from kvoffloadd.planner.modelconfig import SPARSE, ModelConfig
from kvoffloadd.planner.rank import PACKED_LATENT_BYTES, Rank
from kvoffloadd.planner.states import LIGHTNING

MHA, MLA, STATES, INDEX = "MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "MambaPoolHost", "DSAIndexerPoolHost"

WINDOWS_APART = frozenset(
    {"gemma4_text", "gpt_oss", "granite_swa", "granitemoe_swa", "laguna", "llama4_text", "mellum"}
)
"""Model types that have a separate pool, with few slots, for windows or chunks. SGLang has a list of architectures; for
all others it keeps windows in the one pool of all layers, and all their pages are stored.
"""

PAGES_OF_ONE = frozenset({"lfm2", "lfm2_moe"})
"""Model types with states that SGLang caches with `--page-size 1` alone."""

SAYS_NO_STATE_DTYPE = frozenset({"granitemoehybrid", "kimi_linear"})
"""Model types for which SGLang reads no `mamba_ssm_dtype`."""

REFUSED = {
    COMPRESSED: "kvoffloadd refuses SGLang's pools for DeepSeek V4: entries, states and windows of each ratio",
    "mllama_text_model": "what SGLang keeps of an image's layers is not known here",
    EXPANDED: "SGLang keeps its latents, which are not known here",
    **dict.fromkeys((DOUBLE, GROUPS, SPARSE, LIGHTNING), "its pools were not compared with SGLang's"),
}
"""The reason, by model type, why there is no plan."""

CONV_DTYPE, STATE_DTYPE = "bfloat16", "float32"
"""The dtype of SGLang's convolution states, and that of its recurrent states where the model's file has none."""


@dataclass(frozen=True, slots=True)
class HostPool:
    """A pool of one rank. `name`, `kind`: SGLang's name and class. `payload_bytes`: bytes of a page, or of a state,
    which exists only where SGLang has kept it; `parts`: parts of a key.

    `needed_tokens`: how much of a prompt's end a restore needs; 0: all of it, or with states the last one.
    """

    name: str
    kind: str
    layers: int
    payload_bytes: int
    parts: int
    needed_tokens: int = 0

    @property
    def is_state(self) -> bool:
        return self.kind == STATES

    def stored_keys(self, tokens: int, page_tokens: int) -> int:
        """Counts the keys that are stored for a prompt: one for each whole page, or one state at the end of the last
        whole page.
        """
        pages = tokens // page_tokens
        return min(pages, 1) if self.is_state else pages

    def needed_keys(self, tokens: int, page_tokens: int) -> int:
        """Counts the stored keys that a restore of all whole pages needs."""
        stored = self.stored_keys(tokens, page_tokens)
        return min(stored, -(-self.needed_tokens // page_tokens)) if self.needed_tokens else stored


def page_tokens_of(model: ModelConfig, requested: int) -> int:
    """Returns the value that `--page-size` must have."""
    return 1 if model.model_type in PAGES_OF_ONE else requested


def host_pools(rank: Rank) -> tuple[HostPool, ...]:
    """Returns the host pools in the order of their groups. `rank.block_size`: tokens of a page; its `hybrid` False:
    SGLang is started with `--disable-hybrid-swa-memory`. The model is none of `REFUSED`.
    """
    model, page = rank.model, rank.block_size
    kinds = (*model.kinds, *model.sharing)
    attention = [kind for kind in kinds if kind is not LayerKind.MAMBA]
    apart = [kind for kind in attention if kind in (LayerKind.SLIDING, LayerKind.CHUNKED)]
    if not (rank.hybrid and model.model_type in WINDOWS_APART):
        apart = []
    rest = len(attention) - len(apart)
    if model.is_mla:
        found = [HostPool("kv", MLA, rest, page * rest * _latent_bytes(rank), 1)]
    else:
        found = [HostPool("kv", MHA, rest, page * rest * _token_bytes(rank, LayerKind.FULL), rank.tp)]
    if apart:
        bytes_each = page * len(apart) * _token_bytes(rank, apart[0])
        found.append(HostPool("swa", MHA, len(apart), bytes_each, rank.tp, model.window or model.chunk))
    if model.linear is not None:
        layers = model.count(LayerKind.MAMBA)
        found.append(HostPool("mamba", STATES, layers, layers * _state_bytes(rank), rank.tp))
    if model.indexed:
        each = page * index_bytes(model.index_size)
        found.append(HostPool("indexer", INDEX, len(model.indexed), len(model.indexed) * each, 1))
    return tuple(found)


def _token_bytes(rank: Rank, kind: LayerKind) -> int:
    """Returns the bytes of a token in one layer: keys and values."""
    heads = rank.heads(kind)
    return 2 * heads.count * heads.size * item_bytes(rank.dtype)


def _latent_bytes(rank: Rank) -> int:
    return PACKED_LATENT_BYTES if rank.is_packed else rank.model.head_size * item_bytes(rank.dtype)


def _state_bytes(rank: Rank) -> int:
    """Returns the bytes of one layer's convolution and recurrent state."""
    model = rank.model
    state_dtype = "" if model.model_type in SAYS_NO_STATE_DTYPE else model.state_dtype
    dtypes = (CONV_DTYPE, state_dtype or STATE_DTYPE)
    return sum(math.prod(state.shape) * item_bytes(dtype) for state, dtype in zip(rank.states, dtypes, strict=False))
