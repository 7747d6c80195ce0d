"""Measures how late the event loop is, with a timer that should fire every few milliseconds."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

BEAT_S = 0.005
IDLE_BEAT_S = 0.05
"""The pause between the beats of an idle loop: 200 wake-ups a second take 1.6 % of a core, and keep it from
sleeping.
"""
WORK_S = 0.0005
"""CPU time from one beat to the next that counts as work: a beat alone takes a fifth of it."""
QUIET_BEATS = 20
"""Beats without work before the loop counts as idle."""
WINDOW_S = 2.0
LATE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


class Lag:
    """Measures delays of beats. A delay is caused by the loop's own work, or by the machine: the CPU time of the loop's
    thread from one beat to the next shows which. An idle loop beats less often, until `wake`, and calls `on_idle` then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_idle: Callable[[], None] = lambda: None) -> None:
        self.worst_s = 0.0  # since the start, like the following
        self.worst_cpu_s = 0.0
        self.late_s = 0.0  # sum of all delays
        self.late = [0] * (len(LATE_S) + 1)  # beats by delay: up to each of LATE_S, and above all
        self._loop = loop
        self._on_idle = on_idle
        self._windows = (0.0, 0.0)
        self._cpu_windows = (0.0, 0.0)
        self._cpu_s = 0.0
        self._window_ends = 0.0
        self._quiet = 0  # beats without work, in a row
        self._handle: asyncio.TimerHandle | None = None

    @property
    def recent_s(self) -> float:
        """Returns the longest delay in the last WINDOW_S to 2 * WINDOW_S."""
        return max(self._windows)

    @property
    def recent_cpu_s(self) -> float:
        """Returns the most CPU time of the loop's thread between two beats, in the same time."""
        return max(self._cpu_windows)

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
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
        """Begins to beat. Pair with `stop`."""
        now = self._loop.time()
        self._cpu_s = time.thread_time()
        self._window_ends = now + WINDOW_S
        self._beat_at(now + BEAT_S)

    def wake(self) -> None:
        """Signals that work begins, such as a request: if the loop was idle, beats are frequent from now on."""
        if self._quiet < QUIET_BEATS or self._handle is None:
            return
        self._quiet = 0
        self._handle.cancel()
        self._cpu_s = time.thread_time()
        self._beat_at(self._loop.time() + BEAT_S)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _beat_at(self, due: float) -> None:
        self._handle = self._loop.call_at(due, self._beat, due)

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
        self._quiet = 0 if took_s > WORK_S else self._quiet + 1
        is_idle = self._quiet >= QUIET_BEATS
        self._beat_at(now + (IDLE_BEAT_S if is_idle else BEAT_S))
        if is_idle:
            self._on_idle()
