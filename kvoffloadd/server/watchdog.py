"""Self-tests for the service manager's watchdog: it gets a beat only while a client can connect and the lanes finish
work. A loop that is blocked sends no beat.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import Connection
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.server.context import Context

log = logging.getLogger(__name__)

ROUNDS = 4
"""In the time after which the service manager gives us up."""

FIRST = -1
"""Before the daemon's other work in a lane, and next among users: what is asked is whether the lane moves, not how much
it has to do.
"""

CONNECT_RETRY_S = 0.05
_READ_BYTES = 64 << 10


class Watchdog:
    """Calls `beat` once in each round in which a ping through the socket at `path` is answered, and the lanes that move
    bytes of memory take and finish work. `patience_s`: without a beat for so long, the service manager kills us.

    Lanes of disks are asked too, but what they do only makes a warning: the daemon serves without a disk that hangs,
    and can't be killed while a thread of it is inside the kernel.
    """

    def __init__(self, context: Context, path: Path, lane: Lane, patience_s: float, beat: Callable[[], object]) -> None:
        """`lane`: where the path is looked up, which may take for ever."""
        self._context = context
        self._path = path
        self._lane = lane
        self._patience_s = patience_s
        self._round_s = patience_s / ROUNDS
        self._beat = beat
        self._disks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        loop = self._context.loop
        while True:
            ends = loop.time() + self._round_s
            self._look_at_disks()
            if await self._works():
                self._beat()
            await asyncio.sleep(ends - loop.time())

    async def _works(self) -> bool:
        """Whether all have answered; returns when they have, which may be never."""
        context = self._context
        asked: dict[asyncio.Task[None], str] = {context.loop.create_task(self._ping()): "ping"}
        for lane in (context.hash_lane, *(lane for device in context.devices for lane in device.watched_lanes())):
            asked[context.loop.create_task(self._pass(lane))] = f"lane {lane.name}"
        try:
            _, late = await asyncio.wait(asked, timeout=self._round_s)
            if late:
                names = ", ".join(sorted(asked[task] for task in late))
                log.warning("watchdog: no answer within %.1f s from: %s", self._round_s, names)
                await asyncio.wait(late)
            failures = [f"{name}: {task.exception()}" for task, name in asked.items() if task.exception() is not None]
            if failures:
                log.warning("watchdog: %s", "; ".join(failures))
            return not failures
        finally:
            for task in asked:
                task.cancel()

    async def _pass(self, lane: Lane) -> None:
        """Waits for its turn in the lane. Raises RuntimeError if a thread does not come back, though others do."""
        await lane.perform(_nothing, urgent=FIRST)
        seconds = lane.oldest_running_s(self._context.loop.time())
        if seconds > self._patience_s:
            raise RuntimeError(f"has been busy with one piece of work for {seconds:.0f} s")

    def _look_at_disks(self) -> None:
        """Says which lanes of disks have not answered since the last round; asks the others again."""
        disk = self._context.disk
        for root in disk.roots if disk is not None else ():
            for lane in (root.read_lane, root.write_lane):
                name = f"{root.path}, lane {lane.name}"
                task = self._disks.get(name)
                if task is not None and not task.done():
                    log.warning("disk %s: does not answer; the longest I/O takes %.0f s", name, self._oldest_s(lane))
                else:
                    # Closed lanes are no event: they go with their root, or with the daemon.
                    self._disks[name] = self._context.spawn(_ask(lane), errors_are_handled=True)

    def _oldest_s(self, lane: Lane) -> float:
        return lane.oldest_running_s(self._context.loop.time())

    # --- as a client ---

    async def _ping(self) -> None:
        """Connect, greet, ping, say goodbye. An error reply is an answer too: a daemon that drains is alive.

        Raises:
            OSError: the daemon hangs up.
        """
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # As below: connected peers are served.
            log.warning("no descriptors are left, new connections fail: %s", error.strerror)
            return
        with sock:
            try:
                if not await self._connect(sock):
                    return
            except (FileNotFoundError, ConnectionRefusedError, TimeoutError) as error:
                # Connected peers are served; to kill the daemon would end that.
                why = error.strerror or "its directory does not answer"
                log.warning("watchdog: new connections are not possible: %s: %s", self._path, why)
                return
            protocol = Connection(daemon=False)
            hello = m.Hello(seq=1, version=max(m.VERSIONS), role="observer", instance=os.urandom(16))
            for request in (hello, m.Ping(seq=2), m.Bye(seq=3)):
                await self._context.loop.sock_sendall(sock, protocol.send(request))
                if isinstance(await self._answer(sock, protocol), m.Error):
                    return

    async def _connect(self, sock: socket.socket) -> bool:
        """False: there is no room in the backlog, but others get in, which is as good an answer. Raises TimeoutError if
        the path hangs.
        """
        before = self._context.accepts
        while True:
            try:
                async with asyncio.timeout(self._round_s / 2):
                    await self._lane.perform(partial(sock.connect, str(self._path)))
            except BlockingIOError:  # there is no event for when it no longer is full
                await asyncio.sleep(CONNECT_RETRY_S)
                if self._context.accepts > before:
                    return False
            else:
                return True

    async def _answer(self, sock: socket.socket, protocol: Connection) -> m.Message:
        readable = asyncio.Event()
        self._context.loop.add_reader(sock, readable.set)
        try:
            while (found := protocol.next_message()) is None:
                await readable.wait()
                readable.clear()
                try:
                    data, fds, _, _ = socket.recv_fds(sock, _READ_BYTES, m.FDS_PER_FRAME_MAX)
                except BlockingIOError:
                    continue
                if not data:
                    raise ConnectionResetError("the daemon closed the connection of its own ping")
                protocol.receive_data(data, fds)
        finally:
            self._context.loop.remove_reader(sock)
        message, fds = found
        for fd in fds:
            os.close(fd)
        return message


def _nothing() -> None:
    """What a lane is given to do."""


async def _ask(lane: Lane) -> None:
    await lane.perform(_nothing, urgent=FIRST)
