"""Opens a root's directory, and tests the abilities of its file system. Everything here blocks."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.files import DiskError, Files, aligned_pages, lacks_allocation
from kvoffloadd.storage.disk.manifest import MANIFEST_NAME
from kvoffloadd.units import format_path

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that has no room for the data."""

COPY_ON_WRITE: Final = "btrfs"
"""A file system that writes overwritten data to another place, unless a file has FS_NOCOW_FL."""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_PROBE = re.compile("probe-[0-9a-f]{16}")
_PROBE_PAGES = 2


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a directory's file system. `direct`: O_DIRECT works; `allocates`: fallocate(2); `in_place`:
    FS_NOCOW_FL.
    """

    direct: bool
    allocates: bool = True
    in_place: bool = False


def open_root(
    files: Files, path: Path, *, make_root: bool = False, make_segments: bool = False, make_lock: bool = False
) -> tuple[int, int, int]:
    """Returns descriptors of a root's directory, of its segments' directory, and of its lock. The lock and the
    directory stay locked until these are closed. `make_...`: creates what is absent.

    Raises:
        BlockingIOError: another process uses it.
        FileNotFoundError: something is absent, and may not be made.
        DiskError: a directory is another user's, or open to others.
    """
    segments = path / "segments"
    with ExitStack() as opened:
        if make_root:
            files.make_directory(path)
        directory_fd = files.open_directory(path)
        opened.callback(files.close, directory_fd)
        try:
            files.lock(directory_fd)  # as well: emptying the directory removes the lock
        except BlockingIOError:
            raise
        except OSError:
            pass  # NFS locks only files
        if make_segments:
            files.make_directory(segments)
        segments_fd = files.open_directory(segments)
        opened.callback(files.close, segments_fd)
        lock_fd = _open_lock(files, directory_fd, make=make_lock)
        opened.callback(files.close, lock_fd)
        files.lock(lock_fd)
        opened.pop_all()
    return directory_fd, segments_fd, lock_fd


def _open_lock(files: Files, directory_fd: int, *, make: bool) -> int:
    if make:
        with suppress(FileExistsError):
            return files.open(directory_fd, "lock", create=True, direct=False, write=True)
    return files.open(directory_fd, "lock", create=False, direct=False, write=True)


def has_manifest(files: Files, path: Path) -> bool:
    """Returns whether a root is there, which shows that its file system is mounted."""
    try:
        return stat.S_ISREG(files.stat(path / MANIFEST_NAME).st_mode)
    except FileNotFoundError:
        return False


def what_is_missing(files: Files, path: Path) -> str:
    """Names the missing parts of a root that existed before, and can't be opened now."""
    try:
        files.stat(path)
    except FileNotFoundError:
        return f"{format_path(path)} is missing: mount its file system, or create it with mode 700"
    return f"{format_path(path)} has no segments or no lock: mount its file system, or restart the daemon to begin anew"


def what_changed(files: Files, path: Path, opened: tuple[int, int, int]) -> str:
    """Returns why this is not the root of the descriptors from `open_root` any more; empty: it is. Raises OSError."""
    directory, segments, lock = map(files.fstat, opened)
    try:
        if not _same(files.stat(path), directory):
            return "another directory is there now: is its file system mounted?"
        for name, found in (("segments", segments), ("lock", lock)):
            if not _same(files.stat(path / name), found):
                return f"another {name} is there now: something else writes there"
    except FileNotFoundError as error:
        return f"{format_path(error.filename)} was removed"
    return ""


def _same(there: os.stat_result, here: os.stat_result) -> bool:
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def probe(files: Files, dir_fd: int, direct: bool | None) -> Abilities:
    """Performs all operations on segments with a temporary file in this directory. `direct`: None to use it where it
    works.

    Raises:
        DiskError: O_DIRECT is required, and does not work.
        OSError: another operation fails. Lack of space does not count: existing contents can be read.
    """
    if direct is not False:
        try:
            return _probe(files, dir_fd, direct=True)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            if direct:
                text = f'O_DIRECT does not work there ({os.strerror(error.errno)}): set disk.direct = "auto"'
                raise DiskError(text) from None
    return _probe(files, dir_fd, direct=False)


def _probe(files: Files, dir_fd: int, *, direct: bool) -> Abilities:
    for left in files.names(dir_fd):  # left by a process that was killed
        if _PROBE.fullmatch(left):
            with suppress(FileNotFoundError):
                files.unlink(dir_fd, left)
    name = f"probe-{secrets.token_hex(8)}"
    allocates, in_place = True, False
    pages = aligned_pages(2 * _PROBE_PAGES)
    written, back = pages[:_PROBE_PAGES], pages[_PROBE_PAGES:]
    try:
        fd = files.open(dir_fd, name, create=True, direct=direct, write=True)
        try:
            in_place = files.overwrite_in_place(fd)
            try:
                files.allocate(fd, _PROBE_PAGES * PAGE_BYTES)
            except OSError as error:
                if not lacks_allocation(error):
                    raise
                allocates = False
            for value in (0, 0x5A):  # overwriting differs from a first write
                written[:], back[:] = value, 0xFF
                files.write(fd, 0, [written])
                files.sync(fd)
            came = files.read(fd, 0, [back])
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return Abilities(direct, allocates, in_place)
        finally:
            files.close(fd)
    finally:
        # A file system that refuses O_DIRECT may have made the file nevertheless.
        with suppress(FileNotFoundError):
            files.unlink(dir_fd, name)
    if came != back.nbytes or (written != back).any():
        raise OSError(errno.EINVAL if direct else errno.EIO, "what was written is not what is read")
    return Abilities(direct, allocates, in_place)
