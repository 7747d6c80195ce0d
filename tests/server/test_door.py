"""Who connects all the time is turned away cheaply, and others come in."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.config import ServerConfig
from kvoffloadd.errors import BusyError, ForbiddenError, LimitError
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.scheduling.turns import Turns
from kvoffloadd.server import listener as module
from kvoffloadd.server.listener import Listener
from kvoffloadd.server.peers.account import BUILT_IN, Account
from kvoffloadd.server.peers.descriptorcloser import DescriptorCloser
from kvoffloadd.server.socketplace import SocketPlace
from kvoffloadd.server.watchdog import Watchdog
from kvoffloadd.testing.wait import HANG_S
from tests.cache.fakes import make_cache
from tests.server.test_clears import context_of

CONNECTIONS = BUILT_IN["connections"]


def lets_in(account: Account) -> bool:
    try:
        account.charge(connections=1)
    except LimitError:
        return False
    return True


def test_what_comes_back_by_itself_is_a_user_s_own() -> None:
    now = 5.0
    account, other = (Account(uid, dict(BUILT_IN), lambda: now) for uid in (1, 2))
    assert all(lets_in(account) for _ in range(CONNECTIONS.cap))
    assert not lets_in(account)
    assert lets_in(other)
    now += 3.5 / CONNECTIONS.per_s
    assert [lets_in(account) for _ in range(4)] == [True, True, True, False]
    now += 0.6 / CONNECTIONS.per_s
    assert [lets_in(account) for _ in range(2)] == [True, False], "nothing of what has come back is lost"
    now += 1e6
    assert [lets_in(account) for _ in range(CONNECTIONS.cap + 1)].count(True) == CONNECTIONS.cap


class Threads:
    """Has as much of a device, and of signals, as a peer that connects needs."""

    def __init__(self) -> None:
        self.short = False

    def admit(self, uid: int) -> None:
        if self.short:
            raise RuntimeError("can't start new thread")


class DoorScene:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.context = context_of(make_cache())
        self.context.closer = DescriptorCloser(self.context.loop, (os.getuid(),))
        self.context.turns = Turns(self.context.loop)
        self.threads = Threads()
        enough: Any = self.threads
        self.context.host = self.context.signals = enough
        self.place = SocketPlace(path, 0o600)
        self.place.claim()
        sock = self.place.listen()
        self.listener = Listener(self.context, sock)
        sock.setblocking(False)

    def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        peer.connect(str(self.path))
        return peer

    async def close(self) -> None:
        await self.listener.close(10)
        self.place.close()


async def test_many_are_accepted_in_a_turn_until_its_time_is_up(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as if they came from another process
    scene = DoorScene(socket_dir / "kvo.sock")
    peers = [scene.connect() for _ in range(200)]  # more than the backlog had room for
    monkeypatch.setattr(module, "ACCEPT_TURN_S", -1.0)
    scene.listener._on_acceptable()
    assert scene.context.accepts == 1, "one, however little time there is"
    monkeypatch.setattr(module, "ACCEPT_TURN_S", 1e6)
    scene.listener._on_acceptable()
    assert scene.context.accepts == 200
    monkeypatch.undo()
    for peer in peers:
        peer.close()
    await scene.close()


async def test_who_floods_is_told_and_costs_no_session(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    scene = DoorScene(socket_dir / "kvo.sock")
    account = scene.context.accounts.of(os.getuid())
    account.clock = lambda: 5.0  # nothing comes back
    account.charge(connections=CONNECTIONS.cap)
    peer = scene.connect()
    scene.listener._on_acceptable()
    assert b"connects too often" in peer.recv(1000)
    assert peer.recv(1000) == b""
    peer.close()
    assert scene.context.counters.sessions_refused == 1
    assert scene.context.sessions == set()
    monkeypatch.undo()
    own = scene.connect()
    scene.listener._on_acceptable()
    assert len(scene.context.sessions) == 1, "the watchdog's own ping comes in"
    own.close()
    await scene.close()


async def test_the_watchdogs_ping_takes_no_session_from_its_user(socket_dir: Path) -> None:
    """Who has all sessions that a user may have does not keep the service manager from hearing that we live."""
    scene = DoorScene(socket_dir / "kvo.sock")
    account, cap = scene.context.accounts.of(os.getuid()), scene.context.config.limits.sessions
    account.charge(sessions=cap)
    own = scene.connect()
    scene.listener._on_acceptable()
    assert len(scene.context.sessions) == 1
    assert account.used["sessions"] == cap
    own.close()
    await scene.close()


async def test_a_user_for_whom_there_are_no_threads_comes_later(socket_dir: Path) -> None:
    scene = DoorScene(socket_dir / "kvo.sock")
    scene.threads.short = True
    peer = scene.connect()
    scene.listener._on_acceptable()
    answer = peer.recv(1000)
    assert b"can't start threads for uid" in answer
    assert BusyError.code.encode() in answer
    assert peer.recv(1000) == b""
    peer.close()
    assert scene.context.accounts.figures() == {}
    scene.threads.short = False
    peer = scene.connect()
    scene.listener._on_acceptable()
    assert len(scene.context.sessions) == 1
    peer.close()
    await scene.close()


async def test_a_user_without_a_number_is_nobody(socket_dir: Path) -> None:
    """Whoever has none in the daemon's user namespace has the same one as all others, even if that is the daemon's own,
    or is listed.
    """
    scene = DoorScene(socket_dir / "kvo.sock")
    scene.context.unmapped_uid = os.getuid()
    scene.context.config = replace(scene.context.config, server=ServerConfig(allowed_uids=(os.getuid(),)))
    peer = scene.connect()
    scene.listener._on_acceptable()
    answer = peer.recv(1000)
    assert f"uid {os.getuid()} stands for every user without a number in the daemon's user".encode() in answer
    assert ForbiddenError.code.encode() in answer
    assert peer.recv(1000) == b""
    peer.close()
    assert scene.context.sessions == set()
    await scene.close()


async def test_a_session_that_can_not_be_watched_ends(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And costs nothing afterwards."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no epoll watches")

    monkeypatch.setattr(os, "getpid", lambda: 1)
    scene = DoorScene(socket_dir / "kvo.sock")
    peer = scene.connect()
    with monkeypatch.context() as without:
        without.setattr(scene.context.loop, "add_reader", fail)
        scene.listener._on_acceptable()
    assert scene.context.accepts == 1
    await asyncio.wait_for(asyncio.gather(*scene.context.tasks), HANG_S)
    assert b"no resources left" in peer.recv(1000)
    assert peer.recv(1000) == b""
    peer.close()
    assert not scene.context.sessions
    assert not scene.listener._connections
    assert scene.context.accounts.figures() == {}
    await scene.close()


async def test_accepts_are_life(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backlog is full of others all the time."""
    path, tries = socket_dir / "full.sock", 0

    class Trying(socket.socket):
        def connect(self, address: Any) -> None:
            nonlocal tries
            tries += 1
            super().connect(address)

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        context = context_of(make_cache())
        lane = Lane("socket", 1, context.loop)
        watchdog = Watchdog(context, path, lane, 1e6, lambda: None)
        monkeypatch.setattr("kvoffloadd.server.watchdog.CONNECT_RETRY_S", 0)
        monkeypatch.setattr(socket, "socket", Trying)
        async with asyncio.timeout(HANG_S):
            pinging = asyncio.ensure_future(watchdog._ping())
            while tries < 3 and not pinging.done():  # noqa: ASYNC110  the ping sets no event
                await asyncio.sleep(0)
            assert not pinging.done()
            context.accepts += 1
            await pinging
        assert tries == 3
        assert await lane.close(HANG_S)


async def test_a_path_that_hangs_stops_neither_the_loop_nor_the_watchdog(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory on a server that is gone does this: connected peers are served."""
    answers, begun = threading.Event(), threading.Event()

    class Hanging(socket.socket):
        def connect(self, address: Any) -> None:
            begun.set()
            answers.wait(HANG_S)

    context = context_of(make_cache())
    lane = Lane("socket", 1, context.loop)
    watchdog = Watchdog(context, socket_dir / "kvo.sock", lane, 0.4, lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Hanging)
        for _ in range(2):
            await watchdog._ping()
    assert begun.is_set()
    assert not answers.is_set()
    assert caplog.text.count("its directory does not answer") == 2
    answers.set()
    assert await lane.close(HANG_S)
