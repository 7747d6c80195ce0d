"""Flips bits where others keep bytes: in files, and in the memory of processes.

Needs nothing but Python's own library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_BIT = 0x40
_PIECE_BYTES = 16 << 20
_PLACES_MAX = 16
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-([sp]) \S+ \S+ \S+ *(.*)")


def flip(path: Path, offset: int) -> None:
    """Damage one byte, so that the next read sees it."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        _flip(fd, offset)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def flip_in_files(folder: Path, needle: bytes) -> int:
    """Flip a bit in the midst of each place below `folder` that holds these bytes; returns how many there were."""
    flipped = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        with path.open("rb") as file:
            places = list(_found(file.fileno(), 0, path.stat().st_size, needle))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for place in places[:_PLACES_MAX]:
            flip(path, place + len(needle) // 2)
        flipped += len(places)
    return flipped


def flip_in_memory(pid: int, needle: bytes) -> int:
    """The same in what a process may write of its memory; of this process only in what it shares, since `needle` itself
    is in the rest. Pages that are mapped twice are flipped once. Raises PermissionError: the kernel does not allow it.
    """
    flipped = 0
    fd = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            mapping = _MAPPING.match(line)
            if mapping is None or (pid == os.getpid() and mapping[3] == "p") or mapping[4].startswith("/dev/dri"):
                continue
            begin, end = int(mapping[1], 16), int(mapping[2], 16)
            for place in list(_found(fd, begin, end, needle))[:_PLACES_MAX]:
                _flip(fd, place + len(needle) // 2)
                flipped += 1
    finally:
        os.close(fd)
    return flipped


def _flip(fd: int, offset: int) -> None:
    (byte,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte ^ _BIT]), offset)


def _found(fd: int, begin: int, end: int, needle: bytes) -> Iterator[int]:
    """Where these bytes are; pieces overlap by as much as may lie across."""
    overlap = len(needle) - 1
    at = begin
    while at < end:
        try:
            piece = os.pread(fd, min(_PIECE_BYTES + overlap, end - at), at)
        except OSError:  # pages that can't be read
            piece = b""
        place = piece.find(needle)
        while place >= 0:
            if place < _PIECE_BYTES:
                yield at + place
            place = piece.find(needle, place + 1)
        at += _PIECE_BYTES
