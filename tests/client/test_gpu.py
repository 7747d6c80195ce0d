"""A worker's GPU memory, found from its address: what is announced, and what is refused with a reason that helps."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import GpuTensor, Group, GroupKind, KvCache, Ref, SharedTensor, Timeline
from kvoffloadd.client.memory.gpu import IpcMemory, VmmMemory, gpu_allocation
from kvoffloadd.errors import UsageError
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.gpu import Gpu, GpuBuffer
from tests import softcuda

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

MIB = 1 << 20
SOON_S = HANG_S


@pytest.fixture(scope="module")
def extras() -> softcuda.SoftCuda:
    """This process's driver is the software one from here on."""
    return softcuda.load()


@pytest.fixture
def gpu(extras: softcuda.SoftCuda) -> Iterator[Gpu]:
    made = Gpu()
    yield made
    made.synchronize()


def buffer(gpu: Gpu, size_bytes: int, **options: Any) -> GpuBuffer:
    return GpuBuffer(gpu, size_bytes, **options)


# --- what is announced -----------------------------------------------------------------------------------------


def test_a_tensor_inside_of_an_allocation(gpu: Gpu) -> None:
    memory = buffer(gpu, 3 * MIB)
    tensor = GpuTensor.adopt(memory.rows(5000, 100, 4096, 5001))
    found = tensor.allocation
    assert isinstance(found, IpcMemory)
    assert (found.address, found.size_bytes, len(found.handle), len(found.uuid)) == (memory.address, 3 * MIB, 64, 16)
    assert (tensor.offset, tensor.num_blocks, tensor.page_bytes, tensor.stride_bytes) == (5000, 100, 4096, 5001)
    memory.free()


def test_tensors_of_one_allocation_are_attached_once(gpu: Gpu) -> None:
    memory, other = buffer(gpu, MIB), buffer(gpu, MIB)
    tensors = [GpuTensor.adopt(m.rows(at, 4, 64, 64)) for m, at in ((memory, 0), (memory, 4096), (other, 0))]
    timeline = Timeline()
    groups = [Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 64),))]
    cache = KvCache(tensors, groups, [timeline])
    assert [type(found).__name__ for found in cache.allocations()] == ["IpcMemory", "IpcMemory", "Allocation"]
    assert tensors[0].allocation.identity == tensors[1].allocation.identity
    for each in (memory, other):
        each.free()


def test_memory_that_was_freed_and_made_again_is_another(gpu: Gpu) -> None:
    memory = buffer(gpu, MIB)
    before = gpu_allocation(memory.address, 1)
    memory.free()
    memory = buffer(gpu, MIB)
    assert gpu_allocation(memory.address, 1).identity != before.identity
    memory.free()


@pytest.mark.parametrize(
    ("offset", "size_bytes", "chunks"),
    [(0, 1, 1), (2 * MIB - 1, 1, 1), (2 * MIB - 1, 2, 2), (3 * MIB, 5 * MIB, 3), (0, 8 * MIB, 4), (2 * MIB, 1, 1)],
)
def test_chunks_that_hold_the_bytes(gpu: Gpu, offset: int, size_bytes: int, chunks: int) -> None:
    memory = buffer(gpu, 8 * MIB, chunk_bytes=2 * MIB)
    found = gpu_allocation(memory.address + offset, size_bytes)
    assert isinstance(found, VmmMemory)
    assert found.chunks == (2 * MIB,) * chunks
    assert found.address == memory.address + offset // (2 * MIB) * (2 * MIB)
    memory.free()


def test_descriptors_live_as_long_as_they_are_held(gpu: Gpu) -> None:
    memory = buffer(gpu, 8 * MIB, chunk_bytes=2 * MIB)
    found = gpu_allocation(memory.address, 8 * MIB)
    assert isinstance(found, VmmMemory)
    held = found.export(1, 2)
    fds = list(held.fds)
    assert len({os.fstat(fd).st_ino for fd in fds}) == 2
    del held
    gc.collect()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    memory.free()


def test_looking_leaves_nothing_behind(gpu: Gpu, extras: softcuda.SoftCuda) -> None:
    memory, chunks = buffer(gpu, MIB), buffer(gpu, 8 * MIB, chunk_bytes=2 * MIB)
    before = extras.counters()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        gpu_allocation(memory.address, MIB)
        gpu_allocation(chunks.address, 8 * MIB)
    after = extras.counters()
    for name in ("live_allocations", "live_mappings", "live_registrations", "live_streams", "copies"):
        assert getattr(after, name) == getattr(before, name), name
    assert len(os.listdir("/proc/self/fd")) == fds
    memory.free()
    chunks.free()


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("handle_type", "words"), [(0, "none"), (8, "FABRIC")])
def test_chunks_that_can_not_be_exported_name_their_handles_and_the_setting(
    gpu: Gpu, handle_type: int, words: str
) -> None:
    memory = buffer(gpu, 2 * MIB, chunk_bytes=2 * MIB, handle_type=handle_type)
    with pytest.raises(UsageError, match=rf"handle types: {words}\).*expandable_segments:False.*sleep mode"):
        GpuTensor.adopt(memory.rows(0, 4, 64, 64))
    memory.free()


def test_a_tensor_that_ends_behind_its_memory(gpu: Gpu) -> None:
    memory, chunks = buffer(gpu, MIB), buffer(gpu, 2 * MIB, chunk_bytes=2 * MIB)
    with pytest.raises(UsageError, match="extend beyond"):
        GpuTensor.adopt(memory.rows(0, 257, 4096, 4096))
    with pytest.raises(UsageError, match="can't be shared"):
        GpuTensor.adopt(chunks.rows(0, 513, 4096, 4096))
    memory.free()
    chunks.free()


class Described:
    """Claims in its interface whatever the test wants."""

    def __init__(self, **changes: Any) -> None:
        interface = {"shape": (4, 64), "typestr": "|u1", "data": (4096, False), "version": 3}
        self.__cuda_array_interface__ = {**interface, **changes}


def test_a_driver_that_says_that_chunks_have_no_bytes(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not be asked for ever."""
    memory = buffer(gpu, 4 * MIB, chunk_bytes=2 * MIB)
    monkeypatch.setattr("kvoffloadd.client.memory.gpu._mapping", lambda address: (address, 0))
    with pytest.raises(UsageError, match="not mapped in whole chunks"):
        gpu_allocation(memory.address, 4 * MIB)
    memory.free()


def test_memory_of_no_gpu(gpu: Gpu) -> None:
    private = np.zeros(4096, np.uint8)
    with pytest.raises(UsageError, match="not memory of a GPU"):
        GpuTensor.adopt(Described(data=(private.ctypes.data, False)))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("read-only", {"data": (4096, True)}),
        ("no blocks", {"shape": (64,)}),
        ("no blocks", {"shape": (0, 64)}),
        ("not contiguous", {"strides": (256, 2)}),
        ("overlap", {"strides": (32, 1)}),
    ],
)
def test_arrays_that_are_no_rows(gpu: Gpu, words: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=words):
        GpuTensor.adopt(Described(**changes))


@pytest.mark.parametrize("thing", [np.zeros((2, 2)), b"bytes", None])
def test_things_that_are_no_arrays_of_a_gpu(gpu: Gpu, thing: object) -> None:
    with pytest.raises(UsageError, match="torch CUDA tensors"):
        GpuTensor.adopt(thing)


def test_a_torch_tensor_of_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match=r"SharedTensor\.adopt"):
        GpuTensor.adopt(torch.zeros(4, 4))


def test_strides_that_are_not_said_are_those_of_c(gpu: Gpu) -> None:
    memory = buffer(gpu, MIB)
    tensor = GpuTensor.adopt(Described(shape=(4, 2, 8), typestr="<f2", data=(memory.address, False), strides=None))
    assert (tensor.num_blocks, tensor.page_bytes, tensor.stride_bytes) == (4, 32, 32)
    memory.free()


def test_a_delay_is_as_long_on_every_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver has none: by how fast this GPU does work of no use, also while the stream waits."""
    monkeypatch.setattr("scripts.harness.gpu.software_driver", lambda: None)
    monkeypatch.setattr("scripts.harness.gpu._BUSY_BYTES", 4096)
    other = Gpu()
    softcuda.load().delay(other.stream, 0.2)
    began = time.monotonic()
    other.delay(0.0)  # measures
    assert time.monotonic() < began + SOON_S
    assert 1e5 < other._busy_bytes_per_s < 1e15
    other.synchronize()
    other.use()
    counted: list[int] = []
    monkeypatch.setattr(other, "_be_busy", lambda times, _stream: counted.append(times))
    other.delay(2.0)
    assert counted == [round(2.0 * other._busy_bytes_per_s / 4096)]


# --- timelines -------------------------------------------------------------------------------------------------


def test_a_streams_timeline_comes_behind_its_work(gpu: Gpu, extras: softcuda.SoftCuda) -> None:
    timeline = Timeline(gpu.stream)
    memory = buffer(gpu, 4096)
    extras.delay(gpu.stream, 0.1)
    memory.set_later(0, 4096, 7)
    ready = timeline.signal()
    assert not ready.reached
    began = time.monotonic()
    while not ready.reached:
        assert time.monotonic() < began + SOON_S
        time.sleep(0.001)
    assert (memory.download(0, 4096) == 7).all()
    memory.free()


def test_points_come_in_order(gpu: Gpu) -> None:
    timeline = Timeline(gpu.stream)
    points = [timeline.signal() for _ in range(5)]
    gpu.synchronize()
    assert [point.value for point in points] == [1, 2, 3, 4, 5]
    assert all(point.reached for point in points)


class StreamOfTorch:
    """Names its handle as torch.cuda.Stream does."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class StreamOfCupy:
    """Names its handle as cupy.cuda.Stream does."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


@pytest.mark.parametrize("kind", [int, StreamOfTorch, StreamOfCupy])
def test_streams_of_other_libraries(gpu: Gpu, kind: Any) -> None:
    ready = Timeline(kind(gpu.stream)).signal()
    gpu.synchronize()
    assert ready.reached


def test_what_is_no_stream(gpu: Gpu) -> None:
    with pytest.raises(UsageError, match="not a CUDA stream"):
        Timeline("stream")


def test_a_streams_point_is_the_streams_to_reach(gpu: Gpu) -> None:
    ready = Timeline(gpu.stream).signal()
    with pytest.raises(UsageError, match="only the stream"):
        ready.reach()


def test_a_point_of_a_thread_never_goes_back() -> None:
    timeline = Timeline()
    first, second = timeline.signal(), timeline.signal()
    second.reach()
    first.reach()
    assert second.reached


def test_a_point_of_a_timeline_that_the_cache_does_not_name() -> None:
    tensor = SharedTensor.allocate(4, 64)
    cache = KvCache([tensor], [Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 64),))], [Timeline()])
    with pytest.raises(UsageError, match="not registered"):
        cache.ready_spec(Timeline().signal())
