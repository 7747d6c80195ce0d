"""The daemon as a process: its socket, its signals, and peers that dawdle."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, GroupKind, Outcome, Ref
from kvoffloadd.errors import ClientError, RemoteError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import RawPeer, frame
from scripts.harness.wait import throughout
from tests.e2e.daemons import Hold
from tests.e2e.rank import NAMESPACE, Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
MIB = 1 << 20


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 4)


# --- the socket ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "mode"), [((), 0o660), (("server.socket_mode=0o600",), 0o600)])
def test_the_socket_is_no_more_open_than_it_shall_be(start_daemon: Start, setting: tuple[str, ...], mode: int) -> None:
    daemon = start_daemon(*setting)
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == mode
    assert stat.S_IMODE(daemon.socket.with_name("kvo.sock.lock").stat().st_mode) == 0o600


def test_a_live_daemon_keeps_its_socket(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon()
    rank = daemon.welcome(Rank(daemon.socket))
    rank.store_keys(keys)
    second = daemon.run_another()
    assert second.returncode == 2
    assert "another daemon uses" in second.stderr
    assert rank.loads_right(keys)
    with Rank(daemon.socket) as other:
        assert other.loads_right(keys)


def test_a_dead_daemon_s_socket_is_taken_over(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon()
    rank = daemon.welcome(Rank(daemon.socket))
    boot_id = rank.client.boot_id
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    # The client connects and registers again by itself.
    assert rank.store_keys(keys).outcome is Outcome.DONE
    assert rank.client.boot_id != boot_id
    assert rank.loads_right(keys)


def test_whatever_else_listens_there_is_left_alone(start_daemon: Start) -> None:
    daemon = start_daemon()
    assert daemon.stop() == 0
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
        other.listen()
        refused = daemon.run_another()
        assert (refused.returncode, "another process listens" in refused.stderr) == (2, True)
    daemon.socket.unlink()
    daemon.socket.write_text("precious")
    refused = daemon.run_another()
    assert (refused.returncode, "is not a socket" in refused.stderr) == (2, True)
    assert daemon.socket.read_text() == "precious"


def test_a_socket_that_was_removed_is_made_again(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon()
    rank = daemon.welcome(Rank(daemon.socket))
    rank.store_keys(keys)
    daemon.socket.unlink()
    until(daemon.socket.exists, "the socket is made again")
    with Rank(daemon.socket) as other:
        assert other.loads_right(keys)
    assert rank.loads_right(keys)  # who was connected still is
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    assert daemon.stop() == 0
    assert not daemon.socket.exists()


def test_what_took_the_socket_s_place_is_left_alone(start_daemon: Start, keys: Keys) -> None:
    daemon = start_daemon()
    rank = daemon.welcome(Rank(daemon.socket))
    daemon.socket.unlink()
    daemon.socket.write_text("precious")
    daemon.expected_in_log = "new connections are not possible"
    assert daemon.says(daemon.expected_in_log)
    assert rank.store_keys(keys).outcome is Outcome.DONE
    assert daemon.stop() == 0
    assert daemon.socket.read_text() == "precious"


def test_a_start_beside_a_daemon_that_nobody_can_reach_is_to_be_tried_again(start_daemon: Start) -> None:
    """Exit status 2 would be final: the unit has RestartPreventExitStatus=2."""
    daemon = start_daemon()
    daemon.signal(signal.SIGSTOP)  # before it makes its socket again
    daemon.socket.unlink()
    second = daemon.run_another()
    daemon.signal(signal.SIGCONT)
    assert second.returncode == 75
    assert f"process {daemon.pid} holds" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_start_waits_for_a_daemon_that_ends(start_daemon: Start, hold: Hold, keys: Keys) -> None:
    daemon = start_daemon(f"server.drain_s={HANG_S}", faults=hold.fault)
    rank = daemon.welcome(Rank(daemon.socket, reconnect=False))
    with hold:
        rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
        daemon.signal(signal.SIGTERM)
        until(lambda: "draining: 1 jobs" in daemon.log(), "the drain has begun")
        second = Daemon(daemon.socket.parent, "16MiB")
        second.log_path = second.log_path.with_name("second.log")
        second.launch()
        until(lambda: "waiting for its end" in second.log(), "the second waits")
    second.await_answer()
    assert daemon.wait() == 0
    assert second.stop() == 0


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_running_jobs(start_daemon: Start, hold: Hold, keys: Keys, number: int) -> None:
    daemon = start_daemon(f"server.drain_s={HANG_S}", faults=hold.fault)
    rank = daemon.welcome(Rank(daemon.socket, reconnect=False))
    other = daemon.welcome(Rank(daemon.socket, reconnect=False))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
        daemon.signal(number)
        until(lambda: "draining: 1 jobs" in daemon.log(), "the drain has begun")
        for request in (lambda: other.store_keys(keys), lambda: other.client.reserve({0: keys})):
            with pytest.raises(RemoteError, match="draining") as caught:
                request()
            assert caught.value.retryable
        other.client.ping()
        with RawPeer(daemon.socket) as late:
            hello: dict[str, Any] = {"role": "worker", "instance": bytes(16), "namespace": {"model": "late"}}
            assert late.ask("hello", version=1, **hello)["code"] == "draining"
        assert daemon.alive
    assert rank.wait(job).outcome is Outcome.DONE
    assert daemon.wait() == 0
    assert not daemon.socket.exists()


def copying(daemon: Daemon, device: str) -> int:
    """How many chunks of stores."""
    (figures,) = (figures for kind, figures in daemon.status()["devices"].items() if kind.startswith(device))
    return int(figures["store_running"])


def test_jobs_that_outlast_the_drain_are_given_up_in_order(
    start_daemon: Start, hold: Hold, keys: Keys, device: str
) -> None:
    """One thread copies one store at a time (a GPU has two chunks in flight): those that have not begun are cancelled
    and reported as such.
    """
    daemon = start_daemon("server.drain_s=0.2", "copy.threads=1", faults=hold.fault)
    rank = daemon.welcome(Rank(daemon.socket, reconnect=False))
    begun = 2 if device == "cuda" else 1
    with hold:
        jobs = [rank.begin_store({0: (keys[at : at + 1], np.array([at]))}) for at in range(4)]
        until(lambda: copying(daemon, device) == begun, "the first are being copied")
        daemon.signal(signal.SIGTERM)
        assert [rank.wait(job).outcome for job in jobs[begun:]] == [Outcome.CANCELLED] * (4 - begun)
        assert not any(job.done for job in jobs[:begun])
    assert [rank.wait(job).outcome for job in jobs[:begun]] == [Outcome.DONE] * begun
    assert daemon.wait() == 0


def test_a_second_signal_forces(start_daemon: Start, hold: Hold, keys: Keys) -> None:
    daemon = start_daemon("server.drain_s=600", faults=hold.fault)
    rank = daemon.welcome(Rank(daemon.socket, reconnect=False))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
        daemon.signal(signal.SIGTERM)
        until(lambda: "draining: 1 jobs" in daemon.log(), "the drain has begun")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 1
    assert rank.wait(job).outcome is Outcome.LOST


def test_the_end_of_an_idle_daemon_is_quick(start_daemon: Start, keys: Keys) -> None:
    """Some sessions read nothing, and one never sent a hello."""
    daemon = start_daemon()
    for _ in range(3):
        daemon.peer().hello()
    daemon.peer()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


# --- peers that dawdle -----------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(standing: Start) -> Daemon:
    return standing("server.partial_frame_s=0.3")


def test_a_frame_that_never_ends(impatient: Daemon) -> None:
    dawdler, idler, bystander = (impatient.peer() for _ in range(3))
    for peer in (dawdler, idler, bystander):
        peer.hello()
    dawdler.send(frame({"type": "ping", "seq": 5})[:-1])
    begun = time.monotonic()
    while impatient.status()["server"]["errors"] == 0 and time.monotonic() < begun + HANG_S:
        bystander.ok("ping")
    assert "no complete frame within 0.3 s" in dawdler.turned_away("bad_frame")
    assert time.monotonic() - begun > 0.25
    idler.ok("ping")  # silence between frames is no offence


def test_a_hello_that_never_comes(impatient: Daemon) -> None:
    silent, babbler = (impatient.peer() for _ in range(2))
    begun = time.monotonic()
    babbled = 0
    while time.monotonic() < begun + 0.2:
        assert babbler.ask("ping")["code"] == "bad_state"
        babbled += 1
    assert babbled
    silent.turned_away("bad_frame")
    babbler.turned_away("bad_frame")


def test_frames_that_never_end_where_a_read_ends(impatient: Daemon) -> None:
    """A peer that is always in the middle of a frame, but never long in the same one, is served."""
    peer = impatient.peer()
    peer.hello()
    ping = frame({"type": "ping", "seq": 7})
    peer.send(ping[:9])
    begun = time.monotonic()
    while time.monotonic() < begun + 0.9:
        peer.send(ping[9:] + ping[:9])
        assert peer.answer(7)["type"] == "done"
    peer.send(ping[9:])
    assert peer.answer(7)["type"] == "done"


def test_a_peer_that_does_not_read_is_not_read_from(impatient: Daemon) -> None:
    """It is not ended for the frame that it could not finish; it gets every answer once it reads."""
    peer = impatient.peer()
    peer.hello()
    peer.socket.settimeout(0.2)
    status = frame({"type": "status", "seq": 8})
    sent = 0
    unsent = b""
    with pytest.raises(TimeoutError):
        while True:
            unsent = status * 500
            while unsent:
                gone = peer.socket.send(unsent)
                sent, unsent = sent + gone, unsent[gone:]
    before = impatient.rss_anon_bytes()
    fact = lambda: impatient.rss_anon_bytes() - before < MIB and len(impatient.sessions()) == 1  # noqa: E731
    throughout(fact, "it is neither ended nor read from", 0.7)
    peer.socket.settimeout(HANG_S)
    rest = len(status) - sent % len(status)
    for _ in range(sent // len(status)):
        assert peer.answer(8)["type"] == "report"
    peer.send(status[len(status) - rest :])
    assert peer.answer(8)["type"] == "report"


def test_half_a_frame_that_the_daemon_itself_does_not_read_on(standing: Start, seed: int) -> None:
    """Events fill the peer's outbox while its frame is half there: that the rest is not read is not its fault."""
    daemon = standing("server.partial_frame_s=2", memory="64MiB")
    small = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 8),)),)
    rank = daemon.welcome(Rank(daemon.socket, small, num_blocks=4096))
    peer = daemon.peer()
    peer.hello(namespace={"model": NAMESPACE.model})
    peer.ok("subscribe")
    ping = frame({"type": "ping", "seq": 6})
    peer.send(ping[:9])
    begun = time.monotonic()
    rng = np.random.default_rng(seed)
    for _ in range(14):  # 128 KiB of events each; above 1 MiB that is unread nothing is read from the peer
        job = rank.client.store(rank.registration, {0: (new_keys(rng, 4096), np.arange(4096))})
        rank.wait(job)
    if time.monotonic() - begun > 1.9:
        pytest.skip("too slow just now: the frame's own time has passed")
    peer.send(ping[9:])
    throughout(lambda: len(daemon.sessions()) == 2, "it is not ended", 2.5)
    assert peer.answer(6)["type"] == "done"


def test_a_peer_that_goes_with_replies_unread_is_gone_at_once(daemon: Daemon) -> None:
    """The peer is gone, so the daemon does not wait a moment for it to read them."""
    peer = daemon.peer()
    peer.hello()
    peer.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        while True:
            peer.socket.sendall(frame({"type": "status", "seq": 8}) * 100)
    assert len(daemon.sessions()) == 1
    peer.close()
    until(lambda: not daemon.sessions(), "its session is gone")


def test_requests_that_come_faster_than_they_are_served_wait_in_the_kernel(daemon: Daemon) -> None:
    """The daemon holds no more of them than it has read at once."""
    peer = daemon.peer()
    peer.hello()
    stop = threading.Event()

    def drain_replies() -> None:
        while not stop.is_set():
            try:
                if not peer.socket.recv(MIB):
                    return
            except OSError:
                return

    reader = threading.Thread(target=drain_replies)
    reader.start()
    pings = frame({"type": "ping", "seq": 9}) * 10_000
    before = daemon.rss_anon_bytes()
    highest = sent = 0
    begun = time.monotonic()
    view = memoryview(pings)
    while time.monotonic() < begun + 1.5:
        sent += peer.socket.send(view[sent % len(pings) :])
        highest = max(highest, daemon.rss_anon_bytes())
    stop.set()
    peer.socket.shutdown(socket.SHUT_RDWR)
    reader.join()
    assert highest - before < 8 * MIB
    assert daemon.ping_s() < HANG_S


def test_a_half_closed_socket_is_the_end_of_the_session(standing: Start, hold: Hold) -> None:
    """What it was promised still comes: the completion after the last access, then the end."""
    from tests.server.scene import Scene, ids
    from tests.server.scene import keys as packed

    daemon = standing(faults=hold.fault)
    scene = Scene(daemon, "half closed")
    load = scene.job(groups=[{"group": 0, "keys": packed(1), "blocks": ids(5)}])
    ends = daemon.log().count(" ends: ")
    with hold:
        scene.peer.ok("load", **load)
        until(lambda: daemon.status()["devices"]["host"]["load_running"] == 1, "the copy has begun")
        scene.peer.socket.shutdown(socket.SHUT_WR)
        until(lambda: daemon.log().count(" ends: ") > ends, "the daemon has seen it")
        silent = lambda: not select.select([scene.peer], [], [], 0)[0]  # noqa: E731
        throughout(silent, "it says nothing before the copy's end", 0.1)
        assert daemon.mapped("bad_input") == 1
    (last,) = scene.peer.end()
    assert (last["type"], last["job"]) == ("completed", load["job"])
    until(lambda: daemon.mapped("bad_input") == 0, "its memory is unmapped")


def test_nobody_listens(start_daemon: Start) -> None:
    daemon = start_daemon()
    daemon.stop()
    begun = time.monotonic()
    with pytest.raises(ClientError, match="start the daemon"):
        Client(daemon.socket, namespace=NAMESPACE, connect_deadline_s=0.2).connect()
    assert time.monotonic() - begun < HANG_S
    assert os.path.exists(daemon.socket.parent)
