"""What becomes of events between the cache and the sessions, where it takes too many of them to try on a daemon."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from kvoffloadd.cache.memory.keytable import Event
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.protocol.connection import Encoded, encode
from kvoffloadd.protocol.messages import Events
from kvoffloadd.server.events import STEPS_PER_TURN, EventFeed

NAMESPACE = Namespace(b"n" * 16, 0, "feed", 32, epoch=0)


class FakeSession:
    """Notes what it is told."""

    def __init__(self, hears: Namespace | None = NAMESPACE) -> None:
        self.namespace, self.events = hears, self
        self.told: list[Any] = []

    def send(self, event: Encoded) -> None:
        self.told.append(event)

    def miss(self) -> None:
        self.told.append("missed")

    def send_gap(self) -> None:
        self.told.append("gap, if any")


def feed_of(events: Iterable[Event], *sessions: FakeSession, lost: int = 0) -> EventFeed:
    entries = SimpleNamespace(events=deque(events), events_lost=lost)
    context: Any = SimpleNamespace(cache=SimpleNamespace(entries=entries), sessions=sessions)
    return EventFeed(context)


async def delivered(events: list[Event], lost: int = 0) -> list[Any]:
    """What a session is told of these events."""
    session = FakeSession()
    await feed_of(events, session, lost=lost).deliver()
    return list(map(seen, session.told))


def seen(told: Any) -> Any:
    message = told.message if isinstance(told, Encoded) else None
    return (message.group, message.added, message.removed) if isinstance(message, Events) else told


async def test_an_event_is_encoded_once_for_all_who_listen() -> None:
    sessions, deaf = [FakeSession() for _ in range(100)], FakeSession(None)
    await feed_of([Event(NAMESPACE, 0, b"k" * 32, b"")], *sessions, deaf).deliver()
    assert len({id(session.told[0].frame) for session in sessions}) == 1
    assert deaf.told == ["gap, if any"]


async def test_many_events_and_listeners_are_told_over_several_turns() -> None:
    sessions = [FakeSession() for _ in range(10)]
    told: list[int] = [0]

    def look() -> None:
        told.append(sum(len(session.told) for session in sessions))
        if told[-1] < 10 * 51:
            asyncio.get_running_loop().call_soon(look)

    look()
    await feed_of([Event(NAMESPACE, 0, bytes(32), b"")] * 50, *sessions).deliver()
    assert sum(len(session.told) for session in sessions) == 10 * 51
    assert max(after - before for before, after in pairwise(told)) <= STEPS_PER_TURN


async def test_events_that_are_lost_meanwhile_are_a_gap_before_the_next_one() -> None:
    session = FakeSession()
    feed = feed_of([Event(NAMESPACE, 0, bytes(32), b"")] * (STEPS_PER_TURN + 2), session)
    task = asyncio.ensure_future(feed.deliver())
    await asyncio.sleep(0)
    before = len(session.told)
    assert 0 < before < STEPS_PER_TURN
    feed._context.cache.entries.events_lost = 1
    await task
    assert session.told[before] == "missed"


async def test_an_event_that_no_frame_could_hold_is_told_in_pieces() -> None:
    keys = bytes(range(256)) * (200_000 // 8)
    told = await delivered([Event(NAMESPACE, 3, b"", keys)])
    pieces = [event for event in told if isinstance(event, tuple)]
    assert b"".join(removed for _, _, removed in pieces) == keys
    for group, added, removed in pieces:
        encode(Events(group=group, added=added, removed=removed))
        assert len(removed) % 32 == 0


async def test_events_that_were_lost_on_the_way_are_a_gap_before_those_that_were_not() -> None:
    told = await delivered([Event(NAMESPACE, 0, b"k" * 32, b"")], lost=5)
    assert told == ["missed", (0, b"k" * 32, b""), "gap, if any"]


async def test_a_gap_does_not_wait_for_the_next_event() -> None:
    assert await delivered([]) == ["gap, if any"]
