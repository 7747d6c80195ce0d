"""Drains: what they wait for, how many may, and that those that end early leave nothing behind."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffloadd.testing.leaks import UID
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import Fields, RawPeer, frame
from tests.server.scene import FULL, Scene, ids, keys

MOST, PER_SESSION = 256, 64
"""That may wait: of a user, as docs/PROTOCOL.md says, and of a session."""
LONG_S = 60.0


class HeldJobs(Scene):
    """Its jobs wait until `let_go`."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon, os.urandom(8).hex())
        self._flag = os.memfd_create("drains")
        os.ftruncate(self._flag, 4096)
        (flag,) = self.peer.attach([self._flag])
        self.waiting = self.peer.ok("register", tensors=[self.tensor], groups=[FULL], signals=[flag])["registration"]

    def begin(self, *numbers: int) -> int:
        """A store of these keys."""
        groups = [{"group": 0, "keys": keys(*numbers), "blocks": ids(*numbers)}]
        ready = {"signal": 0, "offset": 0, "value": 1}
        job = self.job(registration=self.waiting, groups=groups, ready=ready, deadline_s=LONG_S)
        self.peer.ok("store", **job)
        return int(job["job"])

    def let_go(self) -> None:
        os.pwrite(self._flag, struct.pack("<Q", 1), 0)

    def drains(self) -> int:
        used: dict[str, int] = self.daemon.status()["accounts"][str(UID)]
        return used.get("drains", 0)

    def close(self) -> None:
        os.close(self._flag)


@pytest.fixture
def held(daemon: Daemon) -> Iterator[HeldJobs]:
    made = HeldJobs(daemon)
    made.settle()
    yield made
    made.close()


def drain(peer: RawPeer, **fields: Any) -> int:
    return peer.begin("drain", **{"deadline_s": LONG_S, **fields})


def told(reply: Fields) -> tuple[str, int, int]:
    return reply["type"], reply["jobs"], reply["unsealed"]


DONE = ("drained", 0, 0)


def test_many_at_once_are_all_answered_when_their_moment_comes(held: HeldJobs) -> None:
    job = held.begin(9)
    peers = [held.session() for _ in range(MOST // PER_SESSION)]
    asked = [(peer, drain(peer, everything=number % 2 == 0)) for peer in peers for number in range(PER_SESSION)]
    until(lambda: held.drains() == MOST, "all of them wait")
    reply = peers[0].ask("ping")
    assert reply["type"] == "done", "none of them has been answered"
    one_more = held.session()
    refused = one_more.ask("drain", deadline_s=LONG_S)
    assert (refused["type"], refused["code"], refused["retryable"]) == ("error", "busy", True)
    gone = peers.pop()
    gone.close()
    until(lambda: held.drains() == MOST - PER_SESSION, "those of the session that ended do not wait")
    again = drain(one_more)
    held.let_go()
    assert held.peer.completed(job)["outcome"] == "done"
    assert {told(peer.answer(seq)) for peer, seq in asked if peer is not gone} == {DONE}
    assert told(one_more.answer(again)) == DONE
    assert held.drains() == 0
    assert held.daemon.verify() == ()


def test_one_that_is_late_says_what_is_left(held: HeldJobs) -> None:
    jobs = [held.begin(number) for number in (9, 10)]
    late = drain(held.peer, deadline_s=0.05)
    patient = drain(held.peer)
    assert told(held.peer.answer(late)) == ("drained", 2, 0)
    assert held.drains() == 1
    held.let_go()
    for job in jobs:
        assert held.peer.completed(job)["outcome"] == "done"
    assert told(held.peer.answer(patient)) == DONE
    assert held.drains() == 0


def test_jobs_admitted_later_are_not_waited_for(held: HeldJobs) -> None:
    """Not even one that comes in the same write; nor are those of other namespaces."""
    other = HeldJobs(held.daemon)
    other.begin(9)
    job = held.job(registration=held.waiting, ready={"signal": 0, "offset": 0, "value": 1}, deadline_s=LONG_S)
    of_all: Fields = {"everything": True, "deadline_s": 0.05}
    asked = [{"type": "drain"}, {"type": "drain", **of_all}, {"type": "store", **job}]
    held.peer.send(b"".join(frame({**fields, "seq": 900 + number}) for number, fields in enumerate(asked)))
    assert told(held.peer.answer(900)) == DONE
    assert told(held.peer.answer(901)) == ("drained", 1, 0)
    assert held.peer.answer(902)["type"] == "accepted"
    late = drain(held.peer, deadline_s=0.05)
    assert told(held.peer.answer(late)) == ("drained", 1, 0)
    held.let_go()
    assert held.peer.completed(job["job"])["outcome"] == "done"
    other.peer.close()
    other.close()


def test_a_bye_ends_what_it_waits_for(held: HeldJobs) -> None:
    held.begin(9)
    seq = drain(held.peer)
    until(lambda: held.drains() == 1, "it waits")
    bye = held.peer.begin("bye")
    assert told(held.peer.answer(seq)) == DONE, "its job was cancelled"
    assert held.peer.answer(bye)["type"] == "done"
    until(lambda: held.drains() == 0, "nothing is left")
