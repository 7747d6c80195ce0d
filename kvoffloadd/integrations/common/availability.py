"""Whether the daemon answers one of the adapter's threads, and when that thread tries again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import monotonic

from kvoffloadd.client.connector import backoffs

_RETRY_MAX_S = 2.0


class Availability:
    """How the last attempts to reach the daemon went. It belongs to one thread, which says how each of them ended.

    The pauses between attempts grow with each failure in a row, up to two seconds. Of failures in a row one is logged.
    """

    def __init__(self, logger: logging.Logger) -> None:
        """`logger`: the engine's, which is told."""
        self.error: Exception | None = None
        """Why the last attempt failed; None: it did not, or there was none."""
        self._logger = logger
        self._warned = False
        self._pauses = _pauses()
        self._retry_at = 0.0

    @property
    def retry_in_s(self) -> float:
        """How long to wait before the next attempt; 0.0: it may be now."""
        return max(self._retry_at - monotonic(), 0.0)

    def succeeded(self) -> None:
        """The daemon answers."""
        if self._warned:
            self._logger.info("kvoffloadd: the daemon answers again")
        self.error = None
        self._warned = False
        self._pauses = _pauses()
        self._retry_at = 0.0

    def failed(self, error: Exception, warning: str = "") -> None:
        """It does not. `warning` is logged with the error unless one was since the last success; empty: never."""
        self.error = error
        self._retry_at = monotonic() + next(self._pauses)
        if warning and not self._warned:
            self._warned = True
            self._logger.warning("kvoffloadd: %s: %s", warning, error)


def _pauses() -> Iterator[float]:
    return (min(pause_s * 8, _RETRY_MAX_S) for pause_s in backoffs())
