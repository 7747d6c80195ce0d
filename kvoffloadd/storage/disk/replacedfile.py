"""Files of a root that are replaced whole, in one step: written under another name, synced and renamed. Blocks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvoffloadd.storage.disk.files import Files

_NEW = ".new"


def write_new(files: Files, directory_fd: int, name: str, contents: Any) -> None:
    """Writes the next contents of a file, durably. They count once `replace` has returned. One at a time.

    Raises:
        OSError: they can't be written.
    """
    with suppress(FileNotFoundError):
        files.unlink(directory_fd, name + _NEW)
    fd = files.open(directory_fd, name + _NEW, create=True, direct=False, write=True)
    try:
        files.write(fd, 0, [contents])
        files.sync(fd)
    finally:
        files.close(fd)


def replace(files: Files, directory_fd: int, name: str) -> None:
    """Puts the contents of `write_new` in the place of the old ones.

    Raises:
        OSError: the old ones hold, or the new ones do and may not be durable.
    """
    files.rename(directory_fd, name + _NEW, name)
    files.sync_directory(directory_fd)


def remove(files: Files, directory_fd: int, name: str) -> None:
    """Removes a file, durably, if it is there. Raises OSError."""
    with suppress(FileNotFoundError):
        files.unlink(directory_fd, name)
        files.sync_directory(directory_fd)


def read_whole(files: Files, directory_fd: int, name: str, bytes_max: int) -> bytes | None:
    """Returns the contents of a file, of which no more than this many bytes are read; None if there is none.

    Raises:
        OSError: it can't be read.
    """
    try:
        with files.open_to_read(directory_fd, name, direct=False) as fd:
            raw = bytearray(min(files.size_bytes(fd), bytes_max))
            return bytes(raw[: files.read(fd, 0, [raw])])
    except FileNotFoundError:
        return None
