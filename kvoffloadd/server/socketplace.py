"""The path of the daemon's socket, and the lock file next to it that records the owner.

A cleaner or a second daemon may remove or replace them while the daemon runs. The path is therefore checked at
intervals, off the loop, since a path may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kvoffloadd import socketpath
from kvoffloadd.errors import ConfigError, TryAgainError
from kvoffloadd.linux.sockets import bind_path, is_listening
from kvoffloadd.scheduling.lanes import Lane

log = logging.getLogger(__name__)

BACKLOG = (1 << 31) - 1
"""The backlog is as long as the system allows (net.core.somaxconn): all users share it, and it refuses connections when
it is full.
"""

FOLDER_MODE = 0o750
LOOK_S = 5.0
HOLDER_S = 5.0
"""The time that a start waits for the holder of the lock, which may be about to end."""

_HOLDER_LOOK_S = 0.1
_PF_EXITING = 0x4  # linux/sched.h, in field 9 of proc(5)'s stat

Identity = tuple[int, int]
"""Device and inode."""


class SocketPlace:
    """Makes the socket at `path` with `mode`, or adopts `given`, the service manager's socket, which listens there.

    Call `claim` first, then `listen`. Every method blocks; `look` and `remove` may be called from any thread, one at a
    time.
    """

    def __init__(self, path: Path, mode: int, given: socket.socket | None = None) -> None:
        self._path = path
        self._lock_path = Path(f"{path}.lock")
        self._mode = mode
        self._given = given
        self._lock = -1
        self._ours: Identity | None = None

    def claim(self) -> None:
        """Takes the lock. A process that holds it gets some seconds to end.

        Raises:
            ConfigError: a live daemon has it, or the place can't be used.
            TryAgainError: the holder is ending, or can't be reached at the path either.
        """
        self._make_folder()
        until = time.monotonic() + HOLDER_S
        waits = False
        while not self._take_lock():
            if time.monotonic() >= until:
                raise self._why_taken()
            if not waits:
                log.info("another process holds %s: waiting for its end for %g s", self._lock_path, HOLDER_S)
            waits = True
            time.sleep(_HOLDER_LOOK_S)

    def listen(self) -> socket.socket:
        """Returns the listening socket, which the caller owns. Raises ConfigError if the path can't be used, or if it
        belongs to another daemon: one that starts has bound its socket, and does not listen yet.
        """
        if self._given is None:
            self._keep_lock()
        try:
            if self._given is not None:
                listener = self._given
                _check_given(listener, self._path)
            else:
                listener = bind_path("server.socket", self._path, self._mode)
            listener.listen(BACKLOG)
            self._ours = _identity(self._path)
        except OSError as error:
            raise ConfigError(f"server.socket: {self._path} can't be used: {error.strerror}") from None
        return listener

    def look(self) -> socket.socket | None:
        """Returns a new listening socket if the one at the path is gone; leaves other processes' files in place.

        Raises ConfigError if no process can connect to the daemon.
        """
        there = _identity(self._path)
        if self._given is None:
            self._keep_lock()
        if there is not None and there == self._ours:
            return None
        if self._given is not None:
            raise ConfigError(f"systemd's socket is no longer at {self._path}: restart its socket unit")
        self._make_folder()
        return self.listen()

    def remove(self) -> None:
        """Removes the socket from the path, if it is this daemon's."""
        if self._given is None and self._ours is not None and _identity(self._path) == self._ours:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def close(self) -> None:
        """Releases the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make_folder(self) -> None:
        """Makes the folder of the socket, with the same mode under any umask."""
        folder = self._path.parent
        if folder in socketpath.private_folders(os.environ, os.geteuid()):
            _make_private(folder)
            return
        try:
            for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                missing.mkdir(exist_ok=True)
                missing.chmod(FOLDER_MODE)
        except OSError as error:
            raise ConfigError(f"server.socket: {folder} can't be used: {error.strerror}") from None

    def _take_lock(self) -> bool:
        """Takes the lock. Returns False if another process has it."""
        try:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"server.socket: {self._path.parent} can't be used: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(lock)
            if _identity(self._lock_path) != (found.st_dev, found.st_ino):
                raise BlockingIOError  # the file was removed after the open
            os.fchmod(lock, 0o600)  # the same mode under any umask
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % os.getpid(), 0)  # for a process that finds the lock taken
        except BlockingIOError:
            os.close(lock)
            return False
        except OSError as error:
            os.close(lock)
            raise ConfigError(f"server.socket: {self._lock_path} can't be used: {error.strerror}") from None
        self.close()
        self._lock = lock
        return True

    def _keep_lock(self) -> None:
        """Takes the lock again if its file is gone. Raises ConfigError if another daemon was faster."""
        held = os.fstat(self._lock)
        if _identity(self._lock_path) == (held.st_dev, held.st_ino):
            return
        self._make_folder()
        if not self._take_lock():
            raise ConfigError(f"{self._lock_path} was removed, and another daemon has taken {self._path} since")

    def _why_taken(self) -> ConfigError | TryAgainError:
        try:
            text = self._lock_path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            text = ""
        pid = int(text) if text.isdigit() else 0
        holder = f"process {pid}" if pid else "a process"
        if pid and is_ending(pid):
            return TryAgainError(f"server.socket: {holder} holds {self._lock_path}, and is ending but has not ended")
        if not is_listening(self._path):
            return TryAgainError(
                f"server.socket: {holder} holds {self._lock_path}, and no daemon listens at {self._path}: it starts, "
                f"ends, or makes its socket again within {LOOK_S:g} s"
            )
        return ConfigError(f"server.socket: another daemon uses {self._path} ({holder} holds {self._lock_path})")


def is_ending(pid: int, proc: Path = Path("/proc")) -> bool:
    """Returns whether the kernel has begun to end this process, or will do so when it leaves a system call."""
    try:
        status = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False  # the process has ended, or is in another pid namespace
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s+([0-9a-f]+)$", status, re.MULTILINE)
    is_killed = any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)
    dumps = re.search(r"^CoreDumping:\s+1$", status, re.MULTILINE) is not None
    return is_killed or dumps or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


async def keep_socket(place: SocketPlace, lane: Lane, replace: Callable[[socket.socket], None]) -> None:
    """Checks the place at intervals in the lane, until cancelled, and passes a new socket to `replace`."""
    last_error = ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            listener = await lane.perform(place.look)
        except ConfigError as error:
            if last_error != str(error):
                log.error("new connections are not possible: %s", error)
            last_error = str(error)
            continue
        last_error = ""
        if listener is not None:
            replace(listener)
            log.warning("the socket was removed from its path, and is made again")


def _make_private(folder: Path) -> None:
    """Makes the folder for this user alone. Raises ConfigError if one that exists is not."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
            folder.chmod(0o700)  # nobody can have replaced it: above it is /tmp, which is sticky, or a private place
        socketpath.check_private(folder, os.geteuid())
    except ValueError as error:
        raise ConfigError(f"server.socket: {error}") from None
    except OSError as error:
        raise ConfigError(f"server.socket: {folder} can't be used: {error.strerror}") from None


def _check_given(given: socket.socket, path: Path) -> None:
    """Raises ConfigError if the given socket is not at the path that clients use."""
    place = str(given.getsockname())
    if os.path.realpath(place) != os.path.realpath(path):
        raise ConfigError(f"server.socket: is {path}, but systemd listens at {place}: change the socket unit to match")


def _identity(path: Path) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
