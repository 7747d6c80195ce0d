"""Shared memory on the worker's side."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KvCache, Ref, SharedTensor
from kvoffloadd.errors import ResourceError, UsageError
from kvoffloadd.linux.sharedmem import Mapping, is_sealed_against_shrinking
from tests.server.vanishing import SIZE, full_tmpfs

ROOT = Path(__file__).parents[2]


def seen_by_another(tensor: SharedTensor) -> bytes:
    """Returns the tensor's rows, joined, as a process reads them that has the descriptor and the registered numbers."""
    spec = tensor.spec(1)
    with mmap.mmap(tensor.allocation.fd, 0) as mapped:
        starts = [spec.offset + row * spec.stride_bytes for row in range(spec.num_blocks)]
        return b"".join(mapped[start : start + spec.page_bytes] for start in starts)


def test_allocated_tensors_are_shared_and_sealed() -> None:
    tensor = SharedTensor.allocate(4, 100, 128)
    assert tensor.array.dtype == np.uint8
    assert (tensor.array.shape, tensor.array.strides) == ((4, 100), (128, 1))
    assert not tensor.array.any()
    tensor.array[:] = np.arange(400, dtype=np.uint8).reshape(4, 100)
    assert seen_by_another(tensor) == tensor.array.tobytes()
    assert is_sealed_against_shrinking(tensor.allocation.fd)
    assert not os.get_inheritable(tensor.allocation.fd)


def test_all_pages_are_there_before_anybody_else_touches_them() -> None:
    tensor = SharedTensor.allocate(300, 5000)
    assert os.fstat(tensor.allocation.fd).st_blocks * 512 >= 300 * 5000
    path = Path("/dev/shm") / f"kvoffloadd-test-{os.getpid()}"
    try:
        array = np.memmap(path, np.uint8, "w+", offset=4096 + 100, shape=(300, 5000))
        adopted = SharedTensor.adopt(array)
        assert os.fstat(adopted.allocation.fd).st_blocks * 512 >= 300 * 5000
    finally:
        path.unlink(missing_ok=True)


def test_memory_that_is_not_there_is_an_error_for_whoever_shares_it() -> None:
    """Not a signal for the daemon later."""
    with full_tmpfs() as (fd, _):
        array = np.memmap(f"/proc/self/fd/{fd}", np.uint8, "r+", shape=(64, SIZE // 64))
        with pytest.raises(ResourceError, match=r"(?s)can't allocate .* bytes of shared memory: .*tmpfs is full"):
            SharedTensor.adopt(array)


@pytest.mark.slow
def test_memory_lives_as_long_as_its_views_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = Mapping.close

    def count(mapping: Mapping) -> None:
        closed.append(mapping.size_bytes)
        close(mapping)

    monkeypatch.setattr(Mapping, "close", count)
    tensor = SharedTensor.allocate(4, 4096)
    fd, view = tensor.allocation.fd, tensor.array[1:, 5:].view(np.int8)[1]
    del tensor
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    view[:] = 1
    assert closed == []
    del view
    gc.collect()
    assert closed == [4 * 4096]


@pytest.mark.parametrize(("num_blocks", "page_bytes", "stride_bytes"), [(0, 1, 1), (1, 0, 1), (2, 8, 7), (-1, 8, 8)])
def test_no_tensor(num_blocks: int, page_bytes: int, stride_bytes: int) -> None:
    with pytest.raises(UsageError):
        SharedTensor.allocate(num_blocks, page_bytes, stride_bytes)


def test_adopting_views_of_shared_tensors() -> None:
    whole = SharedTensor.allocate(8, 256)
    words = whole.array.view(np.float32).reshape(8, 4, 16)
    part = SharedTensor.adopt(words[2:])
    assert part.allocation is whole.allocation
    assert (part.offset, part.num_blocks, part.page_bytes, part.stride_bytes) == (512, 6, 256, 256)
    words[2:] = 1.5
    assert seen_by_another(part) == words[2:].tobytes() == part.array.tobytes()


def test_adopting_a_memmap(tmp_path: Path) -> None:
    """A file stands in for one on a tmpfs: to the client they are alike."""
    path = tmp_path / "cache"
    page = mmap.ALLOCATIONGRANULARITY
    array = np.memmap(path, np.int16, "w+", offset=page + 64, shape=(6, 32))
    tensor = SharedTensor.adopt(array[1:, :])
    assert (tensor.offset, tensor.num_blocks, tensor.page_bytes, tensor.stride_bytes) == (page + 128, 5, 64, 64)
    array[:] = np.arange(192).reshape(6, 32)
    assert seen_by_another(tensor) == array[1:].tobytes()
    again = SharedTensor.adopt(np.memmap(path, np.uint8, "r+", shape=(2, 64)))
    assert len(KvCache([tensor, again], []).allocations()) == 1  # one file, though mapped twice


def test_one_block_has_any_stride() -> None:
    whole = SharedTensor.allocate(3, 64)
    assert SharedTensor.adopt(whole.array[1:2]).stride_bytes == 64


def test_what_cannot_be_adopted(tmp_path: Path) -> None:
    whole = SharedTensor.allocate(8, 64).array
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    for wrong in (
        np.zeros((4, 64), np.uint8),
        whole[:, ::2],
        whole[::-1],
        whole[:0],
        whole[0],
        whole.reshape(8, 8, 8).transpose(0, 2, 1),
        np.lib.stride_tricks.as_strided(whole, (4, 64), (32, 1)),
        np.memmap(path, np.uint8, "r", shape=(2, 64)),
        np.memmap(path, np.uint8, "c", shape=(2, 64)),
        [1, 2, 3],
        b"bytes",
    ):
        with pytest.raises(UsageError):
            SharedTensor.adopt(wrong)


def test_a_cache_is_checked() -> None:
    tensor = SharedTensor.allocate(4, 64)
    for groups in (
        [Group(0, GroupKind.FULL, 16, refs=[Ref(1, 0, 64)])],
        [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 1, 64)])],
        [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, 8, count=3, stride=29)])],
        [Group(0, GroupKind.FULL, 16, refs=[Ref(0, -1, 8)])],
        [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, 0)])],
        [Group(0, GroupKind.FULL, 16), Group(0, GroupKind.MAMBA, 16)],
        [Group(0, GroupKind.FULL, 16, parts=2, part=2)],
    ):
        with pytest.raises(UsageError):
            KvCache([tensor], groups)
    KvCache([tensor], [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, 8, count=3, stride=28)])])


def test_importing_the_client_loads_little() -> None:
    code = "import sys, kvoffloadd.client; print(*sorted(m for m in sys.modules if not m.startswith('_')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert {name.split(".")[1] for name in loaded if name.startswith("kvoffloadd.")} == {
        "checks", "client", "cudadriver", "errors", "linux", "model", "protocol", "socketpath", "suggestion", "units",
    }  # fmt: skip
    assert loaded.isdisjoint({"torch", "cupy", "cuda", "rich", "uvloop"})


def test_memory_that_another_library_has_mapped() -> None:
    """Several tensors of it are attached once; the descriptor stays that library's."""
    fd = os.memfd_create("theirs")
    os.ftruncate(fd, 8192)
    memory = np.frombuffer(mmap.mmap(fd, 8192), np.uint8)
    halves = memory.reshape(2, 4, 1024)
    one, other = (SharedTensor.of_fd(fd, memory, half) for half in halves)
    os.close(fd)
    other.array[:] = np.arange(4, dtype=np.uint8)[:, None]
    assert seen_by_another(other) == memory[4096:].tobytes()
    assert one.allocation is other.allocation
    with pytest.raises(UsageError, match="are outside the given memory"):
        SharedTensor.of_fd(one.allocation.fd, memory, np.zeros((2, 8), np.uint8))


def test_memory_that_another_library_has_mapped_in_the_place_of_other_memory() -> None:
    """A tensor of the earlier memory may be known still: by its address alone, that would be shared again."""
    place = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)  # where both are mapped, one after the other
    fds = [os.memfd_create(name) for name in ("earlier", "later")]
    tensors = []
    for fd in fds:
        os.ftruncate(fd, 8192)
        tensors.append(SharedTensor.of_fd(fd, place, place.reshape(2, 4096)))
    assert [os.fstat(one.allocation.fd).st_ino for one in tensors] == [os.fstat(fd).st_ino for fd in fds]
    assert SharedTensor.of_fd(fds[1], place, place.reshape(2, 4096)).allocation is tensors[1].allocation
    assert SharedTensor.adopt(place.reshape(2, 4096)).allocation is tensors[1].allocation
    for fd in fds:
        os.close(fd)
