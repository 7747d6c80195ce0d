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
from dataclasses import dataclass

from kvoffloadd.client import Client, Job, KvCache, Outcome, Ready
from kvoffloadd.errors import ConnectionLostError, DaemonUnreachableError, DeadlineError, KvOffloadError
from kvoffloadd.integrations.common.bugs import log_bug
from kvoffloadd.integrations.common.link import DaemonLink
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
    """How a transfer ended; the engine owns its blocks. `success` of a load: every wanted block holds its key's
    contents.

    `partial`, of a load without success: the daemon carried all of it out, except for keys that it had not or has
    dropped by now, because they were damaged. A store has always success: a key that could not be stored is a miss
    later.
    """

    number: int
    success: bool
    bytes: int
    seconds: float
    partial: bool = False


@dataclass(slots=True, eq=False)
class _TransferProgress:
    """A transfer under way, in as many jobs as necessary. `jobs`: how many have not ended.

    `whole`: so far all keys were copied. `carried_out`: so far all keys were that the daemon had.
    """

    transfer: Transfer
    jobs: int
    whole: bool
    carried_out: bool
    bytes: int = 0
    seconds: float = 0.0

    def take(self, job: Job) -> None:
        """Records how one of its jobs has ended."""
        self.jobs -= 1
        result = job.result
        if result is None:
            self.whole = self.carried_out = False
            return
        self.bytes += result.bytes
        self.seconds = max(self.seconds, result.seconds)  # they run concurrently
        whole = result.outcome is Outcome.DONE and all(result.valid(index).all() for index in range(len(job.counts)))
        if not whole and self.transfer.direction is Direction.LOAD:
            logger.warning("kvoffloadd: a load %s: %s", result.outcome, result.reason or "keys were missing")
        self.whole &= whole
        self.carried_out &= result.outcome in (Outcome.DONE, Outcome.PARTIAL)

    def ended(self) -> Ended:
        """Returns the result, once no job is left."""
        success = self.transfer.direction is Direction.STORE or self.whole
        return Ended(self.transfer.number, success, self.bytes, self.seconds, not success and self.carried_out)


class SleepPhase(enum.Enum):
    """A phase of sleep mode, in which the engine takes the KV cache's memory away."""

    AWAKE = enum.auto()
    FALLING_ASLEEP = enum.auto()
    """Begun transfers end, then the daemon releases the memory."""
    ASLEEP = enum.auto()


class TransferThread:
    """Makes the stores and loads of one rank. All methods but `wait`, `sleep` and `close` return at once."""

    def __init__(self, client: Client, caches: KvCache, *, job_deadline_s: float) -> None:
        self._link = DaemonLink(client, caches, logger, lost="no daemon, stores are dropped", refused="a job failed")
        self._job_deadline_s = job_deadline_s
        self._phase = SleepPhase.AWAKE
        # Number of wake-ups. A transfer from before the last one is not begun: its blocks hold something else.
        self._wakes = 0
        self._queue: queue.SimpleQueue[tuple[int, Transfer] | None] = queue.SimpleQueue()
        self._first: deque[tuple[int, Transfer]] = deque()
        self._jobs: dict[Job, _TransferProgress] = {}
        self._ended: deque[Ended] = deque()
        self._open: set[int] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="kvoffloadd-transfers", daemon=True)
        self._thread.start()

    # --- for the engine's thread -------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Begins a transfer. The daemon owns its blocks until it is among those `ended`."""
        with self._changed:
            self._check()
            self._open.add(transfer.number)
        submitted = self._wakes, transfer
        if transfer.expedited:
            self._first.append(submitted)
        self._queue.put(None if transfer.expedited else submitted)

    def ended(self) -> list[Ended]:
        """Returns the transfers that ended since the last call."""
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
        """Has the daemon release the memory, once begun transfers have ended; those that come now end at once.

        Raises DeadlineError where they have not ended by then: the daemon may still use their blocks. A daemon that
        does not answer may keep the memory that it had, but nothing is loaded into that any more.
        """
        with self._changed:
            self._phase = SleepPhase.FALLING_ASLEEP
            self._queue.put(None)
            if not self._changed.wait_for(lambda: self._phase is SleepPhase.ASLEEP or self._broken, deadline_s):
                self.wake()  # vLLM wakes only an engine that slept
                raise DeadlineError(f"the daemon has not ended {len(self._open)} transfers: the engine can't sleep")
            self._check()

    def wake(self) -> None:
        """Allows transfers again: the same tensors are there, in whatever memory."""
        with self._changed:
            if self._phase is not SleepPhase.AWAKE:
                self._phase = SleepPhase.AWAKE
                self._wakes += 1

    def close(self, deadline_s: float) -> None:
        """Ends the session. Blocks that the daemon has not given back by then stay its own until this process ends."""
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
        except Exception as error:  # noqa: BLE001  the thread's boundary: better an engine that ends than one that waits
            log_bug(logger, self._thread.name, error, repeated=True)  # what is refused from now on refers to it
            with self._changed:
                self._broken = True
                self._changed.notify_all()
        self._link.close(_IDLE_S)

    def _serve(self) -> None:
        self._link.connect()
        while not self._closing:
            try:
                submitted = self._queue.get_nowait() if self._jobs else self._queue.get(timeout=_IDLE_S)
                while self._first:
                    self._begin(*self._first.popleft())
                if submitted is not None:
                    self._begin(*submitted)
            except queue.Empty:
                if not self._jobs and self._phase is SleepPhase.AWAKE and not self._link.retry_in_s:
                    # A death must be known, and the next daemon registered with, before the next load needs it.
                    self._link.connect()
            if self._jobs:
                self._look_for_ends()
            elif self._phase is SleepPhase.FALLING_ASLEEP:
                self._let_go()

    def _let_go(self) -> None:
        try:
            self._link.unregister()
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
        # A load is worth an attempt whenever one can't hang: the scheduler counts on the keys.
        hangs = isinstance(self._link.error, DeadlineError)
        lost = self._link.retry_in_s > 0 and (hangs or transfer.direction is Direction.STORE)
        if lost or self._phase is not SleepPhase.AWAKE or wakes != self._wakes:
            self._end(Ended(transfer.number, transfer.direction is Direction.STORE, 0, 0.0))
            return
        groups = {group: (chunk.keys, chunk.blocks) for group, chunk in transfer.chunks.items()}
        first = {group: chunk.first for group, chunk in transfer.chunks.items()}
        # Without its pin's lease: the pin holds the keys, and where it ended with its daemon they may still be on disk.
        jobs, whole = self._link.submit(
            transfer.direction,
            groups,
            first,
            deadline_s=self._job_deadline_s,
            ready=transfer.ready,
            expedited=transfer.expedited,
        )
        course = _TransferProgress(transfer, len(jobs), whole=whole, carried_out=whole)
        self._jobs |= dict.fromkeys((job for _, job in jobs), course)
        if not jobs:
            self._end(course.ended())

    def _look_for_ends(self) -> None:
        try:
            # Queued transfers are begun first: a look is enough then.
            done = self._link.client.wait_any(list(self._jobs), _JOB_POLL_S if self._queue.empty() else 0.0)
        except DeadlineError:
            return
        except KvOffloadError as error:
            self._link.lost(error)
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
