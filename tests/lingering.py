"""A descriptor whose last close waits for as long as a test likes."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

LINGER_S = 3600


@dataclass
class Lingering:
    """`fd`: a connection whose other end does not read what was sent. Its close returns once `release` was called."""

    ours: socket.socket
    theirs: socket.socket

    @property
    def fd(self) -> int:
        return self.ours.fileno()

    def drop(self) -> None:
        """Give up this process's own reference, of which it must not have the last."""
        self.ours.close()

    def release(self) -> None:
        self.theirs.close()


@contextlib.contextmanager
def lingering() -> Iterator[Lingering]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    made = Lingering(ours, theirs)
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    try:
        yield made
    finally:
        made.release()
        made.drop()
