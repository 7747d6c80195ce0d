"""Delivers key events from the cache's queues to the sessions that subscribed. Deliveries take turns of the namespace's
user, like requests.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Final

from kvoffloadd.cache.memory.events import Event, WaitingEvents
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.protocol.connection import Encoded
from kvoffloadd.protocol.messages import Events
from kvoffloadd.scheduling.steps import TURN_S, Steps, take_turn
from kvoffloadd.scheduling.turns import FIRST_TURN_US, Turns
from kvoffloadd.server.peers.subscription import Subscription

INTERVAL_S = 0.02
"""The time for which events are gathered before they are sent."""

KEYS_PER_EVENT = 32_768
"""Larger events are sent in pieces, so that each fits into a frame and none fills an outbox alone."""

FEEDS: Final = -1
"""The flow number of all feeds of a user: together they share the loop like one engine. Engines have other numbers."""


class Feed:
    """The events of one namespace. A `turns.Served`."""

    _numbers = itertools.count(1)

    def __init__(self, namespace: Namespace, waiting: WaitingEvents, turns: Turns) -> None:
        self.subscribers: dict[Subscription, None] = {}
        self.turn_us = FIRST_TURN_US
        self.flow = (namespace.uid, FEEDS, next(self._numbers))
        self._namespace = namespace
        self._waiting = waiting
        self._turns = turns
        self._steps: Steps[bool] | None = None  # the current delivery, or that of the next turn

    @property
    def is_over(self) -> bool:
        """Whether there are no subscribers, and no events are left."""
        return not self.subscribers and self._steps is None and not self._waiting.waits(self._namespace)

    def count(self) -> None:
        """Records how many subscribers there are now, for those who make events."""
        self._namespace.listeners = len(self.subscribers)
        self._namespace.tier_listeners = sum(subscriber.tiers for subscriber in self.subscribers)

    def deliver(self) -> None:
        """Delivers the waiting events, over as many turns as necessary."""
        if self._steps is None and (
            self._waiting.waits(self._namespace) or any(subscriber.missed for subscriber in self.subscribers)
        ):
            self._steps = self._delivery()
            self._turns.queue(self)

    def serve(self) -> None:
        """Takes one turn of the delivery: implements `turns.Served`."""
        began_s = time.monotonic()
        steps, self._steps = self._steps, None
        if steps is not None and take_turn(steps, began_s + TURN_S) is None:
            self._steps = steps
        self.turn_us = int((time.monotonic() - began_s) * 1e6)
        if self._steps is not None:
            self._turns.queue(self)

    def _delivery(self) -> Steps[bool]:
        self._tell_loss()
        while (event := self._waiting.take(self._namespace)) is not None:
            for encoded in _frames(event):
                for subscriber in list(self.subscribers):
                    if subscriber.tiers == (event.tier is not None):
                        subscriber.send(encoded)
                    yield
            yield
            self._tell_loss()
        for subscriber in list(self.subscribers):
            subscriber.send_gap()  # now, since there may be no further event
            yield
        return True

    def _tell_loss(self) -> None:
        if self._waiting.take_loss(self._namespace):
            for subscriber in self.subscribers:
                subscriber.missed = True


class EventFeeds:
    """All feeds; a namespace without subscribers has none."""

    def __init__(self, waiting: WaitingEvents, turns: Turns) -> None:
        self._waiting = waiting
        self._turns = turns
        self._feeds: dict[Namespace, Feed] = {}
        self._has_feeds = asyncio.Event()

    def join(self, namespace: Namespace, subscription: Subscription, *, tiers: bool = False) -> None:
        """Subscribes to the events of this namespace, from now on. `tiers`: to those of each tier, instead of those of
        all tiers together. Pair with `leave`.
        """
        subscription.tiers = tiers
        feed = self._feeds.get(namespace)
        if feed is None:
            feed = self._feeds[namespace] = Feed(namespace, self._waiting, self._turns)
        feed.subscribers[subscription] = None
        feed.count()
        self._has_feeds.set()

    def leave(self, namespace: Namespace, subscription: Subscription) -> None:
        """Ends the subscription that `join` began; does nothing if there is none."""
        feed = self._feeds.get(namespace)
        if feed is not None:
            feed.subscribers.pop(subscription, None)
            feed.count()

    async def run(self) -> None:
        """Delivers events during the daemon's lifetime."""
        while True:
            await self._has_feeds.wait()
            await asyncio.sleep(INTERVAL_S)
            self.deliver()

    def deliver(self) -> None:
        """Gives a turn to each feed with events to deliver, and drops the feeds that are over."""
        for namespace, feed in list(self._feeds.items()):
            feed.deliver()
            if feed.is_over:
                del self._feeds[namespace]
        if not self._feeds:
            self._has_feeds.clear()


def _frames(event: Event) -> Iterator[Encoded]:
    """Yields the frames of an event, encoded once for all subscribers."""
    step = KEYS_PER_EVENT * event.namespace.key_bytes
    for start in range(0, max(len(event.added), len(event.removed)), step):
        added, removed = event.added[start : start + step], event.removed[start : start + step]
        tier = None if event.tier is None else int(event.tier)
        yield Encoded.of(Events(group=event.group, added=added, removed=removed, tier=tier))
