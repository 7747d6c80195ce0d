"""What lies in the files that an engine computes with, as a text that two engines can compare.

A name stands for contents, so whatever file decides the bytes of a KV cache is named by what is in it:

- A file of Hugging Face's cache is stored under the digest of its contents: that digest names it, on every host.
- On a local file system, a file is named by its size, its times of modification and of change, and its inode. Whoever
  writes to it, or puts another file in its place, changes one of these: the kernel sets the time of change, and nobody
  else can. Other hosts have other times and inodes, and share nothing.
- Other file systems (NFS, FUSE) make times and inodes up, or tell them late. There a file is named by its size, its
  time of modification, and the digest of its first and last MiB.
- With `Fingerprint.CONTENTS` a file is named by the digest of all its bytes: hosts that have equal files share. All of
  them are read, at the speed of the disk.

Nothing here is secret or forgery-proof: who can write an engine's files can change its answers anyway.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.naming import digest_of

END_BYTES: Final = 1 << 20
"""Of a file's begin, and of its end, on file systems whose times say little."""

_READ_BYTES: Final = 16 << 20

_LOCAL: Final = frozenset(
    (
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x01021994,  # tmpfs
        0x794C7630,  # overlayfs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
        0x73717368,  # squashfs
        0xE0F5E1E2,  # erofs
    )
)
"""`f_type` of file systems of the host's own kernel (statfs(2)), which set the time of change at each write."""

_STATFS_BYTES: Final = 256  # struct statfs has 120
_HARMLESS: Final = frozenset((".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".pyc"))
"""Suffixes of files that no engine computes with."""
_HUB_SNAPSHOT: Final = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")
_HUB_BLOB: Final = re.compile(r"/models--[^/]+/blobs/([0-9a-f]{40}|[0-9a-f]{64})$")

_libc = ctypes.CDLL(None, use_errno=True)


class Fingerprint(enum.StrEnum):
    """How files are named. AUTO: by what the file system tells of them, where that is enough."""

    AUTO = "auto"
    CONTENTS = "contents"

    @classmethod
    def of(cls, value: object, where: str) -> Fingerprint:
        """What a user has set. Raises UsageError."""
        try:
            return cls(str(value))
        except ValueError:
            names = " or ".join(repr(str(one)) for one in cls)
            raise UsageError(f"{where}: fingerprint must be {names}, not {value!r}") from None


class ContentsError(UsageError):
    """A file, or a folder, can't be read, or has changed while it was read: what an engine computes with is not known.

    Who gets it shares with nobody.
    """


class _File(NamedTuple):
    """`name`: below the folder that was asked for, with links followed in `path`."""

    name: str
    path: str


def contents_of(path: str | os.PathLike[str], how: Fingerprint = Fingerprint.AUTO) -> str:
    """Names what is in a file, or in all files of a folder and below, but for hidden ones, which no loader reads.

    Empty where nothing is at that path. Reads all bytes with `Fingerprint.CONTENTS`, and up to 2 MiB of a file on file
    systems that are not the host's own.

    Raises:
        ContentsError: something of it can't be read, or changes meanwhile.
    """
    path = os.path.expanduser(os.fspath(path))
    try:
        if not os.path.lexists(path):
            return ""
        found = [(one.name, _named(one.path, how)) for one in _files(path)]
    except OSError as error:
        raise ContentsError(f"{error.filename or path} can't be read: {error.strerror}") from error
    return "files:" + digest_of(sorted(found))


def model_of(path: str | os.PathLike[str], how: Fingerprint = Fingerprint.AUTO) -> str:
    """Names what is in a model's folder or file. As `contents_of`, but a snapshot of the hub is named by its commit:
    hosts that have fetched unlike parts of it share. Files that are not the hub's name it too.

    Raises:
        ContentsError: as `contents_of`.
    """
    folder = os.path.abspath(os.path.expanduser(os.fspath(path)))
    snapshot = _HUB_SNAPSHOT.search(folder)
    if not snapshot or not os.path.isdir(folder):
        return contents_of(folder, how)
    try:
        own = [(one.name, _named(one.path, how)) for one in _files(folder) if not _HUB_BLOB.search(one.path)]
    except OSError as error:
        raise ContentsError(f"{error.filename or folder} can't be read: {error.strerror}") from error
    return f"hub:{snapshot[1]}@{snapshot[2]}" + (":" + digest_of(sorted(own)) if own else "")


def hub_name(path: str) -> str:
    """The hub's name of the model whose snapshot this folder is. Empty: it is none."""
    snapshot = _HUB_SNAPSHOT.search(os.path.abspath(os.path.expanduser(path)))
    return snapshot[1].replace("--", "/") if snapshot else ""


def snapshot_of(model: str, revision: str | None = None, file: str = "config.json") -> str | None:
    """The folder in which Hugging Face's cache of this host has a model of the hub. None: it has none, or `model` is
    none of the hub's. `file`: one that it must have.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        return None
    try:
        found = hub.try_to_load_from_cache(model, file, revision=revision or None)
    except ValueError:  # no name that the hub could have
        return None
    return str(Path(found).parent) if isinstance(found, str) else None


def _files(path: str) -> Iterator[_File]:
    """Of a folder, links to folders followed, each real folder once."""
    if not os.path.isdir(path):
        yield _File(os.path.basename(path), os.path.realpath(path, strict=True))
        return
    seen: set[str] = set()
    folders = [("", os.path.realpath(path, strict=True))]
    while folders:
        below, folder = folders.pop()
        if folder in seen:
            continue
        seen.add(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                name = os.path.join(below, entry.name)
                if entry.name.startswith(".") or entry.name == "__pycache__":
                    continue
                real = os.path.realpath(entry.path, strict=True)
                if os.path.isdir(real):
                    folders.append((name, real))
                elif os.path.splitext(entry.name)[1].lower() not in _HARMLESS:
                    yield _File(name, real)


def _named(path: str, how: Fingerprint) -> tuple[object, ...]:
    """What is in this file, without links in its path."""
    blob = _HUB_BLOB.search(path)
    if blob:
        return "hub", blob[1]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise ContentsError(f"{path} is not a file")
        if how is Fingerprint.CONTENTS:
            named: tuple[object, ...] = ("all", before.st_size, _digest(fd, path, 0, before.st_size))
        elif _is_local(fd, path):
            return "stat", before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino
        else:
            last = max(before.st_size - END_BYTES, END_BYTES)
            ends = _digest(fd, path, 0, END_BYTES), _digest(fd, path, last, END_BYTES)
            named = ("ends", before.st_size, before.st_mtime_ns, *ends)
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ContentsError(f"{path} changes while it is read")
    return named


def _digest(fd: int, path: str, begin: int, size_bytes: int) -> str:
    """Of so many bytes, or of those that there are."""
    hashed = xxhash.xxh3_128()
    at, end = begin, begin + size_bytes
    while at < end:
        read = os.pread(fd, min(_READ_BYTES, end - at), at)
        if not read:
            break
        hashed.update(read)
        at += len(read)
    return hashed.hexdigest()


def _is_local(fd: int, path: str) -> bool:
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF in _LOCAL
