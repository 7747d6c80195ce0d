"""One store or load under way: what it does, what it waits for, and how it ends.

Ownership: everything here belongs to the event loop. The copy lanes read and write the bytes that a job's copy names;
the hash lane reads slots. Both notify the loop when they have finished, and nothing is freed before.

The life of a job is one coroutine, which waits only in `step`, `pause` and `let_others_go_first`. It is not a task: it
runs to its first wait within `Jobs.store` or `Jobs.load`, and goes on within the callback that it waits for. So nothing
happens between that callback and the job's reaction. A job that waits only for its copy has begun it when the request
is answered (a large one some turns of the loop later). A job is never cancelled while its copy is in flight.
"""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from kvoffloadd.cache.jobs.loadplan import NO_PARTS, LoadPlan, LoadRequest, plan_load
from kvoffloadd.cache.jobs.sealing import Sealing
from kvoffloadd.cache.lower.fetches import Urgency
from kvoffloadd.cache.lowertiers import GroupLookup, LowerTiers
from kvoffloadd.cache.memory.cache import NO_ROWS, Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.config import AUTO
from kvoffloadd.device.base import Copy, CopyRequest, CopyResult, Device
from kvoffloadd.device.signals import ReadySignal, Signals, SignalWait
from kvoffloadd.device.work import BlockList, BlockWork, hashable
from kvoffloadd.errors import LimitError
from kvoffloadd.model import BoolArray, Direction, I64Array, Outcome, U32Array, U64Array
from kvoffloadd.scheduling.lanes import DAEMON, Flow, Lane
from kvoffloadd.storage.hashing import hash_payloads, in_turns

T = TypeVar("T")

VERIFY_URGENT = 0
"""The urgency of verification, which comes before sealing: see `sealing`."""

STEP_PARTS = 8192
"""The number of parts of a store that one turn of the loop commits or frees: it takes a millisecond or two."""

SOON_PARTS = 512
"""The maximum number of parts of a store that is sealed in the turn in which it ends: that takes a tenth of a
millisecond.
"""

_SHORT = (MemoryError, OSError, RuntimeError)
"""The errors of a device that lacks memory or threads. Such an error fails the job, which still reports its end."""


class Phase(StrEnum):
    """Names what a job waits for."""

    DISK = "disk"  # or the remote store
    VERIFICATION = "verification"  # of payloads, before they are loaded
    SIGNAL = "signal"  # the worker's
    COPY = "copy"
    END = "end"  # nothing: it ends after the reply


class Stopped(Exception):
    """Ends a job before its copy has begun. The message is the reason, for the worker."""

    def __init__(self, outcome: Outcome, reason: str = "") -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, eq=False)
class CopyOptions:
    """Describes how to copy a job."""

    device: Device
    deadline_s: float  # loop time after which no more pieces of it begin
    urgent: bool = False  # before other jobs of its direction
    ready: ReadySignal | None = None  # nothing is copied before this signal; None: at once
    flow: Flow = DAEMON  # the user and engine whose share of the lanes it uses


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Describes how a job ended."""

    outcome: Outcome
    bytes: int
    seconds: float
    failed: list[I64Array]  # by group: indices of the keys that were not stored or loaded
    reason: str = ""


class Owner(Protocol):
    """Declares what a job uses of `Jobs`."""

    cache: Cache
    lower: LowerTiers | None
    hash_lane: Lane
    signals: Signals
    sealing: Sealing
    verify_loads: bool | str  # AUTO: by devices that hash what they load

    def drop(self, rows: U32Array) -> None:
        """Drops keys with wrong bytes."""

    def remove(self, job: Job, result: CopyResult) -> None:
        """Removes a job that has ended with this result, and counts it."""


@dataclass(slots=True, eq=False)
class Job:
    """A job under way."""

    owner: Owner
    direction: Direction
    options: CopyOptions
    on_end: Callable[[Completion], None]  # called once, after the last access
    # The record numbers that it reads or writes; for a load, also the row of each one's key, which the load holds.
    parts: I64Array = field(default_factory=lambda: NO_PARTS)
    rows: U32Array = field(default_factory=lambda: NO_ROWS)
    lists: list[BlockList] = field(default_factory=list)  # what is copied; the copy takes the lists over when it begins
    # By group: the index of the key of each payload that is copied, and the indices of the keys that are not copied.
    chosen: list[I64Array] = field(default_factory=list)
    lost: list[I64Array] = field(default_factory=list)
    # Which parts have failed verification (load), or were cleared in the meantime (store); and which of them a load's
    # copy verifies.
    bad: BoolArray = field(init=False)
    hashed: BoolArray = field(init=False)
    later: LoadRequest | None = None  # for a load: what it fetches before it is planned again
    settled: int = 0  # for a store: how many of its parts, the last ones, are committed or freed
    phase: Phase = Phase.END
    copy: Copy | None = None
    waiting: SignalWait | None = None  # for the worker's signal
    stopped: Outcome | None = None  # how it ends if its copy has not begun
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    began_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _life: Coroutine[None, Any, None] | None = None
    _give_up: Callable[[], bool] | None = None  # how to stop what it waits for, see `step`

    def take(self, parts: I64Array, lists: list[BlockList], lost: list[I64Array]) -> None:
        """Sets the parts to copy; the lists have their payloads in the same order. `lost`: keys that its end names."""
        self.bad, self.hashed = np.zeros((2, len(parts)), bool)
        self.parts, self.lists, self.lost = parts, lists, lost
        self.chosen = [block_list.keys for block_list in lists]

    @changing
    def hold(self, plan: LoadPlan) -> None:
        """Takes over a plan, and holds its keys in place of the keys held so far."""
        self.take(plan.parts, plan.lists, plan.lost)
        self.owner.cache.hold(plan.rows)
        if len(self.rows):
            self.owner.cache.unhold(self.rows)
        self.rows = plan.rows

    def start(self, life: Coroutine[None, Any, None]) -> None:
        """Runs the job's coroutine to its first wait."""
        self._life = life
        self._go_on(None)

    def busy_s(self, now: float) -> float:
        """Returns the seconds that a thread has been working on the worker's memory for this job; 0 if none is. `now`:
        of time.monotonic().
        """
        turn = self.copy or self.waiting
        return turn.busy_s(now) if turn is not None and not self.ended.is_set() else 0.0

    def cancel(self) -> None:
        self.stop(Outcome.CANCELLED)

    def stop(self, outcome: Outcome) -> None:
        """Drops what has not begun; the job ends with this outcome. `on_end` is still called, after the last access."""
        if self.stopped is None or outcome is Outcome.CANCELLED:  # the worker's last request counts
            self.stopped = outcome
        give_up = self._give_up
        if give_up is not None and give_up():
            self._give_up = None
            with changing, suppress(StopIteration):
                self._life.throw(Stopped(self.stopped))  # type: ignore[union-attr]  # it waits, so it has begun

    @types.coroutine
    def step(
        self, phase: Phase, begin: Callable[[Callable[[T], None]], Callable[[], bool]], until_s: float | None = None
    ) -> Generator[None, T, T]:
        """Begins an operation, waits until it calls back, and returns the value that it brings.

        `begin(resume)` begins the operation, which calls `resume` once, later. It returns a function that gives the
        operation up, and that returns whether it ended at once: then `resume` is not called. `until_s`: loop time at
        which the job is stopped.

        Raises Stopped: the job was stopped before, or the operation was given up.
        """
        if self.stopped is not None:
            raise Stopped(self.stopped)
        self.phase = phase
        self._give_up = begin(self._go_on)
        timer = None
        if until_s is not None:
            timer = asyncio.get_running_loop().call_at(until_s, self.stop, Outcome.EXPIRED)
        try:
            value = yield
        finally:
            self._give_up = None
            if timer is not None:
                timer.cancel()
        return value

    @types.coroutine
    def pause(self) -> Generator[None, None, None]:
        """Goes on in the next turn of the loop, stopped or not: for work after the copy."""
        next_turn(self._go_on)
        yield

    @types.coroutine
    def let_others_go_first(self) -> Generator[None, None, None]:
        """Goes on after all other work of the next turn of the loop, stopped or not: see `behind_others`."""
        behind_others(self._go_on)
        yield

    @changing
    def _go_on(self, value: object) -> None:
        with suppress(StopIteration):
            self._life.send(value)  # type: ignore[union-attr]  # as in `stop`

    # --- the life of a store ---

    async def store(self) -> None:
        """Runs a store: its parts are committed or freed, and sealed."""
        result = await self._result(self._copy())
        seals: Iterable[None] = ()
        if result.outcome is Outcome.DONE:
            seals = await self._commit(result.digests)
        else:
            await self._settle(lambda step: self.owner.cache.abort(self.parts[step]))
        self._end(result)
        if len(self.parts) > SOON_PARTS:
            await self.let_others_go_first()  # the completion is sent
        for _ in seals:
            await self.let_others_go_first()

    async def _commit(self, digests: U64Array | None) -> Iterable[None]:
        """Makes stored parts readable. Returns steps that seal them with these digests, from the first part on; without
        digests, the hash lane seals them.
        """
        entries = self.owner.cache.entries
        generations = entries.parts.generation
        kept, at_commit = deque([np.zeros(0, np.int64)]), deque([generations[:0]])  # the indices of the parts
        # The keyspaces, how often each was dropped from until then, and the parts, of all steps but the last.
        early: list[tuple[Keyspace, int, I64Array]] = []

        def commit(step: slice) -> None:
            parts = self.parts[step]
            if step.start:  # before the commit, which may free rows of keys that were cleared
                keyspaces = entries.by_keyspace(entries.parts.row[parts])
                early.extend((keyspace, keyspace.drops, indices + step.start) for keyspace, indices in keyspaces)
            committed = self.owner.cache.commit(parts)
            if len(committed) < len(parts):  # cleared in the meantime
                self.bad[step] = ~np.isin(parts, committed)
            kept.appendleft(step.start + np.flatnonzero(~self.bad[step]))
            at_commit.appendleft(generations[committed])

        await self._settle(commit)
        for keyspace, drops, indices in early:
            # Cleared between two steps: for the worker the store was still running.
            if keyspace.retired or keyspace.drops > drops:
                self.bad[indices] = True
        which, then = np.concatenate(kept), np.concatenate(at_commit)
        parts = self.parts[which]
        if digests is not None:
            return self.owner.sealing.seal_hashed(self.options.flow, parts, then, digests[which])
        self.owner.sealing.add(self.options.flow, parts, then)
        return ()

    async def _settle(self, do: Callable[[slice], None]) -> None:
        """Commits or frees a store's parts step by step, each step in a separate turn. The last parts come first, as in
        an `Admission`: so the beginning of a prompt is evicted last.
        """
        for end in range(len(self.parts), 0, -STEP_PARTS):
            if self.settled:
                await self.pause()
            begin = max(0, end - STEP_PARTS)
            do(slice(begin, end))
            self.settled = len(self.parts) - begin

    # --- the life of a load ---

    async def load(self) -> None:
        """Runs a load; its keys are held."""
        result = await self._result(self._copy_out())
        self.owner.cache.unhold(self.rows)
        self._end(result)

    async def _copy_out(self) -> CopyResult:
        if self.later is not None:
            await self._fetch(self.later)
        await self._verify()
        result = await self._copy()
        if self.hashed.any() and result.outcome is Outcome.DONE:
            await self._check_hashed(result.digests)
        return result

    async def _fetch(self, request: LoadRequest) -> None:
        """Brings keys into memory, and plans the load again: keys that came are held until the job's next wait. From
        then on, the job uses neither its keys nor their keyspaces.
        """
        cache, lower = self.owner.cache, self.owner.lower
        if lower is not None:
            await self.step(Phase.DISK, partial(self._begin_fetch, lower, request.below), self.options.deadline_s)
        lookups = cache.find_all([(group.keyspace, group.keys) for group in request.groups])
        plan = plan_load(cache.entries, request.groups, lookups)
        try:
            cache.check_hold(self.options.flow.uid, plan.rows)
        except LimitError as error:  # other requests have stored some of the keys in the meantime
            raise Stopped(Outcome.FAILED, str(error)) from None
        self.hold(plan)
        self.later = None

    def _begin_fetch(
        self, lower: LowerTiers, below: list[GroupLookup], resume: Callable[[None], None]
    ) -> Callable[[], bool]:
        fetch = lower.fetch(below, Urgency.LOAD, partial(resume, None), self.options.flow, whole=True)

        def give_up() -> bool:
            fetch.cancel()
            return True

        return give_up

    async def _verify(self) -> None:
        """Verifies the payloads that must be checked, one turn of the lane after the other, and drops keys with wrong
        bytes. The copy verifies the payloads that it can hash.
        """
        columns, device = self.owner.cache.entries.parts, self.options.device
        if verifies(self.owner.verify_loads, device):
            is_due = columns.state[self.parts] == PartState.SEALED
        else:
            is_due = columns.unverified[self.parts] != 0
        if not is_due.any():
            return
        if len(self.parts) > STEP_PARTS:
            await self.step(Phase.VERIFICATION, behind_others)
        if device.hashed_load_bytes:
            self.hashed = is_due & hashable(self.lists, device.hashed_load_bytes)
        due = np.flatnonzero(is_due & ~self.hashed)
        if not len(due):
            return
        for turn in in_turns(due, self.owner.cache.entries.payload_bytes(self.parts[due])):
            parts = self.parts[turn]
            digests = await self.step(Phase.VERIFICATION, partial(self._hash, parts), self.options.deadline_s)
            if isinstance(digests, BaseException):
                if self.stopped is not None:
                    raise Stopped(self.stopped)
                raise Stopped(Outcome.FAILED, f"verification failed: {digests}")
            self._drop_wrong(turn, digests)  # at once, before another job loads them

    async def _check_hashed(self, digests: U64Array | None) -> None:
        """Drops keys that the copy has found wrong, of very many payloads in several turns of the loop."""
        if digests is None:
            raise ValueError("a device was to hash what it loads, and did not")
        copied = np.flatnonzero(self.hashed & ~self.bad)
        for begin in range(0, len(copied), STEP_PARTS):
            if begin:
                await self.pause()
            step = copied[begin : begin + STEP_PARTS]
            self._drop_wrong(step, digests[step])

    @changing
    def _drop_wrong(self, indices: I64Array, digests: U64Array) -> None:
        """Compares payloads of a load with these checksums, and drops keys with wrong bytes."""
        columns, parts = self.owner.cache.entries.parts, self.parts[indices]
        words = np.flatnonzero(digests != np.take(columns.digest, parts, axis=0))  # each payload has two words
        wrong = np.unique(words // 2)
        if len(wrong):
            self.owner.drop(self.rows[indices[wrong]])
        columns.unverified[parts] = 0

    def _hash(self, parts: I64Array, resume: Callable[[U64Array | BaseException], None]) -> Callable[[], bool]:
        sizes = self.owner.cache.entries.payload_bytes(parts)
        work = partial(hash_payloads, self.owner.cache.entries.payload_addresses(parts), sizes)
        ticket = self.owner.hash_lane.submit(
            work, resume, flow=self.options.flow, urgent=VERIFY_URGENT, cost_bytes=int(sizes.sum())
        )

        def give_up() -> bool:
            ticket.cancel()
            return False  # the lane calls back, cancelled or not

        return give_up

    # --- both ---

    async def finish(self) -> None:
        """Runs a job that has nothing to move."""
        await self.step(Phase.END, next_turn)
        self._end(CopyResult(Outcome.DONE, 0, 0, 0, 0.0))

    def _end(self, result: CopyResult) -> None:
        """Reports the result: the job has had its last access, and has nothing to free any more."""
        failed = self._failed(result.outcome)
        outcome = Outcome.PARTIAL if result.outcome is Outcome.DONE and any(map(len, failed)) else result.outcome
        self.owner.remove(self, result)
        self.ended.set()
        self.on_end(Completion(outcome, result.bytes, result.seconds, failed, result.reason))

    def _failed(self, outcome: Outcome) -> list[I64Array]:
        """Returns, by group, the indices of the keys that a copy with this outcome has not stored or loaded."""
        if outcome is not Outcome.DONE:
            return [np.union1d(chosen, lost) for chosen, lost in zip(self.chosen, self.lost, strict=True)]
        if not self.bad.any():
            return self.lost
        masks = np.split(self.bad, np.cumsum([len(chosen) for chosen in self.chosen])[:-1])
        return [np.union1d(chosen[m], lost) for chosen, lost, m in zip(self.chosen, self.lost, masks, strict=True)]

    async def _result(self, steps: Coroutine[None, Any, CopyResult]) -> CopyResult:
        """Returns how the job's steps end. A job that does not reach its copy still ends, after its reply."""
        try:
            return await steps
        except Stopped as stopped:
            return CopyResult.not_begun(stopped.outcome, str(stopped))
        except Exception as error:  # noqa: BLE001  end of a job: otherwise it would have none
            about = {"message": "a job failed by a bug of ours", "exception": error}
            asyncio.get_running_loop().call_exception_handler(about)
        with suppress(Stopped):
            await self.step(Phase.END, next_turn)
        return CopyResult.not_begun(Outcome.FAILED, "it met a bug in the daemon; its log has the details")

    async def _copy(self) -> CopyResult:
        """Waits for the worker's signal, if there is one, then copies. Raises Stopped: no copy has begun."""
        try:
            if self.options.ready is not None:
                await self._await_signal(self.options.ready)
            if len(self.parts) > STEP_PARTS:
                await self.step(Phase.COPY, behind_others)  # planning takes a separate turn
            return await self.step(Phase.COPY, self._submit)
        except _SHORT as error:
            await self.step(Phase.END, next_turn)  # after the reply
            raise Stopped(Outcome.FAILED, f"the job could not start: {type(error).__name__}: {error}") from None

    async def _await_signal(self, ready: ReadySignal) -> None:
        def begin(resume: Callable[[Outcome], None]) -> Callable[[], bool]:
            wait = self.waiting = self.owner.signals.wait(ready, resume, self.options.flow.uid)
            return lambda: self.owner.signals.cancel(wait)

        if self.stopped is not None:
            raise Stopped(self.stopped)
        late = "the worker's signal had not come"
        try:
            outcome = await self.step(Phase.SIGNAL, begin, self.options.deadline_s)
        except Stopped as stopped:
            raise Stopped(stopped.outcome, late) from None
        if self.stopped is not None:
            raise Stopped(self.stopped, late)
        if outcome is not Outcome.DONE:
            raise Stopped(outcome, "the page of the worker's signal is gone" if outcome is Outcome.FAILED else late)

    def _submit(self, resume: Callable[[CopyResult], None]) -> Callable[[], bool]:
        options, lists = self.options, self.lists
        self.lists = []
        work = BlockWork(lists, ~self.bad if self.bad.any() else None)
        made = work.hashing() if self.hashed.any() else work
        request = CopyRequest(self.direction, made, options.deadline_s, options.urgent, options.flow)
        copy = self.copy = options.device.submit(request, resume)

        def give_up() -> bool:
            copy.cancel()
            return False  # its end comes after the last access

        return give_up


def verifies(verify_loads: bool | str, device: Device) -> bool:
    """Returns whether all sealed payloads are verified when they are loaded to this device, not only adopted ones."""
    return device.hashed_load_bytes > 0 if verify_loads == AUTO else bool(verify_loads)


def next_turn(resume: Callable[[None], None]) -> Callable[[], bool]:
    """Goes on in the next turn of the loop: an operation for `Job.step`."""
    asyncio.get_running_loop().call_soon(resume, None)
    return lambda: False


def behind_others(resume: Callable[[None], None]) -> Callable[[], bool]:
    """Goes on in the turn after the next: an operation for `Job.step`. In the next turn, it would run before sockets
    are read.
    """
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, resume, None)
    return lambda: False
