"""Key events, from the cache's bounded queue to the sessions that subscribed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kvoffloadd.cache.memory.keytable import Event
from kvoffloadd.protocol.connection import Encoded
from kvoffloadd.protocol.messages import Events
from kvoffloadd.server.context import Context

INTERVAL_S = 0.02
"""How long events are gathered before they are sent."""

KEYS_PER_EVENT = 32_768
"""A larger event is sent in pieces, so that each fits a frame and none needs an outbox for itself."""

STEPS_PER_TURN = 32
"""Events taken and frames put into outboxes per turn of the loop: there may be very many events and subscribers."""


class EventFeed:
    """The task that delivers events; while no session is subscribed there are none."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lost = 0

    async def run(self) -> None:
        subscribed = self._context.subscribed
        while True:
            await subscribed.wait()
            await asyncio.sleep(INTERVAL_S)
            await self.deliver()
            if not any(namespace.listeners for namespace in self._context.cache.namespaces.values()):
                subscribed.clear()

    async def deliver(self) -> None:
        """Deliver the events since the last time."""
        for step, _ in enumerate(self._steps(), 1):
            if step % STEPS_PER_TURN == 0:
                await asyncio.sleep(0)
        for session in self._context.sessions:
            session.events.send_gap()  # now: there may never be a next event

    def _steps(self) -> Iterator[None]:
        events = self._context.cache.entries.events
        self._mark_lost()
        while events:
            event = events.popleft()
            for encoded in _frames(event):
                for session in [s for s in self._context.sessions if s.events.namespace is event.namespace]:
                    session.events.send(encoded)
                    yield
            yield
            self._mark_lost()

    def _mark_lost(self) -> None:
        lost = self._context.cache.entries.events_lost
        if lost > self._lost:
            self._lost = lost
            for session in self._context.sessions:
                session.events.miss()


def _frames(event: Event) -> Iterator[Encoded]:
    """The frames of an event, encoded once for all subscribers."""
    step = KEYS_PER_EVENT * event.namespace.key_bytes
    for at in range(0, max(len(event.added), len(event.removed)), step):
        added, removed = event.added[at : at + step], event.removed[at : at + step]
        yield Encoded.of(Events(group=event.group, added=added, removed=removed))
