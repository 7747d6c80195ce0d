"""Device pools as SGLang makes them, on the CPU, as far as the linker looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class MHATokenToKVPool:
    """Keys and values: a buffer each for each layer, a row for each token."""

    def __init__(
        self, pages: int, page_size: int, layers: int = 2, heads: int = 2, dims: tuple[int, int] = (8, 8)
    ) -> None:
        self.page_size, self.layer_num, self.head_num = page_size, layers, heads
        self.head_dim, self.v_head_dim = dims
        self.kv_cache_layout = "nhd"
        self.k_scale_buffer: Any = None
        self.k_buffer, self.v_buffer = (
            [torch.zeros(pages * page_size, heads, dim, dtype=torch.bfloat16) for _ in range(layers)] for dim in dims
        )


class MLATokenToKVPool:
    """Latents: a buffer for each layer."""

    def __init__(self, pages: int, page_size: int, layers: int = 2, dim: int = 16) -> None:
        self.page_size, self.layer_num, self.kv_cache_dim = page_size, layers, dim
        self.kv_lora_rank, self.qk_rope_head_dim = dim - 4, 4
        self.kv_scale_buffer: Any = None
        self.kv_buffer = [torch.zeros(pages * page_size, 1, dim, dtype=torch.bfloat16) for _ in range(layers)]


class DSATokenToKVPool(MLATokenToKVPool):
    """Has indexes, in buffers that have a row for each page."""

    def __init__(self, pages: int, page_size: int) -> None:
        super().__init__(pages, page_size)
        self.index_k_with_scale_buffer = [torch.zeros(pages, page_size * 4, dtype=torch.uint8) for _ in range(2)]


class SWAKVPool:
    """Full attention and windows, in a pool each."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.full_kv_pool, self.swa_kv_pool = (
            MHATokenToKVPool(pages, page_size, 1),
            MHATokenToKVPool(pages, page_size, 3),
        )
        self.layer_num = 4


class MambaPool:
    """States: a row for each slot."""

    def __init__(self, slots: int) -> None:
        self.states = [torch.zeros(3, slots, 5), torch.zeros(3, slots, 2, 2)]


def entry(name: str, pool: Any, buffers: Sequence[Any], page_size: int, rows: int, source: str = "") -> SimpleNamespace:
    """Stands in for SGLang's DevicePoolEntry."""
    return SimpleNamespace(
        name=name,
        device_pool=pool,
        indices_from_pool=source or name,
        kv_buffer=list(buffers),
        page_size=page_size,
        _row_span=rows,
        translate_indices=lambda slots: slots,
    )


def params(kvcache: Any, page_size: int, **more: Any) -> SimpleNamespace:
    """Stands in for SGLang's CacheInitParams."""
    return SimpleNamespace(
        page_size=page_size,
        pp_size=1,
        attn_cp_size=1,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kvcache),
        **more,
    )


def components(*names: str) -> set[Any]:
    """Stands in for SGLang's ComponentType."""
    return {SimpleComponent(name) for name in names}


class SimpleComponent:
    """A component of the tree."""

    def __init__(self, name: str) -> None:
        self.name = name


def slots(pages: Sequence[int], page_size: int) -> Any:
    """Returns the slots of some pages, as SGLang names them."""
    return (torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)).reshape(-1)
