"""Workers of vLLM's CPU engine whose layers share tensors, allocated by `kvoffloadd.layout`: asked for by `worker_cls`.

The engine itself offers a tensor a layer alone; its kernels take any distance between blocks and between heads. The
layout is in `VLLM_KV_CACHE_LAYOUT`, the size of a pack of attention layers in `PACK`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from kvoffloadd.layout import (
    PACKED_HND,
    Allocated,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    Plan,
    State,
    cross_layers,
    packed_block_size,
    packed_pages,
)
from kvoffloadd.layout.backend import BLOCK, HEAD, LAYER, PAIR, TOKEN

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

T = TypeVar("T")

BACKENDS: dict[str, Backend] = {
    "BLHNC": PACKED_HND,
    "BHLNC": replace(PACKED_HND, name="packed-heads-first", layered=(BLOCK, HEAD, LAYER, TOKEN, PAIR)),
}
"""By vLLM's names of such layouts."""


KERNEL_TOKENS = 32
"""Of vLLM's CPU attention: blocks are a multiple of it."""

PACK = "KVOFFLOADD_TEST_PACK"


class LayeredWorker(CPUWorker):  # type: ignore[misc]  # of a library without types
    """Offers the layouts of `BACKENDS`. All layers share one tensor."""

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return list(BACKENDS)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with patch.object(gpu_model_runner, "allocate_kv_cache", self.allocate):
            super().initialize_from_config(kv_cache_config)

    def allocate(self, config: Any, _device: Any, layout: Any, _kernel_block_sizes: Any = None) -> dict[str, Any]:
        """Allocates a view of each layer as vLLM makes it: (blocks, heads, tokens, 2 x head size),
        or bytes of states.
        """
        given = {layer: group.kv_cache_spec for group in config.kv_cache_groups for layer in group.layer_names}
        specs = {layer: described(spec, BACKENDS[layout.name]) for layer, spec in given.items()}
        self.allocated = self.plan(config, specs).allocate("cpu")
        made = self.allocated.layers
        return {layer: made[layer][0] if isinstance(spec, Mamba) else made[layer] for layer, spec in specs.items()}

    def plan(self, config: Any, specs: Mapping[str, LayerSpec]) -> Plan:
        """Where vLLM's groups and blocks lie."""
        groups = [LayerGroup(at, tuple(group.layer_names)) for at, group in enumerate(config.kv_cache_groups)]
        plan = cross_layers(specs, groups, config.num_blocks)
        assert len(plan.tensors) == 1, plan.tensors
        return plan


class PackedWorker(LayeredWorker):
    """Attention layers share pages, `PACK` of them one page, and a state has one to itself.

    vLLM would make the block so long that one layer of attention fills the page, and its offloading takes all layers
    that share rows to be in one tensor. Block, groups and canonical caches are ours instead. Scheduler and worker are
    of one process and share the configuration.
    """

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        def register(worker: Any, _layers: Any) -> None:
            worker._init_worker(named(self.allocated))

        with patch.object(OffloadingConnectorWorker, "register_kv_caches", register):
            super().initialize_from_config(kv_cache_config)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        planning.get_kv_cache_groups = packed_groups
        pack = int(os.environ[PACK])
        specs = _in_order(super().get_kv_cache_spec())
        states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
        attention = next(spec for spec in specs.values() if not isinstance(spec, MambaSpec))
        token_bytes = attention.page_size_bytes // attention.block_size
        state_bytes = max(spec.state_content_size_bytes for spec in states)
        block = packed_block_size(state_bytes, token_bytes, pack, KERNEL_TOKENS)
        self.cache_config.block_size = self.cache_config.mamba_block_size = block
        self.cache_config.mamba_page_size_padded = pack * block * token_bytes
        return _in_order(super().get_kv_cache_spec())

    def plan(self, config: Any, specs: Mapping[str, LayerSpec]) -> Plan:
        plan = packed_pages(_in_order(specs), int(os.environ[PACK]), config.num_blocks)
        assert [list(group.layers) for group in plan.groups] == [group.layer_names for group in config.kv_cache_groups]
        return plan


def packed_groups(_config: Any, specs: dict[str, Any]) -> list[Any]:
    """Groups of `packed_pages`, as vLLM describes them."""
    plan = packed_pages({at: described(spec, PACKED_HND) for at, spec in specs.items()}, int(os.environ[PACK]), 1)
    return [KVCacheGroupSpec(list(group.layers), specs[group.layers[0]]) for group in plan.groups]


def named(allocated: Allocated) -> CanonicalKVCaches:
    """Returns vLLM's description of the memory if it had this layout."""
    cache = allocated.cache
    assert all((ref.offset, ref.count) == (0, 1) for group in cache.groups for ref in group.refs)
    tensors = [CanonicalKVCacheTensor(one, one.shape[1]) for one in cache.tensors]
    refs = [[CanonicalKVCacheRef(ref.tensor, ref.length) for ref in group.refs] for group in cache.groups]
    return CanonicalKVCaches(tensors, refs)


def _in_order(specs: Mapping[str, T]) -> dict[str, T]:
    """Returns specs in the order of the model's layers, which vLLM's groups do not show."""
    return {layer: specs[layer] for layer in sorted(specs, key=extract_layer_index)}


def described(spec: Any, backend: Backend) -> LayerSpec:
    """vLLM's description of a layer as ours. Its states are one run of bytes."""
    padded = spec.page_size_padded or 0
    if isinstance(spec, MambaSpec):
        return Mamba(spec.block_size, (State((1, 1, spec.state_content_size_bytes), "int8"),), padded)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    dtype = str(spec.dtype).removeprefix("torch.")
    return Attention(spec.block_size, spec.num_kv_heads, spec.head_size, dtype, backend, kind, window, padded)
