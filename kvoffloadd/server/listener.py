"""Accepts connections at the listening socket, and checks which users may connect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time

from kvoffloadd.errors import BusyError, ForbiddenError, LimitError, PeerError, ResourceError
from kvoffloadd.linux.sockets import keep_inline, pass_descriptors
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import encode
from kvoffloadd.server.connection import PeerConnection
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers import peer as peers
from kvoffloadd.server.peers.descriptorcloser import STRANGERS

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.1
ACCEPT_TURN_S = 0.002
"""The time that one turn of the loop spends on connections: none is begun later than this."""
_TOO_OFTEN = encode(
    m.Error(seq=0, code=BusyError.code, message="this user connects too often", fault=BusyError.fault, retryable=True)
)


class Listener:
    """Accepts peers and owns their connections, and the listening socket."""

    def __init__(self, context: Context, listener: socket.socket) -> None:
        self._context = context
        self._listener = listener
        self._connections: set[PeerConnection] = set()
        self._refused: set[int] = set()  # users with a last connection that came too often

    def start(self) -> None:
        self._listener.setblocking(False)
        pass_descriptors(self._listener, allowed=False)  # until a peer is admitted
        self._context.loop.add_reader(self._listener.fileno(), self._on_acceptable)

    def _on_acceptable(self) -> None:
        self._context.lag.wake()
        turn_ends = time.monotonic() + ACCEPT_TURN_S
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # No descriptors are left: the connection stays in the backlog, and a busy loop would not help.
                log.error("accept failed: %s", error.strerror)
                self._context.loop.remove_reader(self._listener.fileno())
                self._context.loop.call_later(ACCEPT_RETRY_S, self._retry)
                return
            self._context.accepts += 1
            sock.setblocking(False)
            self._admit(sock)
            if time.monotonic() >= turn_ends:
                return

    def _retry(self) -> None:
        if self._listener.fileno() >= 0:
            self.start()

    def _admit(self, sock: socket.socket) -> None:
        context = self._context
        try:
            peer = peers.identify(sock)
        except OSError:
            context.closer.close_socket(STRANGERS, sock)  # the peer is gone already
            return
        own = peer.pid == os.getpid()  # the watchdog's pings do not count against other peers
        charged = int(not own)
        key = STRANGERS if self._why_forbidden(peer.uid) else peer.uid
        try:
            context.accounts.of(key).charge(connections=charged)
        except LimitError:
            context.counters.sessions_refused += 1
            if key not in self._refused:  # log only the first
                log.warning("uid %d connects too often; its connections are refused for a while", peer.uid)
            self._refused.add(key)
            with contextlib.suppress(OSError):
                sock.send(_TOO_OFTEN)
            context.closer.close_socket(peer.uid, sock)
            return
        if not own:
            self._refused.discard(key)
        try:
            self._check_uid(peer.uid)
            context.admit(peer.uid)
            context.accounts.of(peer.uid).charge(sessions=charged)
        except (ForbiddenError, ResourceError) as error:
            context.counters.sessions_refused += 1
            about = {"pid": peer.pid, "uid": peer.uid, "reason": error}
            log.warning("refused pid %(pid)d of uid %(uid)d: %(reason)s", about)
            self._turn_away(sock, peer.uid, error)
            return
        connection = PeerConnection(context, sock, peers.watch(sock, peer))
        self._connections.add(connection)
        context.spawn(self._forget(connection, peer.uid, charged))
        try:
            keep_inline(sock)
            pass_descriptors(sock, allowed=True)
            connection.start()
        except OSError as error:
            log.error("a session can't be served: %s", error.strerror)
            _say(sock, BusyError("the system has no resources left to watch this session"))
            connection.end(f"it can't be served: {error.strerror}")

    def _turn_away(self, sock: socket.socket, uid: int, error: PeerError | ResourceError) -> None:
        """Sends one error frame, as far as the socket takes it, and closes the socket."""
        _say(sock, error)
        self._context.closer.close_socket(uid, sock)

    def _why_forbidden(self, uid: int) -> str:
        """Returns why this user may not connect; empty: it may."""
        if uid == self._context.unmapped_uid:
            return (
                f"uid {uid} stands for every user without a number in the daemon's user namespace: map this user "
                "there, or run the daemon without a user namespace"
            )
        if uid in self._context.trusted_uids or uid in self._context.config.server.allowed_uids:
            return ""
        return f"uid {uid} is not in server.allowed_uids"

    def _check_uid(self, uid: int) -> None:
        if reason := self._why_forbidden(uid):
            raise ForbiddenError(reason)

    def check_all(self) -> None:
        """Ends the sessions of users that are no longer allowed."""
        for connection in list(self._connections):
            try:
                self._check_uid(connection.session.peer.uid)
            except ForbiddenError as error:
                connection.turn_away(error)

    async def _forget(self, connection: PeerConnection, uid: int, charged: int) -> None:
        await connection.ended.wait()
        self._connections.discard(connection)
        connection.take_apart()
        self._context.accounts.of(uid).refund(sessions=charged)

    def replace(self, listener: socket.socket) -> None:
        """Accepts peers at this socket from now on. The former socket is not reachable any more; connections in its
        backlog are accepted as far as one turn allows.
        """
        self._on_acceptable()
        self._leave()
        self._listener = listener
        self.start()

    def _leave(self) -> None:
        """Closes the socket, connections that were not accepted, and the data in them. The service manager may still
        listen.
        """
        self._context.loop.remove_reader(self._listener.fileno())
        self._context.closer.hold(STRANGERS, 1)
        self._context.closer.close(STRANGERS, [self._listener.detach()])

    async def close(self, deadline_s: float) -> None:
        """Accepts no more connections, and ends all sessions: each session's copies end before its socket closes."""
        self._leave()
        ends = [connection.end("the daemon shuts down") for connection in list(self._connections)]
        if ends:
            await asyncio.wait(ends, timeout=deadline_s)


def _say(sock: socket.socket, error: PeerError | ResourceError) -> None:
    reply = m.Error(seq=0, code=error.code, message=str(error), fault=error.fault, retryable=error.retryable)
    with contextlib.suppress(OSError):
        sock.send(encode(reply))
