"""Health checks of a root: whether it still answers, is the same directory, and accepts writes again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.scheduling.stuckdetector import StuckDetector
from kvoffloadd.storage.disk.files import describe_error, lacks_resources
from kvoffloadd.storage.disk.health import Health, RootState
from kvoffloadd.storage.disk.rootdirectory import RootDirectory
from kvoffloadd.storage.disk.segmentpool import SegmentPool

T = TypeVar("T")

READ_FAILURES_MAX = 16
"""After this number of consecutive failed reads the root is taken off, and tried again later."""

LOOKS = 8
"""How often within `stuck_s` a root is checked for an answer."""

NO_ANSWER: Final = "the disk does not answer"


class Probe:
    """The health checks of one root, whose reads and writes run in `lanes`. `retry_s`: between two checks; `stuck_s`:
    how long I/O may take.
    """

    def __init__(
        self,
        directory: RootDirectory,
        pool: SegmentPool,
        health: Health,
        lanes: tuple[Lane, ...],
        retry_s: float,
        stuck_s: float,
    ) -> None:
        self._directory = directory
        self._pool = pool
        self._health = health
        self._loop = lanes[0].loop
        self.lane = directory.lane  # not one of the other lanes: they may hang
        self._lanes = (*lanes, self.lane)
        self._retry_s = retry_s
        self._stuck_s = stuck_s
        self._oldest, self._newest = StuckDetector(stuck_s / LOOKS), StuckDetector(stuck_s / LOOKS)

    async def pause(self) -> None:
        """Waits until the next `check` is due. Sets the root OFF, and returns soon, if the disk does not answer."""
        left = self._retry_s * self._health.retry_factor()
        until = self._loop.time() + left
        while left > 0 and self._health.state != RootState.OFF:
            await asyncio.sleep(min(left, self._oldest.look_s))
            if self.hangs():
                self._health.become(RootState.OFF, NO_ANSWER)
                return
            left = until - self._loop.time()
        await asyncio.sleep(max(left, 0))

    async def wait_for(self, came: asyncio.Event) -> None:
        """Waits for the root without a limit; but if none of its I/O ends for `stuck_s`, sets it OFF and returns."""
        while not came.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._newest.look_s):
                    await came.wait()
            if not came.is_set() and self.stands_still():
                self._health.become(RootState.OFF, NO_ANSWER)
                return

    def hangs(self) -> bool:
        """Returns whether some I/O takes longer than `stuck_s`."""
        now = time.monotonic()
        return self._oldest.is_over(max(lane.oldest_running_s(now) for lane in self._lanes), now, self._stuck_s)

    def stands_still(self) -> bool:
        """Returns whether there is I/O, none of it ended for `stuck_s`: reading many records may take long."""
        now = time.monotonic()
        moved = [lane.newest_running_s(now) for lane in self._lanes if lane.running]
        still_s = min(*moved, now - self._directory.last_progress_s) if moved else 0.0
        return self._newest.is_over(still_s, now, self._stuck_s)

    async def check(self) -> bool:
        """Returns whether the root is not OFF. May set it OFF, or OK."""
        if self._health.state == RootState.OFF:
            return False
        try:
            trouble = await self._ask(self._directory.perform(self.lane, self._directory.trouble))
            if not trouble:
                await self._ask(self._pool.look(self.lane))
        except TimeoutError:
            trouble = NO_ANSWER
        except OSError as error:
            trouble = "" if lacks_resources(error) else describe_error(error)
        if not trouble and self._health.reads_failed >= READ_FAILURES_MAX:
            trouble = "reads fail again and again"
        if trouble:
            self._health.become(RootState.OFF, trouble)
            return False
        if self._health.state in (RootState.READ_ONLY, RootState.FULL):
            await self._try_write()
        return True

    async def _ask(self, answer: Coroutine[Any, Any, T]) -> T:
        """Returns the disk's answer. Raises TimeoutError if this or any other I/O takes too long."""
        task = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({task}, timeout=self._oldest.look_s))[0]:
                if self.hangs():
                    raise TimeoutError
            return task.result()
        finally:
            task.cancel()

    async def _try_write(self) -> None:
        """Sets the state OK if operations like those of the next writes succeed. This lane has one thread: a trial that
        does not end blocks the next one, which would write to the same place.
        """
        try:
            if not await self._ask(self._pool.try_write(self.lane)):
                return
        except TimeoutError:
            self._health.become(RootState.READ_ONLY, NO_ANSWER)
        except (OSError, KvOffloadError) as error:
            if not lacks_resources(error):
                self._health.stop_writing(error)
        else:
            self._health.write_succeeded()
            self._health.become(RootState.OK)
