"""Copies of other users' memory that do not end, and what they hold until they do. Event loop only.

A page of a worker's memory can keep the thread that touches it waiting inside the kernel, for as long as the owner of
the memory likes. Such a copy may go on at any time, so its slots and the memory that it names stay as they are. They
stay charged to their user, whose threads wait, and the daemon serves on. Only when too much of its own memory is held
that way does the process end: nothing else would release it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from kvoffloadd.cache.job import Job
from kvoffloadd.cache.jobs import Jobs

log = logging.getLogger(__name__)

FULL_SHARE = 1 / 2
"""Of memory: more than one user may hold (see `cache.memory.held`), so that it takes several to end the process."""


@dataclass(slots=True, eq=False)
class Quarantine:
    """Ends jobs, and keeps those that do not end. `trusted`: users whose copies end the process instead, by `fatal`:
    their threads are the daemon's own as well.
    """

    jobs: Jobs
    trusted: Collection[int]
    fatal: Callable[[str], None]
    _held: dict[Job, int] = field(default_factory=dict)  # with its bytes in memory

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are held."""
        return sum(self._held.values())

    def __len__(self) -> int:
        """Jobs that are held."""
        return len(self._held)

    async def end(self, uid: int, running: set[Job], stuck_s: float, whose: str) -> bool:
        """Wait until these jobs, of which nothing more is to begin, have ended. False: a thread has been at one chunk
        for `stuck_s`; they are held until `until_ended`. `whose`: for messages.
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
            "copies of %s, of uid %d, do not end: its memory keeps the kernel waiting; what they hold stays as it is",
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
        sizes = self.jobs.cache.entries.payload_bytes(np.unique(job.parts))
        self._held[job] = int(sizes.sum())

    async def until_ended(self, running: set[Job]) -> None:
        """Wait until these jobs have ended, which may be never: for a task that nobody waits for."""
        for job in list(running):
            await job.ended.wait()
            self._held.pop(job, None)
