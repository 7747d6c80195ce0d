"""A descriptor whose last close waits for as long as a test likes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
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
        """Give up this process's own reference. If it turns out to be the last, a thread waits."""
        if (fd := self.ours.detach()) >= 0:
            threading.Thread(target=os.close, args=(fd,), daemon=True).start()

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
