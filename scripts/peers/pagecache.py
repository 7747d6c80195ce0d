"""The kernel's page cache of files: whether a system went past it, and out of the way of the next read."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_MINCORE = ctypes.CDLL(None, use_errno=True).mincore
_MINCORE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def cached_share(folder: Path) -> float:
    """How much of all files below is in the page cache, 0 to 1."""
    cached = pages = 0
    for fd, size in _files(folder):
        count = -(-size // mmap.PAGESIZE)
        states = (ctypes.c_uint8 * count)()
        # Writable and private, since ctypes takes the address of no other; nothing is written.
        with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE) as mapped:
            address = ctypes.c_char.from_buffer(mapped)
            failed = _MINCORE(ctypes.addressof(address), size, states)
            del address
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        cached += sum(state & 1 for state in states)
        pages += count
    return cached / pages if pages else 0.0


def drop(folder: Path) -> None:
    """Nothing of these files is cached any more: what is read next comes from the disk."""
    for fd, _ in _files(folder):
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _files(folder: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size of each that holds anything."""
    for path in folder.rglob("*"):
        if not path.is_file() or path.is_symlink():
            continue
        with path.open("rb") as file:
            if size := os.fstat(file.fileno()).st_size:
                yield file.fileno(), size
