"""A read window: the bytes of slots that may be reserved at once for reads from one place. Event loop only."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvoffloadd.scheduling.fairqueue import FairQueue
from kvoffloadd.scheduling.lanes import Flow

T = TypeVar("T", bound=Hashable)


class Window(Generic[T]):
    """A bound on reserved bytes. A fetch that finds no room waits; users and engines take turns."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._first: deque[T] = deque()
        self._waiting: FairQueue[T] = FairQueue(max(limit_bytes, 1))

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether this number of bytes may be reserved now. Requests larger than the whole window go alone."""
        return not self.used_bytes or self.used_bytes + num_bytes <= self.limit_bytes

    @property
    def is_busy(self) -> bool:
        """Whether other fetches wait for room: a new one has to wait behind them."""
        return bool(self.used_bytes and (self._first or len(self._waiting)))

    def wait(self, waiter: T, flow: Flow, num_bytes: int) -> None:
        """Queues a waiter that wants this number of bytes."""
        self._waiting.push(((flow.uid, flow.divisor), (flow.instance, 1)), waiter, max(num_bytes, 1))

    def wait_first(self, waiter: T) -> None:
        """Queues a waiter, returned by `next` but still without room, before all others."""
        self._first.append(waiter)

    def next(self) -> T | None:
        """Takes the waiter whose turn it is out of the queue; None: none waits."""
        return self._first.popleft() if self._first else self._waiting.take()
