"""Unix sockets: descriptors that travel with bytes; what peers may send, and whether they have sent something."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Ancillary = list[tuple[int, int, bytes]]
"""What `recvmsg` gives beside the bytes."""

_SO_PASSRIGHTS = 83  # Linux 6.16; not in Python's socket module
_LOOK = bytearray(256 << 10)
"""How far a queue is looked through: what an unprivileged peer can queue, where the system's defaults hold."""


def pack_fds(fds: Iterable[int]) -> list[tuple[int, int, array.array[int]]]:
    """Descriptors as `sendmsg` takes them, at least one."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


def unpack_fds(ancillary: Ancillary) -> list[int]:
    """The descriptors that `recvmsg` has made, which are the caller's to close."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def carries_nothing(sock: socket.socket) -> bool:
    """Whether no descriptors that were sent to this socket are queued, and none can be any more: they travel with
    bytes. False if that can't be told. Takes nothing out of the queue.
    """
    size = array.array("i", [0])
    try:
        sock.shutdown(socket.SHUT_RDWR)
        fcntl.ioctl(sock, termios.FIONREAD, size)
        if size[0] == 0 or _never_passed(sock):
            return True
        # Without room for descriptors: those that are met show in the flags, and stay where they are.
        seen, _, flags, _ = sock.recvmsg_into([_LOOK], 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return seen == size[0] and not flags & socket.MSG_CTRUNC


def _never_passed(sock: socket.socket) -> bool:
    """Whether peers were never allowed to send descriptors: who is once allowed stays so."""
    try:
        return not sock.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS)
    except OSError:
        return False


def pass_descriptors(sock: socket.socket, allowed: bool) -> None:
    """Whether peers may send descriptors over this socket, or over those that it will accept. Kernels before 6.16 don't
    ask: there they may.
    """
    _set(sock, _SO_PASSRIGHTS, int(allowed))


def keep_inline(sock: socket.socket) -> None:
    """Out-of-band bytes are bytes as all others: the kernel would drop them, and what they carry, within a read."""
    _set(sock, socket.SO_OOBINLINE, 1)


def _set(sock: socket.socket, option: int, value: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, option, value)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP):
            raise
