"""A thread that carries out functions, one after the other, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvoffloadd.integrations.common.bugs import log_bug

logger = logging.getLogger("sglang.kvoffloadd")

Work = Callable[[], bool]


class Background:
    """Runs functions on a daemon thread, which ends with the process: a daemon that hangs can't keep an engine from its
    end.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Future[bool]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Work) -> Future[bool]:
        """Queues `work` and returns at once. The future has what `work` returns, or False where it raises."""
        done: Future[bool] = Future()
        self._queue.put((work, done))
        return done

    def close(self, deadline_s: float) -> None:
        """Waits until queued work has ended, until the deadline at most. `begin` must not be called any more."""
        self._queue.put(None)
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            work, done = given
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  the thread's boundary, logged
                log_bug(logger, self._thread.name, error)
                result = False
            done.set_result(result)
