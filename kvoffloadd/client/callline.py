"""The order of a blocking client's calls: a lock that no exception of a signal's handler can leave locked.

Such an exception can come between any two instructions, also between taking a lock and the `try` that gives it back.
So nothing here depends on code that runs at the end of a call. A call stands in line with its frame, and the
interpreter tells whether a frame still runs: who waits behind one that does not knows that its call was interrupted.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import takewhile
from time import monotonic
from types import FrameType

from kvoffloadd.errors import DeadlineError, UsageError

_LOOK_AGAIN_S = 0.05
"""Nobody tells those behind it of a call that was interrupted."""


class CallTicket:
    """A call's place in the line."""

    __slots__ = ("_frame", "thread", "turn")

    def __init__(self, frame: FrameType) -> None:
        """`frame`: of the function that enters the line, does the call, and leaves the line."""
        self._frame: FrameType | None = frame
        self.thread = threading.get_ident()
        self.turn = threading.Lock()
        """Released when it is worth looking whether it is this call's turn."""
        self.turn.acquire()

    def is_over(self) -> bool:
        """Whether its function has ended, so that no line of the call runs any more. Any thread can tell."""
        try:
            if self._frame is not None:
                self._frame.clear()
        except RuntimeError:  # the interpreter clears no frame that runs
            return False
        return True

    def end(self) -> None:
        """The call has left the line. Its frame, which holds this ticket, is let go."""
        self._frame = None

    def look(self) -> None:
        """Have it look whether it is its turn."""
        with suppress(RuntimeError):  # told already
            self.turn.release()


class CallersLine:
    """Calls, one after the other, in the order in which they came.

    Ownership: `_tickets` belongs to all threads; each operation on it is one that the interpreter does not interrupt.
    The first ticket whose function still runs has the client.
    """

    def __init__(self) -> None:
        self._tickets: list[CallTicket] = []

    def enter(self, ticket: CallTicket, until: float) -> None:
        """Wait until all calls before this one have ended. The caller leaves again, whatever this raises.

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
        """Nothing if it is not in line."""
        try:  # noqa: SIM105  every call comes here, and `suppress` takes a microsecond
            self._tickets.remove(ticket)
        except ValueError:
            pass
        ticket.end()
        for first in self._tickets[:1]:
            first.look()

    def _ahead_of(self, ticket: CallTicket) -> list[CallTicket]:
        """The calls before it that go on."""
        going_on = []
        for other in takewhile(lambda other: other is not ticket, self._tickets[:]):
            if other.is_over():
                self.leave(other)
            else:
                going_on.append(other)
        return going_on
