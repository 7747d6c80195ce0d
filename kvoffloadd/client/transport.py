"""A client's connections and their I/O: non-blocking sockets with descriptors both ways, and the daemon's pidfd."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvoffloadd.client.calls import Call
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.dialing import Dialer
from kvoffloadd.client.events import EventQueue
from kvoffloadd.errors import FramingError, PeerError, StateError, UsageError
from kvoffloadd.linux.sockets import close_fds, pack_fds, unpack_fds
from kvoffloadd.protocol.messages import FDS_PER_FRAME_MAX

_READ_BYTES = 256 << 10
_CMSG_CLOEXEC, _CTRUNC = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)  # as enums they cost microseconds
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_PER_FRAME_MAX * 4)


class Poller(Protocol):
    """Calls back when a descriptor is ready. Level-triggered: `ready` is called as long as it is."""

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Calls `ready` when `fd` is readable."""

    def watch_writable(self, fd: int, ready: Callable[[], None]) -> None:
        """Calls `ready` also when `fd`, which is watched, is writable."""

    def unwatch_writable(self, fd: int) -> None:
        """Undoes `watch_writable`; does nothing if it was not called."""

    def unwatch(self, fd: int) -> None:
        """Stops watching `fd`, which is still open; does nothing if it is not watched."""


class Transport:
    """Moves bytes between the sockets and the connections' states. Every method returns at once.

    `current` is the present connection; `former` are ended ones that still have jobs with blocks not proven free.
    `dialer` opens their sockets.
    """

    def __init__(self, dialer: Dialer, events: EventQueue, poller: Poller) -> None:
        self.current: ConnectionState | None = None
        self.former: list[ConnectionState] = []
        self.dialer = dialer
        self._events = events
        self._poller = poller
        self._sockets: dict[ConnectionState, socket.socket] = {}
        self._stalled: set[ConnectionState] = set()
        self._buffer = bytearray(_READ_BYTES)

    def open(self) -> ConnectionState:
        """Opens a new connection, not greeted yet; the one before has ended. Raises DialError."""
        made = self.dialer.dial()
        self.current = connection = ConnectionState(self._events)
        self._sockets[connection] = made
        self._poller.watch(made.fileno(), partial(self._readable, connection))
        return connection

    def watch_daemon(self, connection: ConnectionState) -> None:
        """Starts to watch for the daemon's death."""
        self._poller.watch(connection.pidfd, partial(self._daemon_ended, connection))

    def ask(self, connection: ConnectionState, call: Call[Any]) -> None:
        """Sends the call's request, or queues what the kernel does not take now. Raises UsageError if it can't be
        sent.
        """
        try:
            connection.ask(call)
        except FramingError as error:
            raise UsageError(f"too large for one request: {error}") from error
        except StateError as error:
            raise UsageError(f"the client is being closed: {error}") from error
        if not connection.ended.done:
            self._flush(connection)

    def break_off(self, connection: ConnectionState, reason: str) -> None:
        """Ends the connection. While jobs depend on it, the socket is kept to learn when the daemon closes it."""
        self._end(connection, reason)
        if connection.jobs and connection in self._sockets:
            try:
                self._sockets[connection].shutdown(socket.SHUT_WR)
            except OSError as error:
                if error.errno not in (errno.ENOTCONN, errno.EBADF):  # the daemon closed it first, or we: interrupted
                    raise
        self.reap()

    def awaits_close(self, connection: ConnectionState) -> bool:
        """Returns whether it was broken off and the daemon has not closed it yet."""
        return connection.ended.done and connection in self._sockets

    def reap(self) -> None:
        """Closes the sockets of ended connections that no job depends on any more."""
        for connection in [connection for connection in self.former if not connection.jobs]:
            self._dispose(connection)
            self.former.remove(connection)

    def close(self) -> None:
        """Closes everything, even where jobs depend on it."""
        if self.current is not None:
            self._end(self.current, "the client was closed")
        for connection in self.former:
            self._dispose(connection)
        self.former.clear()

    def mend(self) -> None:
        """Breaks off everything after a call was interrupted, wherever that was. Nothing stays watched. May be
        repeated.
        """
        self._stalled.clear()
        self._sockets = {connection: sock for connection, sock in self._sockets.items() if sock.fileno() >= 0}
        for connection in self._connections():
            connection.forget_done_jobs()
            self.break_off(connection, "a call was interrupted")
        for connection in self.former:
            if connection in self._sockets:
                self._poller.watch(self._sockets[connection].fileno(), partial(self._readable, connection))
            if connection.pidfd >= 0:
                self.watch_daemon(connection)

    def abandon(self, reason: str) -> None:
        """Closes the descriptors of a forked child. Connections and poller are its parent's, and stay as they are."""
        connections = self._connections()
        self.current, self.former = None, []
        for connection in connections:
            close_fds([*connection.take_fds(), *_taken_pidfd(connection)])
            connection.end(reason)
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    # --- what the poller calls -----------------------------------------------------------------------

    def _readable(self, connection: ConnectionState) -> None:
        self._read(connection)
        if self.former:
            self.reap()

    def _flush(self, connection: ConnectionState) -> None:
        sock = self._sockets[connection]
        try:
            all_sent = _send(sock, connection)
        except ConnectionError:
            self._read_rest(connection)  # messages from before it closed still count
            self.break_off(connection, "the daemon takes no more requests on this connection")
            return
        except OSError as error:
            self.break_off(connection, f"can't send: {error}")
            return
        except BaseException:  # a signal handler has raised: how many bytes were sent is not known
            self.break_off(connection, "a call was interrupted")
            raise
        if not all_sent:
            self._stalled.add(connection)
            self._poller.watch_writable(sock.fileno(), partial(self._flush, connection))
        elif connection in self._stalled:
            self._stalled.discard(connection)
            self._poller.unwatch_writable(sock.fileno())

    def _daemon_ended(self, connection: ConnectionState) -> None:
        self._poller.unwatch(connection.pidfd)  # stays readable for ever
        self._read_rest(connection)
        self._end(connection, "the daemon died")
        connection.dead.settle()
        connection.lose_jobs("the daemon died")  # its copies are dead, too
        self.reap()

    # --- helpers -------------------------------------------------------------------------------------

    def _connections(self) -> list[ConnectionState]:
        return self.former[:] if self.current is None else [*self.former, self.current]

    def _read(self, connection: ConnectionState) -> bool:
        """Takes the data that has come; returns True if there may be more."""
        try:
            received = self._receive(self._sockets[connection])
            if received is None:
                return False
            data, fds = received
            if not data:
                self._closed_by_daemon(connection)
                return False
            if connection.ended.done:  # broken off: messages no longer count
                close_fds(fds)
            else:
                connection.receive(data, fds)
                if connection.unclaimed:
                    self._take_back_unclaimed(connection)
        except PeerError as error:
            self.break_off(connection, f"the daemon broke the protocol: {error}")
        except OSError as error:  # this socket will report nothing more, not even that the daemon closed it
            self._close_socket(connection)
            self._end(connection, f"can't read: {error}")
        except BaseException:  # bytes that were read may be lost
            self.break_off(connection, "a call was interrupted")
            raise
        return True

    def _receive(self, sock: socket.socket) -> tuple[memoryview, list[int]] | None:
        """Returns the data that has come, valid until the next call; no bytes: the daemon closed it; None: nothing now.

        Raises FramingError where descriptors came that did not fit.
        """
        try:
            count, ancillary, flags, _address = sock.recvmsg_into([self._buffer], _ANCILLARY_BYTES, _CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionError:
            return memoryview(b""), []
        fds = unpack_fds(ancillary) if ancillary else []
        if flags & _CTRUNC:
            close_fds(fds)
            raise FramingError("a frame came with too many descriptors")
        return memoryview(self._buffer)[:count], fds

    def _read_rest(self, connection: ConnectionState) -> None:
        while connection in self._sockets and self._read(connection):
            pass

    def _take_back_unclaimed(self, connection: ConnectionState) -> None:
        # After `bye`, they end with the session.
        while connection.unclaimed and not connection.ended.done and connection.bye is None:
            self.ask(connection, connection.unclaimed.pop())

    def _end(self, connection: ConnectionState, reason: str) -> None:
        """Records that nothing more will come on the connection. Without jobs it need not be remembered."""
        connection.end(reason)
        if self.current is connection:
            if connection not in self.former:  # first: another thread may ask for `open_jobs`
                self.former.append(connection)
            self.current = None

    def _closed_by_daemon(self, connection: ConnectionState) -> None:
        connection.closed.settle()  # first: nothing else settles it again
        self._close_socket(connection)
        self._end(connection, "the daemon closed the connection")

    def _close_socket(self, connection: ConnectionState) -> None:
        sock = self._sockets.get(connection)
        if sock is not None:
            self._stalled.discard(connection)
            self._poller.unwatch(sock.fileno())
            sock.close()
            del self._sockets[connection]
        close_fds(connection.take_fds())

    def _dispose(self, connection: ConnectionState) -> None:
        self._close_socket(connection)
        if connection.pidfd >= 0:
            self._poller.unwatch(connection.pidfd)
            close_fds(_taken_pidfd(connection))


def _taken_pidfd(connection: ConnectionState) -> list[int]:
    """Takes the connection's pidfd, if it has one; the caller closes it. If that is interrupted, it stays open; but no
    number is closed twice.
    """
    pidfd, connection.pidfd = connection.pidfd, -1
    return [pidfd] if pidfd >= 0 else []


def _send(sock: socket.socket, connection: ConnectionState) -> bool:
    """Sends what the kernel takes; returns True if that was all. Raises ConnectionError: the daemon closed it."""
    outbox = connection.outbox
    while outbox:
        call = outbox[0]
        was_sent = call.sent
        call.sent = True  # before the system call: a signal handler may raise at its end
        try:
            if call.fds and not was_sent:  # they go with the first byte
                count = sock.sendmsg([call.unsent], pack_fds(call.fds))
            else:
                count = sock.send(call.unsent)
        except OSError as error:
            call.sent = was_sent
            if isinstance(error, BlockingIOError):
                return False
            raise
        if count == len(call.unsent):
            outbox.popleft()
        else:
            call.unsent = memoryview(call.unsent)[count:]
    return True
