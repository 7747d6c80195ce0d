"""A queue of callbacks from threads to the event loop, which runs a bounded number of them per turn.

Ownership
    _lock       guards `_queue` and `_waking`; it is never held while a callback runs.
    _queue      callbacks with their values: threads append, the loop takes them in order.
    _waking     the loop has been woken and has not yet found `_queue` empty: the next value needs no wakeup.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

TURN_S = 0.002
"""How long one turn of the loop takes values: none begins later than this."""


class Deliveries:
    """`name`: whose they are, for messages."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._loop = loop
        self._lock = threading.Lock()
        self._queue: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._waking = False

    def put(self, done: Callable[[Any], None], value: object) -> None:
        """Calls `done(value)` on the loop, behind all that was put before. From any thread. Nothing happens if the loop
        is closed: there is no loop left to run it.
        """
        with self._lock:
            self._queue.append((done, value))
            if self._waking:
                return
            self._waking = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        turn_ends = time.monotonic() + TURN_S
        while True:
            with self._lock:
                if not self._queue:
                    self._waking = False
                    return
                done, value = self._queue.popleft()
            try:
                done(value)
            except Exception as error:  # noqa: BLE001  one callback's bug may not cost the others their values
                self._loop.call_exception_handler(
                    {"message": f"{self._name}: a completion callback failed", "exception": error}
                )
            if time.monotonic() >= turn_ends:
                self._loop.call_soon(self._deliver)  # even if none is left now: only here `_waking` ends
                return
