"""The events of one session: what it subscribed to, and whether some were dropped because it reads too slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.protocol.connection import Encoded
from kvoffloadd.protocol.messages import Gap, Push
from kvoffloadd.server.outbox import Outbox

FRAME_BYTES = 256
"""Of a frame, beside the keys that it names."""


@dataclass(slots=True, eq=False)
class Subscription:
    """`push` queues a message for the peer; `events_max` frames may wait. `namespace`: whose events it hears; None: of
    none.
    """

    outbox: Outbox
    push: Callable[[Push | Encoded], None]
    events_max: int
    namespace: Namespace | None = None
    missed: bool = False

    def begin(self, namespace: Namespace) -> None:
        """Hear the events of this namespace, from now on. Pair with `end`."""
        if self.namespace is None:
            self.namespace = namespace
            namespace.listeners += 1

    def end(self) -> None:
        """Hear nothing more."""
        if self.namespace is not None:
            self.namespace.listeners -= 1
            self.namespace = None

    def tell(self, event: Encoded) -> None:
        """An event of the namespace; dropped, with a `gap`, when the peer reads too slowly."""
        if self._has_room(len(event.frame)):
            self.tell_gap()
            self.push(event)
        else:
            self.missed = True

    def miss(self) -> None:
        """Events were lost before they reached any session."""
        self.missed = self.namespace is not None

    def tell_gap(self) -> None:
        """If events were dropped and the peer reads again, say so."""
        if self.missed and self._has_room(0):
            self.missed = False
            self.push(Gap())

    def _has_room(self, size: int) -> bool:
        return len(self.outbox.frames) < self.events_max and self.outbox.room(size + FRAME_BYTES)
