"""SGLang's HiCache storage backend: `class_name` KVOffloaddStorage, `module_path` of this package.

SGLang takes a page that it does not get for one to compute, so whatever goes wrong is told as a miss.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvoffloadd.client import Client
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.sglang import engine, versions
from kvoffloadd.integrations.sglang.hostpool import KV, check_pool, host_pools
from kvoffloadd.integrations.sglang.namespace import namespace_of
from kvoffloadd.integrations.sglang.options import StorageOptions
from kvoffloadd.integrations.sglang.pagestore import Pages, PageStore
from kvoffloadd.integrations.sglang.prefixes import Needed
from kvoffloadd.model import BoolArray, Direction

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("sglang.kvoffloadd")

R = TypeVar("R")

_WORKER_S = 10.0  # an engine's memory is attached in it, too


def _missing_if_it_fails(
    miss: Callable[..., R],
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """The boundary to SGLang's threads: a bug of ours costs a request its computation. `miss`: the answer then."""

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def guarded(self: KVOffloaddStorage, *arguments: Any, **named: Any) -> R:
            try:
                return method(self, *arguments, **named)
            except Exception:
                logger.exception("kvoffloadd: a bug, please report it")
                return miss(*arguments, **named)

        return guarded

    return decorate


def _no_pages(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KVOffloaddStorage(HiCacheStorage):
    """Of one rank. Whatever SGLang asks once it has started is answered, in the worst case as a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Connects to nothing yet. Raises UsageError for what can't be, with the flag to change."""
        self._config = storage_config
        self._options = StorageOptions.of(storage_config.extra_config or {})
        self._host_pools: dict[str, Any] = {}
        self._pages: PageStore | None = None
        engine.refuse_parallel(storage_config)
        engine.watch_weights()

    # --- the start, and the end --------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values."""
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Any pool. Raises UsageError for one that comes after the others were shared."""
        name = str(host_pool_name)
        if self._pages is not None:
            check_pool(name, host_pool)
            raise UsageError(f"kvoffloadd: SGLang has registered the pool {name!r} too late")
        self._host_pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        """All pools are known: share them with the daemon, or keep trying. Raises UsageError for what can't be."""
        config, options = self._config, self._options
        pools = host_pools(self._host_pools, config.tp_rank, config.tp_size, replicated=config.is_mla_model)
        namespace = namespace_of(engine.arguments(), pools, config.tp_size, versions.check())

        instance = secrets.token_bytes(16)

        def client(role: Literal["scheduler", "worker"]) -> Client:
            deadline_s = options.timeout_s if role == "scheduler" else max(_WORKER_S, options.timeout_s)
            return Client(
                options.socket,
                namespace=namespace,
                role=role,
                instance=instance,
                deadline_s=deadline_s,
                connect_deadline_s=0.0,
            )

        known = engine.WEIGHTS.engine
        number = engine.agreed(secrets.randbits(64)) if known is None else known
        self._pages = PageStore(pools, client, job_deadline_s=options.job_deadline_s)
        engine.WEIGHTS.follow(self._pages, number)
        logger.info("kvoffloadd: pools %s, daemon at %s", ", ".join(pools.pools), options.socket)

    def close(self) -> None:
        """SGLang's threads have ended. Nothing is known any more."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    # --- SGLang's threads --------------------------------------------------------------------------

    @_missing_if_it_fails(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages could be loaded, from the first on."""
        return 0 if self._pages is None else self._pages.restorable(keys).pages

    @_missing_if_it_fails(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """As `batch_exists`, with what other pools need for a prefix of each length."""
        if self._pages is None:
            return PoolTransferResult(0, {}, [])
        found = self._pages.restorable(keys, [_needed(transfer) for transfer in pool_transfers or ()])
        return PoolTransferResult(found.pages, dict(found.by_pool), list(found.lengths))

    @_missing_if_it_fails(lambda keys, *_, **__: [False] * len(keys))
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Which pages hold what was asked for."""
        return self._move(Direction.LOAD, [Pages(KV, keys, _slots(host_indices))])[KV]

    @_missing_if_it_fails(lambda keys, *_, **__: [False] * len(keys))
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Which pages the daemon has, or is being given."""
        return self._move(Direction.STORE, [Pages(KV, keys, _slots(host_indices))])[KV]

    @_missing_if_it_fails(_no_pages)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_get_v1`, of several pools."""
        return self._move(Direction.LOAD, _pages(transfers))

    @_missing_if_it_fails(_no_pages)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """As `batch_set_v1`, of several pools."""
        return self._move(Direction.STORE, _pages(transfers))

    def _move(self, direction: Direction, transfers: list[Pages]) -> dict[str, list[bool]]:
        if self._pages is None:
            return {pages.pool: [False] * len(pages.keys) for pages in transfers}
        move = self._pages.store if direction is Direction.STORE else self._pages.load
        done: dict[str, BoolArray] = move(transfers)
        return {pool: copied.tolist() for pool, copied in done.items()}

    # --- the scheduler's thread --------------------------------------------------------------------

    def clear(self) -> None:
        """Drop every key of the namespace. SGLang tells its user in any case that this was done."""
        if self._pages is not None:
            self._pages.clear()

    def get_stats(self) -> StorageMetrics | None:
        """What was moved since the last call."""
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
        """A miss."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Misses."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not stored."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not stored."""
        return False

    def exists(self, key: str) -> bool:
        """Whether a page could be loaded."""
        return self.batch_exists([key]) == 1


def _needed(transfer: PoolTransfer) -> Needed:
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return Needed(str(transfer.name))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return Needed(str(transfer.name), max(1, len(transfer.keys or ())))
    raise ValueError(f"pages of {transfer.name} are needed by a rule that is not known: {transfer.hit_policy}")


def _pages(transfers: list[PoolTransfer]) -> list[Pages]:
    return [Pages(str(transfer.name), transfer.keys or (), _slots(transfer.host_indices)) for transfer in transfers]


def _slots(host_indices: torch.Tensor | None) -> npt.NDArray[np.int64]:
    """None of them where SGLang names none."""
    return np.empty(0, np.int64) if host_indices is None else host_indices.cpu().numpy()
