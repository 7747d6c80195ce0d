"""SGLang's external linker: `linker` KVOffloaddLinker, `linker_module_path` this package.

The daemon copies from and to the pools that the model computes with. SGLang calls everything on the scheduler's thread,
so nothing here waits for a daemon that does not answer, except for one that may still write to pages, or read them.

By default `load` returns when the pages are there, or False: then SGLang computes them. With `overlap` it returns at
once, and the forward waits for the pages; SGLang has no way back then, and fails the requests of a load that fails.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvoffloadd.client import Timeline
from kvoffloadd.integrations.sglang import engine
from kvoffloadd.integrations.sglang.background import Background
from kvoffloadd.integrations.sglang.devicepool import DevicePool, device_pools, found_pools
from kvoffloadd.integrations.sglang.guard import or_else
from kvoffloadd.integrations.sglang.lookupcache import LookupCache
from kvoffloadd.integrations.sglang.options import LinkerOptions
from kvoffloadd.integrations.sglang.pagestore import Pages
from kvoffloadd.integrations.sglang.pools import KV, STATES
from kvoffloadd.integrations.sglang.start import page_store
from kvoffloadd.integrations.sglang.storequeue import StoreQueue
from kvoffloadd.integrations.sglang.transfers import needed_of

if TYPE_CHECKING:
    import torch

_CLOSE_S = 2.0


def _nothing(*_: Any) -> Future[bool] | None:
    return None


class KVOffloaddLinker(UnifiedCacheLinker):
    """Serves one rank. After the start every call of SGLang gets an answer, in the worst case a miss."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Shares the pools. Raises UsageError, with the flag to change, for pools that can't be shared."""
        options = LinkerOptions.of(extra_config or {})
        engine.refuse_parallel(params.pp_size, params.attn_cp_size, engine.dcp_size())
        engine.refuse_moving_memory()
        engine.watch_weights()
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        found = found_pools(
            kvcache,
            params,
            components,
            lambda: resolve_hybrid_device_pool_group(
                kvcache=kvcache, page_size=params.page_size, params=params, components=components
            ),
        )
        self.forward_stream = forward_stream
        self._timeline = Timeline(forward_stream or engine.stream()) if found.on_gpu else None
        rank = engine.rank()
        pools = device_pools(found, rank, [] if self._timeline is None else [self._timeline])
        self._device_pools = found.pools
        self._overlap = options.overlap
        self._pages = page_store(pools, options, rank.size, retry_busy=False)
        self._answers = LookupCache()
        self._queued: dict[str, Future[bool]] = {}
        self._landing: dict[int, Future[bool]] = {}  # loads that unfinished forwards wait for
        self._loads = Background("kvoffloadd-loads")
        self._offloads = StoreQueue(pools.pools[KV].pages // 2)
        # SGLang reads these attributes of a linker.
        self.pools = {PoolName(pool.name): pool for pool in found.pools}
        self.layer_done_counter = LayerWiseLoadCounter(found.layers)
        if STATES in pools.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    # --- lookups -----------------------------------------------------------------------------------

    @or_else(lambda *_: [])
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Returns the prefixes that could be loaded, in pages. SGLang takes those in the answers of all ranks."""
        if not self._pages.available:
            return []
        by_source = {str(transfer.name): transfer for transfer in transfers if transfer.keys}
        if any(pool.source not in by_source for pool in self._device_pools):
            return []
        keys = list(by_source[KV].keys)
        wanted = (keys[0], len(keys))
        lengths = self._answers.known(rid, wanted)
        if lengths is None:
            others = [pool for pool in self._device_pools if pool.name != KV]
            needed = [needed_of(by_source[pool.source], pool.name) for pool in others]
            lengths = self._answers.ask(rid, wanted, lambda: self._pages.restorable(keys, needed).lengths)
        return list(lengths)

    # --- loads -------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Fills pages, or begins to. False, on all ranks alike: SGLang must compute them."""
        # Even if this rank fails, it joins the agreement: the others wait for it.
        begun = self._begin_load(rid, transfers)
        good = engine.all_agree(begun is not None and (self._overlap or begun.result()))
        if good and begun is not None:
            self._queued[rid] = begun
        elif begun is not None:
            begun.result()  # its pages are SGLang's again
        return good

    @or_else(_nothing)
    def _begin_load(self, rid: str, transfers: list[PoolTransfer]) -> Future[bool] | None:
        self._answers.forget(rid)
        pages = [self._pages_of(pool, transfer) for pool, transfer in self._named(transfers)]
        if not pages or not self._pages.responds():
            return None
        ready = None if self._timeline is None else self._timeline.signal()
        return self._loads.begin(lambda: _all(self._pages.load(pages, ready)))

    @or_else(lambda *_: -1)
    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads for the next forward. Returns how its layers wait for them; -1: they need not
        wait.
        """
        queued, self._queued = self._queued, {}
        if not self._overlap or not queued:
            return -1
        index: int = self.layer_done_counter.update_producer()
        self._landing[index] = self._loads.begin(partial(self._land, index, list(queued.values())))
        return index

    def _land(self, index: int, loads: list[Future[bool]]) -> bool:
        """Lets the forward go on even if loads failed: SGLang checks their result afterwards."""
        landed = all(load.result() for load in loads)
        for layer in range(self.layer_done_counter.num_layers):
            if not landed:
                break
            self.layer_done_counter.complete(index, layer)
        else:
            return True
        self.layer_done_counter.fail(index, RuntimeError("kvoffloadd: pages were not loaded"))
        return False

    @or_else(lambda *_: False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Returns whether the pages of that forward came; SGLang owns them again."""
        landing = self._landing.pop(counter_index, None)
        if landing is not None:  # SGLang's counter forgets which layers wait, and would wait for ever itself
            landing.result()
        return bool(self.layer_done_counter.finish(counter_index))

    @or_else(lambda *_: False)
    def cancel_queued_load(self, rid: str) -> bool:
        """Cancels the load of a request that is gone; its pages are free when this returns."""
        self._answers.forget(rid)
        queued = self._queued.pop(rid, None)
        if queued is not None:
            queued.result()
        return queued is not None

    # --- stores ------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Begins to store pages; alike on all ranks. SGLang leaves them unchanged until it has popped the end of it."""
        named = self._named(transfers)
        pages = next((len(transfer.keys or ()) for pool, transfer in named if pool.name == KV), 0)
        return pages > 0 and self._offloads.begin(pages, partial(self._store, named, self.record_offload_ready()))

    def _store(self, named: list[tuple[DevicePool, PoolTransfer]], events: list[torch.cuda.Event]) -> bool:
        for event in events:
            event.synchronize()
        return _all(self._pages.store([self._pages_of(pool, transfer) for pool, transfer in named]))

    def num_completed_offloads(self) -> int:
        """Returns how many may be popped."""
        return self._offloads.ended()

    def pop_completed_offload(self) -> bool:
        """Returns whether the daemon has, or is being given, all pages of the oldest."""
        return self._offloads.pop()

    # --- the end -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Ends all use of pages: SGLang forgets them, and nothing may read or write them any more."""
        self._loads.begin(lambda: True).result()  # behind all others
        self._queued.clear()
        self._landing.clear()
        self._offloads.quiesce()
        self._answers.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Ends the session."""
        self._offloads.close(_CLOSE_S)
        self._loads.close(_CLOSE_S)
        self._pages.close()

    # --- helpers -----------------------------------------------------------------------------------

    def _named(self, transfers: list[PoolTransfer]) -> list[tuple[DevicePool, PoolTransfer]]:
        """Returns each pool with SGLang's transfer for its source, where that names any pages."""
        by_source = {str(transfer.name): transfer for transfer in transfers if transfer.keys}
        return [(pool, by_source[pool.source]) for pool in self._device_pools if pool.source in by_source]

    def _pages_of(self, pool: DevicePool, transfer: PoolTransfer) -> Pages:
        slots: npt.NDArray[np.int64] = pool.slots(transfer.device_indices).cpu().numpy()
        return Pages(pool.name, transfer.keys or (), slots.astype(np.int64, copy=False))


def _all(done: dict[str, npt.NDArray[np.bool_]]) -> bool:
    return bool(done) and all(bool(copied.all()) for copied in done.values())
