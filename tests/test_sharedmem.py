"""Tests shared memory: sealing, mappings that end on request, prefaulting, lazily committed arrays."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.errors import MemoryKindError, ResourceError, UsageError
from kvoffloadd.linux import sharedmem
from kvoffloadd.linux.sharedmem import Mapping, create_memfd, is_sealed_against_shrinking, populate, reserve_array
from kvoffloadd.model import PAGE_BYTES
from tests.server.vanishing import HALF, SIZE, full_tmpfs

MIB = 1 << 20


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = create_memfd("kvo-test", 4 * MIB)
    yield fd
    os.close(fd)


def _resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_memfd_has_its_size_for_good(memfd: int) -> None:
    assert os.fstat(memfd).st_size == 4 * MIB
    assert not os.get_inheritable(memfd)
    for size in (MIB, 8 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(memfd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_memfd_of_nothing_is_refused(size_bytes: int) -> None:
    with pytest.raises(UsageError):
        create_memfd("kvo-test", size_bytes)


def test_memfd_is_closed_when_it_cant_be_made() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OverflowError):
        create_memfd("kvo-test", 1 << 63)
    assert len(os.listdir("/proc/self/fd")) == before


def test_sealing_is_told_from_the_file(memfd: int, tmp_path: Path) -> None:
    assert is_sealed_against_shrinking(memfd)
    unsealed = os.memfd_create("kvo-test", os.MFD_ALLOW_SEALING)
    assert not is_sealed_against_shrinking(unsealed)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    assert not is_sealed_against_shrinking(unsealed)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert is_sealed_against_shrinking(unsealed)
    os.close(unsealed)
    with (tmp_path / "file").open("wb") as file:
        assert not is_sealed_against_shrinking(file.fileno())


def test_two_mappings_of_a_file_are_the_same_memory(memfd: int) -> None:
    one, other = Mapping.map_fd(memfd, 4 * MIB), Mapping.map_fd(memfd, 4 * MIB, writable=False)
    one.array()[4 * MIB - 1] = 7
    assert other.array()[-1] == 7
    assert one.array().shape == (4 * MIB,)
    assert one.array().ctypes.data == one.address
    with pytest.raises(ValueError, match="read-only"):
        other.array()[0] = 1
    one.close()
    assert other.array()[-1] == 7, "the other mapping lives on"
    other.close()


def test_mapping_outlives_its_descriptor() -> None:
    fd = create_memfd("kvo-test", PAGE_BYTES)
    mapping = Mapping.map_fd(fd, PAGE_BYTES)
    os.close(fd)
    mapping.array()[:] = 3
    assert int(mapping.array().sum()) == 3 * PAGE_BYTES
    mapping.close()


def test_closed_mapping_can_only_say_so(memfd: int) -> None:
    mapping = Mapping.map_fd(memfd, 4 * MIB)
    mapping.close()
    with pytest.raises(UsageError, match="closed"):
        mapping.close()
    with pytest.raises(UsageError, match="closed"):
        mapping.array()
    with pytest.raises(UsageError, match="closed"):
        _ = mapping.address


def test_close_returns_the_address_space() -> None:
    name = "kvo-closes"  # other tests of this process map memory, too
    fd = create_memfd(name, 4 * MIB)
    mapping = Mapping.map_fd(fd, 4 * MIB)
    os.close(fd)
    with open("/proc/self/maps") as maps:
        assert name in maps.read()
    mapping.close()
    with open("/proc/self/maps") as maps:
        assert name not in maps.read()


def test_kernels_refusal_is_told(memfd: int) -> None:
    read_only = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    with pytest.raises(MemoryKindError, match="Permission denied"):
        Mapping.map_fd(read_only, 4 * MIB)
    Mapping.map_fd(read_only, 4 * MIB, writable=False).close()
    os.close(read_only)
    with pytest.raises(MemoryKindError, match="Bad file descriptor"):
        Mapping.map_fd(read_only, 4 * MIB)
    with pytest.raises(UsageError):
        Mapping.map_fd(memfd, 0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("old_kernel", [False, True])
def test_populate_commits_pages_and_keeps_contents(
    memfd: int, threads: int, old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_kernel:
        monkeypatch.setattr(sharedmem, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, like a kernel that does not know it
    mapping = Mapping.map_fd(memfd, 4 * MIB)
    mapping.array()[MIB + 5] = 9
    assert _resident_bytes(memfd) < MIB
    populate(mapping.address, 4 * MIB, threads, fd=memfd)
    assert _resident_bytes(memfd) == 4 * MIB
    assert mapping.array()[MIB + 5] == 9
    assert int(mapping.array().sum()) == 9
    mapping.close()


def test_populate_of_a_part_leaves_the_rest(memfd: int) -> None:
    mapping = Mapping.map_fd(memfd, 4 * MIB)
    populate(mapping.address + MIB + 100, PAGE_BYTES, 2)
    assert _resident_bytes(memfd) == 2 * PAGE_BYTES, "two pages, since the range straddles them"
    populate(mapping.address, 0, 2)
    assert _resident_bytes(memfd) == 2 * PAGE_BYTES
    mapping.close()


def test_populate_of_no_memory_is_an_error(memfd: int) -> None:
    mapping = Mapping.map_fd(memfd, 4 * MIB)
    address = mapping.address
    mapping.close()
    with pytest.raises(ResourceError, match=os.strerror(errno.ENOMEM)):
        populate(address, 4 * MIB, 1)


@pytest.mark.slow
def test_populate_lets_other_threads_run() -> None:
    fd = create_memfd("kvo-test", 256 * MIB)
    mapping = Mapping.map_fd(fd, 256 * MIB)
    worker = threading.Thread(target=populate, args=(mapping.address, 256 * MIB, 1))
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    worker.join()
    mapping.close()
    os.close(fd)
    assert turns > 100


def test_reserved_array_is_zeroed_and_lazy() -> None:
    array = reserve_array((1 << 32, 2), np.uint64)  # 64 GiB, more than most machines have
    assert array.shape == (1 << 32, 2)
    assert array.dtype == np.uint64
    assert array[12345678].tolist() == [0, 0]
    array[-1, 1] = 42
    assert int(array[-1].sum()) == 42
    view = array[-1:]
    del array
    assert int(view[0, 1]) == 42, "a view keeps the memory"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)])
def test_reserved_array_of_any_shape(shape: tuple[int, ...]) -> None:
    array = reserve_array(shape, np.uint16)
    assert array.shape == shape
    assert not array.any()
    array[...] = 7
    assert int(array.sum()) == 7 * array.size


def test_mapping_is_not_unmapped_by_garbage_collection(memfd: int) -> None:
    mapping = Mapping.map_fd(memfd, 4 * MIB)
    address = mapping.address
    mapping.array()[0] = 5
    del mapping
    assert ctypes.c_uint8.from_address(address).value == 5
    Mapping(address, 4 * MIB, True).close()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_populate_where_there_is_no_memory(old_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, not the signal that touching it would be."""
    if old_kernel:
        monkeypatch.setattr(sharedmem, "_MADV_POPULATE_WRITE", 9999)
    with full_tmpfs() as (fd, _):
        mapping = Mapping.map_fd(fd, SIZE)
        with pytest.raises(ResourceError, match="a tmpfs is full" if not old_kernel else os.strerror(errno.ENOSPC)):
            populate(mapping.address, SIZE, 2, fd=fd)
        populate(mapping.address, HALF, 2, fd=fd)
        mapping.close()


def test_a_table_that_is_made_while_others_are_in_use_fails_as_one_of_numpys_would() -> None:
    with pytest.raises(MemoryError):
        reserve_array((1 << 47,), np.uint8, scattered=True)
    with pytest.raises(OSError, match="memory"):
        reserve_array((1 << 47,), np.uint8)
