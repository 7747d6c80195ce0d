"""Small objects read side by side, for clients of stores whose calls may hang: one that does holds up no other."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvoffloadd.agentwire.frames import Code

log = logging.getLogger(__name__)

Values = Sequence[bytes | int | None]
"""See `Engine.read`."""


class Readers:
    """So many threads. A lot that does not come in time keeps its thread, and fails at once until that is free again:
    however often it is asked for, it takes no further ones.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "reader")
        self._lock = threading.Lock()
        self._late: Counter[str] = Counter()  # threads that each lot keeps

    def read(
        self, lots: Mapping[str, Sequence[str]], work: Callable[[Sequence[str]], Values], until_s: float
    ) -> dict[str, bytes | int | None]:
        """What `work` finds for each name. `lots`: names that share their fate, as those that are on one machine; of
        what is late, or fails, all are FAILED.
        """
        asked = {lot: self._threads.submit(work, names) for lot, names in lots.items() if not self._is_late(lot)}
        wait(asked.values(), max(until_s - time.monotonic(), 0.0))
        found: dict[str, bytes | int | None] = {}
        for lot, names in lots.items():
            values = self._values(lot, asked[lot]) if lot in asked else None
            found.update(zip(names, [Code.FAILED] * len(names) if values is None else values, strict=True))
        return found

    def _is_late(self, lot: str) -> bool:
        with self._lock:
            return self._late[lot] > 0

    def _values(self, lot: str, call: Future[Values]) -> Values | None:
        """None: there are none in time."""
        if call.cancel():
            return None  # it had not begun
        if not call.done():
            with self._lock:
                self._late[lot] += 1
            call.add_done_callback(lambda _: self._let_go(lot))
            return None
        try:
            return call.result()
        except Exception:  # a client of a store may raise anything, and the other lots are there
            log.exception("the engine failed")
            return None

    def _let_go(self, lot: str) -> None:
        with self._lock:
            self._late[lot] -= 1
            if not self._late[lot]:
                del self._late[lot]
