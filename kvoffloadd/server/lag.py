"""Measuring how late the event loop is, with a timer that should fire every few milliseconds."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from typing import Any

BEAT_S = 0.005
WINDOW_S = 2.0
LATE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class Lag:
    """Delays of beats. A delay is the loop's own work, or the machine did not let it run: the CPU time that the loop's
    thread took from one beat to the next shows which.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.worst_s = 0.0  # since the start, as the following
        self.worst_cpu_s = 0.0
        self.late_s = 0.0  # all delays together
        self.late = [0] * (len(LATE_S) + 1)  # beats by delay: up to each of LATE_S, and above all
        self._loop = loop
        self._windows = (0.0, 0.0)
        self._cpu_windows = (0.0, 0.0)
        self._cpu_s = 0.0
        self._window_ends = 0.0
        self._handle: asyncio.TimerHandle | None = None

    @property
    def recent_s(self) -> float:
        """The longest delay in the last WINDOW_S to 2 * WINDOW_S."""
        return max(self._windows)

    @property
    def recent_cpu_s(self) -> float:
        """The most CPU time of the loop's thread between two beats, in the same time."""
        return max(self._cpu_windows)

    def figures(self) -> dict[str, Any]:
        """For `status`."""
        names = [*(f"{bound:g}" for bound in LATE_S), "inf"]
        return {
            "worst_lag_s": round(self.worst_s, 6),
            "recent_lag_s": round(self.recent_s, 6),
            "worst_cpu_s": round(self.worst_cpu_s, 6),
            "recent_cpu_s": round(self.recent_cpu_s, 6),
            "late_s": round(self.late_s, 6),
            "late_beats": dict(zip(names, self.late, strict=True)),
        }

    def start(self) -> None:
        """Begin to beat. Pair with `stop`."""
        now = self._loop.time()
        self._cpu_s = time.thread_time()
        self._window_ends = now + WINDOW_S
        self._handle = self._loop.call_at(now + BEAT_S, self._beat, now + BEAT_S)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _beat(self, due: float) -> None:
        now = self._loop.time()
        late = max(0.0, now - due)
        before, self._cpu_s = self._cpu_s, time.thread_time()
        took_s = self._cpu_s - before
        self.worst_cpu_s = max(self.worst_cpu_s, took_s)
        self.worst_s = max(self.worst_s, late)
        self.late_s += late
        self.late[bisect_left(LATE_S, late)] += 1
        if now >= self._window_ends:
            self._windows = (0.0, self._windows[0])
            self._cpu_windows = (0.0, self._cpu_windows[0])
            self._window_ends = now + WINDOW_S
        self._windows = (max(self._windows[0], late), self._windows[1])
        self._cpu_windows = (max(self._cpu_windows[0], took_s), self._cpu_windows[1])
        self._handle = self._loop.call_at(now + BEAT_S, self._beat, now + BEAT_S)
