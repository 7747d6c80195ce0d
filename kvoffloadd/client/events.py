"""Keys that come and go, as the daemon reports them to subscribers, kept until the caller fetches them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvoffloadd.client.keys import unpack_keys
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import MessageError, RemoteError
from kvoffloadd.model import Tier, U8Array
from kvoffloadd.protocol import messages

EVENTS_MAX = 10_000
"""Limit of events that wait for a caller to fetch them; beyond it they are dropped and replaced by a gap."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyEvents:
    """Keys of a group that became complete or went: u8 (keys, key_bytes) each. `tier`: in which tier, memory or disk;
    None: in the daemon as a whole.
    """

    group: int
    added: U8Array
    removed: U8Array
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class EventGap:
    """Marks a point before which events were lost (a slow reader, a lost connection): read a snapshot."""


Event = KeyEvents | EventGap


class EventQueue:
    """Collects the events of all connections of a client. `news` is done once there are some; `take` replaces it.

    `key_bytes`: width of the client's keys; None where it has no namespace, and so can't subscribe.
    """

    def __init__(self, key_bytes: int | None) -> None:
        self.subscribed = False
        self.tiers = False  # whether the subscription follows each tier, if the daemon can
        self.news = Waitable()
        self._key_bytes = key_bytes
        self._events: deque[Event] = deque()

    @contextmanager
    def subscribing(self, *, tiers: bool) -> Iterator[None]:
        """Expects events from now on, unless the daemon refuses the subscription."""
        self.subscribed, self.tiers = True, tiers
        try:
            yield
        except RemoteError:
            self.subscribed = False
            raise

    def take(self) -> list[Event]:
        """Returns the events since the last call."""
        events = list(self._events)
        self._events.clear()
        self.news = Waitable()
        return events

    def receive(self, push: messages.Events | messages.Gap) -> None:
        """Keeps the events of a message. Raises MessageError for keys without a subscription."""
        if isinstance(push, messages.Gap):
            self._add(EventGap())
            return
        if not self.subscribed or not self._key_bytes:
            raise MessageError("unexpected events: the session has not subscribed")
        added, removed = unpack_keys(push.added, self._key_bytes), unpack_keys(push.removed, self._key_bytes)
        self._add(KeyEvents(push.group, added, removed, None if push.tier is None else Tier(push.tier)))

    def connection_lost(self) -> None:
        """Adds a gap: the events until there is a new connection are lost."""
        if self.subscribed:
            self._add(EventGap())

    def _add(self, event: Event) -> None:
        if len(self._events) >= EVENTS_MAX:
            self._events.clear()
            event = EventGap()
        self._events.append(event)
        self.news.settle()
