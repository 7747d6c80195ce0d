"""A rank's line to the daemon: a thread that submits stores and loads and learns how they end.

Ownership: the thread alone has the client. The engine's thread queues transfers, takes what has ended, and waits for
some of them where it is about to use their blocks again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from kvoffloadd.client import JobConnectionLostError, JobDeadlineError, Outcome
from kvoffloadd.client.dialer import backoffs
from kvoffloadd.errors import DaemonUnreachableError, DeadlineError, KvOffloadError
from kvoffloadd.model import Direction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvoffloadd.client import Client, Job, KvCache, Ready, Registration
    from kvoffloadd.integrations.vllm.blocks import Chunks

logger = logging.getLogger("vllm.kvoffloadd")

_JOB_POLL_S = 0.002
_IDLE_S = 1.0
_BACKOFF_MAX_S = 2.0
_WAIT_WARNING_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One of the engine's transfers. `ready`: when its blocks are final; None: they are."""

    number: int
    direction: Direction
    chunks: Chunks
    ready: Ready | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How one ended; its blocks are the engine's. `success` of a load: every wanted block holds what was asked for.

    A store has always success: what could not be stored is a miss later.
    """

    number: int
    success: bool
    bytes: int
    seconds: float


class Carrier:
    """Stores and loads of one rank. All methods but `wait` and `close` return at once."""

    def __init__(self, client: Client, caches: KvCache, *, job_deadline_s: float) -> None:
        self._client = client
        self._caches = caches
        self._job_deadline_s = job_deadline_s
        self._registration: Registration | None = None
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._jobs: dict[Job, Transfer] = {}
        self._ended: deque[Ended] = deque()
        self._open: set[int] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._warned = False
        self._pauses: Iterator[float] = backoffs()
        self._retry_at = 0.0
        self._hangs = False
        self._thread = threading.Thread(target=self._run, name="kvoffloadd-carrier", daemon=True)
        self._thread.start()

    # --- for the engine's thread -------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Begin it. Its blocks are the daemon's until it is among those `ended`."""
        with self._changed:
            self._open.add(transfer.number)
        self._queue.put(transfer)

    def ended(self) -> list[Ended]:
        """Those that ended since the last call."""
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def wait(self, numbers: Collection[int]) -> None:
        """Until these have ended. No deadline: before that, nobody may use their blocks."""
        wanted = set(numbers)
        with self._changed:
            while not self._changed.wait_for(lambda: not wanted & self._open, _WAIT_WARNING_S):
                logger.warning("kvoffloadd: still waiting for %d transfers to end", len(wanted & self._open))

    def close(self, deadline_s: float) -> None:
        """End the session. What the daemon has not given back by then stays its own until this process ends."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(deadline_s)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._connect()
        while not self._closing:
            try:
                transfer = self._queue.get_nowait() if self._jobs else self._queue.get(timeout=_IDLE_S)
                if transfer is not None:
                    self._begin(transfer)
            except queue.Empty:
                if not self._jobs and monotonic() >= self._retry_at:
                    self._idle()
            if self._jobs:
                self._look_for_ends()
        with suppress(KvOffloadError):
            self._client.close(_IDLE_S, force=True)

    def _idle(self) -> None:
        """A daemon's death is to be known, and its successor registered with, before the next load needs it."""
        if self._registration is not None:
            with suppress(KvOffloadError):
                self._client.ping()
                return
        self._connect()

    def _connect(self) -> None:
        try:
            if self._registration is None:
                self._registration = self._client.register(self._caches)
            else:
                self._client.connect()
        except KvOffloadError as error:
            self._lost(error)
        else:
            self._succeeded()

    def _begin(self, transfer: Transfer) -> None:
        if not transfer.chunks:
            self._end(Ended(transfer.number, True, 0, 0.0))
            return
        # A load is worth an attempt whenever one can't hang: the scheduler was told that the keys are there.
        if monotonic() < self._retry_at and (self._hangs or transfer.direction is Direction.STORE):
            self._end(Ended(transfer.number, transfer.direction is Direction.STORE, 0, 0.0))
            return
        try:
            self._jobs[self._ask(transfer)] = transfer
        except (JobDeadlineError, JobConnectionLostError) as error:
            self._jobs[error.job] = transfer  # the daemon may have its blocks
            self._lost(error)
        except KvOffloadError as error:
            self._lost(error)
            self._end(Ended(transfer.number, transfer.direction is Direction.STORE, 0, 0.0))
        else:
            self._succeeded()

    def _ask(self, transfer: Transfer) -> Job:
        if self._registration is None:
            self._registration = self._client.register(self._caches)
        if transfer.direction is Direction.STORE:
            return self._client.store(
                self._registration, transfer.chunks, ready=transfer.ready, deadline_s=self._job_deadline_s
            )
        # Without its pin's lease: the pin holds the keys, and where it ended with its daemon they may still be on disk.
        return self._client.load(
            self._registration, transfer.chunks, ready=transfer.ready, deadline_s=self._job_deadline_s
        )

    def _look_for_ends(self) -> None:
        try:
            done = self._client.wait_any(list(self._jobs), _JOB_POLL_S)
        except DeadlineError:
            return
        except KvOffloadError as error:
            self._lost(error)
            return
        for job in done:
            self._end(_ended(job, self._jobs.pop(job)))

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended)
        with self._changed:
            self._open.discard(ended.number)
            self._changed.notify_all()

    def _succeeded(self) -> None:
        if self._warned:
            logger.info("kvoffloadd: the daemon answers again")
        self._warned = self._hangs = False
        self._pauses = backoffs()
        self._retry_at = 0.0

    def _lost(self, error: KvOffloadError) -> None:
        self._hangs = isinstance(error, DeadlineError)
        self._retry_at = monotonic() + min(next(self._pauses) * 8, _BACKOFF_MAX_S)
        if not self._warned:
            self._warned = True
            absent = isinstance(error, DaemonUnreachableError)
            logger.warning("kvoffloadd: %s: %s", "no daemon, stores are dropped" if absent else "a job failed", error)


def _ended(job: Job, transfer: Transfer) -> Ended:
    result = job.result
    if result is None:
        return Ended(transfer.number, False, 0, 0.0)
    if transfer.direction is Direction.STORE:
        return Ended(transfer.number, True, result.bytes, result.seconds)
    whole = result.outcome is Outcome.DONE and all(result.valid(at).all() for at in range(len(job.counts)))
    if not whole:
        logger.warning("kvoffloadd: a load %s: %s", result.outcome, result.reason or "keys were missing")
    return Ended(transfer.number, whole, result.bytes, result.seconds)
