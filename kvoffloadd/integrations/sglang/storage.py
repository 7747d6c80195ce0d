"""SGLang's HiCache storage backend: `class_name` KVOffloaddStorage, `module_path` of this package.

SGLang computes a page that it does not get, so every failure is reported as a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.sglang import engine
from kvoffloadd.integrations.sglang.guard import or_else
from kvoffloadd.integrations.sglang.hostpool import check_pool, host_pools
from kvoffloadd.integrations.sglang.options import StorageOptions
from kvoffloadd.integrations.sglang.pagestore import Pages, PageStore
from kvoffloadd.integrations.sglang.pools import KV, TpRank
from kvoffloadd.integrations.sglang.start import page_store
from kvoffloadd.integrations.sglang.transfers import needed_of
from kvoffloadd.model import BoolArray, Direction

if TYPE_CHECKING:
    import torch


def _no_pages(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KVOffloaddStorage(HiCacheStorage):
    """Serves one rank. After the start every call of SGLang gets an answer, in the worst case a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Stores the options; does not connect yet. Raises UsageError, with the flag to change, for invalid ones."""
        self._config = storage_config
        self._options = StorageOptions.of(storage_config.extra_config or {})
        self._host_pools: dict[str, Any] = {}
        self._pages: PageStore | None = None
        engine.refuse_parallel(storage_config.pp_size, storage_config.attn_cp_size, storage_config.dcp_size)
        engine.watch_weights()

    # --- the start, and the end --------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Adds the pool of keys and values."""
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Adds any pool. Raises UsageError for one that can't be shared, or comes after the others were."""
        name = str(host_pool_name)
        check_pool(name, host_pool)  # here, since SGLang removes a storage that refused its first pool
        if self._pages is not None:
            raise UsageError(f"kvoffloadd: SGLang has registered the pool {name!r} too late")
        self._host_pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """Shares all pools with the daemon, or keeps trying. Raises UsageError for pools that can't be shared."""
        config = self._config
        rank = TpRank(config.tp_rank, config.tp_size)
        with engine.all_or_none():
            pools = host_pools(self._host_pools, rank, replicated=config.is_mla_model)
        self._pages = page_store(pools, self._options, config.tp_size, retry_busy=True)
        engine.rest_during_flushes(self._pages)

    def close(self) -> None:
        """Ends the session and forgets everything: SGLang's threads have ended."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    # --- SGLang's threads --------------------------------------------------------------------------

    @or_else(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Returns how many pages could be loaded, from the first on."""
        return 0 if self._pages is None else self._pages.restorable(keys, wait_s=self._options.wait_s).pages

    @or_else(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Does what `batch_exists` does, including the pages of other pools that a prefix of each length needs."""
        if self._pages is None:
            return PoolTransferResult(0, {}, [])
        needed = [needed_of(transfer, str(transfer.name)) for transfer in pool_transfers or ()]
        found = self._pages.restorable(keys, needed, self._options.wait_s)
        return PoolTransferResult(found.pages, dict(found.by_pool), list(found.lengths))

    @or_else(lambda keys, *_, **__: [False] * len(keys))
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Loads pages; returns which hold their key's contents."""
        return self._move(Direction.LOAD, [Pages(KV, keys, _slots(host_indices))])[KV]

    @or_else(lambda keys, *_, **__: [False] * len(keys))
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages; returns which the daemon has, or is being given."""
        return self._move(Direction.STORE, [Pages(KV, keys, _slots(host_indices))])[KV]

    @or_else(_no_pages)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Does what `batch_get_v1` does, for several pools."""
        return self._move(Direction.LOAD, _pages(transfers))

    @or_else(_no_pages)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Does what `batch_set_v1` does, for several pools."""
        return self._move(Direction.STORE, _pages(transfers))

    def _move(self, direction: Direction, transfers: list[Pages]) -> dict[str, list[bool]]:
        if self._pages is None:
            return {pages.pool: [False] * len(pages.keys) for pages in transfers}
        move = self._pages.store if direction is Direction.STORE else self._pages.load
        done: dict[str, BoolArray] = move(transfers)
        return {pool: copied.tolist() for pool, copied in done.items()}

    # --- the scheduler's thread --------------------------------------------------------------------

    def clear(self) -> None:
        """Drops every key of the namespace. SGLang reports success to its user in any case."""
        if self._pages is not None:
            self._pages.clear()

    def get_stats(self) -> StorageMetrics | None:
        """Returns what was moved since the last call."""
        if self._pages is None or not self._config.enable_storage_metrics:
            return None
        loads, stores = self._pages.moved(Direction.LOAD), self._pages.moved(Direction.STORE)
        return StorageMetrics(
            prefetch_pgs=[moved.pages for moved in loads],
            backup_pgs=[moved.pages for moved in stores],
            prefetch_bandwidth=[moved.gb_per_s for moved in loads],
            backup_bandwidth=[moved.gb_per_s for moved in stores],
        )

    # --- SGLang's older interface, which it does not call with `interface_v1` --------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Returns a miss."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Returns misses."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Returns False: nothing is stored."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Returns False: nothing is stored."""
        return False

    def exists(self, key: str) -> bool:
        """Returns whether a page could be loaded."""
        return self.batch_exists([key]) == 1


def _pages(transfers: list[PoolTransfer]) -> list[Pages]:
    return [Pages(str(transfer.name), transfer.keys or (), _slots(transfer.host_indices)) for transfer in transfers]


def _slots(host_indices: torch.Tensor | None) -> npt.NDArray[np.int64]:
    """Converts slots; returns none where SGLang names none."""
    return np.empty(0, np.int64) if host_indices is None else host_indices.cpu().numpy()
