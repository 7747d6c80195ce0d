"""A circuit breaker: while a kind of call keeps failing, none is made, so that nothing waits for it. Pure, clock given.

CLOSED  every call is made; after `TIMEOUTS` time-outs in a row, or when half of the last `WINDOW` calls have
        failed, it opens
OPEN    no call is made; after a delay of 1, 2, 4 .. 60 s the owner tries the store with an unimportant probe
TRIAL   the probe succeeded: one call is made; its end closes the breaker or opens it again
"""

from __future__ import annotations

import enum
from collections import deque

TIMEOUTS = 3
WINDOW = 20
DELAY_S_MIN, DELAY_S_MAX = 1.0, 60.0


class BreakerState(enum.Enum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Breaker:
    """Guards one kind of call. Seconds are those of any one clock."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0  # times
        self._due_s = 0.0
        self._delay_s = DELAY_S_MIN
        self._stage = 0  # calls that began in an earlier stage do not count
        self._trying = False
        self._timeouts = 0
        self._ends: deque[bool] = deque(maxlen=WINDOW)
        self._successes = 0  # since it closed

    def allows(self) -> bool:
        """Returns whether a call may be made now."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.TRIAL and not self._trying)

    def begin(self) -> int:
        """Notes an allowed call. The return value goes to `end` or `withdraw`."""
        self._trying = self.state is BreakerState.TRIAL
        return self._stage

    def withdraw(self, call: int) -> None:
        """Notes that the call was not made after all."""
        if call == self._stage:
            self._trying = False

    def end(self, call: int, now_s: float, *, ok: bool, timed_out: bool = False) -> None:
        """Notes that the call has ended, or will end too late. Only the first report about a call counts: make only
        one.
        """
        if call != self._stage or self.state is BreakerState.OPEN:
            return
        if self.state is BreakerState.TRIAL:
            if ok:
                self._close()
            else:
                self._open(now_s)
            return
        self._ends.append(ok)
        self._timeouts = 0 if ok else self._timeouts + timed_out
        self._successes += ok
        if self._successes >= WINDOW:
            self._delay_s = DELAY_S_MIN
        if ok:
            return  # it may have recovered, whatever the window still has
        failed = self._ends.count(False)
        if self._timeouts >= TIMEOUTS or (len(self._ends) == WINDOW and 2 * failed >= WINDOW):
            self._open(now_s)

    def probe_in_s(self, now_s: float) -> float | None:
        """Returns the seconds after which to try the store; None: not at all."""
        return max(self._due_s - now_s, 0.0) if self.state is BreakerState.OPEN else None

    def probed(self, now_s: float, *, ok: bool) -> None:
        """Notes that the store was tried. No effect unless the breaker is open."""
        if self.state is not BreakerState.OPEN:
            return
        if ok:
            self.state = BreakerState.TRIAL
            self._stage += 1
            self._trying = False
        else:
            self._wait(now_s)

    def _close(self) -> None:
        self.state = BreakerState.CLOSED
        self._stage += 1
        self._trying = False
        self._timeouts = self._successes = 0
        self._ends.clear()

    def _open(self, now_s: float) -> None:
        self.state = BreakerState.OPEN
        self._stage += 1
        self._trying = False
        self.opened += 1
        self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        """Sets the next delay: it grows each time, and starts over only after a whole window of successes."""
        self._due_s = now_s + self._delay_s
        self._delay_s = min(2 * self._delay_s, DELAY_S_MAX)
