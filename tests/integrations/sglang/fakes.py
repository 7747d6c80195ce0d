"""Host pools as SGLang makes them with its `shm` allocator, as far as the adapter looks at them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.model import U8Array


class ShmHostTensorAllocator:
    """Each allocation is a memfd, mapped."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.mms: list[mmap.mmap] = []

    def allocate(self, size: int) -> U8Array:
        """Zeros."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fds.append(os.memfd_create("pool"))
        os.ftruncate(self.fds[-1], size)
        self.mms.append(mmap.mmap(self.fds[-1], size))
        return np.frombuffer(self.mms[-1], np.uint8)


class HostPool:
    """`runs`: bytes of a page in each of its runs, which lie in one allocation, one after the other, as keys and values
    do, or in separate allocations.
    """

    def __init__(self, page_num: int, page_size: int, runs: Sequence[int], *, together: bool = True) -> None:
        self.layout = "page_first_direct"
        self.page_size, self.page_num = page_size, page_num
        self.size = page_num * page_size
        self.size_per_token = sum(runs) // page_size
        self.layer_num, self.head_num, self.dtype = 2, 4, "bfloat16"
        self.head_dim = self.v_head_dim = self.kv_cache_dim = 16
        self.kv_lora_rank, self.qk_rope_head_dim = 12, 4
        self.allocator: Any = ShmHostTensorAllocator()
        if together:
            whole = self.allocator.allocate(sum(runs) * page_num)
            ends = np.cumsum(runs) * page_num
            halves = [whole[end - run * page_num : end] for run, end in zip(runs, ends, strict=True)]
        else:
            halves = [self.allocator.allocate(run * page_num)[: run * page_num] for run in runs]
        self.rows = [half.reshape(page_num, run) for half, run in zip(halves, runs, strict=True)]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """SGLang's: where some pages lie, named by all of their slots."""
        assert len(indices) % self.page_size == 0
        pages = [slot // self.page_size for slot in indices.tolist()[:: self.page_size]]
        places = [(row.ctypes.data + page * row.shape[1], row.shape[1]) for page in pages for row in self.rows]
        return [address for address, _ in places], [size for _, size in places]

    def slots(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Returns the slots of some pages, as SGLang names them."""
        return (np.array(pages, np.int64)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)


class MHATokenToKVPoolHost(HostPool):
    """Keys and values."""


class MLATokenToKVPoolHost(HostPool):
    """Latents."""


class MambaPoolHost(HostPool):
    """States: a slot each."""


class DSAIndexerPoolHost(HostPool):
    """Stands in for the host pool of sparse attention."""
