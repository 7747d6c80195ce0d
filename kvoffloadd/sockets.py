"""Unix sockets whose peers may be anybody: what they may send, and whether they have sent something."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import termios

_SO_PASSRIGHTS = 83  # Linux 6.16; not in Python's socket module


def is_empty(sock: socket.socket) -> bool:
    """Whether nothing is queued that was sent to this socket, and nothing can be any more: descriptors travel with
    bytes.
    """
    size = array.array("i", [0])
    try:
        sock.shutdown(socket.SHUT_RDWR)
        fcntl.ioctl(sock, termios.FIONREAD, size)
    except OSError:
        return False
    return size[0] == 0


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
