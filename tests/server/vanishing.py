"""Shared memory whose second half goes away, in each way in which peers can do that to a daemon that has mapped it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvoffloadd.linux.sharedmem import create_memfd
from tests.kernelsettings import reserved_pages

BLOCK = 64 << 10
BLOCKS = 64
SIZE = BLOCKS * BLOCK
HALF = SIZE // 2
GONE_BLOCK = BLOCKS // 2
"""The first of those that go."""

_HUGE = 2 << 20
_CLONE_NEWNS = 0x00020000
_MS_PRIVATE_REC = 1 << 18 | 1 << 14
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)

Vanish = Callable[[], None]


def punch(fd: int, offset: int, size: int) -> None:
    """Give these pages back to the kernel; seals against shrinking do not forbid it."""
    assert _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size) == 0, os.strerror(ctypes.get_errno())


@contextmanager
def cut_off() -> Iterator[tuple[int, Vanish]]:
    """An unsealed file that is truncated."""
    fd = os.memfd_create("vanishing", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, SIZE)
    yield fd, lambda: os.truncate(fd, HALF)
    os.close(fd)


@contextmanager
def full_tmpfs() -> Iterator[tuple[int, Vanish]]:
    """A sparse file in a tmpfs that is full: the pages that were not written yet can't be had."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:  # its mounts end with it; the file lives as long as we have it open
        try:
            assert _libc.unshare(_CLONE_NEWNS) == 0
            assert _libc.mount(b"none", b"/", None, _MS_PRIVATE_REC, None) == 0
            assert _libc.mount(b"none", b"/tmp", b"tmpfs", 0, f"size={HALF}".encode()) == 0
            fd = os.open("/tmp/sparse", os.O_RDWR | os.O_CREAT, 0o600)
            os.truncate(fd, SIZE)
            os.posix_fallocate(fd, 0, HALF)
            socket.send_fds(theirs, [b"."], [fd])
        finally:
            os._exit(0)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    os.waitpid(child, 0)
    if not fds:
        pytest.skip("no tmpfs can be mounted here")
    yield fds[0], lambda: None  # it is gone from the beginning
    os.close(fds[0])


@contextmanager
def huge_pages() -> Iterator[tuple[int, Vanish]]:
    """Huge pages that are punched out, and taken for another file. They are sealed, as other users' memory must be."""
    with ExitStack() as stack:
        stack.enter_context(reserved_pages(SIZE // _HUGE))
        fd = _huge_memfd(SIZE)
        stack.callback(os.close, fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        _touch(fd, SIZE)

        def vanish() -> None:
            punch(fd, HALF, SIZE - HALF)
            other = _huge_memfd(SIZE - HALF)
            stack.callback(os.close, other)
            _touch(other, SIZE - HALF)

        yield fd, vanish


@contextmanager
def holes() -> Iterator[tuple[int, Vanish]]:
    """Pages that are punched out, and that the kernel would give again to the first process that touches them."""
    fd = create_memfd("vanishing", SIZE)
    os.posix_fallocate(fd, 0, SIZE)
    yield fd, lambda: punch(fd, HALF, SIZE - HALF)
    os.close(fd)


def _huge_memfd(size: int) -> int:
    fd = os.memfd_create("vanishing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.truncate(fd, size)
    return fd


def _touch(fd: int, size: int) -> None:
    with mmap.mmap(fd, size) as whole:
        for at in range(0, size, _HUGE):
            whole[at] = 1
