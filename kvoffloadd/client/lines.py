"""A client's open connections: each link with its socket and its daemon's pidfd, and what to do when one is ready."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvoffloadd.client.calls import Call
from kvoffloadd.client.connection import ConnectionState, Pending
from kvoffloadd.client.job import Job
from kvoffloadd.client.session import Session
from kvoffloadd.client.wire import Wire
from kvoffloadd.errors import FramingError, PeerError, StateError, UsageError
from kvoffloadd.sockets import close_fds


class Poller(Protocol):
    """Tells when a descriptor is ready. Level-triggered: `ready` is called as long as it is."""

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call `ready` when `fd` is readable."""

    def watch_writable(self, fd: int, ready: Callable[[], None]) -> None:
        """Call `ready` also when `fd`, which is watched, is writable."""

    def unwatch_writable(self, fd: int) -> None:
        """Take back `watch_writable`; nothing if there was none."""

    def unwatch(self, fd: int) -> None:
        """Forget `fd`, which is still open; nothing if it is not watched."""


class Lines:
    """Moves bytes between sockets and links. Every method returns at once."""

    def __init__(self, path: str, session: Session, poller: Poller) -> None:
        self._path = path
        self._session = session
        self._poller = poller
        self._wires: dict[ConnectionState, Wire] = {}
        self._stalled: set[ConnectionState] = set()

    def open(self) -> ConnectionState:
        """A new connection, not greeted yet. Raises OSError."""
        wire = Wire(self._path)
        link = self._session.begin()
        self._wires[link] = wire
        self._poller.watch(wire.fileno(), partial(self._readable, link))
        return link

    def watch_daemon(self, link: ConnectionState) -> None:
        """From now on learn of the daemon's death."""
        self._poller.watch(link.pidfd, partial(self._daemon_ended, link))

    def ask(self, link: ConnectionState, op: Call[Any], job: Job | None = None) -> Pending:
        """Send a request, or queue what the kernel does not take now. Raises UsageError if it can't be asked at all."""
        try:
            pending = link.ask(op, job)
        except FramingError as error:
            raise UsageError(f"too much for one request: {error}") from error
        except StateError as error:
            raise UsageError(f"the client is being closed: {error}") from error
        if not link.ended.done:
            self._flush(link)
        return pending

    def break_off(self, link: ConnectionState, reason: str) -> None:
        """Say and hear nothing more. While jobs hang on it, the socket is kept to learn when the daemon closes it."""
        self._session.end(link, reason)
        if link.jobs and link in self._wires:
            self._wires[link].stop_sending()
        self.reap()

    def awaits_close(self, link: ConnectionState) -> bool:
        """Whether it was broken off and the daemon has not closed it yet."""
        return link.ended.done and link in self._wires

    def reap(self) -> None:
        """Close what belongs to ended connections on which nothing hangs any more."""
        for link in self._session.finished():
            self._dispose(link)

    def close(self) -> None:
        """Close everything, whatever hangs on it."""
        if self._session.link is not None:
            self._session.end(self._session.link, "the client was closed")
        for link in self._session.old:
            self._dispose(link)
        self._session.old.clear()

    # --- what the poller calls -----------------------------------------------------------------------

    def _readable(self, link: ConnectionState) -> None:
        self._read(link)
        if self._session.old:
            self.reap()

    def _flush(self, link: ConnectionState) -> None:
        wire = self._wires[link]
        try:
            all_sent = wire.send(link.outbox)
        except ConnectionError:
            self._read_rest(link)  # what it said before it closed still counts
            self.break_off(link, "the daemon takes no more requests on this connection")
            return
        except OSError as error:
            self.break_off(link, f"can't send: {error}")
            return
        except BaseException:  # a signal's handler has raised: how much was sent is not known
            self.break_off(link, "a call was interrupted")
            raise
        if not all_sent:
            self._stalled.add(link)
            self._poller.watch_writable(wire.fileno(), partial(self._flush, link))
        elif link in self._stalled:
            self._stalled.discard(link)
            self._poller.unwatch_writable(wire.fileno())

    def _daemon_ended(self, link: ConnectionState) -> None:
        self._poller.unwatch(link.pidfd)  # stays readable for ever
        self._read_rest(link)
        self._session.died(link)
        self.reap()

    # --- helpers -------------------------------------------------------------------------------------

    def _read(self, link: ConnectionState) -> bool:
        """Take what has come; True if there may be more."""
        try:
            got = self._wires[link].read()
            if got is None:
                return False
            data, fds = got
            if not data:
                self._closed_by_daemon(link)
                return False
            if link.ended.done:  # broken off: nothing that is said on it counts any more
                close_fds(fds)
            else:
                self._session.receive(link, data, fds)
                if link.unclaimed:
                    self._take_back_unclaimed(link)
        except PeerError as error:
            self.break_off(link, f"the daemon broke the protocol: {error}")
        except OSError as error:  # this socket will tell nothing more, not even that the daemon closed it
            self._close_wire(link)
            self._session.end(link, f"can't read: {error}")
        except BaseException:  # what was read may be lost
            self.break_off(link, "a call was interrupted")
            raise
        return True

    def _read_rest(self, link: ConnectionState) -> None:
        while link in self._wires and self._read(link):
            pass

    def _take_back_unclaimed(self, link: ConnectionState) -> None:
        while link.unclaimed and not link.ended.done and link.bye is None:  # else they end with the session
            self.ask(link, link.unclaimed.pop())

    def _closed_by_daemon(self, link: ConnectionState) -> None:
        self._close_wire(link)
        self._session.end(link, "the daemon closed the connection")
        link.closed.settle()

    def _close_wire(self, link: ConnectionState) -> None:
        wire = self._wires.pop(link, None)
        if wire is not None:
            self._stalled.discard(link)
            self._poller.unwatch(wire.fileno())
            wire.close()
        close_fds(link.connection.take_fds())

    def _dispose(self, link: ConnectionState) -> None:
        self._close_wire(link)
        if link.pidfd >= 0:
            self._poller.unwatch(link.pidfd)
            os.close(link.pidfd)
            link.pidfd = -1
