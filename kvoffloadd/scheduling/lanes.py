"""Lanes: pools of threads that only move bytes. The event loop makes all decisions and state changes.

Ownership
    _lock       guards every field named here; it is never held while work or a callback runs.
    _queue      tickets that wait for a thread; any thread may change it, through the methods.
    _running    ticket -> time.monotonic() when a thread began with it; written by the lane's threads.
    _busy_s     time that ended work has taken; written by the lane's threads.
    _deliveries calls of `done`, on their way to the loop; it has a separate lock.
    _closing    set once, by `close`.
    _live, _ended   the event loop alone: threads that have not ended; set when none is left.
    Ticket      `since_s` and its places are the lane's; the rest is read-only. A thread runs `work`, the loop `done`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, Literal, NamedTuple, ParamSpec, TypeVar

from kvoffloadd.errors import UsageError
from kvoffloadd.scheduling.fairqueue import FairQueue

T = TypeVar("T")
P = ParamSpec("P")


TURN_BYTES = 32 << 20
"""The most that one turn of a thread moves or hashes, where cutting costs nothing: all others wait for some
milliseconds.
"""

TURN_BYTES_MIN = 64 << 10
"""The least cost of a turn to its flow, however few bytes it moves."""

TURN_S = 0.002
"""How long one turn of the event loop runs callbacks from threads: none begins later than this."""

URGENCY_RATIO = 8
"""The ratio of turns, in bytes, between neighbouring urgencies of one engine that has work of both."""

MOST_URGENT, LEAST_URGENT = -1, 3
"""Urgencies beyond these share like these."""


class Flow(NamedTuple):
    """The owner of work: lanes share their time equally by `uid`, then by engine (an instance's id), and then by
    urgency and ticket. `divisor` n: others of the `uid` level get n times as much.
    """

    uid: int
    instance: int
    divisor: int = 1


DAEMON: Final = Flow(-1, 0)
"""The daemon's own work, which requests may wait for."""

BACKGROUND: Final = Flow(-2, 0, 8)
"""Work that may wait: audits, relocation of records."""


class CancelledWork(Exception):
    """Given to `done` in place of a result: the work was dropped before it began, or before it began again."""


class Again(enum.Enum):
    """The type of `AGAIN`."""

    AGAIN = enum.auto()


AGAIN: Final = Again.AGAIN
"""Returned by work that is not finished: it goes to the end of its queue, and others have their turn."""


_Path = tuple[tuple[int, int], ...]
"""A flow and an urgency, as `FairQueue` names them."""


class Deliveries:
    """Callbacks from threads to the event loop, which runs a bounded number of them in each turn. `name`: the owner's
    name, for messages.

    Ownership: `_lock` guards `_queue`, which threads append to, and `_waking`: the loop has been woken and has not yet
    found `_queue` empty, so that the next value needs no wakeup. It is never held while a callback runs.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._loop = loop
        self._lock = threading.Lock()
        self._queue: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._waking = False

    def put(self, done: Callable[[Any], None], value: object) -> None:
        """Calls `done(value)` on the loop, after all earlier values. Any thread may call this. If the loop is closed,
        the call has no effect.
        """
        with self._lock:
            self._queue.append((done, value))
            if self._waking:
                return
            self._waking = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        turn_ends = time.monotonic() + TURN_S
        while True:
            with self._lock:
                if not self._queue:
                    self._waking = False
                    return
                done, value = self._queue.popleft()
            try:
                done(value)
            except Exception as error:  # noqa: BLE001  one callback's bug may not cost the others their values
                self._loop.call_exception_handler(
                    {"message": f"{self._name}: a completion callback failed", "exception": error}
                )
            if time.monotonic() >= turn_ends:
                self._loop.call_soon(self._deliver)  # even if none is left now: `_waking` ends only here
                return


class Ticket:
    """One piece of work in a lane."""

    __slots__ = ("_lane", "cost_bytes", "done", "path", "since_s", "work")

    def __init__(
        self, lane: Lane, work: Callable[[], Any], done: Callable[[Any], None], path: _Path, cost_bytes: int
    ) -> None:
        self._lane = lane
        self.work = work
        self.done = done
        self.path = path
        self.cost_bytes = max(cost_bytes, TURN_BYTES_MIN)
        self.since_s = 0.0

    def cancel(self) -> bool:
        """Drops the work if no thread runs it. Returns True if it won't run (again), and `done` gets a `CancelledWork`,
        later. False: it runs now or has ended, and nothing changes.
        """
        return self._lane._cancel(self)

    def running_s(self, now: float) -> float:
        """Returns the seconds that a thread has spent in its present turn; 0 while none runs. `now`: of
        time.monotonic().
        """
        return self._lane._running_s(self, now)


class Lane:
    """`threads` threads that run work, turn by turn, and share their time fairly: see `Flow` and `FairQueue`. All
    waiting work has its turn eventually.

    `loop`: calls every `done`. The threads are daemons: one that hangs in the kernel can't keep the process from its
    exit.
    """

    def __init__(
        self, name: str, threads: int, loop: asyncio.AbstractEventLoop, cpus: frozenset[int] = frozenset()
    ) -> None:
        """Starts the threads. `cpus`: those that they run on; none: any."""
        if threads < 1:
            raise UsageError(f"lane {name}: needs a thread, got {threads}")
        self.name = name
        self.threads = threads
        self.loop = loop
        self._cpus = cpus
        self._lock = threading.Lock()
        self._work_or_close = threading.Condition(self._lock)
        self._queue: FairQueue[Ticket] = FairQueue(TURN_BYTES)
        self._running: dict[Ticket, float] = {}
        self._busy_s = 0.0
        self._deliveries = Deliveries(f"lane {name}", loop)
        self._closing = False
        self._live = threads
        self._ended = asyncio.Event()
        try:
            for index in range(threads):
                threading.Thread(target=self._serve, name=f"kvo-{name}-{index}", daemon=True).start()
        except BaseException:
            self.dismiss()
            raise

    def submit(
        self,
        work: Callable[[], T | Again],
        done: Callable[[T | BaseException], None],
        *,
        flow: Flow = DAEMON,
        urgent: int = 0,
        cost_bytes: int = 0,
    ) -> Ticket:
        """Queues `work` behind all of the same `flow` and `urgent` (lower goes first). Any thread may call this.

        `cost_bytes`: approximately what a turn moves. `done` is called exactly once, on the loop, never within this
        call: with what `work` returned, with what it raised, or with a `CancelledWork`. Work that returns `AGAIN` is
        queued again and not reported.

        Raises:
            UsageError: the lane is closed.
        """
        return self.submit_all(1, work, done, flow=flow, urgent=urgent, cost_bytes=cost_bytes)[0]

    def submit_all(
        self,
        count: int,
        work: Callable[[], T | Again],
        done: Callable[[T | BaseException], None],
        *,
        flow: Flow = DAEMON,
        urgent: int = 0,
        cost_bytes: int = 0,
    ) -> list[Ticket]:
        """Submits work that up to `count` threads share, like `submit`: `count` tickets that each run `work` and call
        `done`. If this raises, none of them is queued.
        """
        path = path_of(flow, urgent)
        tickets = [Ticket(self, work, done, path, cost_bytes) for _ in range(count)]
        with self._lock:
            if self._closing:
                raise UsageError(f"lane {self.name}: closed")
            now = time.monotonic()
            try:
                for ticket in tickets:
                    ticket.since_s = now
                    self._queue.push(path, ticket, ticket.cost_bytes)
            except BaseException:
                for ticket in tickets:
                    self._queue.remove(ticket)
                raise
            self._work_or_close.notify(count)
        return tickets

    def raise_priority(self, ticket: Ticket, flow: Flow, urgent: int) -> None:
        """Queues the ticket, if it still waits, for a turn of this `flow` at this urgency, too; the first turn
        counts.
        """
        with self._lock:
            if ticket in self._queue:
                self._queue.push(path_of(flow, urgent), ticket, ticket.cost_bytes)

    async def perform(
        self, work: Callable[[], T | Again], *, flow: Flow = DAEMON, urgent: int = 0, cost_bytes: int = 0
    ) -> T:
        """Runs `work` in the lane and waits for it; raises what it raises. The caller enforces the deadline: when it
        stops waiting, the work continues to run.

        Raises:
            UsageError: the lane is closed.
        """
        ended: asyncio.Future[T] = self.loop.create_future()

        def settle(value: T | BaseException) -> None:
            if ended.done():
                return  # the caller is gone
            if isinstance(value, StopIteration):  # which a future refuses
                ended.set_exception(RuntimeError(f"lane {self.name}: work raised StopIteration"))
            elif isinstance(value, BaseException):
                ended.set_exception(value)
            else:
                ended.set_result(value)

        self.submit(work, settle, flow=flow, urgent=urgent, cost_bytes=cost_bytes)
        return await ended

    @property
    def closing(self) -> bool:
        """Returns whether `close` was called: the lane takes no more work."""
        return self._closing

    @property
    def queued(self) -> int:
        """Returns the number of tickets that wait for a thread."""
        with self._lock:
            return len(self._queue)

    @property
    def running(self) -> int:
        """Returns the number of tickets that a thread runs."""
        return len(self._running)

    def oldest_running_s(self, now: float) -> float:
        """Returns the seconds since the longest running work began; 0 if none runs. `now`: of time.monotonic() or
        loop.time().
        """
        with self._lock:
            began = min(self._running.values(), default=now)
        return max(now - began, 0.0)  # uvloop's time() is that of the loop's last turn, and may lie before

    def newest_running_s(self, now: float) -> float:
        """Does what `oldest_running_s` does, but for the running work that began last: a thread that ends one piece of
        work begins the next.
        """
        with self._lock:
            began = max(self._running.values(), default=now)
        return max(now - began, 0.0)

    def figures(self) -> dict[str, int | float]:
        """Returns the figures for `status`. `busy_s`: the time that all threads have spent on work since the start."""
        with self._lock:
            now = time.monotonic()
            first = next(iter(self._queue), None)
            running = list(self._running.values())
            return {
                "threads": self.threads,
                "queued": len(self._queue),
                "running": len(running),
                "oldest_queued_s": round(now - first.since_s, 6) if first else 0.0,
                "oldest_running_s": round(now - min(running, default=now), 6),
                "busy_s": round(self._busy_s + sum(now - began for began in running), 6),
            }

    def dismiss(self) -> None:
        """Takes no more work and cancels queued work; the threads end with their present work."""
        with self._lock:
            self._closing = True
            # Under the lock: no thread may report its end before these are reported.
            for ticket in list(self._queue):
                self._queue.remove(ticket)
                self._deliveries.put(ticket.done, CancelledWork())
            self._work_or_close.notify_all()

    async def close(self, deadline_s: float) -> bool:
        """Ends the lane like `dismiss`, and waits at most `deadline_s` seconds for running work.

        Returns True if every `done` has been called, and no thread touches anything any more. False: some work still
        runs, and the resources that it uses can't be released; its `done` is called if it ends while the loop lives.
        May be called again.
        """
        self.dismiss()
        try:
            async with asyncio.timeout(deadline_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            if not self._queue.remove(ticket):
                return False
            self._deliveries.put(ticket.done, CancelledWork())  # as in `dismiss`
        return True

    def _running_s(self, ticket: Ticket, now: float) -> float:
        with self._lock:
            began = self._running.get(ticket, now)
        return max(now - began, 0.0)

    # --- the lane's threads ---------------------------------------------------------------------

    def _serve(self) -> None:
        if self._cpus:
            with contextlib.suppress(OSError):  # a cpuset has changed since: any CPU does
                os.sched_setaffinity(0, self._cpus)
        while (ticket := self._take()) is not None:
            try:
                value = ticket.work()
            except BaseException as error:  # noqa: BLE001 end of a thread: the loop must learn of any exception
                value = error
            self._end(ticket, value)
            del ticket, value  # or they, and the buffers they name, would live until the next ticket
        self._deliveries.put(self._on_thread_end, None)

    def _take(self) -> Ticket | None:
        with self._lock:
            while (ticket := self._queue.take()) is None:
                if self._closing:
                    return None
                self._work_or_close.wait()
            self._running[ticket] = time.monotonic()
            return ticket

    def _end(self, ticket: Ticket, value: object) -> None:
        with self._lock:
            now = time.monotonic()
            self._busy_s += now - self._running.pop(ticket)
            if value is AGAIN and not self._closing:
                # No notify: this thread comes for the next ticket itself.
                ticket.since_s = now
                self._queue.push(ticket.path, ticket, ticket.cost_bytes)
                return
        self._deliveries.put(ticket.done, CancelledWork() if value is AGAIN else value)

    # --- the event loop ---------------------------------------------------------------------------

    def _on_thread_end(self, _: Literal[None]) -> None:
        self._live -= 1
        if self._live == 0:
            self._ended.set()


class LaneExecutor(Executor):
    """A lane for libraries that take an executor: hanging calls are noticed, and delay no others."""

    def __init__(self, lane: Lane, urgent: int) -> None:
        self._lane = lane
        self._urgent = urgent

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submits a call. Raises UsageError if the lane is closed. The call can't be cancelled."""
        ended: Future[T] = Future()
        ended.set_running_or_notify_cancel()

        def settle(value: T | BaseException) -> None:
            if isinstance(value, BaseException):
                ended.set_exception(value)
            else:
                ended.set_result(value)

        self._lane.submit(lambda: fn(*args, **kwargs), settle, urgent=self._urgent)
        return ended


def path_of(flow: Flow, urgent: int) -> _Path:
    """Returns the path of work of this flow and urgency (lower goes first), as `FairQueue` names it."""
    level = min(max(urgent, MOST_URGENT), LEAST_URGENT) - MOST_URGENT
    return (flow.uid, flow.divisor), (flow.instance, 1), (level, URGENCY_RATIO**level)
