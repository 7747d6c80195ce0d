"""The blocking client's waits: poll, and running the steps of one call after the other."""

from __future__ import annotations

import select
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

from kvoffloadd.client.waiting import Gen, Wait
from kvoffloadd.errors import KvOffloadError

R = TypeVar("R")

_POLL_MS_MAX = 3_600_000.0


class Poll:
    """Implements `transport.Poller` on select.poll, and runs the steps of calls.

    A signal handler can raise anywhere. `amid` records where it did: False during the wait for descriptors alone, when
    everything else is consistent; True during anything else.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._steps: Gen[Any] | None = None  # of the call that runs, or was interrupted
        self._amid = False

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._poll.register(fd, select.POLLIN)  # first: every entry in the table can be unregistered
        self._readers[fd] = ready

    def watch_writable(self, fd: int, ready: Callable[[], None]) -> None:
        self._poll.register(fd, select.POLLIN | select.POLLOUT)
        self._writers[fd] = ready

    def unwatch_writable(self, fd: int) -> None:
        if self._writers.pop(fd, None) is not None:
            self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._writers.pop(fd, None)
        if self._readers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def run(self, steps: Gen[R], mend: Callable[[], None]) -> R:
        """Returns the value of a call. Raises the errors of its steps.

        `mend` repairs what a call that was interrupted left, and watches again what is open. It may be interrupted
        itself.
        """
        self._put_right(mend)
        self._amid = True
        self._steps = steps
        try:
            while True:
                self._carry_out(next(steps))
        except StopIteration as end:
            value: R = end.value
            self._amid = False
            return value
        except KvOffloadError:  # raised on purpose
            self._amid = False
            raise
        finally:
            self._put_right(mend)

    def _put_right(self, mend: Callable[[], None]) -> None:
        """Ends the steps that were run last, if they have not ended."""
        if self._steps is None:
            return
        if self._amid:
            self._readers, self._writers = {}, {}
            self._poll = select.poll()
            mend()
        self._amid = True
        self._steps.close()
        self._steps = None

    def _carry_out(self, wait: Wait) -> None:
        """Polls, once at least, until a target is done or the time has passed."""
        while True:
            left_ms = min(max(wait.until - monotonic(), 0.0) * 1000.0, _POLL_MS_MAX)
            self._amid = False
            ready = self._poll.poll(left_ms)
            self._amid = True
            for fd, events in ready:
                self._serve(fd, events)
            for target in wait.targets:
                if target.done:
                    return
            if monotonic() >= wait.until:
                return

    def _serve(self, fd: int, events: int) -> None:
        writer = self._writers.get(fd)
        if writer is not None and events & select.POLLOUT:
            writer()
        reader = self._readers.get(fd)  # looked up late: an earlier reader may have removed it
        if reader is not None and events & ~select.POLLOUT:
            reader()
