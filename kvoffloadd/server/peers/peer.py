"""The process at the other end of a Unix socket: its credentials from the kernel, and a pidfd that becomes readable at
its end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass, replace

from kvoffloadd.linux.sockets import peer_credentials

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python 3.11's socket module


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end. The holder closes the pidfd."""

    pid: int
    uid: int
    gid: int
    pidfd: int  # -1: the process can't be watched (it is gone already, or in a foreign pid namespace)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


def identify(sock: socket.socket) -> Peer:
    """Returns the process that connected, without a pidfd. If it has passed the socket on, this is still its uid."""
    return Peer(*peer_credentials(sock), -1)


def watch(sock: socket.socket, peer: Peer) -> Peer:
    """Returns the same peer with an open pidfd."""
    return replace(peer, pidfd=_pidfd(sock, peer.pid))


def _pidfd(sock: socket.socket, pid: int) -> int:
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError, ValueError):
        return os.pidfd_open(pid)  # racy in theory (a reused pid): the socket's end is watched as well
    return -1
