"""Key events, from the cache's bounded queue to the sessions that subscribed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvoffloadd.server.context import Context

INTERVAL_S = 0.02
"""How long events are gathered before they are told."""


class EventFeed:
    """Runs beside everything else; while nobody listens there are no events."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def run(self) -> None:
        """Until cancelled."""
        subscribed = self._context.subscribed
        while True:
            await subscribed.wait()
            await asyncio.sleep(INTERVAL_S)
            self._deliver()
            if not any(namespace.listeners for namespace in self._context.cache.namespaces.values()):
                subscribed.clear()

    def _deliver(self) -> None:
        entries = self._context.cache.entries
        while entries.events:
            event = entries.events.popleft()
            for session in self._context.sessions:
                session.tell(event.namespace, event.group, event.added, event.removed)
