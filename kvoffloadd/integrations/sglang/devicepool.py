"""Presents SGLang's device pools, which its model computes with, as memory that the daemon copies from and to.

A pool has a buffer for each layer, or two, for keys and values, with a row for each token or page. Each buffer becomes
a canonical tensor with a row for each page, and each pool a group with the page in all of its buffers, one after the
other, as its payload. On a GPU the memory stays as it is; on the CPU it is moved to shared memory, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffloadd.client import GpuTensor, Group, KvCache, Ref, SharedTensor, Timeline, digest_layers
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.sglang.pools import (
    KV,
    NAMES,
    STATES,
    USUAL_ORDER,
    PagePool,
    Pools,
    Shape,
    TpRank,
    attention_layers,
    other_layers,
    shape_of_attention,
    shape_of_latents,
)
from kvoffloadd.model import dtype_named

_ATTENTION = "MHATokenToKVPool"
_LATENTS = "MLATokenToKVPool"
_WINDOWS = "SWAKVPool"
_OTHERS = frozenset({"MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool", "MambaPool"})
_UNKNOWN = "this model, or the format of its KV cache (--kv-cache-dtype, --enable-unified-memory), is not supported"


@dataclass(frozen=True, slots=True)
class DevicePool:
    """One pool. `source`: the pool with the slots that SGLang names its pages by, `slots` converts them to its own
    slots; `tokens`: tokens of a page, as slots are counted. `buffers`: torch tensors, in the order of the payload;
    `rows`: rows of a page in each of them; `layers`: the daemon's names of their contents.
    """

    name: str
    source: str
    buffers: Sequence[Any]
    rows: int
    tokens: int
    shape: Shape
    layers: Sequence[str]
    replicated: bool = False
    slots: Callable[[Any], Any] = lambda slots: slots


@dataclass(frozen=True, slots=True)
class ModelPools:
    """All pools of a model, and how many layers its forward waits for, one by one."""

    pools: tuple[DevicePool, ...]
    layers: int

    @property
    def on_gpu(self) -> bool:
        """Whether they lie on a GPU, all together."""
        return bool(self.pools[0].buffers[0].device.type == "cuda")


def found_pools(kvcache: Any, params: Any, components: set[Any], assemble: Callable[[], Any]) -> ModelPools:
    """Finds the pools of a model. `kvcache`, `params`, `components`: as SGLang gives them to a linker. `assemble`:
    returns SGLang's own group of pools, for models that have more than attention or MLA, with windows or without:
    0.5.23 has none for these.

    Raises UsageError, with the flag to change, for pools that can't be shared or are not known.
    """
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    if any(getattr(params, name, ()) for name in drafts):
        raise UsageError("kvoffloadd can't store pools of a draft model: start SGLang without --speculative-algorithm")
    kind, page = type(kvcache).__name__, params.page_size
    if kind in (_ATTENTION, _LATENTS):
        return ModelPools((_plain(KV, kvcache, page),), kvcache.layer_num)
    if kind == _WINDOWS and {component.name for component in components} == {"FULL", "SWA"}:
        windows = _plain("swa", kvcache.swa_kv_pool, page)
        return ModelPools((_plain(KV, kvcache.full_kv_pool, page), windows), kvcache.layer_num)
    try:
        group = assemble()
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"kvoffloadd does not know KV caches of class {kind}: {_UNKNOWN}: {error}") from error
    pools = tuple(_assembled(entry, page) for entry in group.entries)
    if KV not in {pool.name for pool in pools}:
        raise UsageError(f"kvoffloadd: SGLang has no pool for keys and values in a {kind}: {_UNKNOWN}")
    return ModelPools(pools, group.num_layers)


def device_pools(found: ModelPools, rank: TpRank, timelines: Sequence[Timeline] = ()) -> Pools:
    """Shares the pools. Raises UsageError where memory can't be shared, ResourceError where there is none to move it
    to.
    """
    tensors: list[SharedTensor | GpuTensor] = []
    groups: list[Group] = []
    pools: dict[str, PagePool] = {}
    by_name: Mapping[str, DevicePool] = {pool.name: pool for pool in found.pools}
    ordered = [by_name[name] for name in NAMES if name in by_name]
    for pool in ordered:
        rows = [_adopt(pool, buffer) for buffer in pool.buffers]
        layers, dtypes = digest_layers(pool.layers), [dtype_named(buffer.dtype) for buffer in pool.buffers]
        refs = [
            Ref(len(tensors) + index, 0, tensor.page_bytes, dtype=dtype, layers=layers)
            for index, (tensor, dtype) in enumerate(zip(rows, dtypes, strict=True))
        ]
        tensors += rows
        groups.append(rank.group(pool.name, refs, by_name[KV].tokens, replicated=pool.replicated))
        pages = min(tensor.num_blocks for tensor in rows)
        pools[pool.name] = PagePool(NAMES.index(pool.name), pool.tokens, pages)
    return Pools(KvCache(tensors, groups, timelines), pools, tuple(pool.shape for pool in ordered))


def _adopt(pool: DevicePool, buffer: Any) -> SharedTensor | GpuTensor:
    pages = buffer.shape[0] // pool.rows
    rows = buffer[: pages * pool.rows].unflatten(0, (pages, pool.rows)) if pool.rows > 1 else buffer
    if buffer.device.type == "cpu":
        return SharedTensor.adopt(rows)
    return GpuTensor.adopt(rows)


def _plain(name: str, pool: Any, page: int) -> DevicePool:
    kind = type(pool).__name__
    if kind == _ATTENTION:
        buffers = [*pool.k_buffer, *pool.v_buffer]
        _check_attention(name, pool)
        shape = shape_of_attention(name, pool, page, _page_bytes(buffers, page))
        layers = attention_layers(name, pool.layer_num)
    elif kind == _LATENTS:
        buffers = list(pool.kv_buffer)
        if getattr(pool, "kv_scale_buffer", None) is not None:
            raise UsageError(f"kvoffloadd can't store scaled latents: {_UNKNOWN}")
        shape = shape_of_latents(name, pool, page, _page_bytes(buffers, page))
        layers = other_layers(name, pool.layer_num)
    else:
        raise UsageError(f"kvoffloadd does not know device pools {name!r} of class {kind}: {_UNKNOWN}")
    if pool.page_size != page:
        raise UsageError(f"kvoffloadd: pages of the pool {name!r} have {pool.page_size} tokens, SGLang's tree {page}")
    if not buffers:
        raise UsageError(f"kvoffloadd: the pool {name!r} has no layers: {_UNKNOWN}")
    shape = (*shape, repr(buffers[0].dtype))
    return DevicePool(name, name, buffers, page, page, shape, layers, replicated=kind == _LATENTS)


def _check_attention(name: str, pool: Any) -> None:
    """Checks that rows have the shape that `shape_of_attention` describes."""
    scales = (getattr(pool, scale, None) for scale in ("k_scale_buffer", "native_k_scale_buffer"))
    if any(scale is not None for scale in scales):
        raise UsageError(f"kvoffloadd can't store the scales of the pool {name!r}: choose another --kv-cache-dtype")
    rows = [(pool.head_num, pool.head_dim)] * len(pool.k_buffer) + [(pool.head_num, pool.v_head_dim)] * len(
        pool.v_buffer
    )
    buffers = [*pool.k_buffer, *pool.v_buffer]
    if pool.kv_cache_layout != USUAL_ORDER or [tuple(buffer.shape[1:]) for buffer in buffers] != rows:
        raise UsageError(
            f"kvoffloadd: the pool {name!r} is laid out as {pool.kv_cache_layout!r}; only {USUAL_ORDER!r} is known "
            "(SGLANG_USE_HND_KVCACHE, SGLANG_AITER_KV_CACHE_LAYOUT)"
        )


def _assembled(entry: Any, page: int) -> DevicePool:
    """Converts a pool that SGLang has assembled: its DevicePoolEntry."""
    name, kind = str(entry.name), type(entry.device_pool).__name__
    if name not in NAMES or kind not in _OTHERS:
        raise UsageError(f"kvoffloadd does not know device pools {name!r} of class {kind}: {_UNKNOWN}")
    if kind == _ATTENTION or (kind == _LATENTS and name == KV):
        return _plain(name, entry.device_pool, page)
    rows: int = entry._row_span
    described = [(tuple(buffer.shape[1:]), repr(buffer.dtype)) for buffer in entry.kv_buffer]
    return DevicePool(
        name,
        str(entry.indices_from_pool),
        list(entry.kv_buffer),
        rows,
        entry.page_size,
        # Host pools of this kind were not seen to have the same bytes: the storage has other shapes for them.
        (name, "device", kind, rows, entry.page_size, described),
        other_layers(name, len(described)),
        replicated=name != STATES,
        slots=entry.translate_indices,
    )


def _page_bytes(buffers: Sequence[Any], page: int) -> int:
    return sum(page * buffer[0].numel() * buffer.element_size() for buffer in buffers)
