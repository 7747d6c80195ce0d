"""System calls of the disk tier on directories and segment files, in one place, so that tests can replace them.

Every method may block for as long as the disk likes: call them in threads. OSError passes through.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.errors import ResourceError
from kvoffloadd.model import PAGE_BYTES, U8Array

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SEGMENT_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DiskError(ResourceError):
    """A directory of the disk tier can't be used; the message says why."""

    fault = "operator"


class DiskManifestError(DiskError):
    """A manifest that is not what was written."""


class DiskVersionError(DiskManifestError):
    """A manifest of another format version: it must not be overwritten."""


def lacks_resources(error: BaseException) -> bool:
    """Whether the system was out of descriptors or memory: that says nothing about the disk or what is on it."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _NO_RESOURCES


def describe_error(error: BaseException) -> str:
    """An error in words, without a number, for people who read `status`."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def is_segment_name(name: str) -> bool:
    """Whether a segment file may have this name."""
    return _SEGMENT_NAME.fullmatch(name) is not None


def aligned_pages(count: int) -> U8Array:
    """(count, 4096) bytes of anything that begin at a page boundary, as O_DIRECT wants them."""
    raw = np.empty((count + 1) * PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    pages: U8Array = raw[start : start + count * PAGE_BYTES].reshape(count, PAGE_BYTES)
    return pages


class Files:
    """The real thing. `direct` opens with O_DIRECT: then memory, offsets and sizes must be whole pages."""

    def open_directory(self, path: str | Path) -> int:
        """A descriptor of a directory that no other user may enter.

        Raises:
            DiskError: the directory is another user's, or open to others.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(fd)
        trouble = ""
        if found.st_uid != os.geteuid():
            trouble = f"belongs to uid {found.st_uid}, and this runs as uid {os.geteuid()}: only its owner may use it"
        elif found.st_mode & 0o077:
            trouble = f"has mode {stat.S_IMODE(found.st_mode):o}, so that other users may enter it; make that 700"
        if trouble:
            os.close(fd)
            raise DiskError(f"{path} {trouble}")
        return fd

    def make_directory(self, path: str | Path) -> None:
        """Make a private directory, if nothing has this name yet."""
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def open(self, dir_fd: int, name: str, *, create: bool, direct: bool, write: bool) -> int:
        """A descriptor of a file; with `create` of a new one, and FileExistsError if there is one."""
        # O_NONBLOCK means nothing to files; without it, a FIFO under the name of one would be waited for.
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_RDWR if write else os.O_RDONLY)
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if direct else 0
        return os.open(name, flags, 0o600, dir_fd=dir_fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Make the file at least so long, with space on the disk behind every byte: later writes never lack it."""
        os.posix_fallocate(fd, 0, size_bytes)

    def write(self, fd: int, offset: int, buffers: Sequence[Any]) -> None:
        """Write all buffers behind one another from `offset` on. After an error some of the bytes may be there."""
        for first in range(0, len(buffers), _IOV_MAX):
            some = buffers[first : first + _IOV_MAX]
            size = sum(memoryview(one).nbytes for one in some)
            done = os.pwritev(fd, some, offset)
            if done < size:
                self._write_rest(fd, offset, some, done)
            offset += size

    def _write_rest(self, fd: int, offset: int, buffers: Sequence[Any], done: int) -> None:
        total = sum(memoryview(one).nbytes for one in buffers)
        step = PAGE_BYTES if _is_direct(fd) else 1
        before = 0
        while done < total:
            done -= done % step  # the torn page is written again: O_DIRECT knows whole pages only
            if done <= before:
                raise OSError(errno.EIO, f"nothing more can be written at {offset + done}")
            before = done
            done += os.pwritev(fd, _rest(buffers, done), offset + done)

    def read(self, fd: int, offset: int, buffers: Sequence[Any]) -> int:
        """Fill the buffers behind one another from `offset` on. Returns bytes read: fewer only at the file's end."""
        filled = 0
        for first in range(0, len(buffers), _IOV_MAX):
            some = buffers[first : first + _IOV_MAX]
            size = sum(memoryview(one).nbytes for one in some)
            done = os.preadv(fd, some, offset)
            if done < size:
                done = self._read_rest(fd, offset, some, done)
            filled += done
            offset += done
            if done < size:
                break
        return filled

    def _read_rest(self, fd: int, offset: int, buffers: Sequence[Any], done: int) -> int:
        total = sum(memoryview(one).nbytes for one in buffers)
        end = os.fstat(fd).st_size
        step = PAGE_BYTES if _is_direct(fd) else 1
        before = 0
        while done < total and offset + done < end:
            done -= done % step
            if done <= before:
                raise OSError(errno.EIO, f"nothing more can be read at {offset + done}")
            before = done
            done += os.preadv(fd, _rest(buffers, done), offset + done)
        return min(done, max(end - offset, 0))

    def drop_cached(self, fd: int, offset: int, size_bytes: int) -> None:
        """These bytes need not stay in the page cache. What is dirty begins to be written. Advice: it never fails."""
        with suppress(OSError):
            os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        """Wait until the file's bytes are durable, and what is needed to find them."""
        os.fdatasync(fd)

    def sync_directory(self, fd: int) -> None:
        """Wait until the directory's names are durable."""
        os.fsync(fd)

    def unlink(self, dir_fd: int, name: str) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def names(self, dir_fd: int) -> list[str]:
        """All names in a directory, in no order."""
        return os.listdir(dir_fd)

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def free_bytes(self, dir_fd: int) -> int:
        """What the file system would still give to this user."""
        found = os.fstatvfs(dir_fd)
        return found.f_bavail * found.f_frsize

    def close(self, fd: int) -> None:
        os.close(fd)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _rest(buffers: Sequence[Any], skip: int) -> list[Any]:
    """What is left of the buffers behind their first `skip` bytes."""
    left: list[Any] = []
    for one in buffers:
        size = memoryview(one).nbytes
        if skip == 0:
            left.append(one)
        elif skip < size:
            left.append(np.frombuffer(one, np.uint8)[skip:])  # a memoryview can't cast all that ctypes makes
        skip = max(skip - size, 0)
    return left


def open_root(files: Files, path: Path, *, create: bool, create_lock: bool) -> tuple[int, int, int]:
    """Descriptors of a root's directory, of the one with its segments, and of its lock, which is held until that one
    is closed. `create`: make directories that are not there; `create_lock`: make the lock's file, too.

    Raises:
        BlockingIOError: another process holds the lock.
        FileNotFoundError: something is not there, and is not to be made.
        DiskError: a directory is another user's, or open to others.
    """
    segments = path / "segments"
    with ExitStack() as opened:
        if create:
            files.make_directory(path)
        directory_fd = files.open_directory(path)
        opened.callback(os.close, directory_fd)
        if create:
            files.make_directory(segments)
        segments_fd = files.open_directory(segments)
        opened.callback(os.close, segments_fd)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create_lock else 0)
        lock_fd = os.open("lock", flags, 0o600, dir_fd=directory_fd)
        opened.callback(os.close, lock_fd)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened.pop_all()
    return directory_fd, segments_fd, lock_fd


def probe_direct(files: Files, dir_fd: int) -> bool:
    """Whether O_DIRECT works in this directory: writes a page to a temporary file and reads it back.

    Raises:
        OSError: for another reason than O_DIRECT.
    """
    name = f"probe-{secrets.token_hex(8)}"
    pages = aligned_pages(2)
    pages[0], pages[1] = 0x5A, 0
    fd = -1
    try:
        fd = files.open(dir_fd, name, create=True, direct=True, write=True)
        files.write(fd, 0, [pages[0]])
        return files.read(fd, 0, [pages[1]]) == PAGE_BYTES and bool((pages[0] == pages[1]).all())
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return False
        raise
    finally:
        if fd != -1:
            files.close(fd)
        # A file system that refuses O_DIRECT may have made the file all the same.
        with suppress(FileNotFoundError):
            files.unlink(dir_fd, name)
