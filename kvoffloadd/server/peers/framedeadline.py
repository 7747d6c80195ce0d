"""The deadline for the rest of a frame that has begun, and for the hello."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvoffloadd.scheduling.stuckdetector import StuckDetector

LOOKS = 4
"""The number of checks within the deadline. Several are necessary: a process that was stopped has read nothing."""


@dataclass(slots=True, eq=False)
class _Watch:
    """One frame. Its times are of a clock that stops while the deadline is paused."""

    limit_s: float
    patience: StuckDetector
    since_s: float
    next_s: float  # time of the next check
    behind_s: float = 0.0  # how far this clock lags behind the real one
    paused_s: float | None = None  # start of the pause


class FrameDeadline:
    """Calls `late(limit_s)` once if a deadline that has begun does not end within `limit_s`, not counting pauses. Event
    loop only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        late: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._late = late
        self._clock = clock
        self.watch: _Watch | None = None  # the current deadline; read-only for callers
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, limit_s: float) -> None:
        """Begins a deadline. A running one continues: it belongs to the frame, however often the rest of the frame is
        awaited.
        """
        if self.watch is None:
            now = self._clock()
            patience = StuckDetector(limit_s / LOOKS, now)
            self.watch = _Watch(limit_s, patience, now, now + patience.look_s)
            self._set_timer(self.watch, now)
        else:
            self.go_on()

    def pause(self) -> None:
        """Pauses the deadline, while the peer does not cause the delay."""
        if self.watch is not None and self.watch.paused_s is None:
            self.watch.paused_s = self._clock()
            self._cancel_timer()

    def go_on(self) -> None:
        """Ends a pause, if there is one."""
        watch = self.watch
        if watch is not None and watch.paused_s is not None:
            watch.behind_s += self._clock() - watch.paused_s
            watch.paused_s = None
            self._set_timer(watch, self._clock() - watch.behind_s)

    def end(self) -> None:
        """Ends the deadline: the frame has come, or is no longer awaited."""
        self.watch = None
        self._cancel_timer()

    def _set_timer(self, watch: _Watch, now: float) -> None:
        self._timer = self._loop.call_later(max(watch.next_s - now, 0.0), self._look, watch)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, watch: _Watch) -> None:
        now = self._clock() - watch.behind_s
        if watch.patience.is_over(now - watch.since_s, now, watch.limit_s):
            self.end()
            self._late(watch.limit_s)
        else:
            watch.next_s = now + watch.patience.look_s
            self._set_timer(watch, now)
