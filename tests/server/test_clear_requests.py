"""Tests clears that a disk or the remote store can't record yet: done at once, and repeated by the daemon alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.client import Client, NamespaceSpec
from kvoffloadd.storage.disk.manifest import decode_manifest
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import Fields, RawPeer
from tests.e2e.disk import MIB, disk_settings
from tests.e2e.unrecordable import WAYS, Unrecordable, epoch
from tests.server.scene import Scene, ids, keys

Start = Callable[..., Daemon]
MISS, HIT = b"\0", b"\1"
MOST, PER_SESSION = 256, 64
"""Clears that may wait to be recorded: of a user, as docs/PROTOCOL.md says, and requests of a session."""


@dataclass
class Cleared(Scene):
    """A scene with a disk, whose root this is."""

    root: Path = Path()

    def status(self) -> Fields:
        found: Fields = self.daemon.status()["clears"]
        return found

    def epoch(self) -> int:
        """Returns the epoch of the namespace."""
        return epoch(self.daemon)

    def recorded_epoch(self) -> int:
        """What the disk has recorded of it."""
        manifest = decode_manifest((self.root / "manifest").read_bytes())
        return max([*manifest.epochs.values(), manifest.base_epoch])

    def states(self, *numbers: int) -> bytes:
        groups = [{"group": 0, "keys": keys(*numbers)}]
        found: bytes = self.peer.ok("lookup", groups=groups)["states"][0]
        return found

    def other_stores(self, number: int) -> None:
        """Another engine of the namespace stores a key."""
        self.store(self.peer, keys(number), ids(number))


@pytest.fixture
def place(tmp_path: Path) -> Unrecordable:
    return Unrecordable("disk", tmp_path)


@pytest.fixture
def spoilt(start_daemon: Start, place: Unrecordable) -> Iterator[Cleared]:
    """The place is spoilt."""
    daemon = start_daemon(*place.settings())
    scene = Cleared(daemon, "clear", root=Path(place.place))
    scene.settle()
    place.spoil()
    yield scene
    assert daemon.verify() == ()


def clear(peer: RawPeer, token: bytes = b"t" * 16, **fields: Any) -> Fields:
    return peer.ok("clear", token=token, **{"wait_s": 0.0, **fields})


def test_whoever_asks_again_is_answered_for_the_same_clear(spoilt: Cleared, place: Unrecordable) -> None:
    """Any connection of the user gets the answer. What others have stored since stays."""
    asks = spoilt.stranger("scheduler")
    first = clear(asks)
    assert (first["keys"], first["unrecorded"]) == (4, [str(spoilt.root)])
    assert spoilt.states(1, 2, 3, 4) == MISS * 4
    epoch = spoilt.epoch()
    spoilt.other_stores(9)
    for peer in (asks, asks, spoilt.stranger("scheduler")):
        again = clear(peer)
        assert (again["keys"], again["unrecorded"]) == (4, [str(spoilt.root)])
    assert (spoilt.states(9), spoilt.epoch()) == (HIT, epoch)
    assert spoilt.status() == {"unrecorded": 1, "places": [str(spoilt.root)]}
    place.mend()
    until(lambda: spoilt.status() == {"unrecorded": 0, "places": []}, "the daemon alone has recorded it")
    assert (spoilt.states(9), spoilt.epoch(), spoilt.recorded_epoch()) == (HIT, epoch, epoch), "by the same number"
    assert "unrecorded" not in clear(asks)
    another = clear(asks, b"u" * 16, wait_s=60.0)
    assert (another["keys"], spoilt.states(9)) == (1, MISS)
    assert spoilt.recorded_epoch() == spoilt.epoch() > epoch


def test_an_answer_waits_for_the_record_as_long_as_it_was_told(spoilt: Cleared, place: Unrecordable) -> None:
    patient = spoilt.stranger("scheduler")
    asked = patient.begin("clear", token=b"t" * 16, wait_s=60.0)
    assert patient.ask("ping")["type"] == "done", "the other is not answered"
    late = clear(spoilt.peer, wait_s=0.05)
    assert late["unrecorded"] == [str(spoilt.root)]
    place.mend()
    answer = patient.answer(asked)
    assert (answer["type"], answer["keys"]) == ("cleared", 4)
    assert "unrecorded" not in answer
    assert spoilt.recorded_epoch() == spoilt.epoch()


def test_more_than_may_wait_are_answered_at_once(spoilt: Cleared, place: Unrecordable) -> None:
    peers = [spoilt.stranger("scheduler") for _ in range(MOST // PER_SESSION)]
    asked = [(peer, peer.begin("clear", token=b"t" * 16, wait_s=60.0)) for peer in peers for _ in range(PER_SESSION)]

    def waiting() -> int:
        used: dict[str, int] = spoilt.daemon.status()["accounts"][str(os.getuid())]
        return used.get("clears", 0)

    until(lambda: waiting() == MOST, "all of them wait")
    assert clear(spoilt.peer, wait_s=60.0)["unrecorded"] == [str(spoilt.root)]
    peers[-1].close()
    until(lambda: waiting() == MOST - PER_SESSION, "those of the session that ended do not wait")
    place.mend()
    assert {peer.answer(seq)["type"] for peer, seq in asked if peer is not peers[-1]} == {"cleared"}
    until(lambda: waiting() == 0, "nothing is left")


def test_a_client_that_knows_no_tokens(spoilt: Cleared, place: Unrecordable) -> None:
    """Older clients ask again until a clear is recorded: that clears nothing anew. The frames that they get have no
    fields that they do not know.
    """
    asks = spoilt.stranger()
    refused = asks.ask("clear", everything=False)
    assert (refused["code"], refused["retryable"]) == ("not_durable", True)
    assert str(spoilt.root) in refused["message"]
    assert spoilt.states(1, 2, 3, 4) == MISS * 4
    epoch = spoilt.epoch()
    spoilt.other_stores(9)
    for _ in range(3):
        assert asks.ask("clear")["code"] == "not_durable"
    assert (spoilt.states(9), spoilt.epoch()) == (HIT, epoch)
    assert asks.ask("clear", everything=True)["code"] == "not_durable", "another clear"
    assert spoilt.states(9) == MISS
    place.mend()
    until(lambda: spoilt.status()["unrecorded"] == 0, "it is recorded")
    spoilt.other_stores(9)
    answer = asks.ok("clear")
    assert set(answer) == {"type", "seq", "keys", "bytes"}
    assert (answer["keys"], spoilt.states(9)) == (1, MISS), "what is recorded is over"


def test_a_client_without_tokens_that_has_stored_clears_that_too(spoilt: Cleared) -> None:
    assert spoilt.peer.ask("clear")["code"] == "not_durable"
    spoilt.other_stores(9)  # the same session
    assert spoilt.states(9) == HIT
    assert spoilt.peer.ask("clear")["code"] == "not_durable"
    assert spoilt.states(9) == MISS


def test_a_store_that_hangs_delays_no_disk(start_daemon: Start, tmp_path: Path) -> None:
    root, place = tmp_path / "disk", Unrecordable("store", tmp_path)
    daemon = start_daemon(*disk_settings((root, 64 * MIB)), *place.settings(), faults=place.faults)
    scene = Cleared(daemon, "clear", root=root)
    until(lambda: all(daemon.status()["remote"]["eras"].values()), "the era is known")
    place.spoil()
    answer = clear(scene.peer)
    assert "remote" in answer["unrecorded"]
    until(lambda: scene.status() == {"unrecorded": 1, "places": ["remote"]}, "the disk has recorded it")
    assert scene.recorded_epoch() == scene.epoch()
    scene.other_stores(9)
    epoch = scene.epoch()
    place.mend()
    until(lambda: scene.status()["unrecorded"] == 0, "the store has recorded it, too")
    assert (scene.epoch(), scene.states(9)) == (epoch, HIT)


# --- by the names of namespaces ---


@pytest.mark.parametrize("way", WAYS)
def test_a_clear_by_names_is_recorded_as_any_other(start_daemon: Start, tmp_path: Path, way: str) -> None:
    place = Unrecordable(way, tmp_path)
    daemon = start_daemon(*place.settings(), faults=place.faults)
    scenes = [Cleared(daemon, salt, root=tmp_path / "disk") for salt in ("one", "two")]
    if way == "store":
        until(lambda: all(daemon.status()["remote"]["eras"].values()), "the eras are known")
    place.spoil()
    other = daemon.peer()
    other.hello("worker", namespace={"model": "other", "key_bytes": 32})
    asks = scenes[0].stranger("observer")
    for _ in range(2):
        answer = clear(asks, namespaces="bad_input#*")
        assert (answer["namespaces"], answer["keys"], answer["unrecorded"]) == (2, 8, [place.place])
    assert [scene.states(1, 2, 3, 4) for scene in scenes] == [MISS * 4] * 2
    assert scenes[0].status() == {"unrecorded": 1, "places": [place.place]}
    epochs = {row["label"]: row["epoch"] for row in daemon.status()["namespaces"]}
    assert epochs["bad input"] > epochs["other"] == 0
    scenes[0].other_stores(9)
    place.mend()
    until(lambda: scenes[0].status()["unrecorded"] == 0, "it is recorded")
    assert scenes[0].states(9) == HIT, "nothing was cleared anew"
    assert "unrecorded" not in clear(asks, namespaces="bad_input#*")
    if way == "disk":
        assert scenes[0].recorded_epoch() == max(row["epoch"] for row in daemon.status()["namespaces"])
    assert daemon.verify() == ()


# --- restarts ---


@pytest.mark.slow
def test_a_daemon_that_ends_before_it_has_recorded_a_clear(start_daemon: Start, tmp_path: Path) -> None:
    """The arena file has it: the next run goes on, with the same epoch. The token is of no run but the first: there it
    is a new clear.
    """
    place = Unrecordable("disk", tmp_path)
    daemon = start_daemon(*place.settings(), f"memory.pool_file={tmp_path / 'pool'}")
    scene = Cleared(daemon, "clear", root=Path(place.place))
    scene.settle()
    until(lambda: daemon.status()["disk"]["keys"] == 4, "the keys are on disk")
    place.spoil()
    assert clear(scene.peer)["unrecorded"] == [place.place]
    cleared = scene.epoch()
    scene.other_stores(9)
    scene.settle()
    scene.peer.close()
    daemon.leave_guests()
    daemon.kill()
    place.mend()
    daemon.start()
    again = Cleared(daemon, "clear", root=scene.root)
    until(lambda: again.recorded_epoch() == cleared, "the next run has recorded it")
    assert (again.epoch(), again.states(9)) == (cleared, HIT)
    assert again.daemon.status()["cache"]["keys_adopted"] == 1, "what was cleared was left behind"
    assert "unrecorded" not in clear(again.peer, wait_s=60.0)
    assert again.epoch() > cleared


@pytest.mark.slow
def test_a_daemon_that_ends_in_mid_call(start_daemon: Start) -> None:
    """The client asks the next one."""
    daemon = start_daemon()
    spec = NamespaceSpec(model="clear")
    with Client(daemon.socket, namespace=spec, role="scheduler", deadline_s=60.0, connect_deadline_s=60.0) as client:
        client.ping()
        daemon.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as executor:
            cleared = executor.submit(client.clear)
            daemon.kill()
            daemon.start()
            assert cleared.result(HANG_S).unrecorded == ()
        assert epoch(daemon) > 0
