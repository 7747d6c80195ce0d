"""A plug-in of SGLang's: what its builds for CPUs leave out of HiCache, in plain torch.

HiCache copies pages between the device's pools and the host's with kernels that only GPUs have. Their names are put
where they would have been imported. Semantics as SGLang 0.5.23 calls them, for the layout `page_first_direct`: a host
page is (layers, tokens of a page, ...), a device's layer is (tokens, ...); indices name tokens.
"""

from __future__ import annotations

import importlib
from typing import Any


def load_layer(
    *, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer of some host pages, to the device."""
    pages = src_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[dst_indices] = host[pages, layer_id].flatten(0, 1)


def store_layers(*, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """All layers of some device pages, to the host. `src_ptrs`: the layers' keys, then their values."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for nth, host in enumerate(dst_ptrs):
        for layer, device in enumerate(src_ptrs[nth * layers : (nth + 1) * layers]):
            host[pages, layer] = device[src_indices].unflatten(0, (len(pages), page_size))


def copy_rows(*, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Tokens from layers to layers."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


KERNELS = {
    "transfer_kv_per_layer_direct_pf_lf": load_layer,
    "transfer_kv_all_layer_direct_lf_pf": store_layers,
    "transfer_kv_direct": copy_rows,
}
MODULES = ("pool_host.mha", "pool_host.mla", "pool_host.mamba", "memory_pool_host")


def install() -> None:
    """SGLang's entry point for plug-ins: called in each of its processes."""
    for name in MODULES:
        module = importlib.import_module(f"sglang.srt.mem_cache.{name}")
        for kernel, copy in KERNELS.items():
            if not hasattr(module, kernel):
                setattr(module, kernel, copy)
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    common._cuda_host_register = lambda *_, **__: None  # memory is pinned for GPUs
    _translate_windows()


def _translate_windows() -> None:
    """SGLang 0.5.23's plain-torch attention takes slots of the full pool for those of the sliding layers' pool, too.

    Give it the rows of such layers in the order of the full pool's slots.
    """
    pool = importlib.import_module("sglang.srt.mem_cache.swa_memory_pool").SWAKVPool
    for name in ("get_key_buffer", "get_value_buffer"):
        setattr(pool, name, _translated(getattr(pool, name)))


def _translated(method: Any) -> Any:
    def read(self: Any, layer_id: int) -> Any:
        buffer = method(self, layer_id)
        return buffer[self.full_to_swa_index_mapping] if self.layers_mapping[layer_id][1] else buffer

    return read
