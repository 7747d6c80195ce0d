"""The steps of a long request are turns of its session: by user, then engine, whatever others have begun."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.state import ProtocolState
from kvoffloadd.scheduling import steps as steps_module
from kvoffloadd.scheduling.steps import TURN_S, Steps
from kvoffloadd.server import connection as connections
from kvoffloadd.server.connection import PeerConnection
from kvoffloadd.server.peers.connectionstate import Input
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.peer import frame
from tests.server.test_ends import UID, connect, connection

STEPS = 10


class LongSessions:
    """Sessions with a long request each, whose steps take a turn by a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.made: list[tuple[PeerConnection, Any]] = []
        self._now_s = 0.0
        for module in (connections, steps_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self._now_s))

    def add(self, who: str, peer: PeerConnection, theirs: Any, instance: int) -> None:
        def work(seq: int) -> Steps[m.Reply]:
            for _ in range(STEPS):
                self.order.append(who)
                self._now_s += TURN_S
                yield
            return m.Done(seq=seq)

        session: Any = peer.session
        session.handle = lambda message, fds: work(message.seq)
        session.role = "scheduler"
        session._instance = SimpleNamespace(id=instance)
        peer._protocol.state = ProtocolState.READY
        self.made.append((peer, theirs))

    def ask(self) -> None:
        """Asks as when the requests of all have come at once."""
        for peer, _ in self.made:
            peer._protocol.receive_data(frame({"type": "ping", "seq": 1}), [])
            peer._settle(Input.QUEUED)

    async def end(self) -> None:
        async with asyncio.timeout(HANG_S):
            while len(self.order) < STEPS * len(self.made):  # noqa: ASYNC110  it is the loop's turns that are tried
                await asyncio.sleep(0)
        for peer, theirs in self.made:
            peer.session._instance = None
            theirs.close()
            await peer.end("the test ends")


@pytest.mark.parametrize(("uid", "instance"), [(UID + 1, 1), (UID, 2)])
async def test_the_steps_of_many_requests_delay_another_s_by_one_of_theirs(
    uid: int, instance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other request is of another user, or of another engine of the same user."""
    crowd = LongSessions(monkeypatch)
    first, theirs, context = connection()
    crowd.add("loud", first, theirs, 1)
    for _ in range(29):
        crowd.add("loud", *connect(context, UID), 1)
    crowd.add("quiet", *connect(context, uid), instance)
    crowd.ask()
    await crowd.end()
    turns = [number for number, who in enumerate(crowd.order) if who == "quiet"]
    assert turns[0] <= 2
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 3, "half of the turns, not a thirtieth"
