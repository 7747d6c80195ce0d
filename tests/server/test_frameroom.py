"""Frames that have begun to come: a user's sessions share the memory for them, and all come through in the end."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from kvoffloadd.server.peers.account import BUILT_IN, Accounts
from scripts.harness.daemon import Daemon
from tests.server.scene import Scene, ids, keys

pytestmark = pytest.mark.slow

SESSIONS = 60
ROOM_BYTES = BUILT_IN["frame_bytes"].cap
FRAME_BYTES = 4 << 20


class WaitingPeer:
    """Counts how often it was let go on."""

    def __init__(self) -> None:
        self.told = 0

    def go_on(self) -> None:
        self.told += 1


def test_who_waits_longest_comes_first() -> None:
    account = Accounts({"frame_bytes": 10}).of(1)
    peers = [WaitingPeer() for _ in range(4)]
    assert [account.receive(peer, 6) for peer in peers[:3]] == [True, False, False]
    assert not account.receive(peers[3], 1), "it would overtake those who wait"
    account.received(peers[0])
    assert [peer.told for peer in peers] == [0, 1, 0, 0]
    account.received(peers[2])  # it waits no more
    assert [peer.told for peer in peers] == [0, 1, 0, 1]
    assert account.used == {"frame_bytes": 7}
    assert account.receive(peers[1], 6), "it has its room already"
    for peer in peers:
        account.received(peer)
        account.received(peer)
    assert account.used == {"frame_bytes": 0}


def test_frames_that_have_begun_are_bounded_and_all_are_served(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("server.partial_frame_s=60")
    scene = Scene(daemon, "frames")
    scene.settle()
    peers = [scene.session() for _ in range(SESSIONS)]
    begun = struct.pack("<I", FRAME_BYTES) + bytes(FRAME_BYTES - 5)
    before = daemon.rss_anon_bytes()
    for peer in peers:
        peer.socket.setblocking(False)
        at, stalled = 0, 0
        while at < len(begun) and stalled < 20:
            try:
                at += peer.socket.send(begun[at : at + (1 << 18)])
                stalled = 0
            except BlockingIOError:
                stalled += 1
                scene.peer.ok("ping")  # it reads what there is, if it does
    assert at < len(begun), "the last one's frame is left in its socket"
    assert daemon.rss_anon_bytes() - before < ROOM_BYTES + SESSIONS * (1 << 19)
    for peer in peers[: SESSIONS // 2]:
        peer.close()
    other = scene.session()
    asked = [{"group": 0, "keys": keys(*range(10_000))}]
    seq = other.begin("lookup", groups=asked)  # large, too: it waits for those before it
    for peer in peers[SESSIONS // 2 :]:
        peer.close()
    assert len(other.answer(seq)["states"][0]) == 10_000
    job = scene.job(groups=[{"group": 0, "keys": keys(*range(9000)), "blocks": ids(*[0] * 9000)}])
    scene.peer.ok("store", **job)
    assert scene.peer.completed(job["job"])["outcome"] == "done"


def test_large_frames_that_are_refused_keep_no_room(start_daemon: Callable[..., Daemon]) -> None:
    """Their sessions stay, and say no more."""
    daemon = start_daemon()
    scene = Scene(daemon, "refused")
    scene.settle()
    peers = [scene.session() for _ in range(ROOM_BYTES // FRAME_BYTES + 1)]
    for peer in peers:
        refused = peer.ask("lookup", groups=[{"group": 0, "keys": bytes(FRAME_BYTES - 1024)}], unknown=1)
        assert refused["type"] == "error"
    assert len(scene.session().ok("lookup", groups=[{"group": 0, "keys": keys(*range(10_000))}])["states"][0]) == 10_000
