"""A worker of vLLM's CPU engine whose layers share one tensor, allocated by `kvoffloadd.layout`.

The engine itself offers a tensor a layer alone; its kernels take any distance between blocks and between heads. Asked
for by `worker_cls`, with the layout in `VLLM_KV_CACHE_LAYOUT`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from kvoffloadd.layout import (
    PACKED_HND,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    State,
    cross_layers,
)
from kvoffloadd.layout.backend import BLOCK, HEAD, LAYER, PAIR, TOKEN

BACKENDS: dict[str, Backend] = {
    "BLHNC": PACKED_HND,
    "BHLNC": replace(PACKED_HND, name="packed-heads-first", layered=(BLOCK, HEAD, LAYER, TOKEN, PAIR)),
}
"""By vLLM's names of such layouts."""


class LayeredWorker(CPUWorker):  # type: ignore[misc]  # of a library without types
    """Offers the layouts of `BACKENDS`."""

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return list(BACKENDS)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with patch.object(gpu_model_runner, "allocate_kv_cache", allocate):
            super().initialize_from_config(kv_cache_config)


def allocate(config: Any, _device: Any, layout: Any, _kernel_block_sizes: Any = None) -> dict[str, Any]:
    """Of each layer a view as vLLM would have made it: (blocks, heads, tokens, 2 x head size), or bytes of states."""
    groups = [LayerGroup(at, tuple(group.layer_names)) for at, group in enumerate(config.kv_cache_groups)]
    specs = {
        layer: described(group.kv_cache_spec, BACKENDS[layout.name])
        for group in config.kv_cache_groups
        for layer in group.layer_names
    }
    plan = cross_layers(specs, groups, config.num_blocks)
    assert len(plan.tensors) == 1, plan.tensors
    made = plan.allocate("cpu").layers
    return {layer: made[layer][0] if isinstance(spec, Mamba) else made[layer] for layer, spec in specs.items()}


def described(spec: Any, backend: Backend) -> LayerSpec:
    """vLLM's description of a layer as ours. Its states are one run of bytes."""
    padded = spec.page_size_padded or 0
    if isinstance(spec, MambaSpec):
        return Mamba(spec.block_size, (State((1, 1, spec.state_content_size_bytes), "int8"),), padded)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    dtype = str(spec.dtype).removeprefix("torch.")
    return Attention(spec.block_size, spec.num_kv_heads, spec.head_size, dtype, backend, kind, window, padded)
