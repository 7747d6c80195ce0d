"""One copy in chunks: some threads of a lane take its chunks, one at a time and in turn with other copies', until none
is left. What every device's copies have in common.

Ownership: the event loop, except for these, which the threads of its lane share:
    _chunks     taken by threads, dropped by whoever stops the copy.
    _stop       why chunks are dropped; set by the loop (cancel, deadline) or by a thread (failure), which the GIL makes
                atomic. A copy that both ends and is stopped at the same time is judged by what was moved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvoffloadd.device.base import CopyResult
from kvoffloadd.device.chunks import Chunks
from kvoffloadd.device.plan import Copies
from kvoffloadd.lanes import AGAIN, DAEMON, Again, CancelledWork, Flow, Lane, Ticket
from kvoffloadd.model import Direction, Outcome

_URGENT, _ORDINARY = 0, 1


class Turn(NamedTuple):
    """Where a copy is to be made: by at most `threads` threads of `lane`, in the turns of its `flow`, before what is
    not `urgent`.
    """

    loop: asyncio.AbstractEventLoop
    lane: Lane
    threads: int
    urgent: bool
    flow: Flow = DAEMON


class ChunkedCopy:
    """From its making to `done`, which comes after `start`, or after what stops it before. `move` copies one chunk, in
    a lane's thread.
    """

    def __init__(
        self,
        chunks: Chunks,
        move: Callable[[Copies], None],
        turn: Turn,
        deadline_s: float,
        done: Callable[[CopyResult], None],
    ) -> None:
        self._move = move
        self._turn = turn
        self._chunks = chunks
        self._stop: Outcome | None = None
        self._deadline_s = deadline_s
        self._done = done
        self._reason = ""
        self._began_s = time.monotonic()
        self._tickets: list[Ticket] = []
        self._open_tickets = 0
        self._timer = turn.loop.call_at(deadline_s, self._drop, Outcome.EXPIRED)

    def start(self) -> None:
        """Queues it for its threads (for one, if there is nothing to copy: its end comes the same way). Once; later
        calls change nothing.
        """
        if self._tickets:
            return
        lane, urgency = self._turn.lane, _URGENT if self._turn.urgent else _ORDINARY
        for _ in range(self._chunks.share(self._turn.threads)):
            try:
                ticket = lane.submit(
                    self._copy_chunk,
                    self._on_ticket_end,
                    flow=self._turn.flow,
                    urgent=urgency,
                    cost_bytes=self._chunks.turn_bytes,
                )
            except Exception as error:
                if not self._tickets:
                    self._timer.cancel()
                    raise
                # A thread may be at it already: it ends with those that are queued, and not before.
                self._stop, self._reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
                self._chunks.drop()
                return
            self._tickets.append(ticket)
            self._open_tickets += 1

    def cancel(self) -> None:
        """See `Copy.cancel`."""
        self._drop(Outcome.CANCELLED)

    def busy_s(self, now: float) -> float:
        """See `Copy.busy_s`."""
        return max((ticket.running_s(now) for ticket in self._tickets), default=0.0)

    def _drop(self, outcome: Outcome) -> None:
        self._stop = self._stop or outcome
        self._chunks.drop()
        for ticket in self._tickets:
            ticket.cancel()
        self.start()

    # --- the lane's threads -----------------------------------------------------------------------

    def _copy_chunk(self) -> Again | None:
        if time.monotonic() >= self._deadline_s:  # the loop's timer may be late
            self._stop = self._stop or Outcome.EXPIRED
            self._chunks.drop()
        try:
            chunk = self._chunks.take()
            if chunk is None:
                return None
            if len(chunk):
                self._move(chunk)
        except BaseException:
            self._stop = Outcome.FAILED
            self._chunks.drop()
            raise
        self._chunks.note_moved(chunk)
        return AGAIN if self._chunks.left else None

    # --- the event loop -----------------------------------------------------------------------------

    def _on_ticket_end(self, value: Again | BaseException | None) -> None:
        if isinstance(value, BaseException) and not isinstance(value, CancelledWork):
            self._reason = self._reason or f"{type(value).__name__}: {value}"
        self._open_tickets -= 1
        if self._open_tickets == 0:
            self._timer.cancel()
            self._done(self._result())

    def _result(self) -> CopyResult:
        chunks = self._chunks
        # Chunks are left behind without a reason only when the lane is closed, which is a cancel as well.
        outcome = Outcome.DONE if chunks.complete else self._stop or Outcome.CANCELLED
        took_s = time.monotonic() - self._began_s
        return CopyResult(outcome, chunks.bytes, chunks.descriptors, chunks.copies, took_s, self._reason)


def lane_gauges(lanes: Mapping[Direction, Lane]) -> dict[str, int]:
    """`{store,load}_{queued,running}`: threads' turns that copies wait for, and have."""
    return {
        f"{direction.value}_{name}": getattr(lane, name)
        for direction, lane in lanes.items()
        for name in ("queued", "running")
    }
