"""Huge pages of shared memory: why the kernel gives none, and how much memory has them."""

from __future__ import annotations

import fcntl
import re
import struct
from pathlib import Path

import numpy as np

from kvoffloadd.model import HUGE_PAGE_BYTES

_FOLDER = Path("sys/kernel/mm/transparent_hugepage")
_SIZE = f"hugepages-{HUGE_PAGE_BYTES >> 10}kB"
_PAGEMAP_SCAN = 0xC0606610  # ioctl of proc_pid_pagemap(5), Linux 6.7
_SCAN = struct.Struct("<12Q")  # pm_scan_arg
_MAPPED_HUGE = 1 << 6 | 1 << 3  # PAGE_IS_HUGE, which a hole in reserved pages is, too, and PAGE_IS_PRESENT
_SCAN_BYTES = 64 << 20  # a call holds the lock of the address space, as in `sharedmem.populate`
_REGIONS = 256


def why_not_transparent(root: Path = Path("/")) -> str:
    """Returns what keeps the kernel from giving transparent huge pages to shared memory that requests them; empty:
    nothing. `root` is where sys is mounted.
    """
    whole, of_size = _FOLDER / "shmem_enabled", _FOLDER / _SIZE / "shmem_enabled"
    chosen = _chosen(root / whole)
    if not chosen:
        return "this kernel has none for shared memory"
    if chosen in ("deny", "force"):
        return f"/{whole} is deny: write advise to it" if chosen == "deny" else ""
    own = _chosen(root / of_size)  # Linux 6.10
    if own not in ("", "inherit"):
        return f"/{of_size} is never: write inherit to it, and advise to /{whole}" if own == "never" else ""
    return f"/{whole} is never: write advise to it" if chosen == "never" else ""


def _chosen(path: Path) -> str:
    """Returns the word in brackets; empty: there is no such file."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text(encoding="ascii"))
    except OSError:
        return ""
    return found[1] if found else ""


def huge_bytes(address: int, size_bytes: int) -> int | None:
    """Returns how many bytes of this process's memory are mapped by huge pages. None: this kernel does not report it.
    Blocks, for some 10 ms for each GiB of small pages.
    """
    regions = np.zeros((_REGIONS, 3), np.uint64)  # page_region: start, end, categories
    start, end, found = address, address + size_bytes, 0
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            while start < end:
                regions[:] = 0
                upto = min(start + _SCAN_BYTES, end)
                argument = bytearray(
                    _SCAN.pack(_SCAN.size, 0, start, upto, 0, regions.ctypes.data, _REGIONS, 0, 0, _MAPPED_HUGE, 0, 0)
                )
                fcntl.ioctl(pagemap, _PAGEMAP_SCAN, argument)
                found += int((regions[:, 1] - regions[:, 0]).sum())
                start = _SCAN.unpack(argument)[4]  # where the kernel stopped
    except OSError:
        return None
    return found
