"""Tests that descriptors from peers are closed where only these peers wait for it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffloadd.errors import BusyError, LimitError
from kvoffloadd.linux import sockets
from kvoffloadd.server.peers import descriptorcloser as closer_module
from kvoffloadd.server.peers.descriptorcloser import LOOK_S, SPARE, STUCK_S, DescriptorCloser
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import RawPeer, frame
from tests.conftest import OTHER_UID
from tests.e2e.users import Stranger, needs_root
from tests.lingering import Lingering, lingering

THEIRS, OURS = 7, 8
CAP = 4


@pytest.fixture
def stuck() -> Iterator[Lingering]:
    with lingering() as made:
        yield made


@pytest.fixture
async def closer() -> AsyncIterator[DescriptorCloser]:
    made = DescriptorCloser(asyncio.get_running_loop(), (THEIRS, OURS))
    yield made
    for uid in made._queues:
        await closed(made, uid, [])
        assert made._of(uid).held == 0


async def closed(closer: DescriptorCloser, uid: int, fds: list[int]) -> None:
    """Wait for it, and for all that came before."""
    done = asyncio.Event()
    fds = [*fds, os.dup(0)]
    closer.hold(uid, len(fds))
    closer.close(uid, fds, done.set)
    async with asyncio.timeout(HANG_S):
        await done.wait()


def begin(closer: DescriptorCloser, stuck: Lingering) -> asyncio.Event:
    """Its last reference is being closed; the event: it is."""
    done = asyncio.Event()
    closer.hold(THEIRS, 1)
    closer.close(THEIRS, [stuck.ours.detach()], done.set)
    return done


async def test_who_sends_what_does_not_close_waits_alone(closer: DescriptorCloser, stuck: Lingering) -> None:
    done = begin(closer, stuck)
    kept, other = os.pipe()
    await closed(closer, OURS, [other])
    assert os.read(kept, 1) == b"", "the other end is closed"
    assert not done.is_set()
    stuck.release()
    async with asyncio.timeout(HANG_S):
        await done.wait()
    os.close(kept)


async def test_a_stuck_thread_s_user_is_refused_until_it_comes_back(
    closer: DescriptorCloser, stuck: Lingering, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(closer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    done = begin(closer, stuck)
    for _ in range(int(STUCK_S / LOOK_S) + 1):
        closer.admit(THEIRS)
        closer.check(THEIRS, CAP)
        now[0] += LOOK_S
        closer._look()
    with pytest.raises(LimitError, match="can't be closed"):
        closer.admit(THEIRS)
    with pytest.raises(LimitError, match="can't be closed"):
        closer.check(THEIRS, CAP)
    closer.admit(OURS)
    closer.check(OURS, CAP)
    stuck.release()
    async with asyncio.timeout(HANG_S):
        await done.wait()
    closer._look()
    closer.admit(THEIRS)


async def test_what_waits_to_be_closed_counts(closer: DescriptorCloser, stuck: Lingering) -> None:
    begin(closer, stuck)
    for count in range(1, CAP + SPARE):
        closer.check(THEIRS, CAP)
        closer.hold(THEIRS, 1)
        closer.close(THEIRS, [os.dup(0)])
        assert closer._of(THEIRS).held == count + 1
    closer.check(THEIRS, CAP)
    closer.hold(THEIRS, 1)
    closer.close(THEIRS, [os.dup(0)])
    with pytest.raises(LimitError, match="not closed yet"):
        closer.check(THEIRS, CAP)
    stuck.release()
    await closed(closer, THEIRS, [])
    closer.check(THEIRS, CAP)


async def test_nobody_comes_in_who_can_have_no_thread(
    closer: DescriptorCloser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", fail)
        with pytest.raises(BusyError, match="thread"):
            closer.admit(99)
        closer.admit(OURS)
    closer.admit(99)


@pytest.mark.parametrize("queued", [0, 1, 1000])
async def test_a_socket_with_descriptors_in_its_queue(closer: DescriptorCloser, stuck: Lingering, queued: int) -> None:
    """The queue has `queued` bytes before them."""
    ours, theirs = socket.socketpair()
    theirs.send(bytes(queued))
    theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stuck.fd]))])
    stuck.drop()
    theirs.send(b"z")
    done = asyncio.Event()
    closer.close_socket(99, ours, done.set)
    assert not done.is_set()
    assert ours.fileno() == -1
    with pytest.raises(BrokenPipeError):
        theirs.send(b"y")
    stuck.release()
    async with asyncio.timeout(HANG_S):
        await done.wait()
    theirs.close()


@pytest.mark.parametrize("queued", [0, 1, 1000, 100_000])
async def test_a_socket_without_costs_nothing(closer: DescriptorCloser, stuck: Lingering, queued: int) -> None:
    """Whose user's thread is stuck."""
    begin(closer, stuck)
    ours, theirs = socket.socketpair()
    theirs.settimeout(HANG_S)
    theirs.send(bytes(queued))
    done = asyncio.Event()
    closer.close_socket(THEIRS, ours, done.set)
    assert done.is_set()
    assert closer._of(THEIRS).held == 1, "what is stuck"
    with pytest.raises(BrokenPipeError):
        theirs.send(b"y")
    theirs.close()
    stuck.release()


def test_a_socket_that_could_never_be_sent_descriptors_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_LOOK", bytearray(10))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(bytes(20))
        assert not sockets.carries_nothing(ours), "it can't be told"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sockets.pass_descriptors(ours, allowed=False)
        if not sockets._never_passed(ours):
            pytest.skip("this kernel always lets descriptors in")
        theirs.send(bytes(20))
        assert sockets.carries_nothing(ours)


# --- a daemon ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def last_in(daemon: Daemon, stuck: Lingering) -> Iterator[None]:
    """What is sent inside is the last reference: the daemon does not run until ours is gone."""
    daemon.signal(signal.SIGSTOP)
    try:
        until(lambda: is_stopped(daemon), "it is stopped")
        yield
        os.close(stuck.ours.detach())
    finally:
        daemon.signal(signal.SIGCONT)


def is_stopped(daemon: Daemon) -> bool:
    threads = Path(f"/proc/{daemon.pid}/task").iterdir()
    return all("State:\tT" in (thread / "status").read_text() for thread in threads)


def attach_and_drop(daemon: Daemon, peer: RawPeer, stuck: Lingering, *before: int) -> int:
    with last_in(daemon, stuck):
        return peer.begin("attach", rights=[*before, stuck.fd], kind="shm", fds=1 + len(before))


@needs_root
def test_descriptors_of_a_user_keep_nobody_else_waiting(daemon: Daemon, stuck: Lingering) -> None:
    stranger: RawPeer = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID)).peer
    stranger.hello()
    seq = attach_and_drop(daemon, stranger, stuck)
    assert "not shared memory" in str(stranger.answer(seq)), "its own session goes on"
    other = daemon.peer()
    other.hello()
    other.ok("ping")
    stranger.ok("ping")


def test_more_descriptors_than_fit_are_not_closed_by_the_kernel(daemon: Daemon, stuck: Lingering) -> None:
    """The test sends 65, where the last one lingers, and all that a message can carry."""
    other = daemon.peer()
    other.hello()
    peer = daemon.peer()
    peer.hello()
    attach_and_drop(daemon, peer, stuck, *[0] * 64)
    other.ok("ping")
    peer.turned_away("bad_frame")
    most = daemon.peer()
    most.hello()
    most.begin("attach", rights=[0] * 253, kind="shm", fds=253)
    most.turned_away("bad_frame")
    other.ok("ping")


@pytest.mark.slow
def test_descriptors_with_an_out_of_band_byte_arrive(daemon: Daemon, stuck: Lingering) -> None:
    """The kernel would close them within the read of what comes behind."""
    other = daemon.peer()
    other.hello()
    peer = daemon.peer()
    peer.hello()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stuck.fd]))]
    with last_in(daemon, stuck):
        try:
            peer.socket.sendmsg([b"x"], rights, socket.MSG_OOB)
        except OSError:
            pytest.skip("this kernel has no out-of-band bytes for Unix sockets")
    peer.send(frame({"type": "ping", "seq": 9}))
    other.ok("ping")
    peer.end()
    other.ok("ping")


@pytest.mark.slow
def test_descriptors_of_frames_that_never_come_count(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("limits.fds=4", "limits.sessions=16")
    whole = frame({"type": "attach", "seq": 9, "kind": "shm", "fds": 64})
    before, peers = daemon.open_fds(), [daemon.peer() for _ in range(4)]
    for peer in peers:
        peer.hello()
    peers[0].send(whole[:5], [0] * 64)
    until(lambda: daemon.open_fds() >= before + 4 + 64, "they are here")
    peers[1].send(whole[:5], [0] * 4)
    until(lambda: daemon.open_fds() >= before + 4 + 68, "they are here")
    peers[2].send(whole[:5], [0])
    assert "the cap is 4" in peers[2].turned_away("limit")
    peers[0].close()
    until(lambda: daemon.open_fds() <= before + 4 + 4, "they are gone")
    peer = peers[3]
    while not has_room(daemon, peer, before + 4 + 5):  # the loop hears a moment later that they are gone
        peer = daemon.peer()
        peer.hello()


def has_room(daemon: Daemon, peer: RawPeer, fds: int) -> bool:
    """Whether the daemon keeps a descriptor of this peer, and then has `fds` open; otherwise an error has come."""
    peer.send(frame({"type": "attach", "seq": 9, "kind": "shm", "fds": 64})[:5], [0])

    def is_refused() -> bool:
        return bool(select.select([peer], [], [], 0)[0])

    until(lambda: is_refused() or daemon.open_fds() == fds, "it has come, or is refused")
    return not is_refused()
