"""Presents SGLang's host pools, which hold the pages of its second cache level, as memory that the daemon copies.

A pool reports where its pages lie (`get_page_buffer_meta`): some runs of bytes for each page, such as its keys and its
values. Each run becomes a canonical tensor with a row for each page, and each pool a group. The memory is a memfd, if
SGLang was configured with its `shm` allocator, and stays SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvoffloadd.client import Group, KvCache, Ref, SharedTensor, digest_layers
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
from kvoffloadd.model import Dtype, U8Array, dtype_named
from kvoffloadd.sglangnames import STORAGE_FLAG

_LAYOUT = "page_first_direct"
_ATTENTION = frozenset({"MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost"})
_LATENTS = frozenset({"MLATokenToKVPoolHost"})
_POOLS = {
    KV: _ATTENTION | _LATENTS,
    "swa": _ATTENTION,
    STATES: frozenset({"MambaPoolHost"}),
    "indexer": frozenset({"DSAIndexerPoolHost"}),
}
"""SGLang's names of pools -> the classes of host pools that are known to report where all bytes of a page lie."""

_FORMAT = (
    *("layer_num", "num_mamba_layers", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"),
    *("temporal_state_shape", "temporal_dtype", "conv_state_shapes", "indexer_dtype"),
)
"""Attributes that distinguish formats of pages of equal size, in pools of states or of indexes."""


def host_pools(pools: Mapping[str, Any], rank: TpRank, *, replicated: bool) -> Pools:
    """Shares `pools`: SGLang's host pools by their names; `replicated`: all ranks hold the same, except for states.

    Raises UsageError, with the flag to change, for pools that can't be shared or are not known.
    """
    tensors: list[SharedTensor] = []
    groups: list[Group] = []
    found: dict[str, PagePool] = {}
    shapes: list[Shape] = []
    for name, pool in pools.items():
        check_pool(name, pool)
    if KV not in pools:
        raise UsageError("SGLang has registered no pool for keys and values")
    for number, name in enumerate(NAMES):
        pool = pools.get(name)
        if pool is None:
            continue
        rows = _rows(name, pool)
        dtype, layers = _composition(name, pool, len(rows))
        refs = [
            Ref(len(tensors) + index, 0, tensor.page_bytes, dtype=dtype, layers=layers)
            for index, tensor in enumerate(rows)
        ]
        tensors += rows
        groups.append(rank.group(name, refs, pools[KV].page_size, replicated=replicated and name != STATES))
        found[name] = PagePool(number, pool.page_size, rows[0].num_blocks)
        shapes.append(_shape(name, pool, sum(tensor.page_bytes for tensor in rows)))
    return Pools(KvCache(tensors, groups), found, tuple(shapes))


def check_pool(name: str, pool: Any) -> None:
    """Raises UsageError for a pool that is not known."""
    if name.startswith("draft") or _has_draft_layers(pool):
        raise UsageError(
            f"kvoffloadd can't store the pool {name!r} of a draft model: start SGLang without --speculative-algorithm"
        )
    kind = type(pool).__name__
    if kind not in _POOLS.get(name, ()):
        raise UsageError(
            f"kvoffloadd does not know pools {name!r} of class {kind}: this model, or the format of its KV cache "
            "(--kv-cache-dtype, --enable-unified-memory), is not supported"
        )
    if pool.layout != _LAYOUT:
        raise UsageError(
            f"kvoffloadd needs --hicache-mem-layout {_LAYOUT} and --hicache-io-backend direct; the layout of the pool "
            f"{name!r} is {pool.layout!r}"
        )
    if not getattr(pool.allocator, "fds", None):
        raise UsageError(
            f'kvoffloadd needs host pools that other processes can map: "allocator": "shm" in {STORAGE_FLAG}, which '
            "must be given in full when SGLang is started, not by @file, with "
            "--hicache-storage-backend dynamic"
        )


def _has_draft_layers(pool: Any) -> bool:
    """Returns whether pages contain draft layers: SGLang puts those of some draft models behind those of the model."""
    layers = getattr(pool, "layer_num", None)
    return bool(getattr(pool, "target_layer_num", layers) != layers or getattr(pool, "mtp_draft_buffer_infos", ()))


def _shape(name: str, pool: Any, page_bytes: int) -> Shape:
    kind = type(pool).__name__
    if kind in _ATTENTION:
        shape = shape_of_attention(name, pool, pool.page_size, page_bytes)
    elif kind in _LATENTS:
        shape = shape_of_latents(name, pool, pool.page_size, page_bytes)
    else:
        # Device pools of this kind were not seen to have the same bytes: the linker has other shapes for them.
        described = [getattr(pool, what, None) for what in _FORMAT]
        shape = (name, "host", kind, pool.layout, *described, pool.page_size, page_bytes)
    # SGLANG_USE_HND_KVCACHE and the like change the order of a page's bytes, and nothing else.
    orders = [info.buffers.layout.value for info in getattr(pool, "_buffer_infos", ())]
    return (*shape, repr(pool.dtype), *(order for order in orders if order != USUAL_ORDER))


def _composition(name: str, pool: Any, runs: int) -> tuple[Dtype, bytes]:
    """Describes the bytes of a page: in the same way as for device pools where these may have the same."""
    kind = type(pool).__name__
    if kind in _ATTENTION:
        return dtype_named(pool.dtype), digest_layers(attention_layers(name, pool.layer_num))
    if kind in _LATENTS:
        return dtype_named(pool.dtype), digest_layers(other_layers(name, pool.layer_num))
    return "", digest_layers(other_layers(name, runs))  # for these, `dtype` may be that of another pool


def _rows(name: str, pool: Any) -> list[SharedTensor]:
    count = pool.size // pool.page_size
    first, last = _runs(pool, 0), _runs(pool, count - 1)
    second = _runs(pool, min(1, count - 1))
    if sum(size for _, size in first) != pool.size_per_token * pool.page_size:
        raise UsageError(f"kvoffloadd: the pool {name!r} does not say where all bytes of a page lie")
    made = zip(pool.allocator.fds, pool.allocator.mms, strict=True)
    memory = [(fd, np.frombuffer(mapped, np.uint8)) for fd, mapped in made]
    tensors = []
    for (address, size), (next_address, _), end in zip(first, second, last, strict=True):
        stride = next_address - address if count > 1 else size
        if end != (address + (count - 1) * stride, size):
            raise UsageError(f"kvoffloadd: the pages of the pool {name!r} do not lie at equal distances")
        tensors.append(_tensor(name, memory, address, (count, size, stride)))
    return tensors


def _runs(pool: Any, page: int) -> list[tuple[int, int]]:
    """Returns address and bytes of each run of a page."""
    slots = np.arange(page * pool.page_size, (page + 1) * pool.page_size)
    try:
        addresses, sizes = pool.get_page_buffer_meta(slots)
    except (NotImplementedError, ValueError) as error:
        raise UsageError(
            f"kvoffloadd: SGLang can't say where the pages of a {type(pool).__name__} lie: {error}"
        ) from error
    return list(zip(addresses, sizes, strict=True))


def _tensor(name: str, memory: list[tuple[int, U8Array]], address: int, shape: tuple[int, int, int]) -> SharedTensor:
    count, size, stride = shape
    for fd, mapped in memory:
        offset = address - mapped.ctypes.data
        if offset >= 0 and offset + (count - 1) * stride + size <= mapped.size:
            rows: U8Array = np.ndarray((count, size), np.uint8, mapped.data, offset, (stride, 1))
            return SharedTensor.of_fd(fd, mapped, rows)
    raise UsageError(f"kvoffloadd: pages of the pool {name!r} lie outside of what SGLang's shm allocator has made")
