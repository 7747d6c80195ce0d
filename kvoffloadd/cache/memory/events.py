"""Keeps events of keys that wait for delivery, in a queue for each namespace. Event loop only.

All queues share one bound. A user may have no more of it than is then left for all others, and a namespace no more of
that than is left for the user's other ones (see `shares`): a user who makes events faster than they are delivered loses
only this user's events.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.model import Tier
from kvoffloadd.scheduling.shares import share_left

WAITING_BYTES_MAX = 128 << 20
EVENT_BYTES = 256
"""The maximum memory of an event in addition to its keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Reports that keys of one namespace and group became complete, or were removed: in one tier, or for listeners that
    do not follow the tiers, in this daemon.
    """

    namespace: Namespace
    group: int
    added: bytes  # packed keys
    removed: bytes  # packed keys
    tier: Tier | None = None

    @property
    def size(self) -> int:
        """Returns the bytes of memory that the event takes."""
        return EVENT_BYTES + len(self.added) + len(self.removed)


@dataclass(slots=True)
class _EventQueue:
    events: deque[Event] = field(default_factory=deque)
    bytes: int = 0
    lost: bool = False  # older events were lost, and the loss is not reported yet


class WaitingEvents:
    """Keeps the events of all namespaces."""

    def __init__(self, bytes_max: int = WAITING_BYTES_MAX) -> None:
        self.lost = 0  # since the start
        self._bytes_max = bytes_max
        self._bytes = 0
        self._bytes_by_uid = Counter[int]()
        self._queues: dict[Namespace, _EventQueue] = {}  # those that have something to report

    def waits(self, namespace: Namespace) -> bool:
        """Returns whether there are events or losses of this namespace to report."""
        return namespace in self._queues

    def put(self, event: Event) -> None:
        """Adds an event to its namespace's queue. Without room, it replaces the oldest events of the queue, which are
        lost. The events left in the queue are later than the lost ones, so they are valid after a snapshot that was
        read in between.
        """
        queue = self._queues.setdefault(event.namespace, _EventQueue())
        room = self._left(event.namespace.uid, queue.bytes)
        while event.size > room and queue.events:
            room += self._remove(queue).size
            self._lose(queue)
        if event.size > room:
            self._lose(queue)
            return
        queue.events.append(event)
        self._count(queue, event, event.size)

    @changing
    def lose(self, namespace: Namespace) -> None:
        """Loses all waiting events of a namespace, and those of a change that happens now."""
        queue = self._queues.setdefault(namespace, _EventQueue())
        while queue.events:
            self._remove(queue)
            self.lost += 1
        self._lose(queue)

    @changing
    def take(self, namespace: Namespace) -> Event | None:
        """Returns the oldest event of a namespace, and removes it; None if there is none."""
        queue = self._queues.get(namespace)
        if queue is None:
            return None
        event = self._remove(queue) if queue.events else None
        if not queue.events and not queue.lost:
            del self._queues[namespace]
        return event

    @changing
    def take_loss(self, namespace: Namespace) -> bool:
        """Returns, once, whether events were lost that are older than the waiting ones. The caller reports the loss
        before the next event.
        """
        queue = self._queues.get(namespace)
        if queue is None or not queue.lost:
            return False
        queue.lost = False
        return True

    def _left(self, uid: int, bytes_of_namespace: int) -> int:
        """Returns how many more bytes a namespace of this user may have."""
        left = share_left(self._bytes_max, self._bytes, self._bytes_by_uid[uid])
        return share_left(left, 0, bytes_of_namespace)

    def _remove(self, queue: _EventQueue) -> Event:
        event = queue.events.popleft()
        self._count(queue, event, -event.size)
        return event

    def _lose(self, queue: _EventQueue) -> None:
        queue.lost = True
        self.lost += 1

    def _count(self, queue: _EventQueue, event: Event, size: int) -> None:
        uid = event.namespace.uid
        queue.bytes += size
        self._bytes += size
        self._bytes_by_uid[uid] += size
        if not self._bytes_by_uid[uid]:
            del self._bytes_by_uid[uid]
