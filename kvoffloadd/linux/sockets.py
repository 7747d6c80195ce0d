"""Unix sockets: binding, passing descriptors, and forbidding or counting descriptors that peers send."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterable
from pathlib import Path

from kvoffloadd.errors import ConfigError

Ancillary = list[tuple[int, int, bytes]]
"""The ancillary data that `recvmsg` returns with the bytes."""

PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: sun_path has 108 bytes, the last one is NUL."""


_UCRED = struct.Struct("iII")
_SO_PASSRIGHTS = 83  # Linux 6.16; not in Python's socket module
_LOOK = bytearray(256 << 10)
"""The length to which a queue is searched: the most that an unprivileged peer can queue under the system's defaults."""


def bind_path(key: str, path: Path, mode: int) -> socket.socket:
    """Returns a Unix socket bound to `path`, replacing one that a dead process has left. `key`: the config's, for
    errors.

    Raises ConfigError if a live process listens there, or another kind of file is there; OSError if it can't be bound.
    """
    _remove_stale(key, path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        bound.bind(str(path))
        path.chmod(mode)  # before it listens: no peer can have connected by then
    except BaseException:
        bound.close()
        raise
    return bound


def _remove_stale(key: str, path: Path) -> None:
    try:
        if not path.is_socket():
            if path.exists():
                raise ConfigError(f"{key}: {path} exists and is not a socket")
            return
    except OSError as error:
        raise ConfigError(f"{key}: {path} can't be inspected: {error.strerror}") from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass  # its backlog is full: alive
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                path.unlink(missing_ok=True)
                return
            raise ConfigError(f"{key}: {path} can't be tested: {error.strerror}") from None
    raise ConfigError(f"{key}: another process listens at {path}")


def is_listening(path: Path) -> bool:
    """Returns whether a process accepts connections there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
    return True


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Returns pid, uid and gid of the process that connected, or that called listen(2). If it has passed the socket on,
    this is still its uid.
    """
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def pack_fds(fds: Iterable[int]) -> list[tuple[int, int, array.array[int]]]:
    """Packs descriptors for `sendmsg`, at least one."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


def unpack_fds(ancillary: Ancillary) -> list[int]:
    """Returns the descriptors that `recvmsg` has made, which the caller must close."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_fds(fds: Iterable[int]) -> None:
    """Closes descriptors that are not needed."""
    for fd in fds:
        os.close(fd)


def carries_nothing(sock: socket.socket) -> bool:
    """Returns whether no descriptors that were sent to this socket are queued, and none can be any more: they travel
    with bytes. False if that is unknown. Removes nothing from the queue.
    """
    size = array.array("i", [0])
    try:
        sock.shutdown(socket.SHUT_RDWR)
        fcntl.ioctl(sock, termios.FIONREAD, size)
        if size[0] == 0 or _never_passed(sock):
            return True
        # Without room for descriptors: those that are found show in the flags, and stay queued.
        seen, _, flags, _ = sock.recvmsg_into([_LOOK], 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return seen == size[0] and not flags & socket.MSG_CTRUNC


def _never_passed(sock: socket.socket) -> bool:
    """Returns whether peers were never allowed to send descriptors: once allowed, a peer may have queued some."""
    try:
        return not sock.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS)
    except OSError:
        return False


def pass_descriptors(sock: socket.socket, allowed: bool) -> None:
    """Sets whether peers may send descriptors over this socket, or over those that it will accept. Kernels before 6.16
    have no such option: there they may.
    """
    _set(sock, _SO_PASSRIGHTS, int(allowed))


def keep_inline(sock: socket.socket) -> None:
    """Makes out-of-band bytes ordinary ones: otherwise the kernel would drop them, and what they carry, within
    a read.
    """
    _set(sock, socket.SO_OOBINLINE, 1)


def _set(sock: socket.socket, option: int, value: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, option, value)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP):
            raise
