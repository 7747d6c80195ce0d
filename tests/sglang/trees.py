"""SGLang's tree of prefixes with its HiCache, without a model: what one stores of its device, another has back.

A program, since SGLang's state belongs to a process: `python -m tests.sglang.trees SOCKET`. It takes SGLang's own kit
for tests of trees, with our storage in place of files, and ends with 0 if every byte of the second device is right.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import TestCase

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from scripts.sglang import storage_options
from tests.sglang import pools

PAGE = pools.PAGE
PAGES = 4
_LARGE = {"page_size": PAGE, "kv_size": 1024, "max_context_len": 1024}
CONFIGS = {
    "full": CacheConfig(**_LARGE),
    "windows": CacheConfig(components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=2 * PAGE, **_LARGE),
    "states": CacheConfig(
        components=(ComponentType.FULL, ComponentType.MAMBA),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=20,
        **_LARGE,
    ),
}


class Flow(UnifiedRadixCacheStorageFixtures, TestCase):  # type: ignore[misc]
    """`cfg`: a tree's; `socket`: of the daemon."""

    def __init__(self, cfg: CacheConfig, socket: str) -> None:
        super().__init__()
        self.cfg = cfg
        self.socket = socket

    def runTest(self) -> None:
        tokens = self._make_seq(1, PAGES)
        stored = self._tree(1)
        cache, allocator, requests = stored
        self._insert(cache, allocator, requests, tokens)
        leaf = match_prefix(cache, tokens).last_device_node
        self._backup_node(cache, leaf)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache)

        loaded = self._tree(2)
        cache, allocator, requests = loaded
        self._consume_prefetch(cache, tokens, CacheRequestHandle("asked", 0))
        self._load_back_through_admission(cache, requests, tokens)
        self._finish_pending_loads(cache)
        self.assertEqual(match_prefix(cache, tokens).device_prefix_len, len(tokens))

        right, found = self._bytes_of(stored, tokens), self._bytes_of(loaded, tokens)
        self.assertEqual(right.keys(), found.keys())
        for name in right:
            self.assertTrue(torch.equal(right[name], found[name]), name)
            self.assertGreater(len(set(right[name].flatten().tolist())), 200, name)

    def _tree(self, seed: int) -> Any:
        """A tree with the storage. Its device holds noise."""
        torch.manual_seed(seed)
        cache, allocator, requests = build_fixture(self.cfg)
        for buffer in self._buffers(allocator, requests):
            buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))
        self._init_hicache(cache)
        return cache, allocator, requests

    def _init_hicache(self, cache: Any) -> None:
        """Replaces the kit's method, which knows SGLang's own storages."""
        arguments = ServerArgs(
            model_path="none",
            page_size=PAGE,
            **storage_options(socket=self.socket, timeout_s=60.0, prefetch_threshold=1),
        )
        arguments._mamba_cache_chunk_size = PAGE
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        controller.prefetch_capacity_limit = controller.mem_pool_host.size
        self.addCleanup(cache.shutdown)

    def _buffers(self, allocator: Any, requests: Any) -> list[torch.Tensor]:
        """All of the device's memory, as bytes."""
        pool = allocator.get_kvcache()
        keys_and_values = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)]
        tensors = [tensor for one in keys_and_values or [pool] for tensor in (*one.k_buffer, *one.v_buffer)]
        if self.cfg.has_mamba:
            states = requests.mamba_pool.mamba_cache
            tensors += [states.temporal, *states.conv]
        return [tensor.view(torch.uint8) for tensor in tensors]

    def _bytes_of(self, tree: Any, tokens: list[int]) -> dict[str, torch.Tensor]:
        """What the device holds of a prompt: all of its keys and values, and of the last pages what else it needs."""
        cache, allocator, requests = tree
        leaf = match_prefix(cache, tokens).last_device_node
        slots = cache.path_device_indices(leaf)
        pool = allocator.get_kvcache()
        full = getattr(pool, "full_kv_pool", pool)
        found = {f"kv {at}": layer[slots] for at, layer in enumerate((*full.k_buffer, *full.v_buffer))}
        if self.cfg.has_swa:
            window = allocator.full_to_swa_index_mapping[slots[-self.cfg.sliding_window_size :]]
            swa = pool.swa_kv_pool
            found |= {f"swa {at}": layer[window] for at, layer in enumerate((*swa.k_buffer, *swa.v_buffer))}
        if self.cfg.has_mamba:
            slot = node_device_value(cache, leaf, ComponentType.MAMBA)
            states = requests.mamba_pool.mamba_cache
            found |= {f"mamba {at}": state[:, slot] for at, state in enumerate((states.temporal, *states.conv))}
        return {name: rows.contiguous().view(torch.uint8) for name, rows in found.items()}


def main(socket: str) -> None:
    pools.configure(socket)
    for name, cfg in CONFIGS.items():
        Flow(cfg, socket).debug()
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
