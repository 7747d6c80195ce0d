"""Opening a root's directory, and trying out what its file system can do. Everything here blocks."""

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
"""Errors of a disk that has no room for what is written."""

COPY_ON_WRITE: Final = "btrfs"
"""A file system that writes what is overwritten to another place, unless a file has FS_NOCOW_FL."""

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_PROBE = re.compile("probe-[0-9a-f]{16}")
_PROBE_PAGES = 2


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the file system of a directory can do. `direct`: O_DIRECT is to be used; `allocates`: fallocate(2);
    `in_place`: FS_NOCOW_FL.
    """

    direct: bool
    allocates: bool = True
    in_place: bool = False


def open_root(
    files: Files, path: Path, *, make_root: bool = False, make_segments: bool = False, make_lock: bool = False
) -> tuple[int, int, int]:
    """Descriptors of a root's directory, of the one with its segments, and of its lock. The lock and the directory are
    locked until these are closed. `make_...`: if it is not there.

    Raises:
        BlockingIOError: another process uses it.
        FileNotFoundError: something is not there, and is not to be made.
        DiskError: a directory is another user's, or open to others.
    """
    segments = path / "segments"
    with ExitStack() as opened:
        if make_root:
            files.make_directory(path)
        directory_fd = files.open_directory(path)
        opened.callback(files.close, directory_fd)
        try:
            files.lock(directory_fd)  # as well: whoever empties the directory removes the lock
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
    """Whether a root is there: its file system is mounted, then."""
    try:
        return stat.S_ISREG(files.stat(path / MANIFEST_NAME).st_mode)
    except FileNotFoundError:
        return False


def what_is_missing(files: Files, path: Path) -> str:
    """Tell what is missing of a root that was there before, and can't be opened now."""
    try:
        files.stat(path)
    except FileNotFoundError:
        return f"{format_path(path)} is missing: mount its file system, or create it with mode 700"
    return f"{format_path(path)} has no segments or no lock: mount its file system, or restart the daemon to begin anew"


def what_changed(files: Files, path: Path, opened: tuple[int, int, int]) -> str:
    """Why this is not the root any more whose descriptors `open_root` has returned; empty: it is. Raises OSError."""
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
    """Do to a temporary file in this directory all that is done to segments. `direct`: None for where it works.

    Raises:
        DiskError: O_DIRECT is asked for, and does not work.
        OSError: something else does not. Want of space is no reason: what is on the disk can be read.
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
    for left in files.names(dir_fd):  # by a process that was killed
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
            for value in (0, 0x5A):  # what is overwritten is not written as what is new
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
        # A file system that refuses O_DIRECT may have made the file all the same.
        with suppress(FileNotFoundError):
            files.unlink(dir_fd, name)
    if came != back.nbytes or (written != back).any():
        raise OSError(errno.EINVAL if direct else errno.EIO, "what was written is not what is read")
    return Abilities(direct, allocates, in_place)
