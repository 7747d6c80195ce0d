"""Lanes: threads that move bytes, and nothing else. What moves, and what is true then, is decided on the event loop.

Ownership
    _lock       guards every field named here; it is never held while work or a callback runs.
    _queues     by urgency, tickets in the order in which they run, each with when it was queued; any thread may change
                them, through the methods.
    _running    ticket -> time.monotonic() when a thread began with it; written by the lane's threads.
    _busy_s     what ended work has taken; written by the lane's threads.
    _finished   callbacks with their values, on their way to the loop: threads append, the loop takes them in order.
    _waking     the loop has been woken and has not yet found `_finished` empty: the next completion needs no wakeup.
    _closing    set once, by `close`.
    _live, _ended   the event loop alone: threads that have not said goodbye; set when none is left.
    Ticket.work, Ticket.done   read-only; a thread runs `work`, the loop runs `done`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from kvoffloadd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

TURN_S = 0.002
"""How long one turn of the loop takes completions: none begins later than this."""


class CancelledWork(Exception):
    """Given to `done` in place of a result: the work was dropped before it began, or before it began again."""


class Again(enum.Enum):
    """Type of `AGAIN`."""

    AGAIN = enum.auto()


AGAIN: Final = Again.AGAIN
"""Returned by work that is not finished: it goes to the end of its queue, and others of its urgency have their turn."""


class Ticket:
    """One piece of work in a lane."""

    __slots__ = ("_lane", "done", "urgent", "work")

    def __init__(self, lane: Lane, work: Callable[[], Any], done: Callable[[Any], None], urgent: int) -> None:
        self._lane = lane
        self.work = work
        self.done = done
        self.urgent = urgent

    def cancel(self) -> bool:
        """Drops the work if no thread is at it. True: it won't run (again), and `done` gets a `CancelledWork`, later.
        False: it runs now or has ended, and nothing changes.
        """
        return self._lane._cancel(self)


class Lane:
    """`threads` threads that run work in the order of submission, the more urgent first.

    `loop`: where every `done` is called. The threads are daemons: one that hangs in the kernel can't keep the process
    from its exit.
    """

    def __init__(self, name: str, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        if threads < 1:
            raise UsageError(f"lane {name}: needs a thread, got {threads}")
        self.name = name
        self.threads = threads
        self.loop = loop
        self._lock = threading.Lock()
        self._work_or_close = threading.Condition(self._lock)
        self._queues: dict[int, OrderedDict[Ticket, float]] = {}
        self._running: dict[Ticket, float] = {}
        self._busy_s = 0.0
        self._finished: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._waking = False
        self._closing = False
        self._live = threads
        self._ended = asyncio.Event()
        for index in range(threads):
            threading.Thread(target=self._serve, name=f"kvo-{name}-{index}", daemon=True).start()

    def submit(
        self, work: Callable[[], T | Again], done: Callable[[T | BaseException], None], *, urgent: int = 0
    ) -> Ticket:
        """Queues `work` behind all of the same `urgent` (lower runs first). From any thread.

        `done` is called exactly once, on the loop, never within this call: with what `work` returned, with what it
        raised, or with a `CancelledWork`. Work that returns `AGAIN` is queued again and not reported.

        Raises:
            UsageError: the lane is closed.
        """
        ticket = Ticket(self, work, done, urgent)
        with self._lock:
            if self._closing:
                raise UsageError(f"lane {self.name}: closed")
            self._queues.setdefault(urgent, OrderedDict())[ticket] = time.monotonic()
            self._work_or_close.notify()
        return ticket

    def hasten(self, ticket: Ticket, urgent: int) -> None:
        """Queues it among the more urgent, if it still waits."""
        with self._lock:
            queue = self._queues.get(ticket.urgent)
            if queue is not None and ticket in queue and urgent < ticket.urgent:
                since = queue.pop(ticket)
                ticket.urgent = urgent
                self._queues.setdefault(urgent, OrderedDict())[ticket] = since

    async def perform(self, work: Callable[[], T], *, urgent: int = 0) -> T:
        """Runs `work` in the lane and waits for it; raises what it raises. The caller sees to the deadline: whoever
        gives up waiting leaves the work running.

        Raises:
            UsageError: the lane is closed.
        """
        ended: asyncio.Future[T] = self.loop.create_future()

        def settle(value: T | BaseException) -> None:
            if ended.done():
                return  # whoever asked is gone
            if isinstance(value, StopIteration):  # which a future refuses
                ended.set_exception(RuntimeError(f"lane {self.name}: work raised StopIteration"))
            elif isinstance(value, BaseException):
                ended.set_exception(value)
            else:
                ended.set_result(value)

        self.submit(work, settle, urgent=urgent)
        return await ended

    @property
    def queued(self) -> int:
        """Tickets that wait for a thread."""
        with self._lock:
            return sum(map(len, self._queues.values()))

    @property
    def running(self) -> int:
        """Tickets that a thread is at."""
        return len(self._running)

    def oldest_running_s(self, now: float) -> float:
        """Seconds since the longest running work began; 0 if none runs. `now`: of time.monotonic() or loop.time()."""
        with self._lock:
            began = min(self._running.values(), default=now)
        return max(now - began, 0.0)  # uvloop's time() is that of the loop's last turn, and may lie before

    def figures(self) -> dict[str, int | float]:
        """For `status`. `busy_s`: what the threads have spent on work since the start, together."""
        with self._lock:
            now = time.monotonic()
            # Each queue's first has waited the longest, but for one that was hastened into it.
            queued = [next(iter(queue.values())) for queue in self._queues.values() if queue]
            running = list(self._running.values())
            return {
                "threads": self.threads,
                "queued": sum(map(len, self._queues.values())),
                "running": len(running),
                "oldest_queued_s": round(now - min(queued, default=now), 6),
                "oldest_running_s": round(now - min(running, default=now), 6),
                "busy_s": round(self._busy_s + sum(now - began for began in running), 6),
            }

    async def close(self, deadline_s: float) -> bool:
        """Ends the lane: takes no more work, cancels what is queued, waits at most `deadline_s` seconds for what runs.

        True: every `done` has been called, and no thread touches anything any more. False: some work still runs, and
        whatever it uses can't be released; its `done` is called if it ends while the loop lives. May be called again.
        """
        with self._lock:
            self._closing = True
            dropped = [ticket for queue in self._queues.values() for ticket in queue]
            self._queues.clear()
            self._work_or_close.notify_all()
        for ticket in dropped:
            self._report(ticket.done, CancelledWork())
        try:
            async with asyncio.timeout(deadline_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            queue = self._queues.get(ticket.urgent)
            if queue is None or ticket not in queue:
                return False
            del queue[ticket]
        self._report(ticket.done, CancelledWork())
        return True

    # --- the lane's threads ---------------------------------------------------------------------

    def _serve(self) -> None:
        while (ticket := self._take()) is not None:
            self._perform(ticket)
            del ticket  # or it, and the buffers it names, would live until the next one comes
        self._report(self._on_thread_end, None)

    def _take(self) -> Ticket | None:
        with self._lock:
            while True:
                for _, queue in sorted(self._queues.items()):
                    if queue:
                        ticket, _ = queue.popitem(last=False)
                        self._running[ticket] = time.monotonic()
                        return ticket
                if self._closing:
                    return None
                self._work_or_close.wait()

    def _perform(self, ticket: Ticket) -> None:
        try:
            value = ticket.work()
        except BaseException as error:  # noqa: BLE001  end of a thread: whatever it is, the loop must hear of it
            value = error
        with self._lock:
            now = time.monotonic()
            self._busy_s += now - self._running.pop(ticket)
            if value is AGAIN and not self._closing:
                # No notify: this thread comes for the next ticket itself.
                self._queues.setdefault(ticket.urgent, OrderedDict())[ticket] = now
                return
        self._report(ticket.done, CancelledWork() if value is AGAIN else value)

    def _report(self, done: Callable[[Any], None], value: object) -> None:
        with self._lock:
            self._finished.append((done, value))
            if self._waking:
                return
            self._waking = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could be told
            self.loop.call_soon_threadsafe(self._deliver)

    # --- the event loop ---------------------------------------------------------------------------

    def _deliver(self) -> None:
        turn_ends = time.monotonic() + TURN_S
        while True:
            with self._lock:
                if not self._finished:
                    self._waking = False
                    return
                done, value = self._finished.popleft()
            try:
                done(value)
            except Exception as error:  # noqa: BLE001  one callback's bug may not cost the others their completion
                self.loop.call_exception_handler(
                    {"message": f"lane {self.name}: a completion callback failed", "exception": error}
                )
            if time.monotonic() >= turn_ends:
                self.loop.call_soon(self._deliver)  # even if none is left now: only here `_waking` ends
                return

    def _on_thread_end(self, _: Literal[None]) -> None:
        self._live -= 1
        if self._live == 0:
            self._ended.set()
