"""One copy in chunks: some threads of a lane take its chunks, one at a time and in turn with other copies', until none
is left. All devices copy this way.

Ownership: the event loop, except for these, which the threads of its lane share:
    _chunks     taken by threads, dropped by the thread or the loop that stops the copy.
    _stop       why chunks are dropped; set by the loop (cancel, deadline) or by a thread (failure), which the GIL makes
                atomic. A copy that both ends and is stopped at the same time is judged by what was moved.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvoffloadd.device.base import CopyResult, Work
from kvoffloadd.device.plan import CHUNK_DESCRIPTORS, Copies
from kvoffloadd.model import Direction, Outcome
from kvoffloadd.scheduling.lanes import AGAIN, DAEMON, Again, CancelledWork, Flow, Lane, Ticket

PIECE_DESCRIPTORS = 32_768
"""Descriptors that are made in one go, in some milliseconds: enough that threads seldom wait for each other meanwhile,
and that adjacent ranges become large copies.
"""

_URGENT, _ORDINARY = 0, 1


Mover = Callable[[Copies], None]
"""Performs the copies of a chunk, in a lane's thread; raises what makes the copy FAILED."""


class Turn(NamedTuple):
    """Where to make a copy: in at most `threads` threads of `lane`, in the turns of its `flow`, ahead of copies that
    are not `urgent`.
    """

    loop: asyncio.AbstractEventLoop
    lane: Lane
    threads: int
    urgent: bool
    flow: Flow = DAEMON


class Chunks:
    """The chunks of one copy, made as threads ask for them, and the counts of moved bytes and descriptors. `cut` turns
    copies into chunks. `piece_bytes`: roughly the most that is made in one go. `at_once`: small work is made and cut
    immediately, in the event loop's thread.

    Ownership: any thread, through the methods. `_lock` guards every field that changes; it is never held while copies
    are made, which is most of the work.
    """

    def __init__(
        self,
        work: Work,
        direction: Direction,
        cut: Callable[[Copies], list[Copies]],
        piece_bytes: int,
        *,
        at_once: bool = True,
    ) -> None:
        self.bytes = self.descriptors = self.copies = 0
        self._work = work
        self._direction = direction
        self._cut = cut
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._dropped = False
        now = work.small and at_once
        self._made = deque(cut(work.make_all(direction)) if now else ())
        self._pieces = iter(()) if now else work.pieces(PIECE_DESCRIPTORS, piece_bytes)
        self._next = next(self._pieces, None)

    @property
    def turn_bytes(self) -> int:
        """Returns roughly what a chunk moves, as long as nothing has been taken."""
        if self._made:
            return self._work.total_bytes // len(self._made)
        return min(self._piece_bytes, self._work.total_bytes * CHUNK_DESCRIPTORS // max(self._work.descriptors, 1))

    @property
    def complete(self) -> bool:
        """Returns whether all of the work was moved."""
        return self.bytes == self._work.total_bytes

    def share(self, threads: int) -> int:
        """Returns how many of these threads find work; at least one, which reports the end."""
        return threads if self._next is not None else max(min(threads, len(self._made)), 1)

    def copy_next(self, mover: Mover) -> bool:
        """Takes a chunk, copies it, and counts the bytes that have arrived. Returns False if nothing is left for
        another turn. Blocks until the chunk is copied, and until its piece is made if necessary.
        """
        chunk = self._take()
        if chunk is None:
            return False
        if chunk.size.size:
            mover(chunk)
        with self._lock:
            self.bytes += int(chunk.size.sum())
            self.descriptors += chunk.descriptors
            self.copies += chunk.size.size
            return bool(self._made) or self._next is not None

    def _take(self) -> Copies | None:
        """Returns a chunk for this thread alone; None: none is left. The chunk is empty if no block of a piece is
        wanted: others have their turn before the next one.
        """
        with self._lock:
            if self._made:
                return self._made.popleft()
            piece = self._next
            if piece is None:
                return None
            self._next = next(self._pieces, None)
        copies = self._work.make(self._direction, piece)
        made = self._cut(copies)
        with self._lock:
            if self._dropped:
                return None
            self._made.extend(made[1:])
            return made[0] if made else copies

    def drop(self) -> None:
        """Drops all chunks that are not taken."""
        with self._lock:
            self._dropped = True
            self._made.clear()
            self._next = None


class ChunkedCopy:
    """Represents a copy from its creation to `done`, which is called after `start`, or after the cancel or deadline
    that stops the copy before that. The copy is in `under_way` until then. `mover` performs a chunk's copies, in a
    lane's thread.
    """

    def __init__(
        self,
        chunks: Chunks,
        mover: Mover,
        turn: Turn,
        deadline_s: float,
        done: Callable[[CopyResult], None],
        under_way: set[ChunkedCopy],
    ) -> None:
        self._mover = mover
        self._turn = turn
        self._chunks = chunks
        self._stop: Outcome | None = None
        self._deadline_s = deadline_s
        self._done = done
        self._under_way = under_way
        self._reason = ""
        self._began_s = time.monotonic()
        self._started = False
        self._tickets: list[Ticket] = []
        self._open_tickets = 0
        self._timer = turn.loop.call_at(deadline_s, self._drop, Outcome.EXPIRED)
        under_way.add(self)

    def start(self) -> None:
        """Queues it for its threads (for one, if there is nothing to copy, so that the end is reported the same way).
        Only the first call has an effect.

        Raises:
            UsageError: the lane is closed. Then the copy has ended, without `done`.
        """
        if self._started:
            return
        self._started = True
        turn, threads = self._turn, self._chunks.share(self._turn.threads)
        try:
            self._tickets = turn.lane.submit_all(
                threads,
                self._copy_chunk,
                self._on_ticket_end,
                flow=turn.flow,
                urgent=_URGENT if turn.urgent else _ORDINARY,
                cost_bytes=self._chunks.turn_bytes,
            )
        except BaseException:
            self._timer.cancel()
            self._under_way.discard(self)
            raise
        self._open_tickets = threads

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
            return AGAIN if self._chunks.copy_next(self._mover) else None
        except BaseException:
            self._stop = Outcome.FAILED
            self._chunks.drop()
            raise

    # --- the event loop -----------------------------------------------------------------------------

    def _on_ticket_end(self, value: Again | BaseException | None) -> None:
        if isinstance(value, BaseException) and not isinstance(value, CancelledWork):
            self._reason = self._reason or f"{type(value).__name__}: {value}"
        self._open_tickets -= 1
        if self._open_tickets == 0:
            self._timer.cancel()
            self._under_way.discard(self)
            done = self._done
            self._tickets.clear()
            # tickets and the job refer to this copy: it is freed with them, without a garbage collection
            del self._done
            done(self._result())

    def _result(self) -> CopyResult:
        chunks = self._chunks
        # Chunks are left over without a reason only when the lane is closed, which counts as a cancel.
        outcome = Outcome.DONE if chunks.complete else self._stop or Outcome.CANCELLED
        took_s = time.monotonic() - self._began_s
        return CopyResult(outcome, chunks.bytes, chunks.descriptors, chunks.copies, took_s, self._reason)


def lane_gauges(users: Iterable[Mapping[Direction, Lane]]) -> dict[str, int]:
    """Returns `{store,load}_{queued,running}`: turns of threads that copies of all users wait for, and have."""
    lanes = list(users)
    return {
        f"{direction.value}_{name}": sum(getattr(user_lanes[direction], name) for user_lanes in lanes)
        for direction in Direction
        for name in ("queued", "running")
    }
