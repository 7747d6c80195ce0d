"""Waiting until a worker says that its blocks are final.

A signal is a u64 in shared memory that only grows: a worker's stream raises it behind the work that a job depends on
(cuStreamWriteValue64 to registered host memory, see docs/PROTOCOL.md). Reading it costs no call and no GPU work, and a
worker that dies leaves nothing behind that could not be given up: nothing is ever queued on a GPU that waits for it.

Ownership
    _lock, _waits   the waits under way; the loop adds and removes, the thread takes a copy and removes.
    Wait            `done` is the loop's; the rest never changes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffloadd.device.copyruns import read_words
from kvoffloadd.errors import UsageError
from kvoffloadd.model import Outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

POLL_MIN_S, POLL_MAX_S = 20e-6, 1e-3
_PATIENCE = 1 / 16
"""The pause before the next look, as a share of how long the youngest wait has lasted."""


class Ready(NamedTuple):
    """When a job may begin: once the u64 at `address`, which is aligned, is at least `value`."""

    address: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait."""

    ready: Ready
    deadline_s: float
    done: Callable[[Outcome], None]
    began_s: float = field(default_factory=time.monotonic)


def _ends(waits: list[Wait]) -> list[Outcome | None]:
    """How each of them ends now: DONE, or FAILED if its word is gone; None: not yet."""
    values, gone = read_words(np.array([wait.ready.address for wait in waits], np.uint64))
    return [
        Outcome.FAILED if lost else Outcome.DONE if value >= wait.ready.value else None
        for wait, value, lost in zip(waits, values.tolist(), gone.tolist(), strict=True)
    ]


class Signals:
    """All waits of the daemon, and the one thread that looks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waits: dict[Wait, None] = {}
        self._closing = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Waits under way."""
        return len(self._waits)

    def wait(self, ready: Ready, deadline_s: float, done: Callable[[Outcome], None]) -> Wait:
        """Calls `done` on the loop, never within this call, once: with DONE when the worker is ready, with EXPIRED at
        `deadline_s` of `loop.time()`, with FAILED when the word's page is gone, with CANCELLED at `close`.

        The caller sees to it that the address stays mapped until then, or until `cancel`.

        Raises:
            UsageError: closed.
        """
        wait = Wait(ready, deadline_s, done)
        if self._closing:
            raise UsageError("signals: closed")
        (outcome,) = _ends([wait])
        if outcome is not None:  # mostly the case: no thread is woken for it
            self._loop.call_soon(done, outcome)
            return wait
        with self._lock:
            self._waits[wait] = None
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="kvo-signals", daemon=True)
            self._thread.start()
        return wait

    def cancel(self, wait: Wait) -> bool:
        """Ends a wait. True: `done` is not called. False: it was, or is about to be."""
        with self._lock:  # the thread reads no address without it
            return self._waits.pop(wait, self) is None

    def close(self) -> None:
        """Cancels all waits and ends the thread."""
        with self._lock:
            self._closing = True
            dropped = list(self._waits)
            self._waits.clear()
            self._changed.notify()
        for wait in dropped:
            self._loop.call_soon(wait.done, Outcome.CANCELLED)

    # --- the thread -----------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._closing:
            now = time.monotonic()
            ended: list[tuple[Wait, Outcome]] = []
            with self._lock:
                waits = list(self._waits)
                for wait, outcome in zip(waits, _ends(waits), strict=True):
                    if outcome is not None:
                        ended.append((wait, outcome))
                    elif now >= wait.deadline_s:
                        ended.append((wait, Outcome.EXPIRED))
                for wait, _ in ended:
                    del self._waits[wait]
                youngest = max((wait.began_s for wait in self._waits), default=0.0)
                idle = not self._waits and not self._closing
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could be told
                for wait, outcome in ended:
                    self._loop.call_soon_threadsafe(wait.done, outcome)
            if idle:
                with self._lock:
                    while not self._waits and not self._closing:
                        self._changed.wait()
            else:
                time.sleep(min(max((now - youngest) * _PATIENCE, POLL_MIN_S), POLL_MAX_S))
