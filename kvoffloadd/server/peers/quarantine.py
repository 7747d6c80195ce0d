"""Copies of other users' memory that do not end, and the resources that they hold until then. Event loop only.

A page of a worker's memory can keep the thread that touches it waiting inside the kernel, for as long as the owner of
the memory likes. Such a copy may continue at any time, so its slots and the memory that it names stay in place. They
stay charged to their user, who has the waiting threads, and the daemon continues to serve. The process ends only when
such copies hold too much of its memory: nothing else would release it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvoffloadd.cache.jobs.job import Job
from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.model import I64Array, U32Array

log = logging.getLogger(__name__)

FULL_SHARE = 1 / 2
"""The quarantined share of memory that ends the process. It is more than one user may hold (see `cache.memory.held`),
so several users are necessary.
"""


@dataclass(slots=True, eq=False)
class Quarantine:
    """Ends jobs, and keeps those that do not end. `trusted`: users with copies that end the process instead, by
    `fatal`: their threads are the daemon's own as well. `held_bytes`: held memory; slots of several jobs count once.
    """

    jobs: Jobs
    trusted: Collection[int]
    fatal: Callable[[str], None]
    held_bytes: int = 0
    _held: dict[Job, tuple[I64Array, I64Array]] = field(default_factory=dict)  # its distinct parts, and their bytes
    _holders: U32Array = field(default_factory=lambda: np.zeros(0, np.uint32))  # how many held jobs have each part

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Job]:
        """Iterates over the held jobs."""
        return iter(self._held)

    async def end(self, uid: int, running: set[Job], stuck_s: float, whose: str) -> bool:
        """Waits until these jobs have ended; no more work of theirs may begin. Returns False if a thread has been at
        one chunk for `stuck_s`; the jobs are held until `until_ended`. `whose`: for messages.
        """
        if await self.jobs.end(running, stuck_s):
            return True
        if uid in self.trusted:
            self.fatal(f"copies of {whose} do not end within {stuck_s:g} s")
            return False
        for job in running:
            if not job.ended.is_set():
                self._hold(job)
        log.warning(
            "copies of %s, of uid %d, do not end: the kernel or the driver waits for its memory; they are held",
            whose, uid,
        )  # fmt: skip
        capacity_bytes = self.jobs.cache.tier.capacity_bytes
        if self.held_bytes > FULL_SHARE * capacity_bytes:
            self.fatal(
                f"copies of other users' memory that do not end hold {self.held_bytes >> 20} of "
                f"{capacity_bytes >> 20} MiB of memory"
            )
        return False

    def _hold(self, job: Job) -> None:
        if job in self._held:
            return  # its registration and its session both end
        entries = self.jobs.cache.entries
        if not len(self._holders):
            self._holders = np.zeros(len(entries.parts.row), np.uint32)  # for the worst case; few pages are touched
        parts = np.unique(job.parts)
        sizes = entries.payload_bytes(parts)
        self._held[job] = parts, sizes
        self.held_bytes += int(sizes[self._holders[parts] == 0].sum())
        self._holders[parts] += 1

    async def until_ended(self, running: set[Job]) -> None:
        """Waits until these jobs have ended, which may be never: only for a background task."""
        await asyncio.gather(*map(self._until_ended, running))

    async def _until_ended(self, job: Job) -> None:
        await job.ended.wait()
        if job in self._held:
            parts, sizes = self._held.pop(job)
            self._holders[parts] -= 1
            self.held_bytes -= int(sizes[self._holders[parts] == 0].sum())
