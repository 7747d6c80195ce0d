"""A session's subscription to the events of its namespace, and whether some were dropped: it may read too slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffloadd.protocol.connection import Encoded
from kvoffloadd.protocol.messages import Gap, Push
from kvoffloadd.server.peers.outbox import Outbox

FRAME_BYTES = 256
"""The bytes of a frame in addition to the keys that it names."""


@dataclass(slots=True, eq=False)
class Subscription:
    """One session's subscription to the events of its namespace."""

    outbox: Outbox
    push: Callable[[Push | Encoded], None]  # queues a message for the peer
    events_max: int  # frames that may wait in the outbox
    missed: bool = False  # events were dropped, and the peer has no notice yet
    tiers: bool = False  # whether it follows each tier

    def send(self, event: Encoded) -> None:
        """Sends an event. If the peer reads too slowly, the event is dropped, and a `gap` follows later."""
        if self._has_room(len(event.frame)):
            self.send_gap()
            self.push(event)
        else:
            self.missed = True

    def send_gap(self) -> None:
        """Sends a `gap` if events were dropped and the peer reads again."""
        if self.missed and self._has_room(0):
            self.missed = False
            self.push(Gap())

    def _has_room(self, size: int) -> bool:
        return len(self.outbox.frames) < self.events_max and self.outbox.room(size + FRAME_BYTES)
