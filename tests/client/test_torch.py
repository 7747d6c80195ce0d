"""Adopting torch's tensors. Needs torch, on a CPU; the package itself does without."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import KvCache, SharedTensor
from kvoffloadd.errors import UsageError
from tests.client.test_tensor import seen_by_another

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")


def test_a_shared_tensor_seen_by_torch() -> None:
    tensor = SharedTensor.allocate(4, 100, 128)
    view = tensor.torch()
    assert (view.dtype, tuple(view.shape), view.stride()) == (torch.int8, (4, 100), (128, 1))
    view[2] = -1
    assert seen_by_another(tensor)[200:300] == b"\xff" * 100
    del tensor
    gc.collect()
    assert view[2, 5] == -1


def test_views_stay_valid_when_their_storage_moves() -> None:
    whole = torch.arange(8 * 32, dtype=torch.float32).reshape(8, 32)
    view, before = whole[4:], whole.clone()
    tensor = SharedTensor.adopt(whole)
    assert torch.equal(whole, before)
    assert (tensor.num_blocks, tensor.page_bytes, tensor.stride_bytes, tensor.offset) == (8, 128, 128, 0)
    view += 1000  # a view from before writes to what others now see
    assert seen_by_another(tensor) == whole.numpy().tobytes()
    assert tensor.array.tobytes() == whole.numpy().tobytes()


def test_several_tensors_of_one_allocation_are_attached_once() -> None:
    """vLLM's layers are often views of one buffer."""
    buffer = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    layers = [SharedTensor.adopt(buffer[0]), SharedTensor.adopt(buffer[1])]
    assert layers[0].allocation is layers[1].allocation
    assert [layer.offset for layer in layers] == [0, 8 * 128]
    assert len(KvCache(layers, []).allocations()) == 1
    buffer[1] = 1.0
    assert set(seen_by_another(layers[0])) == {0}
    assert seen_by_another(layers[1]) == buffer[1].view(torch.uint8).numpy().tobytes()


def test_rows_with_padding() -> None:
    base = torch.zeros(6, 256, dtype=torch.int8)
    tensor = SharedTensor.adopt(base[:, 16:116])
    assert (tensor.offset, tensor.page_bytes, tensor.stride_bytes) == (16, 100, 256)
    assert tensor.array.shape == (6, 100)
    tensor.array[3] = 7
    assert int(base[3].sum()) == 700


def test_a_torch_view_of_a_shared_tensor() -> None:
    tensor = SharedTensor.allocate(4, 64)
    adopted = SharedTensor.adopt(tensor.torch()[1:])
    assert adopted.allocation is tensor.allocation
    assert (adopted.offset, adopted.num_blocks) == (64, 3)


def test_memory_that_torch_shared_already() -> None:
    shared = torch.zeros(4, 64, dtype=torch.uint8).share_memory_()
    tensor = SharedTensor.adopt(shared)
    shared[1] = 9
    assert seen_by_another(tensor)[64:128] == b"\x09" * 64


def test_what_cannot_be_adopted() -> None:
    whole = torch.zeros(4, 64)
    for wrong in (
        whole.t(),
        whole[:, ::2],
        whole[0],
        whole.expand(4, 64)[:1].expand(4, 64),
        torch.zeros(4, 64, device="meta"),
        torch.zeros(4, 4).to_sparse(),
        whole[:0],
    ):
        with pytest.raises(UsageError):
            SharedTensor.adopt(wrong)
    assert not whole.is_shared()  # refused before anything was moved


def test_descriptors_end_with_the_tensors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    tensors = [SharedTensor.adopt(torch.zeros(2, 4096)) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) > before
    assert all(isinstance(tensor.array, np.ndarray) for tensor in tensors)
    tensors.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
