"""One asynchronous store or load, and the ownership of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvoffloadd.client.keys import unpack_u32
from kvoffloadd.client.memory.kvcache import Registration
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import ConnectionLostError, DeadlineError, MessageError
from kvoffloadd.model import BoolArray, Direction, KeyState, Outcome, U8Array, U32Array
from kvoffloadd.protocol import messages


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """Describes how a job ended; its blocks are free.

    `bytes` and `seconds`: copied, and from admission to the end, as the daemon counts. `states[g]`: u8 `model.KeyState`
    of each key of the g-th group at admission (MISS if the daemon never reported it): a store copied the keys in state
    RESERVED, a load those in state HIT. `failed[g]`: u32 indices of keys of the g-th group that were not stored, or
    have blocks without valid data (load). `reason`: for a human; of a store that is done the number of keys that got no
    space, "" if none.
    """

    direction: Direction
    outcome: Outcome
    bytes: int
    seconds: float
    states: list[U8Array]
    failed: list[U32Array]
    reason: str

    def valid(self, group: int) -> BoolArray:
        """Returns bool (keys,) of the g-th group: True where this job copied the whole key. On any doubt False."""
        wanted = KeyState.RESERVED if self.direction is Direction.STORE else KeyState.HIT
        valid: BoolArray = self.states[group] == wanted
        valid[self.failed[group]] = False
        return valid


class Job(Waitable):
    """A store or load that was sent. `done` once it has ended and its blocks are free.

    The daemon owns its blocks as long as `blocks_free` is False, whatever deadline passed: the caller must not write
    them (load: nor read them) and not give them away. The job holds its registration, and so the memory, until then.
    """

    __slots__ = ("counts", "direction", "id", "registration", "result", "states")

    def __init__(self, job_id: int, direction: Direction, registration: Registration, counts: tuple[int, ...]) -> None:
        super().__init__()
        self.id = job_id
        self.direction = direction
        self.registration = registration
        self.counts = counts
        self.states: list[U8Array] = [np.full(count, KeyState.MISS, np.uint8) for count in counts]
        self.result: JobResult | None = None

    def __repr__(self) -> str:
        end = self.result.outcome if self.result is not None else "open"
        return f"<Job {self.id} {self.direction} {sum(self.counts)} keys, {end}>"

    @property
    def blocks_free(self) -> bool:
        """True once the daemon can no longer touch the job's blocks."""
        return self.done

    # --- called by the connection alone, in the order of the daemon's messages ------------------

    def accept(self, states: list[U8Array]) -> None:
        """Records that the daemon admitted the job, perhaps after its end has been reported."""
        self.states = states
        if self.result is not None:
            self.result = replace(self.result, states=states)

    def refuse(self, reason: str) -> None:
        """Ends the job as refused: the daemon never had the blocks."""
        self._end(Outcome.FAILED, reason)

    def lose(self, reason: str) -> None:
        """Ends the job as lost: its end will never be reported, and it is proven that its copies have ended."""
        self._end(Outcome.LOST, reason)

    def complete(self, message: messages.Completed) -> None:
        """Ends the job as the daemon reports. Raises MessageError if `failed` doesn't fit the job."""
        outcome = Outcome(message.outcome)
        if message.failed:
            failed = self._checked([unpack_u32(packed, "failed") for packed in message.failed])
        else:
            failed = self._none() if outcome is Outcome.DONE else self._all()
        self._end(outcome, message.reason, failed, message.bytes, message.seconds)

    def _end(
        self,
        outcome: Outcome,
        reason: str,
        failed: list[U32Array] | None = None,
        copied_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        failed = self._all() if failed is None else failed
        self.result = JobResult(self.direction, outcome, copied_bytes, seconds, self.states, failed, reason)
        self.settle()

    def _checked(self, failed: list[U32Array]) -> list[U32Array]:
        if len(failed) != len(self.counts):
            raise MessageError(f"`failed` names {len(failed)} groups; job {self.id} has {len(self.counts)}")
        for indices, count in zip(failed, self.counts, strict=True):
            if indices.size and indices.max() >= count:
                raise MessageError(f"`failed` names key {indices.max()} of {count} in job {self.id}")
        return failed

    def _all(self) -> list[U32Array]:
        return [np.arange(count, dtype=np.uint32) for count in self.counts]

    def _none(self) -> list[U32Array]:
        return [np.empty(0, np.uint32) for _ in self.counts]


class JobDeadlineError(DeadlineError):
    """Raised when a job's end, or the reply to its request, did not come in time. The daemon owns its blocks; wait
    again.
    """

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job


class JobConnectionLostError(ConnectionLostError):
    """Raised when the connection ended during a job's request. The daemon may own its blocks; the job can be waited
    for.
    """

    def __init__(self, message: str, job: Job) -> None:
        super().__init__(message)
        self.job = job
