"""The order of a blocking client's calls: a lock that no exception of a signal handler can leave locked.

Such an exception can come between any two instructions, also between taking a lock and the `try` that releases it. So
nothing here depends on code that runs at the end of a call. A call stands in line with its frame, and the interpreter
knows whether a frame still runs: a call that waits behind a frame that does not run knows that it was interrupted.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import takewhile
from time import monotonic
from types import FrameType

from kvoffloadd.errors import DeadlineError, UsageError

_LOOK_AGAIN_S = 0.05
"""How often a waiting call checks the line: nothing notifies it when a call before it was interrupted."""


class CallTicket:
    """A call's place in the line."""

    __slots__ = ("_frame", "thread", "turn")

    def __init__(self, frame: FrameType) -> None:
        """Takes `frame`: that of the function that enters the line, makes the call, and leaves the line."""
        self._frame: FrameType | None = frame
        self.thread = threading.get_ident()
        self.turn = threading.Lock()
        """Released when the call should check whether its turn has come."""
        self.turn.acquire()

    def is_over(self) -> bool:
        """Returns whether its function has ended, so that no line of the call runs any more. Any thread may ask."""
        try:
            if self._frame is not None:
                self._frame.clear()
        except RuntimeError:  # the interpreter clears no frame that runs
            return False
        return True

    def end(self) -> None:
        """Drops the frame, which holds this ticket: the call has left the line."""
        self._frame = None

    def look(self) -> None:
        """Has the waiting call check whether its turn has come."""
        with suppress(RuntimeError):  # woken already
            self.turn.release()


class CallersLine:
    """Lets calls run one after the other, in the order in which they came.

    Ownership: `_tickets` belongs to all threads; the interpreter interrupts none of the operations on it. The first
    ticket with a function that still runs has the client.
    """

    def __init__(self) -> None:
        self._tickets: list[CallTicket] = []

    def enter(self, ticket: CallTicket, until: float) -> None:
        """Waits until all calls before this one have ended. The caller must leave again, whatever this raises.

        Raises DeadlineError, or UsageError where one of them waits for this call, since it runs beneath it.
        """
        self._tickets.append(ticket)
        while self._tickets[0] is not ticket and (ahead := self._ahead_of(ticket)):
            if any(other.thread == ticket.thread for other in ahead):
                raise UsageError(
                    "this thread is in a call of this client already, which can't go on before this one has ended: a "
                    "signal's handler or a destructor can't use the client of the call that it interrupts"
                )
            left_s = until - monotonic()
            if left_s <= 0:
                raise DeadlineError("calls of other threads used the client until the deadline")
            ticket.turn.acquire(timeout=min(left_s, _LOOK_AGAIN_S))

    def leave(self, ticket: CallTicket) -> None:
        """Removes the ticket; does nothing if it is not in line."""
        try:  # noqa: SIM105  every call comes here, and `suppress` takes a microsecond
            self._tickets.remove(ticket)
        except ValueError:
            pass
        ticket.end()
        for first in self._tickets[:1]:
            first.look()

    def _ahead_of(self, ticket: CallTicket) -> list[CallTicket]:
        """Returns the calls before it that go on."""
        going_on = []
        for other in takewhile(lambda other: other is not ticket, self._tickets[:]):
            if other.is_over():
                self.leave(other)
            else:
                going_on.append(other)
        return going_on
