"""The deadline of a frame that has begun to come, and of the hello."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvoffloadd.patience import Patience

LOOKS = 4
"""How often within the deadline the rest is looked for: while the process was stopped, nothing was read."""


class FrameDeadline:
    """`late(limit_s)` is called once if a deadline that has begun does not end within `limit_s`. Event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[float], None]) -> None:
        self._loop = loop
        self._late = late
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, limit_s: float) -> None:
        """Begin, unless one has begun."""
        if self._timer is None:
            now = time.monotonic()
            self._look_soon(limit_s, Patience(limit_s / LOOKS, now), now)

    def end(self) -> None:
        """The frame has come, or is not waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_soon(self, limit_s: float, patience: Patience, since_s: float) -> None:
        self._timer = self._loop.call_later(patience.look_s, self._look, limit_s, patience, since_s)

    def _look(self, limit_s: float, patience: Patience, since_s: float) -> None:
        now = time.monotonic()
        if patience.is_over(now - since_s, now, limit_s):
            self._timer = None
            self._late(limit_s)
        else:
            self._look_soon(limit_s, patience, since_s)
