"""System calls of the disk tier on directories and segment files, in one place, so that tests can replace them.

Every method may block without limit on the disk: call them in threads. OSError passes through.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.errors import ResourceError
from kvoffloadd.model import PAGE_BYTES, U8Array
from kvoffloadd.units import format_path

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SEGMENT_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_GET_FLAGS, _SET_FLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000  # FS_IOC_GETFLAGS and so on, see linux/fs.h

# Not os.posix_fallocate: where the file system has no fallocate(2), glibc writes a byte into each block instead.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


class DiskError(ResourceError):
    """A directory of the disk tier can't be used; the message has the reason."""

    fault = "operator"


class DiskManifestError(DiskError):
    """A manifest is damaged."""


class DiskVersionError(DiskManifestError):
    """A manifest has another format version and must not be overwritten."""


def lacks_resources(error: BaseException) -> bool:
    """Returns whether the system was out of descriptors or memory, which shows nothing about the disk."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _NO_RESOURCES


def lacks_allocation(error: OSError) -> bool:
    """Returns whether the error means that the file system has no fallocate(2)."""
    return error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)


def describe_error(error: BaseException) -> str:
    """Returns the text of an error without a number, for people who read `status`."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def is_segment_name(name: str) -> bool:
    """Returns whether a segment file may have this name."""
    return _SEGMENT_NAME.fullmatch(name) is not None


def aligned_pages(count: int) -> U8Array:
    """Returns (count, 4096) uninitialised bytes that begin at a page boundary, as O_DIRECT requires."""
    raw = np.empty((count + 1) * PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    pages: U8Array = raw[start : start + count * PAGE_BYTES].reshape(count, PAGE_BYTES)
    return pages


class Files:
    """The real file system. `direct` opens with O_DIRECT: then memory, offsets and sizes must be whole pages."""

    def open_directory(self, path: str | Path) -> int:
        """Returns a descriptor of a directory that no other user may enter.

        Raises:
            DiskError: the directory is another user's, or open to others.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(path, follow_symlinks=False).st_mode):
                where = format_path(os.path.realpath(path))
                raise DiskError(f"{format_path(path)} is a symbolic link: name the directory itself, {where}") from None
            raise
        found = self.fstat(fd)
        trouble = ""
        if found.st_uid != os.geteuid():
            trouble = f"belongs to uid {found.st_uid}, and this runs as uid {os.geteuid()}: only its owner may use it"
        elif found.st_mode & 0o077:
            mode = f"{stat.S_IMODE(found.st_mode):o}"
            trouble = f"has mode {mode}, so that other users may enter it: name a directory of its own, of mode 700"
        if trouble:
            self.close(fd)
            raise DiskError(f"{format_path(path)} {trouble}")
        return fd

    def open_again(self, path: Path) -> int:
        """Returns a descriptor of a directory that was opened before, by the path in /proc of its first descriptor."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def make_directory(self, path: str | Path) -> None:
        """Makes a private directory, if nothing has this name yet."""
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def lock(self, fd: int) -> None:
        """Holds an exclusive lock on a file or directory until its descriptor is closed.

        Raises:
            BlockingIOError: another process holds it.
        """
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def open(self, dir_fd: int, name: str, *, create: bool, direct: bool, write: bool) -> int:
        """Returns a descriptor of a file; with `create` of a new one, and FileExistsError if there is one."""
        # O_NONBLOCK means nothing to files; without it, opening a FIFO with a file's name would block.
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_RDWR if write else os.O_RDONLY)
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if direct else 0
        return os.open(name, flags, 0o600, dir_fd=dir_fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Makes the file at least this long, with disk space behind every byte, so that later writes do not lack it.
        EOPNOTSUPP: the file system can't, see `lacks_allocation`.
        """
        if _fallocate(fd, 0, 0, size_bytes):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def write(self, fd: int, offset: int, buffers: Sequence[Any]) -> None:
        """Writes all buffers one after another from `offset` on. After an error some of the bytes may be there."""
        for first in range(0, len(buffers), _IOV_MAX):
            batch = buffers[first : first + _IOV_MAX]
            size = sum(memoryview(buffer).nbytes for buffer in batch)
            done = os.pwritev(fd, batch, offset)
            if done < size:
                self._write_rest(fd, offset, batch, done)
            offset += size

    def _write_rest(self, fd: int, offset: int, buffers: Sequence[Any], done: int) -> None:
        total = sum(memoryview(buffer).nbytes for buffer in buffers)
        step = PAGE_BYTES if _is_direct(fd) else 1
        before = 0
        while done < total:
            done -= done % step  # the torn page is written again: O_DIRECT takes only whole pages
            if done <= before:
                raise OSError(errno.EIO, f"nothing more can be written at {offset + done}")
            before = done
            done += os.pwritev(fd, _rest(buffers, done), offset + done)

    def read(self, fd: int, offset: int, buffers: Sequence[Any]) -> int:
        """Fills the buffers one after another from `offset` on. Returns bytes read: fewer only at the file's end."""
        filled = 0
        for first in range(0, len(buffers), _IOV_MAX):
            batch = buffers[first : first + _IOV_MAX]
            size = sum(memoryview(buffer).nbytes for buffer in batch)
            done = os.preadv(fd, batch, offset)
            if done < size:
                done = self._read_rest(fd, offset, batch, done)
            filled += done
            offset += done
            if done < size:
                break
        return filled

    def _read_rest(self, fd: int, offset: int, buffers: Sequence[Any], done: int) -> int:
        total = sum(memoryview(buffer).nbytes for buffer in buffers)
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
        """Lets these bytes leave the page cache. Starts writing dirty ones. Advice: it never fails."""
        with suppress(OSError):
            os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        """Waits until the file's bytes, and the metadata to find them, are durable."""
        os.fdatasync(fd)

    def sync_directory(self, fd: int) -> None:
        """Waits until the directory's names are durable."""
        os.fsync(fd)

    def unlink(self, dir_fd: int, name: str) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rename(self, dir_fd: int, old: str, new: str) -> None:
        """Renames a file; replaces a file named `new` in one step."""
        os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def names(self, dir_fd: int) -> list[str]:
        """Returns all names in a directory, unordered."""
        # Opened anew: btrfs lists the contents at the time of opening.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            return os.listdir(fd)
        finally:
            self.close(fd)

    def stat(self, name: str | Path, dir_fd: int | None = None) -> os.stat_result:
        """Returns the status of the file with this name. Links are not followed."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def size_bytes(self, fd: int) -> int:
        return self.fstat(fd).st_size

    def space(self, fd: int) -> os.statvfs_result:
        """Returns the size of the file system and the space available to this user."""
        return os.fstatvfs(fd)

    def free_bytes(self, dir_fd: int) -> int:
        """Returns the bytes that the file system still has for this user."""
        found = self.space(dir_fd)
        return found.f_bavail * found.f_frsize

    def is_overwritten_in_place(self, fd: int) -> bool:
        """Returns whether a file of a copy-on-write file system has FS_NOCOW_FL."""
        try:
            return bool(_flags(fd) & _NOCOW)
        except OSError:
            return False

    def overwrite_in_place(self, fd: int) -> bool:
        """Gives an empty file FS_NOCOW_FL. Returns False if the file system refuses."""
        try:
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", _flags(fd) | _NOCOW))
        except OSError:
            return False
        return True

    def close(self, fd: int) -> None:
        """Releases a descriptor, even when this raises. It may wait for the disk, as on FUSE, NFS and CephFS."""
        os.close(fd)

    @contextmanager
    def open_to_read(self, dir_fd: int, name: str, *, direct: bool) -> Iterator[int]:
        """Opens a file for reading. The outcome of closing does not affect the data read."""
        fd = self.open(dir_fd, name, create=False, direct=direct, write=False)
        try:
            yield fd
        finally:
            with suppress(OSError):
                self.close(fd)

    @contextmanager
    def open_to_write(self, dir_fd: int, name: str, *, direct: bool) -> Iterator[int]:
        """Opens an existing file for writing."""
        fd = self.open(dir_fd, name, create=False, direct=direct, write=True)
        try:
            yield fd
        finally:
            self.close(fd)


def _flags(fd: int) -> int:
    found: int = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))[0]
    return found & 0xFFFFFFFF


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _rest(buffers: Sequence[Any], skip: int) -> list[Any]:
    """Returns the buffers without their first `skip` bytes."""
    left: list[Any] = []
    for buffer in buffers:
        size = memoryview(buffer).nbytes
        if skip == 0:
            left.append(buffer)
        elif skip < size:
            left.append(np.frombuffer(buffer, np.uint8)[skip:])  # a memoryview can't cast all formats that ctypes makes
        skip = max(skip - size, 0)
    return left
