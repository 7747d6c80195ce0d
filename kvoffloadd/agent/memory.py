"""The daemon's memory, as the agent maps it: only the arena's slots and the header pages."""

from __future__ import annotations

import ctypes
import mmap
import os

from kvoffloadd.agent.engines.base import Memory, Region
from kvoffloadd.agentwire.frames import Start

_held: list[mmap.mmap] = []


def map_memory(start: Start, arena_fd: int, headers_fd: int) -> Memory:
    """Maps it for as long as the process lives. The descriptors stay the caller's. Raises OSError, ValueError."""
    return Memory(
        _map(arena_fd, start.arena_offset, start.arena_bytes),
        _map(headers_fd, 0, start.header_bytes),
    )


def _map(fd: int, offset: int, size_bytes: int) -> Region:
    page_bytes = max(os.fstatvfs(fd).f_bsize, mmap.ALLOCATIONGRANULARITY)  # huge pages are mapped whole
    before = offset % page_bytes
    length = before + size_bytes
    length += -length % page_bytes
    mapped = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset - before)
    # A child that a library forks would outlive this process, without the daemon's knowledge; and a core file would
    # contain users' prompts.
    mapped.madvise(mmap.MADV_DONTFORK)
    mapped.madvise(mmap.MADV_DONTDUMP)
    _held.append(mapped)
    return Region(ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + before, size_bytes)
