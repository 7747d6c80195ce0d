"""Reads small objects concurrently, for clients of stores with calls that may hang: one that does delays no other."""

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
    """A limited number of threads. A lot that misses its time keeps its thread, and fails at once until that is free
    again: repeated requests for it take no further threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "reader")
        self._lock = threading.Lock()
        self._late: Counter[str] = Counter()  # threads that each lot keeps

    def read(
        self, lots: Mapping[str, Sequence[str]], work: Callable[[Sequence[str]], Values], until_s: float
    ) -> dict[str, bytes | int | None]:
        """Returns the results of `work` for each name. `lots`: names that share their fate, as those on one machine; if
        a lot is late, or fails, all of its names are FAILED.
        """
        futures = {lot: self._threads.submit(work, names) for lot, names in lots.items() if not self._is_late(lot)}
        wait(futures.values(), max(until_s - time.monotonic(), 0.0))
        found: dict[str, bytes | int | None] = {}
        for lot, names in lots.items():
            values = self._values(lot, futures[lot]) if lot in futures else None
            found.update(zip(names, [Code.FAILED] * len(names) if values is None else values, strict=True))
        return found

    def _is_late(self, lot: str) -> bool:
        with self._lock:
            return self._late[lot] > 0

    def _values(self, lot: str, call: Future[Values]) -> Values | None:
        """Returns None if there are no values in time."""
        if call.cancel():
            return None  # it had not begun
        if not call.done():
            with self._lock:
                self._late[lot] += 1
            call.add_done_callback(lambda _: self._let_go(lot))
            return None
        try:
            return call.result()
        except Exception:  # a client of a store may raise anything, and the other lots continue
            log.exception("the engine failed")
            return None

    def _let_go(self, lot: str) -> None:
        with self._lock:
            self._late[lot] -= 1
            if not self._late[lot]:
                del self._late[lot]
