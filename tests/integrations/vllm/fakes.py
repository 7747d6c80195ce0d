"""vLLM's OffloadingConfig and CanonicalKVCaches, as far as they are read, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvoffloadd.integrations.vllm.identity import IDENTITY
from kvoffloadd.integrations.vllm.parts import HEADS


@dataclass(frozen=True)
class Model:
    name: str = "org/model"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class CacheSettings:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 2


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    is_parallelism_agnostic: bool = False


@dataclass(frozen=True)
class GroupConfig:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("a", "b")
    group_id: int = 0


def identified(**changed: Any) -> dict[str, Any]:
    """Returns the extra_config of an engine that names its identity."""
    standard = dict.fromkeys(("adapters", "drafts", "seen", "doubt"), "")
    named = {"model": "org/model", "dtype": "bfloat16", "hash": "sha256", "weights": "files:one", "fields": "some"}
    return {IDENTITY: standard | named | {"layers": 4, "places": [], "token": "own"} | changed}


@dataclass(frozen=True)
class Config:
    """Stands in for vLLM's OffloadingConfig."""

    groups: tuple[GroupConfig, ...] = (GroupConfig(),)
    worker_kv_bytes_per_block: int = 4096
    extra_config: dict[str, Any] = field(default_factory=identified)
    engine_id: str = "engine"
    model: Model = Model()
    cache: CacheSettings = CacheSettings()
    parallel: Parallel = Parallel()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


@dataclass(frozen=True)
class CopyRun:
    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True)
class PageMapping:
    """Stands in for vLLM's CanonicalPageMapping."""

    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    parallelism_agnostic: bool = True


@dataclass(frozen=True)
class CacheRef:
    """Stands in for vLLM's CanonicalKVCacheRef."""

    tensor_idx: int
    page_size_bytes: int
    mapping: PageMapping | None


@dataclass(frozen=True)
class CacheTensor:
    """Stands in for vLLM's CanonicalKVCacheTensor."""

    tensor: Any


@dataclass(frozen=True)
class Caches:
    """Stands in for vLLM's CanonicalKVCaches."""

    tensors: list[CacheTensor]
    group_data_refs: list[list[CacheRef]]


def of_size(
    ranks: int, heads: int, *, rank: int = 0, agnostic: bool = True, canonical_parts: Any = None, **changed: Any
) -> Config:
    """Returns an engine of a model with this number of KV heads, with vLLM's canonical layout."""
    extra = identified() | {HEADS: heads} | ({} if canonical_parts is None else {"canonical_parts": canonical_parts})
    parallel = Parallel(rank, ranks, ranks, is_parallelism_agnostic=agnostic)
    return replace(Config(extra_config=extra, parallel=parallel, canonical_layout=True), **changed)
