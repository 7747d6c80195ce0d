"""A rank's client of the daemon: a thread that submits stores and loads and learns how they end.

Ownership: the thread alone has the client. The engine's thread queues transfers, takes what has ended, and waits for
some of them where it is about to use their blocks again.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvoffloadd.client import (
    Client,
    Job,
    JobConnectionLostError,
    JobDeadlineError,
    KvCache,
    Outcome,
    Ready,
    Registration,
)
from kvoffloadd.errors import ConnectionLostError, DaemonUnreachableError, DeadlineError, KvOffloadError
from kvoffloadd.integrations.common.availability import Availability
from kvoffloadd.integrations.common.keys import KEY_BYTES, Piece, most_keys, pieces
from kvoffloadd.integrations.vllm.blocks import Chunks
from kvoffloadd.model import Direction

logger = logging.getLogger("vllm.kvoffloadd")

_JOB_POLL_S = 0.002
_IDLE_S = 1.0
_WAIT_WARNING_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One of the engine's transfers. `ready`: when its blocks are final; None: they are. `expedited`: before others."""

    number: int
    direction: Direction
    chunks: Chunks
    ready: Ready | None = None
    expedited: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How one ended; its blocks are the engine's. `success` of a load: every wanted block holds what was asked for.

    `partial`, of a load without success: the daemon carried all of it out, but for keys that it had not or has dropped
    by now, because they were damaged. A store has always success: what could not be stored is a miss later.
    """

    number: int
    success: bool
    bytes: int
    seconds: float
    partial: bool = False


@dataclass(slots=True, eq=False)
class _Course:
    """A transfer under way, in as many jobs as it takes. `unasked`: for how many of them there was no daemon.

    Of the jobs that have ended: `whole`, if all keys were copied; `carried_out`, if all of them that were there.
    """

    transfer: Transfer
    unasked: int
    jobs: int = 0
    whole: bool = True
    carried_out: bool = True
    bytes: int = 0
    seconds: float = 0.0

    def take(self, job: Job) -> None:
        """How one of its jobs has ended."""
        self.jobs -= 1
        result = job.result
        if result is None:
            self.whole = self.carried_out = False
            return
        self.bytes += result.bytes
        self.seconds = max(self.seconds, result.seconds)  # they run side by side
        whole = result.outcome is Outcome.DONE and all(result.valid(at).all() for at in range(len(job.counts)))
        if not whole and self.transfer.direction is Direction.LOAD:
            logger.warning("kvoffloadd: a load %s: %s", result.outcome, result.reason or "keys were missing")
        self.whole &= whole
        self.carried_out &= result.outcome in (Outcome.DONE, Outcome.PARTIAL)

    def ended(self) -> Ended:
        """Once no job is left."""
        success = self.transfer.direction is Direction.STORE or (self.whole and not self.unasked)
        partial = not success and self.carried_out and not self.unasked
        return Ended(self.transfer.number, success, self.bytes, self.seconds, partial)


class SleepPhase(enum.Enum):
    """Represents a phase of sleep mode, in which the engine takes the KV cache's memory away."""

    AWAKE = enum.auto()
    FALLING_ASLEEP = enum.auto()
    """Begun transfers end, then the daemon lets go of the memory."""
    ASLEEP = enum.auto()


class TransferThread:
    """Stores and loads of one rank. All methods but `wait`, `sleep` and `close` return at once."""

    def __init__(self, client: Client, caches: KvCache, *, job_deadline_s: float) -> None:
        self._client = client
        self._caches = caches
        self._job_deadline_s = job_deadline_s
        self._registration: Registration | None = None
        self._former: Registration | None = None
        self._phase = SleepPhase.AWAKE
        # How often it has woken up. After the next time a transfer is not begun: its blocks hold something else.
        self._wakes = 0
        self._queue: queue.SimpleQueue[tuple[int, Transfer] | None] = queue.SimpleQueue()
        self._first: deque[tuple[int, Transfer]] = deque()
        self._jobs: dict[Job, _Course] = {}
        self._ended: deque[Ended] = deque()
        self._open: set[int] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._daemon = Availability(logger)
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="kvoffloadd-transfers", daemon=True)
        self._thread.start()

    # --- for the engine's thread -------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Begin it. Its blocks are the daemon's until it is among those `ended`."""
        with self._changed:
            self._check()
            self._open.add(transfer.number)
        submitted = self._wakes, transfer
        if transfer.expedited:
            self._first.append(submitted)
        self._queue.put(None if transfer.expedited else submitted)

    def ended(self) -> list[Ended]:
        """Those that ended since the last call."""
        self._check()
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def wait(self, numbers: Collection[int]) -> None:
        """Waits until these have ended. It has no deadline: their blocks may not be used before that."""
        wanted = set(numbers)
        with self._changed:
            while not self._changed.wait_for(lambda: self._broken or not wanted & self._open, _WAIT_WARNING_S):
                logger.warning("kvoffloadd: still waiting for %d transfers to end", len(wanted & self._open))
            self._check()

    def sleep(self, deadline_s: float) -> None:
        """Have the daemon let go of the memory, once begun transfers have ended; those that come now end at once.

        Raises DeadlineError where they have not ended by then: the daemon may still be at their blocks. One that does
        not answer may keep the memory that it had, but nothing is loaded into that any more.
        """
        with self._changed:
            self._phase = SleepPhase.FALLING_ASLEEP
            self._queue.put(None)
            if not self._changed.wait_for(lambda: self._phase is SleepPhase.ASLEEP or self._broken, deadline_s):
                self.wake()  # vLLM does not wake what never slept
                raise DeadlineError(f"the daemon has not ended {len(self._open)} transfers: the engine can't sleep")
            self._check()

    def wake(self) -> None:
        """The same tensors are there again, in whatever memory: transfers may come."""
        with self._changed:
            if self._phase is not SleepPhase.AWAKE:
                self._phase = SleepPhase.AWAKE
                self._wakes += 1

    def close(self, deadline_s: float) -> None:
        """End the session. What the daemon has not given back by then stays its own until this process ends."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(deadline_s)

    # --- the thread ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError(
                "the connection to kvoffloadd has failed (see the log); it is unknown which blocks are still written"
            )

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # the thread's boundary: an engine that ends is better than one that waits for ever
            logger.exception("kvoffloadd: a bug, please report it")
            with self._changed:
                self._broken = True
                self._changed.notify_all()
        with suppress(KvOffloadError):
            self._client.close(_IDLE_S, force=True)

    def _serve(self) -> None:
        self._connect()
        while not self._closing:
            try:
                submitted = self._queue.get_nowait() if self._jobs else self._queue.get(timeout=_IDLE_S)
                while self._first:
                    self._begin(*self._first.popleft())
                if submitted is not None:
                    self._begin(*submitted)
            except queue.Empty:
                if not self._jobs and self._phase is SleepPhase.AWAKE and not self._daemon.retry_in_s:
                    self._idle()
            if self._jobs:
                self._look_for_ends()
            elif self._phase is SleepPhase.FALLING_ASLEEP:
                self._let_go()

    def _idle(self) -> None:
        """A daemon's death is to be known, and its successor registered with, before the next load needs it."""
        if self._registration is not None:
            with suppress(KvOffloadError):
                self._client.ping()
                return
        self._connect()

    def _connect(self) -> None:
        try:
            self._registered()
            self._client.connect()
        except KvOffloadError as error:
            self._lost(error)
        else:
            self._daemon.succeeded()

    def _registered(self) -> Registration:
        """Raises as the client does."""
        if self._former is not None:
            self._client.unregister(self._former)  # nothing, if that was answered before
            self._former = None
        if self._registration is None:
            self._registration = self._client.register(self._caches)
        return self._registration

    def _let_go(self) -> None:
        if self._registration is not None:
            self._former, self._registration = self._registration, None
            try:
                self._client.unregister(self._former)
            except (ConnectionLostError, DaemonUnreachableError):
                pass  # it ended, and its mappings with it
            except KvOffloadError as error:
                logger.warning("kvoffloadd: the daemon may keep the memory of the sleeping KV cache: %s", error)
        with self._changed:
            if self._phase is SleepPhase.FALLING_ASLEEP:  # else it was woken meanwhile
                self._phase = SleepPhase.ASLEEP
            self._changed.notify_all()

    def _begin(self, wakes: int, transfer: Transfer) -> None:
        if not transfer.chunks:
            self._end(Ended(transfer.number, True, 0, 0.0))
            return
        # A load is worth an attempt whenever one can't hang: the scheduler was told that the keys are there.
        hangs = isinstance(self._daemon.error, DeadlineError)
        lost = self._daemon.retry_in_s > 0 and (hangs or transfer.direction is Direction.STORE)
        if lost or self._phase is not SleepPhase.AWAKE or wakes != self._wakes:
            self._end(Ended(transfer.number, transfer.direction is Direction.STORE, 0, 0.0))
            return
        course = _Course(transfer, 1)
        try:
            registration = self._registered()
            for piece in self._pieces(course):
                job = self._ask(registration, transfer, piece)
                self._add(job, course)
        except (JobDeadlineError, JobConnectionLostError) as error:
            self._add(error.job, course)  # the daemon may have its blocks
            self._lost(error)
        except KvOffloadError as error:
            self._lost(error)
        else:
            self._daemon.succeeded()
        if not course.jobs:
            self._end(course.ended())

    def _pieces(self, course: _Course) -> list[Piece]:
        chunks = course.transfer.chunks
        blocks_per_key = max(one.blocks.shape[1] for one in chunks.values())
        most = most_keys(self._client.limits, self._caches, len(chunks), blocks_per_key)
        found = pieces({group: len(one.blocks) for group, one in chunks.items()}, most)
        course.unasked = len(found)
        return found

    def _add(self, job: Job, course: _Course) -> None:
        self._jobs[job] = course
        course.jobs += 1
        course.unasked -= 1

    def _ask(self, registration: Registration, transfer: Transfer, piece: Piece) -> Job:
        groups, first = {}, {}
        for group, some in piece.items():
            keys, blocks, begin = transfer.chunks[group]
            groups[group] = (keys[some.start * KEY_BYTES : some.stop * KEY_BYTES], blocks[some])
            first[group] = begin + some.start
        common: dict[str, Any] = {"first": first, "ready": transfer.ready, "deadline_s": self._job_deadline_s}
        if transfer.direction is Direction.STORE:
            return self._client.store(registration, groups, **common)
        # Without its pin's lease: the pin holds the keys, and where it ended with its daemon they may still be on disk.
        return self._client.load(registration, groups, expedited=transfer.expedited, **common)

    def _look_for_ends(self) -> None:
        try:
            # What is queued is begun first: a look is enough then.
            done = self._client.wait_any(list(self._jobs), _JOB_POLL_S if self._queue.empty() else 0.0)
        except DeadlineError:
            return
        except KvOffloadError as error:
            self._lost(error)
            return
        for job in done:
            course = self._jobs.pop(job)
            course.take(job)
            if not course.jobs:
                self._end(course.ended())

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended)
        with self._changed:
            self._open.discard(ended.number)
            self._changed.notify_all()

    def _lost(self, error: KvOffloadError) -> None:
        absent = isinstance(error, DaemonUnreachableError)
        self._daemon.failed(error, "no daemon, stores are dropped" if absent else "a job failed")
