"""Key events, from the cache's bounded queue to the sessions that subscribed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffloadd.server.context import Context

INTERVAL_S = 0.02
"""How long events are gathered before they are told."""

KEYS_PER_EVENT = 32_768
"""A larger event is told in pieces, so that each fits a frame and none needs an outbox for itself."""


class EventFeed:
    """Runs beside everything else; while nobody listens there are no events."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lost = 0

    async def run(self) -> None:
        """Until cancelled."""
        subscribed = self._context.subscribed
        while True:
            await subscribed.wait()
            await asyncio.sleep(INTERVAL_S)
            self.deliver()
            if not any(namespace.listeners for namespace in self._context.cache.namespaces.values()):
                subscribed.clear()

    def deliver(self) -> None:
        """What has come since the last time."""
        entries, sessions = self._context.cache.entries, self._context.sessions
        if entries.events_lost > self._lost:
            self._lost = entries.events_lost
            for session in sessions:
                session.miss_events()
        while entries.events:
            event = entries.events.popleft()
            step = KEYS_PER_EVENT * event.namespace.key_bytes
            for at in range(0, max(len(event.added), len(event.removed)), step):
                added, removed = event.added[at : at + step], event.removed[at : at + step]
                for session in sessions:
                    session.tell(event.namespace, event.group, added, removed)
        for session in sessions:
            session.tell_gap()  # perhaps nothing more ever happens, so it can't wait for the next event
