"""The ways in which an owner takes pages out of memory that a daemon has mapped, and gives them back."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress

from kvoffloadd.model import PAGE_BYTES
from scripts.holes.memory import WatchedMemory

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MADV_PAGEOUT = 21  # Linux 5.4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def punch(memory: WatchedMemory, at: int, size: int) -> None:
    """Pages that are whole within these bytes are given back, the others' bytes become zeros. No seal forbids it."""
    _checked(_libc.fallocate(memory.fd, _KEEP_SIZE | _PUNCH_HOLE, at, size))


def punch_pages(memory: WatchedMemory, at: int, size: int) -> None:
    """The pages that these bytes lie on, and nothing else."""
    first = at - at % PAGE_BYTES
    punch(memory, first, -(-(at + size - first) // PAGE_BYTES) * PAGE_BYTES)


def punch_all(memory: WatchedMemory, _at: int, _size: int) -> None:
    """Every page."""
    punch(memory, 0, memory.size_bytes)


def remove(memory: WatchedMemory, at: int, size: int) -> None:
    """The same through the mapping."""
    _advise(memory, at, size, mmap.MADV_REMOVE)


def forget(memory: WatchedMemory, at: int, size: int) -> None:
    """This process's page table entries alone: nothing is lost."""
    _advise(memory, at, size, mmap.MADV_DONTNEED)


def page_out(memory: WatchedMemory, at: int, size: int) -> None:
    """Pages memory out to swap, if there is any: nothing is lost."""
    with suppress(OSError):  # an older kernel
        _advise(memory, at, size, _MADV_PAGEOUT)


def cut(memory: WatchedMemory, at: int, _size: int) -> None:
    """Make the file shorter, and as long as it was. A seal forbids it; raises AssertionError if it does not."""
    try:
        os.ftruncate(memory.fd, at)
    except PermissionError:
        if memory.sealed:
            return
        raise
    if memory.sealed:
        raise AssertionError("the kernel has cut off a file that is sealed against shrinking")
    os.ftruncate(memory.fd, memory.size_bytes)


def fill(memory: WatchedMemory, at: int, size: int) -> None:
    """Have the kernel make the pages that are missing, of zeros."""
    os.posix_fallocate(memory.fd, at, size)


SHAPES = (punch, punch_pages, punch_pages, punch_all, remove, forget, page_out, cut, fill, fill)
"""Of some bytes of the memory each; pages come back about as often as they go, so that some jobs succeed."""


def _advise(memory: WatchedMemory, at: int, size: int, advice: int) -> None:
    first = at - at % PAGE_BYTES
    _checked(_libc.madvise(memory.address + first, at + size - first, advice))  # the kernel takes whole pages


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
