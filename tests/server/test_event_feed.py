"""What becomes of events between the cache and the sessions, where it takes too many of them to try on a daemon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvoffloadd.cache.memory.events import EVENT_BYTES, Event, WaitingEvents
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.model import Tier
from kvoffloadd.protocol.connection import Encoded, encode
from kvoffloadd.protocol.messages import Events
from kvoffloadd.scheduling.steps import TURN_S
from kvoffloadd.scheduling.turns import Turns
from kvoffloadd.server import events as events_module
from kvoffloadd.server.events import FEEDS, EventFeeds
from kvoffloadd.testing.wait import HANG_S

KEY = b"k" * 32


def namespace(uid: int = 1001, name: bytes = b"n") -> Namespace:
    return Namespace(name * 16, uid, "feed", 32, epoch=0)


class FakeSubscription:
    """Notes the events that it gets, and calls `hears` each time."""

    def __init__(self, hears: Callable[[], object] = lambda: None) -> None:
        self.told: list[Any] = []
        self.events: list[Events] = []
        self.missed = False
        self.tiers = False
        self._hears = hears

    def send(self, event: Encoded) -> None:
        self.send_gap()
        if isinstance(event.message, Events):
            self.events.append(event.message)
        self._note(seen(event))

    def send_gap(self) -> None:
        if self.missed:
            self.missed = False
            self._note("gap")

    def _note(self, received: Any) -> None:
        self.told.append(received)
        self._hears()


def seen(event: Encoded) -> Any:
    message = event.message
    return (message.group, message.added, message.removed) if isinstance(message, Events) else event


class FeedScene:
    """Feeds over separate queues and turns."""

    def __init__(self, waiting: WaitingEvents | None = None) -> None:
        self.waiting = waiting or WaitingEvents()
        self.turns = Turns(asyncio.get_running_loop())
        self.feeds = EventFeeds(self.waiting, self.turns)

    def join(self, of: Namespace, subscription: Any, *, tiers: bool = False) -> None:
        self.feeds.join(of, subscription, tiers=tiers)

    async def tell(self, events: Iterable[Event] = ()) -> None:
        """Emits events until all are delivered."""
        for event in events:
            self.waiting.put(event)
        self.feeds.deliver()
        async with asyncio.timeout(HANG_S):
            while any(feed._steps is not None for feed in self.feeds._feeds.values()):  # noqa: ASYNC110  turns
                await asyncio.sleep(0)


async def test_an_event_is_encoded_once_for_all_who_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, space, other = FeedScene(), namespace(), namespace(name=b"o")
    encoded: list[object] = []
    frames_of = events_module._frames

    def frames(event: Event) -> Iterable[Encoded]:
        encoded.append(event)
        return frames_of(event)

    monkeypatch.setattr(events_module, "_frames", frames)
    sessions, deaf = [FakeSubscription() for _ in range(100)], FakeSubscription()
    for session in sessions:
        scene.join(space, session)
    scene.join(other, deaf)
    await scene.tell([Event(space, 0, KEY, b"")])
    assert all(session.told == [(0, KEY, b"")] for session in sessions)
    assert deaf.told == []
    assert len(encoded) == 1


async def test_an_event_that_no_frame_could_hold_is_told_in_pieces() -> None:
    scene, space, session = FeedScene(), namespace(), FakeSubscription()
    scene.join(space, session)
    keys = bytes(range(256)) * (200_000 // 8)
    await scene.tell([Event(space, 3, b"", keys)])
    assert b"".join(removed for _, _, removed in session.told) == keys
    for group, added, removed in session.told:
        encode(Events(group=group, added=added, removed=removed))
        assert len(removed) % 32 == 0


async def test_each_offer_is_a_step_of_a_turn() -> None:
    """There are many events and subscribers, whose delivery the loop's other work interrupts."""
    scene, space = FeedScene(), namespace()
    offers: list[int] = []

    def hears() -> None:
        offers.append(beats[0])
        time.sleep(TURN_S)

    beats = [0]

    def beat() -> None:
        beats[0] += 1
        if len(offers) < 50:
            asyncio.get_running_loop().call_soon(beat)

    beat()
    for _ in range(10):
        scene.join(space, FakeSubscription(hears))
    await scene.tell([Event(space, 0, KEY, b"")] * 5)
    assert len(offers) == 50
    assert max(map(offers.count, offers)) <= 5, "a round of turns ends after 2 ms"


async def test_a_user_with_many_events_and_subscribers_does_not_delay_another_s_event() -> None:
    """Whatever each offer takes: here a whole turn."""
    scene, loud, quiet = FeedScene(), namespace(1001), namespace(1002)
    order: list[str] = []

    def loud_hears() -> None:
        order.append("loud")
        time.sleep(TURN_S)

    for _ in range(20):
        scene.join(loud, FakeSubscription(loud_hears))
    scene.join(quiet, FakeSubscription(lambda: order.append("quiet")))
    delivered = asyncio.ensure_future(scene.tell([Event(loud, 0, KEY, b"")] * 20))
    while len(order) < 20:  # noqa: ASYNC110  turns
        await asyncio.sleep(0)
    assert "quiet" not in order
    before = len(order)
    scene.waiting.put(Event(quiet, 0, KEY, b""))
    scene.feeds.deliver()
    await delivered
    assert len(order) == 401
    assert order[before:].index("quiet") <= 2, "it goes next"


async def test_a_user_s_feeds_share_his_turns_with_his_requests() -> None:
    scene = FeedScene()
    for name in (b"a", b"b"):
        scene.join(namespace(1001, name), FakeSubscription())
    first, second = scene.feeds._feeds.values()
    assert first.flow[:2] == second.flow[:2] == (1001, FEEDS)
    assert first.flow != second.flow


async def test_a_turn_that_was_enough_is_paid_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "TURN_S", 60.0)
    scene, space = FeedScene(), namespace()
    scene.join(space, FakeSubscription(lambda: time.sleep(0.002)))
    await scene.tell([Event(space, 0, KEY, b"")])
    (feed,) = scene.feeds._feeds.values()
    assert feed.turn_us >= 2000


async def test_what_is_lost_is_a_gap_before_the_next_event_and_only_in_its_namespace() -> None:
    scene, loud, quiet = FeedScene(WaitingEvents(100 * (EVENT_BYTES + 32))), namespace(1001), namespace(1002)
    sessions = [FakeSubscription(), FakeSubscription()]
    for of, session in zip((loud, quiet), sessions, strict=True):
        scene.join(of, session)
    await scene.tell([*[Event(loud, 0, KEY, b"")] * 100, Event(quiet, 0, KEY, b"")])
    assert sessions[0].told == ["gap", *[(0, KEY, b"")] * 25]
    assert sessions[1].told == [(0, KEY, b"")]


async def test_events_that_are_lost_meanwhile_are_a_gap_before_the_next_one() -> None:
    scene, space = FeedScene(WaitingEvents(100 * (EVENT_BYTES + 32))), namespace()

    def hears() -> None:
        if len(session.told) == 1:
            for _ in range(30):
                scene.waiting.put(Event(space, 1, KEY, b""))

    session = FakeSubscription(hears)
    scene.join(space, session)
    await scene.tell([Event(space, 0, KEY, b"")] * 2)
    assert session.told == [(0, KEY, b""), "gap", *[(1, KEY, b"")] * 25]


async def test_a_gap_does_not_wait_for_the_next_event() -> None:
    scene, space, session = FeedScene(), namespace(), FakeSubscription()
    scene.join(space, session)
    session.missed = True
    await scene.tell()
    assert session.told == ["gap"]


async def test_what_is_left_when_the_last_subscriber_goes_is_dropped() -> None:
    """The next one hears of nothing that was before it."""
    scene, space, session = FeedScene(), namespace(), FakeSubscription()
    scene.join(space, session)
    assert space.listeners == 1
    scene.waiting.put(Event(space, 0, KEY, b""))
    scene.feeds.leave(space, session)  # type: ignore[arg-type]
    assert space.listeners == 0
    await scene.tell()
    scene.feeds.deliver()
    assert not scene.feeds._feeds
    assert not scene.waiting.waits(space)
    scene.join(space, again := FakeSubscription())
    await scene.tell([Event(space, 1, KEY, b"")])
    assert (session.told, again.told) == ([], [(1, KEY, b"")])


async def test_who_follows_the_tiers_hears_of_them_and_others_of_the_whole() -> None:
    scene, space = FeedScene(), namespace()
    sessions = [FakeSubscription(), FakeSubscription()]
    for session, tiers in zip(sessions, [False, True], strict=True):
        scene.join(space, session, tiers=tiers)
    assert (space.listeners, space.tier_listeners) == (2, 1)
    scene.waiting.lose(space)
    await scene.tell([Event(space, 0, KEY, b"", tier) for tier in (None, Tier.DISK, Tier.MEMORY)])
    assert sessions[0].told == ["gap", (0, KEY, b"")]
    assert sessions[1].told == ["gap", (0, KEY, b""), (0, KEY, b"")]
    assert [event.tier for event in sessions[0].events] == [None]
    assert [event.tier for event in sessions[1].events] == [Tier.DISK, Tier.MEMORY]
    scene.feeds.leave(space, sessions[1])  # type: ignore[arg-type]
    assert (space.listeners, space.tier_listeners) == (1, 0)
