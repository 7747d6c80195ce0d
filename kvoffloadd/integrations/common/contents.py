"""Names the contents of the files that an engine computes with, as a text that two engines can compare.

A name stands for contents, so every file that decides the bytes of a KV cache is named by its contents:

- A file of Hugging Face's cache is stored under the digest of its contents: that digest names it, on every host. Small
  files (configs, code) are read, and compared with their digest. Large ones are, if they were written to after their
  link was made. A file that does not match its digest counts as any other file.
- On a local file system that keeps its times itself, a file is named by its size, its times of modification and of
  change, and its inode. Every write to it, and every replacement, changes one of these: the kernel alone sets the time
  of change. Other hosts have other times and inodes, and share nothing.
- Images (squashfs, erofs) keep the times that their maker chose, overlayfs takes those of the file system below, and in
  tmpfs a mapping is written through without a new time. There a file is named by the digest of all its bytes.
- Other file systems (NFS, FUSE) make times and inodes up, or report them late. There a file is named by its size, its
  time of modification, and the digest of its first and last MiB.
- With `Fingerprint.CONTENTS` a file is named by the digest of all its bytes: hosts that have equal files share. All of
  them are read, at the speed of the disk.

Nothing here is secret or forgery-proof: a user who can write an engine's files can change its answers anyway.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import importlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import xxhash

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.naming import digest_of

END_BYTES: Final = 1 << 20
"""Bytes read at a file's beginning, and at its end, on file systems with times that prove little."""

_READ_BYTES: Final = 16 << 20

_TIMES_TELL: Final = frozenset(
    (
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
    )
)
"""`f_type` of file systems of the host's own kernel (statfs(2)), which set the time of change at each write."""

_TIMES_SAY_NOTHING: Final = frozenset(
    (
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlayfs
        0x73717368,  # squashfs
        0xE0F5E1E2,  # erofs
        0x28CD3D45,  # cramfs
        0x9660,  # iso9660
        0x15013346,  # udf
    )
)
"""`f_type` of file systems on which other contents may have equal times and inodes, and all of a file can be read as
fast as by an engine.
"""

_STATFS_BYTES: Final = 256  # struct statfs has 120
_HARMLESS: Final = frozenset((".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".pyc"))
"""Suffixes of files that no engine computes with."""
_HUB_SNAPSHOT: Final = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")
_HUB_BLOB: Final = re.compile(r"/models--[^/]+/blobs/([0-9a-f]{40}|[0-9a-f]{64})$")
_GIT_DIGEST_CHARS: Final = 40

_libc = ctypes.CDLL(None, use_errno=True)


class Fingerprint(enum.StrEnum):
    """The ways to name files. AUTO: by what the file system reports of them, where that is enough."""

    AUTO = "auto"
    CONTENTS = "contents"

    @classmethod
    def of(cls, value: object, where: str) -> Fingerprint:
        """Reads a user's choice. Raises UsageError."""
        try:
            return cls(str(value))
        except ValueError:
            names = " or ".join(repr(str(member)) for member in cls)
            raise UsageError(f"{where}: fingerprint must be {names}, not {value!r}") from None


class ContentsError(UsageError):
    """Raised when a file or folder can't be read, or has changed while it was read: the engine's files are not known.

    An engine that gets it shares with no other.
    """


class _Times(enum.Enum):
    """What times and inodes of a file prove on its file system."""

    TELL = enum.auto()
    SAY_NOTHING = enum.auto()
    UNKNOWN = enum.auto()


class _File(NamedTuple):
    """A file to name. `name`: below the folder of the call. `path`: with links followed. `place`: its place before
    that, perhaps a link. `alone`: the call is for this file, not for a folder.
    """

    name: str
    path: str
    place: str
    alone: bool = False


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


_digests: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
"""Path, and kind of digest -> the file's `stat`, and the digest of all its bytes."""


def contents_of(path: str | os.PathLike[str], how: Fingerprint | None = Fingerprint.AUTO) -> str:
    """Names the contents of a file, or of all files of a folder and below, except hidden ones, which no loader reads.

    `how`: None for a second look, which is compared with a first one of the same kind: it reads no more of a file than
    both ends, on any file system. Empty where nothing is at that path. Files of a folder that this user may not read
    count as unreadable: no loader of this user's reads them.

    Raises:
        ContentsError: some of it can't be read, or changes meanwhile.
    """
    path = os.path.expanduser(os.fspath(path))
    if not os.path.lexists(path):
        return ""
    return "files:" + digest_of(_all_named(path, how))


def model_of(path: str | os.PathLike[str], how: Fingerprint | None = Fingerprint.AUTO) -> str:
    """Names the contents of a model's folder or file. Does what `contents_of` does, but a snapshot of the hub is named
    by its commit: hosts that have fetched different parts of it share. Files that are not the hub's, or not any more,
    name it too.

    Raises:
        ContentsError: as `contents_of`.
    """
    folder = os.path.abspath(os.path.expanduser(os.fspath(path)))
    snapshot = _HUB_SNAPSHOT.search(folder)
    if not snapshot or not os.path.isdir(folder):
        return contents_of(folder, how)
    return f"hub:{snapshot[1]}@{snapshot[2]}{_own(folder, how)}"


def own_files_of(snapshot: str, how: Fingerprint | None = Fingerprint.AUTO) -> str:
    """Names the files in a snapshot's folder that are not the hub's. Empty: there are none, or there is no such folder.

    Raises:
        ContentsError: as `contents_of`.
    """
    return _own(snapshot, how) if os.path.isdir(snapshot) else ""


def hub_name(path: str) -> str:
    """Returns the hub's name of the model that has its snapshot in this folder. Empty: it is no snapshot."""
    snapshot = _HUB_SNAPSHOT.search(os.path.abspath(os.path.expanduser(path)))
    return snapshot[1].replace("--", "/") if snapshot else ""


def snapshot_of(model: str, revision: str | None = None, file: str = "config.json") -> str | None:
    """Returns the folder in which Hugging Face's cache of this host has a model of the hub. None: it has none, or
    `model` is none of the hub's. `file`: one that it must have.
    """
    if uses_modelscope():
        return None
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        return None
    try:
        found = hub.try_to_load_from_cache(model, file, revision=revision or None)
    except ValueError:  # no valid name on the hub
        return None
    return str(Path(found).parent) if isinstance(found, str) else None


def uses_modelscope() -> bool:
    """Returns whether engines of this environment take models from ModelScope, which has files that can't be named
    here.
    """
    given = (os.environ.get(name, "").lower() for name in ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"))
    return any(value not in ("", "0", "false", "no", "n", "off") for value in given)


def _own(folder: str, how: Fingerprint | None) -> str:
    own = [(name, named) for name, named in _all_named(folder, how) if named[0] != "hub"]
    return ":" + digest_of(own) if own else ""


def _all_named(path: str, how: Fingerprint | None) -> list[tuple[str, tuple[object, ...]]]:
    try:
        return sorted((file.name, _named_if_readable(file, how)) for file in _files(path))
    except OSError as error:
        raise ContentsError(f"{error.filename or path} can't be read: {error.strerror}") from error


def _files(path: str) -> Iterator[_File]:
    """Yields the files of a folder. It follows links to folders, and enters each real folder once."""
    if not os.path.isdir(path):
        yield _File(os.path.basename(path), os.path.realpath(path, strict=True), path, alone=True)
        return
    seen: set[str] = set()
    folders = [("", os.path.realpath(path, strict=True))]
    while folders:
        below, folder = folders.pop()
        if folder in seen:
            continue
        seen.add(folder)
        try:
            entries = sorted(os.listdir(folder))
        except PermissionError:
            if not below:
                raise
            yield _File(below, folder, folder)
            continue
        for entry in entries:
            name, place = os.path.join(below, entry), os.path.join(folder, entry)
            if entry.startswith(".") or entry == "__pycache__":
                continue
            if os.path.isdir(place):
                folders.append((name, os.path.realpath(place, strict=True)))
            elif os.path.splitext(entry)[1].lower() not in _HARMLESS:
                yield _File(name, place, place)


def _named_if_readable(file: _File, how: Fingerprint | None) -> tuple[object, ...]:
    try:
        return _named(file._replace(path=os.path.realpath(file.path, strict=True)), how)
    except PermissionError:
        if file.alone:
            raise
        return ("unreadable",)


def _named(file: _File, how: Fingerprint | None) -> tuple[object, ...]:
    """Names the contents of this file, without links in its path."""
    path, blob = file.path, _HUB_BLOB.search(file.path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise ContentsError(f"{path} is not a file")
        times = _times(fd, path)
        if blob and _is_the_hubs(fd, file, blob[1], how):
            named: tuple[object, ...] = ("hub", blob[1])
        elif how is Fingerprint.CONTENTS:
            named = ("all", before.st_size, _digest(fd, path, 0, before.st_size))
        elif times is _Times.TELL:
            return ("stat", *_stamp(before))
        elif times is _Times.SAY_NOTHING and how is not None:
            named = ("all", before.st_size, _digest_once(fd, path, before, "xxh3", xxhash.xxh3_128()))
        else:
            last = max(before.st_size - END_BYTES, END_BYTES)
            ends = _digest(fd, path, 0, END_BYTES), _digest(fd, path, last, END_BYTES)
            named = ("ends", before.st_size, before.st_mtime_ns, *ends)
            if times is _Times.SAY_NOTHING:
                named = (*named, before.st_ctime_ns, before.st_ino)
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ContentsError(f"{path} changes while it is read")
    return named


def _is_the_hubs(fd: int, file: _File, digest: str, how: Fingerprint | None) -> bool:
    """Returns whether a file under this digest is unchanged since it was fetched. The hub's digests are git's for small
    files, and SHA-256 for large ones.
    """
    about = os.fstat(fd)
    small = len(digest) == _GIT_DIGEST_CHARS
    if not small and how is not Fingerprint.CONTENTS:
        linked_ns = _linked_ns(file.place)
        if linked_ns is not None and about.st_mtime_ns <= linked_ns:
            return True  # it is linked to as soon as it is there
    hashed: _Hasher = hashlib.sha256()
    if small:
        hashed = hashlib.sha1(b"blob %d\0" % about.st_size, usedforsecurity=False)
    if how is Fingerprint.CONTENTS:
        return _digest(fd, file.path, 0, about.st_size, hashed) == digest
    return _digest_once(fd, file.path, about, "hub", hashed) == digest


def _linked_ns(place: str) -> int | None:
    """Returns when the link to a blob was made, the last one where there are several. None: it is no link to one."""
    made = None
    while os.path.islink(place):
        made = os.lstat(place).st_mtime_ns
        place = os.path.join(os.path.dirname(place), os.readlink(place))
    return made


def _stamp(about: os.stat_result) -> tuple[int, ...]:
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def _digest_once(fd: int, path: str, about: os.stat_result, kind: str, hashed: _Hasher) -> str:
    """Digests all bytes, once a process as long as the file is neither written to nor replaced."""
    stamp = (about.st_dev, *_stamp(about))
    known = _digests.get((path, kind))
    if known is None or known[0] != stamp:
        known = stamp, _digest(fd, path, 0, about.st_size, hashed)
        _digests[path, kind] = known
    return known[1]


def _digest(fd: int, path: str, begin: int, size_bytes: int, hashed: _Hasher | None = None) -> str:
    """Digests `size_bytes` bytes, or all that there are."""
    hashed = xxhash.xxh3_128() if hashed is None else hashed
    offset, end = begin, begin + size_bytes
    while offset < end:
        read = os.pread(fd, min(_READ_BYTES, end - offset), offset)
        if not read:
            break
        hashed.update(read)
        offset += len(read)
    return hashed.hexdigest()


def _times(fd: int, path: str) -> _Times:
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    kind = ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
    if kind in _TIMES_TELL:
        return _Times.TELL
    return _Times.SAY_NOTHING if kind in _TIMES_SAY_NOTHING else _Times.UNKNOWN
