"""A worker's KV cache on a GPU, made in every way that engines make theirs, and what each of its bytes must be."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.model import U8Array
from kvoffloadd.testing.oracle import digest, mixed
from scripts.harness.gpu import CHUNK_BYTES, POSIX_FD, Gpu, GpuBuffer

KINDS = ("ipc", "vmm", "vmm-private", "torch")
WIPED = 0xEE
_ITEM_BYTES = 2  # bfloat16


class Rows(NamedTuple):
    """A canonical tensor's place in the memory: block 0 begins at byte `offset`."""

    offset: int
    num_blocks: int
    page_bytes: int
    stride_bytes: int


class Gate:
    """Holds a stream: what is queued behind `close` begins after `open`. A real driver's waits can't be given up, so
    always open it.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._page = Pinned(4096)
        self._word = ctypes.c_uint64.from_address(self._page.address)
        self._value = 0

    def close(self) -> None:
        """Makes the stream wait from here on."""
        self._gpu.use()
        self._value += 1
        library = ctypes.CDLL("libcuda.so.1")
        stream, value = self._gpu.stream, ctypes.c_uint64(self._value)
        if hasattr(library, "softcuda_spin_until"):
            status = library.softcuda_spin_until(ctypes.c_void_p(stream), ctypes.c_void_p(self._page.address), value)
            assert status == 0, status
        else:
            driver().call("cuStreamWaitValue64", stream, self._page.device_address, self._value, 0)  # 0: at least

    def open(self) -> None:
        """The stream goes on."""
        self._word.value = self._value


class CacheMemory:
    """One piece of GPU memory with `tensors` in it; `adoptable[i]`: what an engine would hand over as tensor i.

    `kind`: see KINDS; "torch" is bfloat16, at a non-zero offset of torch's own allocation. `expected`: what every byte
    must be, also of what lies between the rows.
    """

    def __init__(self, gpu: Gpu, kind: str, size_bytes: int, tensors: Sequence[Rows]) -> None:
        assert kind in KINDS, kind
        self.rows = tuple(tensors)
        self.expected: U8Array = np.full(size_bytes, WIPED, np.uint8)
        self._gpu = gpu
        if kind == "torch":
            self._buffer, self.adoptable = _torch_memory(gpu, size_bytes, self.rows)
        else:
            chunks = 0 if kind == "ipc" else CHUNK_BYTES
            handle_type = 0 if kind == "vmm-private" else POSIX_FD
            self._buffer = GpuBuffer(gpu, size_bytes, chunk_bytes=chunks, handle_type=handle_type)
            self.adoptable = [self._buffer.rows(*one) for one in self.rows]
        self.upload()

    def upload(self) -> None:
        """The GPU's bytes become those that are expected; done when it returns. Not behind a closed gate."""
        self._buffer.upload(0, self.expected)
        driver().call("cuCtxSynchronize")  # the last part of pageable memory may still be on its way

    def upload_later(self, source: Pinned) -> None:
        """The same in the stream's order, by way of `source`, which must stay as it is meanwhile."""
        source.array[: self.expected.nbytes] = self.expected
        self._buffer.upload_later(0, source.array[: self.expected.nbytes])

    def download_later(self, target: Pinned) -> None:
        """Read all of it in the stream's order, as a kernel would."""
        self._gpu.use()
        driver().call("cuMemcpyDtoHAsync", target.address, self._buffer.address, self.expected.nbytes, self._gpu.stream)

    def wrong_bytes(self) -> int:
        """How many bytes of the GPU's are not what is expected."""
        return int((self._buffer.download(0, self.expected.nbytes) != self.expected).sum())

    def wipe(self) -> None:
        """Every byte is expected to be 0xEE."""
        self.expected[:] = WIPED

    def expect(self, keys: Sequence[int], blocks: Sequence[int]) -> None:
        """These blocks are expected to hold these keys."""
        for key, block in zip(keys, blocks, strict=True):
            for number, rows in enumerate(self.rows):
                at = rows.offset + block * rows.stride_bytes
                self.expected[at : at + rows.page_bytes] = content(key, number, rows.page_bytes)

    def free(self) -> None:
        """Give it back, unless it is torch's."""
        self._buffer.free()


def content(key: int, tensor: int, size_bytes: int) -> U8Array:
    """What a key's row of a tensor is."""
    words = np.arange(-(-size_bytes // 8), dtype=np.uint64)
    return mixed(words ^ np.uint64(digest(key, tensor))).view(np.uint8)[:size_bytes]


class _TorchBuffer(GpuBuffer):
    """Torch's memory, as if it were the driver's."""

    def __init__(self, gpu: Gpu, address: int, size_bytes: int) -> None:
        self.gpu = gpu
        self.address = address
        self.size_bytes = size_bytes

    def free(self) -> None:
        """Torch's to give back."""


def _torch_memory(gpu: Gpu, size_bytes: int, tensors: Sequence[Rows]) -> tuple[GpuBuffer, list[Any]]:
    """Memory with something else before it in the same segment, and bfloat16 views of it."""
    torch = importlib.import_module("torch")
    device = torch.device("cuda", gpu.ordinal)
    before = torch.empty(2 << 20, dtype=torch.uint8, device=device)
    whole = torch.empty(size_bytes // _ITEM_BYTES, dtype=torch.bfloat16, device=device)
    del before  # its place stays: the allocator hands out parts of larger segments
    torch.cuda.synchronize(device)
    views = [
        whole.as_strided(
            (one.num_blocks, one.page_bytes // _ITEM_BYTES),
            (one.stride_bytes // _ITEM_BYTES, 1),
            one.offset // _ITEM_BYTES,
        )
        for one in tensors
    ]
    gpu.use()
    return _TorchBuffer(gpu, int(whole.data_ptr()), size_bytes), views
