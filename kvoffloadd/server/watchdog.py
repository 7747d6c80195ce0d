"""Self-tests for the service manager's watchdog, which gets a beat only while a client can connect and the lanes finish
work. A blocked loop sends no beat.
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
"""The number of rounds within the service manager's timeout."""

FIRST = -1
"""The urgency of the tests: before the daemon's other work in a lane, and next among users. A test asks whether the
lane moves, not how much work it has.
"""

CONNECT_RETRY_S = 0.05
_READ_BYTES = 64 << 10


class Watchdog:
    """Calls `beat` once in each round in which a ping through the socket at `path` is answered, and the lanes that move
    bytes of memory accept and finish work. `patience_s`: the time without a beat after which the service manager kills
    the daemon.

    Lanes of disks are tested too, but their failure causes only a warning: the daemon can serve without a disk that
    hangs, and can't be killed while one of its threads is inside the kernel.
    """

    def __init__(self, context: Context, path: Path, lane: Lane, patience_s: float, beat: Callable[[], object]) -> None:
        """Makes a watchdog that looks the path up in `lane`, since that may take for ever."""
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
        """Returns whether all tests have passed, when they have ended, which may be never."""
        context = self._context
        probes: dict[asyncio.Task[None], str] = {context.loop.create_task(self._ping()): "ping"}
        for lane in (context.hash_lane, *(lane for device in context.devices for lane in device.watched_lanes())):
            probes[context.loop.create_task(self._pass(lane))] = f"lane {lane.name}"
        try:
            _, late = await asyncio.wait(probes, timeout=self._round_s)
            if late:
                names = ", ".join(sorted(probes[task] for task in late))
                log.warning("watchdog: no answer within %.1f s from: %s", self._round_s, names)
                await asyncio.wait(late)
            failures = [f"{name}: {task.exception()}" for task, name in probes.items() if task.exception() is not None]
            if failures:
                log.warning("watchdog: %s", "; ".join(failures))
            return not failures
        finally:
            for task in probes:
                task.cancel()

    async def _pass(self, lane: Lane) -> None:
        """Waits for its turn in the lane. Raises RuntimeError if a thread does not return, though others do."""
        await lane.perform(_nothing, urgent=FIRST)
        seconds = lane.oldest_running_s(self._context.loop.time())
        if seconds > self._patience_s:
            raise RuntimeError(f"has been busy with one piece of work for {seconds:.0f} s")

    def _look_at_disks(self) -> None:
        """Reports the lanes of disks that have not answered since the last round; tests the others again."""
        disk = self._context.disk
        for root in disk.roots if disk is not None else ():
            for lane in (root.read_lane, root.write_lane):
                name = f"{root.path}, lane {lane.name}"
                task = self._disks.get(name)
                if task is not None and not task.done():
                    log.warning("disk %s: does not answer; the longest I/O takes %.0f s", name, self._oldest_s(lane))
                else:
                    # Closed lanes need no report: they close with their root, or with the daemon.
                    self._disks[name] = self._context.spawn(_ask(lane), errors_are_handled=True)

    def _oldest_s(self, lane: Lane) -> float:
        return lane.oldest_running_s(self._context.loop.time())

    # --- as a client ---

    async def _ping(self) -> None:
        """Connects, greets, pings, sends bye. An error reply is an answer too: a daemon that drains is alive.

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
                # Connected peers are served; killing the daemon would end that.
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
        """Connects. Returns False if the backlog has no room but others get in, which is an equivalent answer. Raises
        TimeoutError if the path hangs.
        """
        before = self._context.accepts
        while True:
            try:
                async with asyncio.timeout(self._round_s / 2):
                    await self._lane.perform(partial(sock.connect, str(self._path)))
            except BlockingIOError:  # no event announces room in the backlog
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
    """Occupies a lane for a moment."""


async def _ask(lane: Lane) -> None:
    await lane.perform(_nothing, urgent=FIRST)
