"""Stores and loads under way. A job owns all that it needs until its last access, then frees it and reports its result.
Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import numpy as np

from kvoffloadd.cache.jobs.job import Completion, CopyOptions, Job, verifies
from kvoffloadd.cache.jobs.loadplan import LoadPlan, LoadRequest
from kvoffloadd.cache.jobs.sealing import Sealing
from kvoffloadd.cache.lowertiers import LowerTiers
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.progress import Progress, Waits
from kvoffloadd.cache.stats.histogram import Histogram
from kvoffloadd.device.base import CopyResult, Device
from kvoffloadd.device.signals import Signals
from kvoffloadd.device.work import BlockList
from kvoffloadd.model import Direction, I64Array, Outcome, U32Array
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.scheduling.stuckdetector import StuckDetector
from kvoffloadd.storage.hashing import hash_payloads, in_turns

STUCK_LOOKS = 10
"""The number of checks of a chunk before it is given up."""

NO_KEYS = np.zeros(0, np.int64)


class Verification(StrEnum):
    """Names what is verified of a device's loads."""

    COPIED = "copied"  # all sealed payloads, during the copy; before it, where that is not possible
    BEFORE = "before"  # all sealed payloads, before the copy
    ADOPTED = "adopted"  # only payloads that an earlier daemon left


TOOK_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds of job durations: from a job of a few small keys to one that waits for a slow disk."""


@dataclass(slots=True)
class JobCounters:
    """Counts what the jobs of one direction have moved since the start."""

    jobs: int = 0  # including those that had nothing to move
    keys: int = 0  # payloads that were moved
    bytes: int = 0
    seconds: float = 0.0
    took_s: Histogram = field(default_factory=lambda: Histogram(TOOK_S))  # from admission to end, of each job
    descriptors: int = 0
    copies: int = 0  # issued, after descriptors were coalesced
    not_done: int = 0  # jobs that failed, were cancelled or expired
    # Payloads that were not moved, by how their job ended; `keys_bad`: see `Job.bad`.
    keys_failed: int = 0
    keys_cancelled: int = 0
    keys_expired: int = 0
    keys_bad: int = 0


@dataclass(slots=True, eq=False)
class Jobs:
    """Keeps all jobs of the daemon that are under way, and seals what they have stored."""

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
        """Returns the number of parts that wait for their checksum."""
        return self.sealing.unsealed

    @property
    def holds(self) -> int:
        """Returns the number of rows that running loads hold."""
        return sum(len(job.rows) for job in self.running)

    @property
    def reserved(self) -> int:
        """Returns the number of parts that running stores own."""
        return sum(len(job.parts) - job.settled for job in self.running if job.direction is Direction.STORE)

    # --- store ---

    @changing
    def store(
        self, parts: I64Array, lists: list[BlockList], options: CopyOptions, on_end: Callable[[Completion], None]
    ) -> Job:
        """Copies into reserved parts that the job owns from here on, and commits or aborts them at the end. `lists`: by
        group, the source of each part's payload, in the same order.
        """
        job = Job(self, Direction.STORE, options, on_end)
        job.take(parts, lists, [NO_KEYS] * len(lists))
        self.running.add(job)
        job.start(job.store() if len(parts) else job.finish())
        return job

    # --- load ---

    @changing
    def load(
        self,
        plan: LoadPlan,
        options: CopyOptions,
        on_end: Callable[[Completion], None],
        later: LoadRequest | None = None,
    ) -> Job:
        """Copies the planned parts, which are held until the end.

        With `later`, keys below memory are first brought there, while the keys of the plan are held; the load is then
        planned again. A key is dropped, and bad, if its payload was adopted (with `verify_loads`: sealed) and does not
        match its checksum. The check comes before the copy, or during a copy that hashes, which may have copied the
        payload.
        """
        job = Job(self, Direction.LOAD, options, on_end, later=later)
        job.hold(plan)
        self.running.add(job)
        job.start(job.load() if len(plan.parts) or later is not None else job.finish())
        return job

    def verification(self, device: Device) -> Verification:
        """Returns what is verified of loads to this device, and when."""
        if not verifies(self.verify_loads, device):
            return Verification.ADOPTED
        return Verification.COPIED if device.hashed_load_bytes else Verification.BEFORE

    async def verify_adopted(self) -> None:
        """Hashes all payloads that were adopted and not loaded since, and drops keys with wrong bytes. No engine is
        served yet, but a root that comes late may show that some of the keys were cleared.
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

    @changing
    def drop(self, rows: U32Array) -> None:
        """Drops keys with wrong bytes: they are misses from now on. Loads under way leave them out if their copy has
        not begun; otherwise they report them as bad.
        """
        if not len(rows):
            return
        self.cache.drop(rows)
        for job in self.running:
            if job.direction is Direction.LOAD:
                job.bad |= np.isin(job.rows, rows)

    # --- both ---

    def remove(self, job: Job, result: CopyResult) -> None:
        """Removes a job that has ended with this result, and counts it."""
        self.running.remove(job)
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

    async def drain(self, progress: Progress, last: int, deadline_s: float) -> bool:
        """Waits until these jobs up to the number `last` have ended, and all parts that were stored by then are sealed
        or gone. Returns False at the deadline. For any number of callers: see `Waits`.
        """
        until_s = asyncio.get_running_loop().time() + deadline_s
        return await self.waits.until_past(progress, last, until_s) and await self.until_sealed(until_s)

    async def until_sealed(self, until_s: float) -> bool:
        """Waits until all parts that were stored by now are sealed or gone. Returns False if they are not at that loop
        time.
        """
        return await self.waits.until_past(self.sealing.stores, self.sealing.stores.last, until_s)

    async def settle(self, jobs: set[Job], deadline_s: float) -> bool:
        """Waits until these jobs have ended. Returns False at the deadline. For one caller for each job: all callers
        that wait for the same job go on in the same turn.
        """
        try:
            async with asyncio.timeout(deadline_s):
                for job in list(jobs):  # one after the other: an end wakes only the callers that wait for this job
                    await job.ended.wait()
        except TimeoutError:
            return False
        return True

    async def end(self, jobs: set[Job], stuck_s: float) -> bool:
        """Waits until these jobs have ended; no more work of them may begin. Returns False if a thread has been working
        on one chunk of one of them, or on its worker's signal, for `stuck_s` seconds, and may do so for ever.

        A late event loop, or chunks of other jobs that take long, are no reason to give up.
        """
        patience = StuckDetector(stuck_s / STUCK_LOOKS, time.monotonic())
        while not await self.settle(jobs, patience.look_s):
            now = time.monotonic()
            if patience.is_over(max((job.busy_s(now) for job in jobs), default=0.0), now, stuck_s):
                return False
        return True
