"""Requests are served in turns: by user, then engine, then session, and never long without the loop's other work."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from kvoffloadd.scheduling.turns import ROUND_S, Turns
from kvoffloadd.testing.wait import HANG_S


def arrive(turns: Turns, peer: QueuedPeer) -> None:
    """Arrives as a connection does when something has come."""
    if not turns.begin(peer):
        turns.queue(peer)


class QueuedPeer:
    """Has `left` turns' requests; notes each turn in `order`."""

    turn_us = 500

    def __init__(self, turns: Turns, order: list[str], flow: tuple[int, int, int], left: int, name: str = "") -> None:
        self.flow = flow
        self.left = left
        self.takes_s = 0.0
        self._turns = turns
        self._order = order
        self._name = name or f"peer {flow[2]}"

    def serve(self) -> None:
        self._order.append(self._name)
        time.sleep(self.takes_s)
        self.left -= 1
        if self.left:
            self._turns.queue(self)


async def until_served(*peers: QueuedPeer) -> None:
    async with asyncio.timeout(HANG_S):
        while any(peer.left for peer in peers):  # noqa: ASYNC110  it is the loop's turns that are tried here
            await asyncio.sleep(0)


async def test_who_comes_alone_is_served_at_once() -> None:
    order: list[str] = []
    turns = Turns(asyncio.get_running_loop())
    arrive(turns, QueuedPeer(turns, order, (1001, 1, 1), 1))
    assert order == ["peer 1"]


async def test_an_engine_does_not_wait_for_all_sessions_of_another() -> None:
    order: list[str] = []
    turns = Turns(asyncio.get_running_loop())
    crowd = [QueuedPeer(turns, order, (1001, 1, number), 10, "crowd") for number in range(40)]
    for peer in crowd:
        arrive(turns, peer)
    for number in (100, 101):
        modest = QueuedPeer(turns, order, (1001 + number % 2, 2, number), 1, "modest")
        before = len(order)
        arrive(turns, modest)
        await until_served(modest)
        assert order[before:].index("modest") <= 1, "it goes next"
    await until_served(*crowd)
    assert order.count("crowd") == 400


async def test_users_share_before_their_engines_and_sessions_do() -> None:
    order: list[str] = []
    turns = Turns(asyncio.get_running_loop())
    crowd = [QueuedPeer(turns, order, (1001, number, number), 10, "crowd") for number in range(40)]
    modest = QueuedPeer(turns, order, (1002, 100, 100), 20, "modest")
    for peer in (*crowd, modest):
        arrive(turns, peer)
    await until_served(modest)
    last = len(order) - order[::-1].index("modest")
    assert order[:last].count("crowd") <= 24, "half of the turns, not a fortieth"


async def test_the_loop_turns_in_between() -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()
    turns = Turns(loop)
    crowd = [QueuedPeer(turns, order, (1001, 1, number), 3) for number in range(10)]
    for peer in crowd:
        peer.takes_s = 2 * ROUND_S
        arrive(turns, peer)
    assert len(order) == 1, "its time is over then"
    seen: list[int] = []

    def look() -> None:
        seen.append(len(order))
        if any(peer.left for peer in crowd):
            loop.call_soon(look)

    look()
    await until_served(*crowd)
    assert max(after - before for before, after in pairwise(seen)) <= 2


async def test_who_has_ended_is_not_served() -> None:
    order: list[str] = []
    turns = Turns(asyncio.get_running_loop())
    first, gone = (QueuedPeer(turns, order, (1001, 1, number), 5) for number in (1, 2))
    arrive(turns, first)
    arrive(turns, gone)
    turns.forget(gone)
    turns.forget(gone)
    await until_served(first)
    assert order == ["peer 1"] * 5


async def test_one_that_fails_costs_the_others_nothing() -> None:
    order: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, _about: order.append("failed"))
    turns = Turns(loop)

    class Failing(QueuedPeer):
        def serve(self) -> None:
            raise ZeroDivisionError("planted")

    turns.queue(Failing(turns, order, (1001, 1, 1), 1))
    healthy = QueuedPeer(turns, order, (1001, 2, 2), 3)
    turns.queue(healthy)
    await until_served(healthy)
    assert order == ["failed", "peer 2", "peer 2", "peer 2"]


async def test_who_has_to_queue_is_told_and_not_served() -> None:
    """So that it reads nothing more: what it has read waits in its own memory."""
    order: list[str] = []
    turns = Turns(asyncio.get_running_loop())
    first, second, third = (QueuedPeer(turns, order, (1001, number, number), 1) for number in (1, 2, 3))
    assert turns.begin(first)
    turns.queue(second)
    assert not turns.begin(third)
    await until_served(first, second)
    assert (order, third.left) == (["peer 1", "peer 2"], 1)
