"""A plug-in of SGLang's: what its builds for CPUs leave out of HiCache and of short convolutions, in plain torch.

HiCache copies pages between the device's pools and the host's with kernels that only GPUs have. Their names are put
where they would have been imported. Semantics as SGLang 0.5.23 calls them, for the layout `page_first_direct`: a host
page is (layers, tokens of a page, ...), a device's layer is (tokens, ...); indices name tokens.
"""

from __future__ import annotations

import ctypes
import importlib
from itertools import pairwise
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


def move_rows(pointers: Any, strides: Any, targets: Any, sources: Any) -> None:
    """Tokens to other places of the same layers. `pointers`: the layers' addresses; `strides`: bytes of a token."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + stride * source, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(pointer + stride * target, row, stride)


def convolve(x: Any, weight: Any, bias: Any, *, conv_states: Any, cache_indices: Any, **given: Any) -> Any:
    """A causal convolution of each channel of some sequences, one after the other.

    `x`: (channels, tokens); `weight`: (channels, width); `conv_states`: (slots, channels, width - 1), what came before
    a sequence if it `has_initial_state`, and afterwards its end. `query_start_loc`: where they start, and the end.
    """
    torch = importlib.import_module("torch")
    found = torch.empty_like(x)
    starts = given["query_start_loc"].tolist()
    for nth, (start, end) in enumerate(pairwise(starts)):
        state = conv_states[cache_indices[nth]]
        before = state.to(x.dtype) * given["has_initial_state"][nth]
        whole = torch.cat([before, x[:, start:end]], 1)
        found[:, start:end] = torch.nn.functional.conv1d(whole[None], weight[:, None], bias, groups=len(x))[0]
        state.copy_(whole[:, -state.shape[1] :])
    return torch.nn.functional.silu(found) if given["activation"] else found


def convolve_one(
    x: Any, conv_state: Any, weight: Any, bias: Any, activation: Any, *, conv_state_indices: Any, **_: Any
) -> Any:
    """Does what `convolve` does, for the next token of each sequence: `x`: (sequences, channels)."""
    torch = importlib.import_module("torch")
    return convolve(
        x.T,
        weight,
        bias,
        conv_states=conv_state,
        cache_indices=conv_state_indices,
        query_start_loc=torch.arange(len(x) + 1),
        has_initial_state=torch.ones(len(x)),
        activation=activation,
    ).T


KERNELS = {
    "transfer_kv_per_layer_direct_pf_lf": load_layer,
    "transfer_kv_all_layer_direct_lf_pf": store_layers,
    "transfer_kv_direct": copy_rows,
}
NAMED = ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu")
"""Kernels of linear attention that only processors with AMX have: named when models with states are, not called."""
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
    _start_drafts()
    torch: Any = importlib.import_module("torch")
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for name in ("empty", "zeros", "tensor", "arange", "full", "empty_like", "zeros_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    for kernel in NAMED:
        if not hasattr(torch.ops.sgl_kernel, kernel):
            torch.library.define(f"sgl_kernel::{kernel}", "() -> ()")
    convolutions: Any = importlib.import_module("sglang.srt.layers.attention.mamba.causal_conv1d")
    convolutions._causal_conv1d_fn_triton = convolve
    convolutions._causal_conv1d_update_triton = convolve_one


def _start_drafts() -> None:
    """Engines with a draft model start, as far as to the storage, which refuses them: nothing drafts on a CPU."""
    moves: Any = importlib.import_module("sglang.kernels.ops.kvcache.cache_move")
    moves.copy_all_layer_kv_cache_cpu = move_rows
    drafts: Any = importlib.import_module("sglang.srt.speculative.draft_utils")
    drafts.DraftBackendFactory.create_draft_extend_backend = lambda _: None


def _unpinned(make: Any) -> Any:
    """What LoRA's pools ask for, whatever the device is."""

    def make_unpinned(*arguments: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*arguments, **named)

    return make_unpinned


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
