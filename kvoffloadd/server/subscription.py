"""The events of one session: what it subscribed to, and whether some were dropped because it reads too slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.protocol.connection import Encoded
from kvoffloadd.protocol.messages import Gap, Push
from kvoffloadd.server.outbox import Outbox

FRAME_BYTES = 256
"""Bytes of a frame beside the keys that it names."""


@dataclass(slots=True, eq=False)
class Subscription:
    """A session's subscription to the events of its namespace."""

    outbox: Outbox
    push: Callable[[Push | Encoded], None]  # queues a message for the peer
    events_max: int  # frames that may wait in the outbox
    namespace: Namespace | None = None  # None: not subscribed
    missed: bool = False  # events were dropped, and the peer does not know yet

    def begin(self, namespace: Namespace) -> None:
        """Subscribe to the events of this namespace, from now on. Pair with `end`."""
        if self.namespace is None:
            self.namespace = namespace
            namespace.listeners += 1

    def end(self) -> None:
        if self.namespace is not None:
            self.namespace.listeners -= 1
            self.namespace = None

    def send(self, event: Encoded) -> None:
        """Send an event of the namespace; when the peer reads too slowly it is dropped, and a `gap` follows later."""
        if self._has_room(len(event.frame)):
            self.send_gap()
            self.push(event)
        else:
            self.missed = True

    def miss(self) -> None:
        """Events were lost before they reached any session."""
        self.missed = self.namespace is not None

    def send_gap(self) -> None:
        """Send a `gap` if events were dropped and the peer reads again."""
        if self.missed and self._has_room(0):
            self.missed = False
            self.push(Gap())

    def _has_room(self, size: int) -> bool:
        return len(self.outbox.frames) < self.events_max and self.outbox.room(size + FRAME_BYTES)
