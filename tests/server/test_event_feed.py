"""What becomes of events between the cache and the sessions, where it takes too many of them to try on a daemon."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from kvoffloadd.cache.entries import Event
from kvoffloadd.cache.namespace import Namespace
from kvoffloadd.protocol import codec
from kvoffloadd.protocol.messages import Events
from kvoffloadd.server.events import EventFeed

NAMESPACE = Namespace(b"n" * 16, 0, "feed", 32, epoch=0)


class FakeSession:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, namespace: Namespace, group: int, added: bytes, removed: bytes) -> None:
        self.told.append((group, added, removed))

    def miss_events(self) -> None:
        self.told.append("missed")

    def tell_gap(self) -> None:
        self.told.append("gap, if any")


def delivered(events: list[Event], lost: int = 0) -> list[Any]:
    """What a session is told of these events."""
    session = FakeSession()
    entries = SimpleNamespace(events=deque(events), events_lost=lost)
    context: Any = SimpleNamespace(cache=SimpleNamespace(entries=entries), sessions=[session])
    EventFeed(context).deliver()
    return session.told


def test_an_event_that_no_frame_could_hold_is_told_in_pieces() -> None:
    keys = bytes(range(256)) * (200_000 // 8)
    told = delivered([Event(NAMESPACE, 3, b"", keys)])
    pieces = [event for event in told if isinstance(event, tuple)]
    assert b"".join(removed for _, _, removed in pieces) == keys
    for group, added, removed in pieces:
        codec.encode(Events(group=group, added=added, removed=removed))
        assert len(removed) % 32 == 0


def test_events_that_were_lost_on_the_way_are_a_gap_before_those_that_were_not() -> None:
    told = delivered([Event(NAMESPACE, 0, b"k" * 32, b"")], lost=5)
    assert told == ["missed", (0, b"k" * 32, b""), "gap, if any"]


def test_a_gap_does_not_wait_for_the_next_event() -> None:
    assert delivered([]) == ["gap, if any"]
