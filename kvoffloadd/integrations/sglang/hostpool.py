"""SGLang's host pools, which hold the pages of its second cache level, as what the daemon copies from and to.

A pool tells where its pages lie (`get_page_buffer_meta`): some runs of bytes for each page, such as its keys and its
values. Each run becomes a canonical tensor with a row for each page, and each pool a group. The memory is a memfd, if
SGLang was told to take its `shm` allocator, and stays SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.client import Group, GroupKind, KvCache, Ref, SharedTensor
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.sglang.options import FLAG
from kvoffloadd.model import U8Array, U32Array

KV = "kv"
_STATE = "mamba"
_LAYOUT = "page_first_direct"
_DENSE = frozenset({"MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost"})
_POOLS = {
    KV: _DENSE | {"MLATokenToKVPoolHost"},
    "swa": _DENSE,
    _STATE: frozenset({"MambaPoolHost"}),
    "indexer": frozenset({"DSAIndexerPoolHost"}),
}
"""SGLang's names of pools -> the classes of host pools that are known to say where all bytes of a page lie. A pool's
group is its place in here.
"""

_SHAPE = ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "num_mamba_layers", "dtype")


@dataclass(frozen=True, slots=True)
class PagePool:
    """One pool. `group`: its number; `tokens`: of one of its pages, as its slots are counted."""

    group: int
    tokens: int
    pages: int

    def blocks(self, slots: npt.NDArray[np.int64], keys: int) -> U32Array | None:
        """Block ids (keys,) of pages that are named by all their slots; None where that names no `keys` whole pages."""
        if slots.size != keys * self.tokens:
            return None
        first = slots[:: self.tokens]
        blocks = first // self.tokens
        if (first % self.tokens).any() or not ((blocks >= 0) & (blocks < self.pages)).all():
            return None
        return blocks.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class HostPools:
    """What a rank registers, and each pool by its name. `shapes`: what its pages' bytes mean."""

    caches: KvCache
    pools: Mapping[str, PagePool]
    shapes: tuple[tuple[Any, ...], ...]


def host_pools(pools: Mapping[str, Any], tp_rank: int, tp_size: int, *, replicated: bool) -> HostPools:
    """`pools`: SGLang's host pools by their names; `replicated`: all ranks hold the same, but for states.

    Raises UsageError, with the flag to change, for pools that can't be shared or are not known.
    """
    tensors: list[SharedTensor] = []
    groups: list[Group] = []
    found: dict[str, PagePool] = {}
    shapes: list[tuple[Any, ...]] = []
    for name, pool in pools.items():
        check_pool(name, pool)
    if KV not in pools:
        raise UsageError("SGLang has registered no pool for keys and values")
    for number, name in enumerate(_POOLS):
        pool = pools.get(name)
        if pool is None:
            continue
        rows = _rows(name, pool)
        refs = [Ref(len(tensors) + at, 0, tensor.page_bytes) for at, tensor in enumerate(rows)]
        tensors += rows
        alone = replicated and name != _STATE
        groups.append(
            Group(
                group=number,
                # Windows and states, too: which of their keys a prompt needs is SGLang's to say, for each prompt.
                kind=GroupKind.FULL,
                tokens_per_key=pools[KV].page_size,
                refs=refs,
                parts=1 if alone else tp_size,
                part=0 if alone else tp_rank,
            )
        )
        found[name] = PagePool(number, pool.page_size, rows[0].num_blocks)
        sizes = tuple(tensor.page_bytes for tensor in rows)
        shapes.append((name, type(pool).__name__, pool.layout, pool.page_size, *map(repr, _shape(pool)), sizes))
    return HostPools(KvCache(tensors, groups), found, tuple(shapes))


def check_pool(name: str, pool: Any) -> None:
    """Raises UsageError for a pool that is not known."""
    if name.startswith("draft"):
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
            f'kvoffloadd needs host pools that other processes can map: "allocator": "shm" in {FLAG}, which must be '
            "given in full when SGLang is started, not by @file, together with --hicache-storage-backend dynamic"
        )


def _shape(pool: Any) -> list[Any]:
    return [getattr(pool, name, None) for name in _SHAPE]


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
    """Address and bytes of each run of a page."""
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
