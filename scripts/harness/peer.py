"""A session without the client library: any bytes out, messages in. For scripts that misbehave on purpose."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Self

import msgpack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PREFIX = struct.Struct("<I")
FDS_MAX = 64
READ_BYTES = 1 << 16
PUSHES = frozenset({"completed", "events", "gap"})

Fields = dict[str, Any]


class SilenceError(Exception):
    """The daemon did not say in time what it must."""


class RawPeer:
    """One connection. `pushes`: what came and was no reply. A context manager; not for threads."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self.pushes: list[Fields] = []
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def fileno(self) -> int:
        """Of the socket."""
        return self.socket.fileno()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """All of it, unless the daemon has hung up; what it said before can still be read. `fds` stay the caller's.

        To a daemon that has not let this peer in yet the kernel may not take them (Linux 6.16): they are left out.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                sent = self.socket.sendmsg([data], rights)
            except PermissionError:
                sent = 0
            if sent < len(data):
                self.socket.sendall(data[sent:])

    def tell(self, fields: Fields, fds: Sequence[int] = ()) -> None:
        """A frame."""
        body = msgpack.packb(fields, use_bin_type=True)
        self.send(PREFIX.pack(len(body)) + body, fds)

    def ask(self, fields: Fields, deadline_s: float, fds: Sequence[int] = ()) -> Fields | None:
        """A frame and its reply; only for a peer that has asked nothing else."""
        self.tell(fields, fds)
        return self.reply(deadline_s)

    def reply(self, deadline_s: float) -> Fields | None:
        """The next message that is no push; None: the daemon has closed the session. Raises SilenceError."""
        until = time.monotonic() + deadline_s
        while True:
            message = self.message(until)
            if message is None or message["type"] not in PUSHES:
                return message
            self.pushes.append(message)

    def message(self, until: float) -> Fields | None:
        """The next message of any kind; None: the daemon has closed the session. Raises SilenceError."""
        while (message := self.buffered()) is None:
            if not self.read(until):
                return None
        return message

    def buffered(self) -> Fields | None:
        """The next message, if it has been read already."""
        if len(self._buffer) < PREFIX.size:
            return None
        (size,) = PREFIX.unpack_from(self._buffer)
        end = PREFIX.size + size
        if len(self._buffer) < end:
            return None
        found: Fields = msgpack.unpackb(self._buffer[PREFIX.size : end])
        del self._buffer[:end]
        return found

    def read(self, until: float, most: int = READ_BYTES) -> bool:
        """Take some bytes from the socket; False: there will be none. Raises SilenceError."""
        self.socket.settimeout(max(until - time.monotonic(), 0.001))
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, most, FDS_MAX)
        except TimeoutError:
            raise SilenceError("the daemon says nothing") from None
        except ConnectionResetError:
            return False
        for fd in fds:
            os.close(fd)
        self._buffer += data
        return bool(data)
