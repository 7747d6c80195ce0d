"""Fault injection in the disk's system calls, for tests and for a running daemon."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvoffloadd.errors import ConfigError
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.units import parse_seconds

_OPERATIONS = (
    "open", "close", "make", "lock", "allocate", "write", "read", "sync", "unlink", "rename", "names", "stat"
)  # fmt: skip
_DELAY = "_delay_s"


class FaultyFiles(Files):
    """Files with the faults that a switch file names, one a line; no file or no lines: none.

    `write=EIO`: every write fails with this error; `read_delay_s=0.5`: every read takes this much longer. A close that
    fails still releases the descriptor. The file is read before each call, so that faults come and go while the daemon
    runs; replace it in one step.
    """

    def __init__(self, switch: Path) -> None:
        self.planted = 0
        self._switch = switch
        self._known: tuple[tuple[int, int, int], dict[str, int], dict[str, float]] = ((0, 0, 0), {}, {})

    def open_directory(self, path: str | Path) -> int:
        self._plant("open")
        return super().open_directory(path)

    def open_again(self, path: Path) -> int:
        self._plant("open")
        return super().open_again(path)

    def make_directory(self, path: str | Path) -> None:
        self._plant("make")
        super().make_directory(path)

    def lock(self, fd: int) -> None:
        self._plant("lock")
        super().lock(fd)

    def open(self, dir_fd: int, name: str, *, create: bool, direct: bool, write: bool) -> int:
        self._plant("open")
        return super().open(dir_fd, name, create=create, direct=direct, write=write)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._plant("allocate")
        super().allocate(fd, size_bytes)

    def write(self, fd: int, offset: int, buffers: Sequence[Any]) -> None:
        self._plant("write")
        super().write(fd, offset, buffers)

    def read(self, fd: int, offset: int, buffers: Sequence[Any]) -> int:
        self._plant("read")
        return super().read(fd, offset, buffers)

    def sync(self, fd: int) -> None:
        self._plant("sync")
        super().sync(fd)

    def sync_directory(self, fd: int) -> None:
        self._plant("sync")
        super().sync_directory(fd)

    def unlink(self, dir_fd: int, name: str) -> None:
        self._plant("unlink")
        super().unlink(dir_fd, name)

    def rename(self, dir_fd: int, old: str, new: str) -> None:
        self._plant("rename")
        super().rename(dir_fd, old, new)

    def names(self, dir_fd: int) -> list[str]:
        self._plant("names")
        return super().names(dir_fd)

    def stat(self, name: str | Path, dir_fd: int | None = None) -> os.stat_result:
        self._plant("stat")
        return super().stat(name, dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        self._plant("stat")
        return super().fstat(fd)

    def space(self, fd: int) -> os.statvfs_result:
        self._plant("stat")
        return super().space(fd)

    def close(self, fd: int) -> None:
        try:
            self._plant("close")
        finally:
            super().close(fd)

    def _plant(self, operation: str) -> None:
        began = time.monotonic()
        errors, delays = self._faults()
        while (left := began + delays.get(operation, 0.0) - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
            errors, delays = self._faults()  # the faults may change meanwhile
        if operation in errors:
            self.planted += 1
            number = errors[operation]
            raise OSError(number, f"{os.strerror(number)} (planted)")

    def _faults(self) -> tuple[dict[str, int], dict[str, float]]:
        try:
            found = os.stat(self._switch)
        except FileNotFoundError:
            return {}, {}
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != self._known[0]:
            # One assignment of a whole tuple: threads of both lanes run this.
            self._known = (stamp, *parse_disk_faults(self._switch.read_text(encoding="utf-8")))
        return self._known[1:]


def parse_disk_faults(text: str) -> tuple[dict[str, int], dict[str, float]]:
    """Returns error numbers and delays in seconds, by operation, from lines like "write=EIO" and "read_delay_s=0.5".

    Raises:
        ConfigError: a line is neither.
    """
    errors: dict[str, int] = {}
    delays: dict[str, float] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, _, value = (part.strip() for part in line.partition("="))
        operation = name.removesuffix(_DELAY)
        if operation not in _OPERATIONS:
            raise ConfigError(f'disk faults: unknown "{name}"; known are {", ".join(_OPERATIONS)}')
        if name.endswith(_DELAY):
            try:
                delays[operation] = parse_seconds(value)
            except ValueError as error:
                raise ConfigError(f"disk faults: {line}: {error}") from None
        else:
            number = getattr(errno, value, None)
            if not isinstance(number, int):
                raise ConfigError(f'disk faults: {line}: must be the name of an error, like "EIO"')
            errors[operation] = number
    return errors, delays
