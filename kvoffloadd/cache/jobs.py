"""Stores and loads under way. A job owns all that it needs until its last access, then frees it and reports its result.

Ownership: everything here belongs to the event loop. The copy lanes read and write the bytes that a job's copy names;
the hash lane reads slots. Both tell the loop when they are done, and only then is anything freed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvoffloadd.cache.fetches import Urgency
from kvoffloadd.cache.job import (
    Completion,
    CopyOptions,
    Job,
    JobCounters,
    Phase,
    Stopped,
    Verification,
    behind_others,
    next_turn,
)
from kvoffloadd.cache.lower import GroupLookup, LowerTiers
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.progress import Progress, Waits
from kvoffloadd.cache.sealing import Sealing
from kvoffloadd.config import AUTO
from kvoffloadd.device.base import CopyResult, Device
from kvoffloadd.device.signals import ReadySignal, Signals
from kvoffloadd.device.work import BlockList, BlockWork, hashable
from kvoffloadd.lanes import Lane
from kvoffloadd.model import Direction, I64Array, Outcome, U32Array, U64Array
from kvoffloadd.patience import Patience
from kvoffloadd.storage.hashing import hash_payloads, in_turns

VERIFY_URGENT = 0
"""Before what is sealed: see `sealing`."""

STEP_PARTS = 8192
"""Parts of a store that one turn of the loop commits or frees: it takes a millisecond or two."""

SOON_PARTS = 512
"""Parts of a store that are sealed before its completion is sent, in a tenth of a millisecond."""

STUCK_LOOKS = 10
"""Looks at a chunk before it is given up."""

_SHORT = (MemoryError, OSError, RuntimeError)
"""What a device raises that is short of memory or threads: it costs the job, which has its end all the same."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """What a load copies as things stand."""

    rows: U32Array  # of each part the row of its key
    parts: I64Array  # record numbers
    lists: list[BlockList]  # where each part's payload is copied to, in the same order


class LoadRequest(Protocol):
    """A load of keys some of which are below memory."""

    below: list[GroupLookup]  # what may come is to be brought into memory first

    def resolve(self) -> LoadPlan:
        """What is to be copied, of keys that are complete now: called when those below have come, or will not."""


@dataclass(slots=True, eq=False)
class Jobs:
    """All jobs of the daemon that are under way, and the sealing of what they stored."""

    cache: Cache
    lower: LowerTiers | None
    hash_lane: Lane
    signals: Signals
    verify_loads: bool | str  # AUTO: by devices that hash what they load
    running: set[Job] = field(default_factory=set)
    progress: Progress = field(default_factory=Progress)  # the running jobs by number; sessions begin and end them
    waits: Waits = field(default_factory=Waits)
    sealing: Sealing = field(init=False)
    counters: dict[Direction, JobCounters] = field(
        default_factory=lambda: {direction: JobCounters() for direction in Direction}
    )

    def __post_init__(self) -> None:
        self.sealing = Sealing(self.cache, self.hash_lane)

    @property
    def unsealed(self) -> int:
        """Parts that wait for their checksum."""
        return self.sealing.unsealed

    @property
    def holds(self) -> int:
        """Rows that running loads hold."""
        return sum(len(job.rows) for job in self.running)

    @property
    def reserved(self) -> int:
        """Parts that running stores own."""
        return sum(len(job.parts) - job.settled for job in self.running if job.direction is Direction.STORE)

    # --- store ---

    def store(
        self, parts: I64Array, lists: list[BlockList], options: CopyOptions, on_end: Callable[[Completion], None]
    ) -> Job:
        """Copy into reserved parts that the job owns from here on; commit or abort them at the end. `lists`: where each
        part's payload is copied from, in the same order.
        """
        job = self._add(Job(Direction.STORE, options, on_end, _now_s(), parts, bad=np.zeros(len(parts), bool)))
        job.lists = lists
        job.start(self._store(job))
        return job

    async def _store(self, job: Job) -> None:
        result = await self._result(job, self._copy(job))
        seals: Iterable[None] = ()
        if result.outcome is Outcome.DONE:
            seals = await self._commit(job, result.digests)
        else:
            await self._settle(job, lambda step: self.cache.abort(job.parts[step]))
        self._end(job, result)
        if len(job.parts) > SOON_PARTS:
            await job.let_others_go_first()  # the completion is sent
        for _ in seals:
            await job.let_others_go_first()

    async def _commit(self, job: Job, digests: U64Array | None) -> Iterable[None]:
        """Make what was stored readable. Then it is to be sealed, from its first part on: by the steps that this
        returns, with these digests, or by the hash lane.
        """
        entries = self.cache.entries
        generations = entries.parts.generation
        kept, at_commit = deque([np.zeros(0, np.int64)]), deque([generations[:0]])  # which of the parts
        # By keyspace, and how often it was dropped from by then: the parts of all steps but the last.
        early: list[tuple[Keyspace, int, I64Array]] = []

        def commit(step: slice) -> None:
            parts = job.parts[step]
            if step.start:  # before the commit, which may free rows of keys that were cleared
                keyspaces = entries.by_keyspace(entries.parts.row[parts])
                early.extend((keyspace, keyspace.drops, at + step.start) for keyspace, at in keyspaces)
            some = self.cache.commit(parts)
            if len(some) < len(parts):  # cleared meanwhile
                job.bad[step] = ~np.isin(parts, some)
            kept.appendleft(step.start + np.flatnonzero(~job.bad[step]))
            at_commit.appendleft(generations[some])

        await self._settle(job, commit)
        for keyspace, drops, at in early:
            # Cleared between two steps: to the worker the store was still running.
            if keyspace.retired or keyspace.drops > drops:
                job.bad[at] = True
        which, then = np.concatenate(kept), np.concatenate(at_commit)
        parts = job.parts[which]
        if digests is not None:
            return self.sealing.seal_hashed(job.options.flow, parts, then, digests[which])
        self.sealing.add(job.options.flow, parts, then)
        return ()

    async def _settle(self, job: Job, do: Callable[[slice], None]) -> None:
        """Commit or free a store's parts step by step, each in a turn of its own. The last come first, as in
        `admission`: so the beginning of a prompt is the last to be evicted.
        """
        for end in range(len(job.parts), 0, -STEP_PARTS):
            if job.settled:
                await job.pause()
            begin = max(0, end - STEP_PARTS)
            do(slice(begin, end))
            job.settled = len(job.parts) - begin

    # --- load ---

    def load(
        self,
        plan: LoadPlan,
        options: CopyOptions,
        on_end: Callable[[Completion], None],
        request: LoadRequest | None = None,
    ) -> Job:
        """Copy out what is planned, which is held until the end.

        With a `request`, its keys below memory are brought there first, while those of the plan are held; what is
        copied is what it resolves to then. A key whose payload was adopted (with `verify_loads`: sealed) and does not
        match its checksum is dropped, and bad: before the copy, or by a copy that hashes, which may have copied it.
        """
        job = Job(Direction.LOAD, options, on_end, _now_s())
        self._hold(job, plan)
        self._add(job)
        job.start(self._load(job, request))
        return job

    async def _load(self, job: Job, request: LoadRequest | None) -> None:
        result = await self._result(job, self._copy_out(job, request))
        self.cache.unhold(job.rows)
        self._end(job, result)

    async def _copy_out(self, job: Job, request: LoadRequest | None) -> CopyResult:
        if request is not None:
            await self._fetch(job, request.below)
            self._hold(job, request.resolve())
        await self._verify(job)
        result = await self._copy(job)
        if job.hashed.any() and result.outcome is Outcome.DONE:
            await self._check_hashed(job, result.digests)
        return result

    def _hold(self, job: Job, plan: LoadPlan) -> None:
        """Hold the plan's keys in place of those held so far."""
        self.cache.hold(plan.rows)
        if len(job.rows):
            self.cache.unhold(job.rows)
        job.rows, job.parts, job.lists = plan.rows, plan.parts, plan.lists
        job.bad, job.hashed = np.zeros((2, len(plan.rows)), bool)

    async def _fetch(self, job: Job, below: list[GroupLookup]) -> None:
        """Bring these keys into memory. They are held until the job waits again."""
        lower = self.lower
        if lower is None:
            return

        def begin(resume: Callable[[None], None]) -> Callable[[], bool]:
            fetch = lower.fetch(below, Urgency.LOAD, partial(resume, None), job.options.flow, whole=True)

            def give_up() -> bool:
                fetch.cancel()
                return True

            return give_up

        await job.step(Phase.DISK, begin, job.options.deadline_s)

    async def _verify(self, job: Job) -> None:
        """Check the payloads whose checksums are due, one turn of the lane after the other, and drop what is wrong. The
        copy checks those that it can hash.
        """
        columns, device = self.cache.entries.parts, job.options.device
        if self.verifies(device):
            is_due = columns.state[job.parts] == PartState.SEALED
        else:
            is_due = columns.unverified[job.parts] != 0
        if not is_due.any():
            return
        if len(job.parts) > STEP_PARTS:
            await job.step(Phase.VERIFICATION, behind_others)
        if device.hashed_load_bytes:
            job.hashed = is_due & hashable(job.lists, device.hashed_load_bytes)
        due = np.flatnonzero(is_due & ~job.hashed)
        for turn in in_turns(due, self.cache.entries.payload_bytes(job.parts[due])):
            parts = job.parts[turn]
            digests = await job.step(Phase.VERIFICATION, partial(self._hash, job, parts), job.options.deadline_s)
            if isinstance(digests, BaseException):
                if job.stopped is not None:
                    raise Stopped(job.stopped)
                raise Stopped(Outcome.FAILED, f"verification failed: {digests}")
            self._drop_wrong(job, turn, digests)  # at once, before another job loads them

    async def _check_hashed(self, job: Job, digests: U64Array | None) -> None:
        """Drop what the copy has found wrong, of very many payloads in some turns of the loop."""
        if digests is None:
            raise ValueError("a device was to hash what it loads, and did not")
        copied = np.flatnonzero(job.hashed & ~job.bad)
        for begin in range(0, len(copied), STEP_PARTS):
            if begin:
                await job.pause()
            step = copied[begin : begin + STEP_PARTS]
            self._drop_wrong(job, step, digests[step])

    def _drop_wrong(self, job: Job, at: I64Array, digests: U64Array) -> None:
        """These payloads of a load have these checksums."""
        columns, parts = self.cache.entries.parts, job.parts[at]
        words = np.flatnonzero(digests != np.take(columns.digest, parts, axis=0))  # of two a payload
        wrong = np.unique(words // 2)
        self.drop(job.rows[at[wrong]])
        columns.unverified[parts] = 0

    def verification(self, device: Device) -> Verification:
        """What is verified of loads to this device, and when."""
        if not self.verifies(device):
            return Verification.ADOPTED
        return Verification.COPIED if device.hashed_load_bytes else Verification.BEFORE

    def verifies(self, device: Device) -> bool:
        """Whether all sealed payloads are verified when they are loaded to this device; not only what was adopted."""
        return device.hashed_load_bytes > 0 if self.verify_loads == AUTO else bool(self.verify_loads)

    def _hash(
        self, job: Job, parts: I64Array, resume: Callable[[U64Array | BaseException], None]
    ) -> Callable[[], bool]:
        sizes = self.cache.entries.payload_bytes(parts)
        work = partial(hash_payloads, self.cache.entries.payload_addresses(parts), sizes)
        ticket = self.hash_lane.submit(
            work, resume, flow=job.options.flow, urgent=VERIFY_URGENT, cost_bytes=int(sizes.sum())
        )

        def give_up() -> bool:
            ticket.cancel()
            return False  # the lane calls back, cancelled or not

        return give_up

    async def verify_adopted(self) -> None:
        """Hash all that was adopted and not loaded since, and drop what is wrong. No engine is served yet, but a root
        that comes late may know that some of it was cleared.
        """
        columns = self.cache.entries.parts
        parts = np.flatnonzero(columns.unverified[: columns.runs.used])
        for turn in in_turns(parts, self.cache.entries.payload_bytes(parts)):
            unverified = turn[columns.unverified[turn] != 0]
            sizes = self.cache.entries.payload_bytes(unverified)
            work = partial(hash_payloads, self.cache.entries.payload_addresses(unverified), sizes)
            digests = await self.hash_lane.perform(work, cost_bytes=int(sizes.sum()))
            wrong = (digests != columns.digest[unverified]).any(axis=1)
            self.drop(columns.row[unverified[wrong]])
            columns.unverified[unverified] = 0

    def drop(self, rows: U32Array) -> None:
        """These keys hold wrong bytes: they are misses from now on. Loads under way leave them out if their copy has
        not begun; otherwise they report them as bad.
        """
        if not len(rows):
            return
        self.cache.drop(rows)
        for job in self.running:
            if job.direction is Direction.LOAD:
                job.bad |= np.isin(job.rows, rows)

    # --- both ---

    def finish(self, direction: Direction, options: CopyOptions, on_end: Callable[[Completion], None]) -> Job:
        """A job that has nothing to move: it ends in the next turn of the loop."""
        job = self._add(Job(direction, options, on_end, _now_s()))
        job.start(self._finish(job))
        return job

    async def _finish(self, job: Job) -> None:
        await job.step(Phase.END, next_turn)
        self._end(job, CopyResult(Outcome.DONE, 0, 0, 0, 0.0))

    def _add(self, job: Job) -> Job:
        self.running.add(job)
        return job

    async def _result(self, job: Job, steps: Coroutine[None, Any, CopyResult]) -> CopyResult:
        """How the job's steps end. One that does not come to its copy has its end all the same, behind its reply."""
        try:
            return await steps
        except Stopped as stopped:
            return CopyResult.not_begun(stopped.outcome, str(stopped))
        except Exception as error:  # noqa: BLE001  end of a job: nobody else would give it one
            about = {"message": "a job failed by a bug of ours", "exception": error}
            asyncio.get_running_loop().call_exception_handler(about)
        with suppress(Stopped):
            await job.step(Phase.END, next_turn)
        return CopyResult.not_begun(Outcome.FAILED, "it met a bug in the daemon; its log has the details")

    async def _copy(self, job: Job) -> CopyResult:
        """Wait for the worker's signal, if there is to be one, then copy. Raises Stopped: no copy has begun."""
        try:
            if job.options.ready is not None:
                await self._await_signal(job, job.options.ready)
            if len(job.parts) > STEP_PARTS:
                await job.step(Phase.COPY, behind_others)  # planning takes a turn of its own
            return await job.step(Phase.COPY, partial(self._submit, job))
        except _SHORT as error:
            await job.step(Phase.END, next_turn)  # behind the reply
            raise Stopped(Outcome.FAILED, f"the job could not start: {type(error).__name__}: {error}") from None

    async def _await_signal(self, job: Job, ready: ReadySignal) -> None:
        def begin(resume: Callable[[Outcome], None]) -> Callable[[], bool]:
            wait = self.signals.wait(ready, job.options.deadline_s, resume)
            return lambda: self.signals.cancel(wait)

        if job.stopped is not None:
            raise Stopped(job.stopped)
        late = "the worker's signal had not come"
        try:
            outcome = await job.step(Phase.SIGNAL, begin)
        except Stopped as stopped:
            raise Stopped(stopped.outcome, late) from None
        if job.stopped is not None:
            raise Stopped(job.stopped, late)
        if outcome is not Outcome.DONE:
            raise Stopped(outcome, "the page of the worker's signal is gone" if outcome is Outcome.FAILED else late)

    def _submit(self, job: Job, resume: Callable[[CopyResult], None]) -> Callable[[], bool]:
        options, lists = job.options, job.lists
        job.lists = []
        work = BlockWork(lists, ~job.bad if job.bad.any() else None)
        copy = job.copy = options.device.submit(
            job.direction,
            work.hashing() if job.hashed.any() else work,
            deadline_s=options.deadline_s,
            urgent=options.urgent,
            done=resume,
            flow=options.flow,
        )

        def give_up() -> bool:
            copy.cancel()
            return False  # its end comes behind the last access

        return give_up

    def _end(self, job: Job, result: CopyResult) -> None:
        self.running.remove(job)
        job.ended.set()
        counters = self.counters[job.direction]
        counters.jobs += 1
        counters.bytes += result.bytes
        counters.seconds += result.seconds
        counters.took_s.add(result.seconds)
        counters.descriptors += result.descriptors
        counters.copies += result.copies
        if result.outcome is Outcome.DONE:
            bad = int(job.bad.sum())
            counters.keys += len(job.parts) - bad
            counters.keys_bad += bad
        else:
            counters.not_done += 1
            name = f"keys_{result.outcome.value}"
            setattr(counters, name, getattr(counters, name) + len(job.parts))
        outcome = Outcome.PARTIAL if result.outcome is Outcome.DONE and job.bad.any() else result.outcome
        job.on_end(Completion(outcome, result.bytes, result.seconds, job.bad, result.reason))

    async def drain(self, progress: Progress, last: int, deadline_s: float) -> bool:
        """Wait until these jobs up to the number `last` have ended, and all that was stored by then has its checksum,
        or has gone; False at the deadline. For any number of callers: see `Waits`.
        """
        until_s = asyncio.get_running_loop().time() + deadline_s
        return await self.waits.until_past(progress, last, until_s) and await self.until_sealed(until_s)

    async def until_sealed(self, until_s: float) -> bool:
        """Wait until all that was stored by now has its checksum, or has gone; False: not by that time of the loop."""
        return await self.waits.until_past(self.sealing.stores, self.sealing.stores.last, until_s)

    async def settle(self, jobs: set[Job], deadline_s: float) -> bool:
        """Wait until these jobs have ended; False at the deadline. For one caller for each job: all callers that wait
        for the same one go on in the same turn.
        """
        try:
            async with asyncio.timeout(deadline_s):
                for job in list(jobs):  # one after the other: an end wakes only the callers that wait for this job
                    await job.ended.wait()
        except TimeoutError:
            return False
        return True

    async def end(self, jobs: set[Job], stuck_s: float) -> bool:
        """Wait until these jobs, of which nothing more is to begin, have ended. False: a thread has been at one
        chunk of one of them for `stuck_s` seconds, and may be at it for ever.

        A late event loop, or chunks of other jobs that take long, are no reason to give up.
        """
        patience = Patience(stuck_s / STUCK_LOOKS)
        while not await self.settle(jobs, patience.look_s):
            now = time.monotonic()
            copies = [job.copy for job in jobs if job.copy is not None and not job.ended.is_set()]
            if patience.is_over(max((copy.busy_s(now) for copy in copies), default=0.0), now, stuck_s):
                return False
        return True


def _now_s() -> float:
    return asyncio.get_running_loop().time()
