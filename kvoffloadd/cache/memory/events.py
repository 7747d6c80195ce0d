"""Events of keys that wait to be told, in a queue for each namespace. Event loop only.

All queues share one bound. A user may have no more of it than is then left for all others, and a namespace no more of
that than is left for the user's other ones (see `shares`): who makes events faster than they are told loses his own.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.scheduling.shares import share_left

WAITING_BYTES_MAX = 128 << 20
EVENT_BYTES = 256
"""What an event takes beside its keys, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Keys of one namespace and group became complete, or were removed."""

    namespace: Namespace
    group: int
    added: bytes  # packed keys
    removed: bytes  # packed keys

    @property
    def size(self) -> int:
        """Bytes of memory that it takes."""
        return EVENT_BYTES + len(self.added) + len(self.removed)


@dataclass(slots=True)
class _EventQueue:
    events: deque[Event] = field(default_factory=deque)
    bytes: int = 0
    lost: bool = False  # events older than these, and nobody was told


class WaitingEvents:
    """The events of all namespaces."""

    def __init__(self, bytes_max: int = WAITING_BYTES_MAX) -> None:
        self.lost = 0  # since the start
        self._bytes_max = bytes_max
        self._bytes = 0
        self._bytes_by_uid = Counter[int]()
        self._queues: dict[Namespace, _EventQueue] = {}  # those of which there is something to tell

    def waits(self, namespace: Namespace) -> bool:
        """Whether there is something to tell of this namespace."""
        return namespace in self._queues

    def put(self, event: Event) -> None:
        """The event waits behind those of its namespace. Without room, it takes that of the oldest of them, which are
        lost. What then waits is later than what was lost, so it is right after a snapshot that was read in between.
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
    def take(self, namespace: Namespace) -> Event | None:
        """The oldest event of a namespace. None: there is none."""
        queue = self._queues.get(namespace)
        if queue is None:
            return None
        event = self._remove(queue) if queue.events else None
        if not queue.events and not queue.lost:
            del self._queues[namespace]
        return event

    @changing
    def take_loss(self, namespace: Namespace) -> bool:
        """Whether events were lost that are older than those that wait: to be told before the next one, once."""
        queue = self._queues.get(namespace)
        if queue is None or not queue.lost:
            return False
        queue.lost = False
        return True

    def _left(self, uid: int, bytes_of_namespace: int) -> int:
        """How many more bytes a namespace of this user may have."""
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
