"""The client's end of the socket: non-blocking, with descriptors both ways."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque

from kvoffloadd.client.connection import Pending
from kvoffloadd.errors import DaemonUnreachableError, FramingError
from kvoffloadd.protocol.messages import FDS_PER_FRAME_MAX
from kvoffloadd.sockets import close_fds, pack_fds, unpack_fds

_READ_BYTES = 256 << 10
_CMSG_CLOEXEC, _CTRUNC = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)  # as enums they cost microseconds
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_PER_FRAME_MAX * 4)

_ADVICE = {
    errno.ENOENT: "no such socket: start the daemon, or compare the path with its `--socket`",
    errno.ECONNREFUSED: "nobody listens there: the daemon has stopped or died, start it again",
    errno.EACCES: "permission denied: join the socket's group, or run as a user whom the daemon allows",
    errno.EPROTOTYPE: "that socket is not the daemon's: it is no stream socket",
    errno.EAGAIN: "the daemon does not accept connections: it is stuck or overloaded, see its log",
}
TRANSIENT = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN})
"""Trying again may help: the daemon is about to start, or to accept."""


def unreachable(path: str, error: OSError) -> DaemonUnreachableError:
    """What to tell, and what to do."""
    advice = _ADVICE.get(error.errno or 0, os.strerror(error.errno or 0))
    return DaemonUnreachableError(f"{path}: {advice}")


class Wire:
    """A connected Unix socket. Every method returns at once."""

    def __init__(self, path: str) -> None:
        """Connects. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._buffer = bytearray(_READ_BYTES)
        try:
            self._socket.connect(path)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """The descriptor to poll; -1 once closed."""
        return self._socket.fileno()

    def send(self, outbox: deque[Pending]) -> bool:
        """Send what the kernel takes; True if that was all. Raises ConnectionError: the daemon closed it."""
        while outbox:
            request = outbox[0]
            was_sent = request.sent
            request.sent = True  # before the call: a signal's handler may raise at its end
            try:
                if request.fds:
                    sent = self._socket.sendmsg([request.data], pack_fds(request.fds))
                else:
                    sent = self._socket.send(request.data)
            except OSError as error:
                request.sent = was_sent
                if isinstance(error, BlockingIOError):
                    return False
                raise
            request.fds = ()
            if sent == len(request.data):
                outbox.popleft()
            else:
                request.data = memoryview(request.data)[sent:]
        return True

    def read(self) -> tuple[memoryview, list[int]] | None:
        """What has come, valid until the next call; no bytes: the daemon closed it; None: nothing now.

        Raises FramingError where descriptors came that did not fit.
        """
        try:
            count, ancillary, flags, _address = self._socket.recvmsg_into(
                [self._buffer], _ANCILLARY_BYTES, _CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionError:
            return memoryview(b""), []
        fds = unpack_fds(ancillary) if ancillary else []
        if flags & _CTRUNC:
            close_fds(fds)
            raise FramingError("more descriptors came than a frame may carry")
        return memoryview(self._buffer)[:count], fds

    def stop_sending(self) -> None:
        """Tell the daemon that nothing more will come; what it says can still be read."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # the daemon closed it first
                raise

    def close(self) -> None:
        """Close the socket. A second time does nothing."""
        self._socket.close()
