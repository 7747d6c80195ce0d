"""How late the loop is: what is remembered, for how long, on a clock of the test's own and on a real loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvoffloadd.scheduling.lag import BEAT_S, IDLE_BEAT_S, QUIET_BEATS, WINDOW_S, Lag


@dataclass(eq=False)
class Timer:
    when: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class LoopClock:
    """A loop whose time the test moves. `sleep(s)`: the loop runs; `block(s)`: it is held."""

    now: float = 1000.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(when, lambda: call(*args))
        self.timers.append(timer)
        return timer

    def block(self, seconds: float) -> None:
        self.now += seconds
        self._run()

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._next() <= end:
            self.now = max(self.now, self._next())
            self._run()
        self.now = end

    def _next(self) -> float:
        return min((timer.when for timer in self.timers if not timer.cancelled), default=float("inf"))

    def _run(self) -> None:
        due = [timer for timer in self.timers if timer.when <= self.now]
        self.timers = [timer for timer in self.timers if timer.when > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.call()


@pytest.fixture
def clock() -> LoopClock:
    return LoopClock()


@pytest.fixture
def lag(clock: LoopClock) -> Lag:
    made = Lag(clock)  # type: ignore[arg-type]
    made.start()
    return made


def test_a_loop_that_keeps_time_is_not_late(clock: LoopClock, lag: Lag) -> None:
    clock.sleep(10)
    assert lag.worst_s == pytest.approx(0, abs=1e-9)
    assert lag.recent_s == pytest.approx(0, abs=1e-9)


def hold(clock: LoopClock, lag: Lag, seconds: float) -> None:
    """A request holds the loop."""
    lag.wake()
    clock.block(seconds)


def test_the_worst_stays_and_the_recent_fades(clock: LoopClock, lag: Lag) -> None:
    clock.sleep(0.5)
    hold(clock, lag, 0.3)
    late = lag.worst_s
    assert 0.29 < late < 0.31
    assert lag.recent_s == late
    clock.sleep(WINDOW_S)
    assert lag.recent_s == late, "it is not forgotten before a whole window has passed"
    clock.sleep(WINDOW_S)
    assert lag.recent_s == pytest.approx(0, abs=1e-9)
    assert lag.worst_s == late
    hold(clock, lag, 0.1)
    assert 0.09 < lag.recent_s < 0.11
    assert lag.worst_s == late


@pytest.mark.parametrize("before_s", [0.0, 0.1, WINDOW_S / 2, WINDOW_S - 0.01, WINDOW_S + 0.3])
def test_the_recent_covers_one_to_two_windows_whenever_the_delay_was(
    clock: LoopClock, lag: Lag, before_s: float
) -> None:
    clock.sleep(before_s)
    hold(clock, lag, 0.05)
    clock.sleep(WINDOW_S - 0.06)
    assert lag.recent_s > 0.04
    clock.sleep(WINDOW_S + 4 * IDLE_BEAT_S)
    assert lag.recent_s == pytest.approx(0, abs=1e-9)


def test_a_smaller_delay_does_not_hide_a_larger_one(clock: LoopClock, lag: Lag) -> None:
    hold(clock, lag, 0.2)
    hold(clock, lag, 0.1)
    assert lag.worst_s == lag.recent_s > 0.19
    clock.sleep(WINDOW_S)
    hold(clock, lag, 0.02)
    assert lag.recent_s > 0.19


def test_missed_beats_are_not_made_up_for(clock: LoopClock, lag: Lag) -> None:
    clock.block(1.0)
    assert len(clock.timers) == 1
    assert clock.timers[0].when == pytest.approx(clock.now + BEAT_S)
    clock.sleep(0.5)
    assert lag.worst_s < 1.01, "one delay counts once"


def test_who_waits_for_an_idle_loop_is_called_then_and_not_while_it_works(
    monkeypatch: pytest.MonkeyPatch, clock: LoopClock
) -> None:
    cpu_s, calls_at = [50.0], list[float]()
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s[0])
    lag = Lag(clock, lambda: calls_at.append(clock.now))  # type: ignore[arg-type]
    lag.start()
    for _ in range(10 * QUIET_BEATS):
        cpu_s[0] += 0.001
        clock.sleep(BEAT_S)
    assert calls_at == []
    begun = clock.now
    clock.sleep(1.0)
    assert calls_at[0] == pytest.approx(begun + QUIET_BEATS * BEAT_S, abs=2 * BEAT_S)
    assert len(calls_at) > 2, "each beat, as long as it stays idle"


def test_what_the_loop_worked_is_told_apart_from_what_it_waited(
    monkeypatch: pytest.MonkeyPatch, clock: LoopClock
) -> None:
    cpu_s = 50.0
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s)
    lag = Lag(clock)  # type: ignore[arg-type]
    lag.start()
    clock.sleep(0.1)
    cpu_s += 0.03
    clock.block(0.3)  # most of it without a core
    assert lag.worst_cpu_s == lag.recent_cpu_s == pytest.approx(0.03)
    clock.sleep(2 * WINDOW_S)
    assert lag.recent_cpu_s == pytest.approx(0)
    cpu_s += 0.02
    clock.sleep(0.1)
    assert lag.recent_cpu_s == pytest.approx(0.02)
    assert lag.worst_cpu_s == pytest.approx(0.03)
    lag.stop()


def beats(lag: Lag) -> int:
    return sum(lag.late)


def test_an_idle_loop_beats_rarely(clock: LoopClock, lag: Lag) -> None:
    clock.sleep(QUIET_BEATS * BEAT_S)
    before = beats(lag)
    clock.sleep(100 * IDLE_BEAT_S)
    assert beats(lag) - before == pytest.approx(100, abs=2)


def test_work_makes_beats_frequent_again(monkeypatch: pytest.MonkeyPatch, clock: LoopClock, lag: Lag) -> None:
    cpu_s = time.thread_time()
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s)
    clock.sleep(1.0)
    cpu_s += 0.002
    clock.sleep(IDLE_BEAT_S)
    before = beats(lag)
    clock.sleep(QUIET_BEATS * BEAT_S / 2)
    assert beats(lag) - before == pytest.approx(QUIET_BEATS / 2, abs=1)


def test_a_request_to_an_idle_loop_is_measured_from_its_start(
    monkeypatch: pytest.MonkeyPatch, clock: LoopClock
) -> None:
    """Neither hidden by the long interval, nor charged with what the loop did before."""
    cpu_s = 50.0
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s)
    lag = Lag(clock)  # type: ignore[arg-type]
    lag.start()
    clock.sleep(1.0 + IDLE_BEAT_S / 2)
    cpu_s += 0.0004
    lag.wake()
    cpu_s += 0.02
    clock.block(0.03)
    assert lag.worst_s == pytest.approx(0.03 - BEAT_S)
    assert lag.worst_cpu_s == pytest.approx(0.02)
    assert len(clock.timers) == 1, "the beat that was due later is not another one"
    lag.wake()  # it is awake
    assert len(clock.timers) == 1


def test_nothing_wakes_a_loop_that_does_not_beat(clock: LoopClock, lag: Lag) -> None:
    clock.sleep(1.0)
    lag.stop()
    lag.wake()
    assert clock.timers == [] or all(timer.cancelled for timer in clock.timers)


def test_no_beats_after_stop(clock: LoopClock, lag: Lag) -> None:
    clock.sleep(0.1)
    lag.stop()
    clock.block(5)
    assert lag.worst_s == pytest.approx(0, abs=1e-9)
    assert clock.timers == []
    lag.stop()
    Lag(clock).stop()  # type: ignore[arg-type]


async def test_a_real_loop_that_is_held_is_late() -> None:
    lag = Lag(asyncio.get_running_loop())
    lag.start()
    await asyncio.sleep(3 * BEAT_S)
    time.sleep(0.08)  # noqa: ASYNC251  it is what the test is about
    await asyncio.sleep(3 * BEAT_S)
    lag.stop()
    assert lag.worst_s >= 0.08 - BEAT_S
    assert lag.recent_s == lag.worst_s
