"""Writes frames to one peer: at once as far as its socket takes them; the rest waits in the outbox."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kvoffloadd.linux.sockets import pack_fds
from kvoffloadd.server.peers.outbox import Outbox

FLUSH_S = 1.0
"""The time that a peer has to read its queued frames when its session ends."""


class FrameWriter:
    """Writes to a socket that the caller closes, after `close`. Calls `wrote()` when the queue has changed, and
    `failed(error)` when the peer is gone; the queue is dropped then.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        outbox: Outbox,
        wrote: Callable[[], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._outbox = outbox
        self._wrote = wrote
        self._failed = failed
        self._watching = False

    def send(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Writes a frame, and queues the part that the socket does not take. `fds` stay the caller's."""
        try:
            written = 0 if self._outbox.frames else self._write(frame, fds)
        except OSError as error:
            self._fail(error)
            return
        if written < len(frame):
            self._outbox.put(frame, fds, written)
            self.flush()

    def flush(self) -> None:
        """Writes as much of the queue as the socket takes now."""
        while self._outbox.frames and self._sock.fileno() >= 0:
            try:
                written = self._write(*self._outbox.frames[0])
            except OSError as error:
                self._fail(error)
                break
            if not written:
                break
            self._outbox.sent(written)
        self._watch(bool(self._outbox.frames))
        self._wrote()

    async def drain(self) -> None:
        """Gives the peer a moment to read queued frames (an error, the last completions)."""
        until = self._loop.time() + FLUSH_S
        while self._outbox.frames and self._loop.time() < until:
            before = self._outbox.queued_bytes
            self.flush()
            if self._outbox.queued_bytes == before:
                await asyncio.sleep(0.01)

    def close(self) -> None:
        """Drops the queue, and writes no more."""
        self._watch(False)
        while self._outbox.frames:
            self._outbox.sent(len(self._outbox.frames[0][0]))

    def _write(self, frame: bytes | memoryview, fds: tuple[int, ...]) -> int:
        """Writes, and returns the number of bytes that the socket took; `fds` go with the first."""
        try:
            return self._sock.sendmsg([frame], pack_fds(fds)) if fds else self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            return 0

    def _fail(self, error: OSError) -> None:
        self.close()
        self._failed(error)

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watching and self._sock.fileno() >= 0:
            self._loop.add_writer(self._sock.fileno(), self.flush)
        elif not wanted and self._watching:
            self._loop.remove_writer(self._sock.fileno())
        self._watching = wanted
