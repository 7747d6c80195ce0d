"""Reading records of a root's segments, in the threads of its read lane."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.lanes import BACKGROUND, CancelledWork, Flow, Lane
from kvoffloadd.tiers.disk.inspect import inspect_records
from kvoffloadd.tiers.disk.records import FAILED, read_records

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvoffloadd.lanes import Ticket
    from kvoffloadd.model import BoolArray, U8Array, U32Array, U64Array
    from kvoffloadd.tiers.disk.files import Files
    from kvoffloadd.tiers.disk.format import SpaceId
    from kvoffloadd.tiers.disk.health import Health
    from kvoffloadd.tiers.disk.home import Home
    from kvoffloadd.tiers.disk.segment import Records, Segment

log = logging.getLogger(__name__)


class Reader:
    """`changed` is set when a read has ended. Counts what was read, and errors, since the start."""

    def __init__(self, home: Home, files: Files, lane: Lane, health: Health, changed: asyncio.Event) -> None:
        self.lane = lane
        self.read_bytes = 0
        self.read_errors = 0
        self._home = home
        self._files = files
        self._health = health
        self._changed = changed

    def read(
        self,
        segment: Segment,
        space: SpaceId,
        wanted: Records,
        urgent: int,
        done: Callable[[U8Array, U64Array], None],
        flow: Flow = BACKGROUND,
    ) -> Ticket:
        """Read records (records.READ) to their addresses and verify them. `done(status, digests)`, once, later."""
        segment.readers += 1
        work = partial(
            read_records, self._files, self._home.segments_fd, segment.name, segment.header.uuid, space, wanted,
            direct=self._home.is_direct,
        )  # fmt: skip

        def finish(result: tuple[U8Array, U64Array] | BaseException) -> None:
            segment.readers -= 1
            self._changed.set()
            if isinstance(result, BaseException):
                if not isinstance(result, OSError | CancelledWork):
                    log.error("%s: reading failed", self._home.path, exc_info=result)
                result = np.full(len(wanted), FAILED, np.uint8), np.zeros((len(wanted), 2), np.uint64)
            status, digests = result
            good = status == 0
            self.read_bytes += int(wanted["payload_bytes"][good].sum())
            failed = int((status == FAILED).sum())
            self.read_errors += failed
            self._health.reads_failed = self._health.reads_failed + failed if not good.any() else 0
            done(status, digests)

        return self.lane.submit(work, finish, flow=flow, urgent=urgent, cost_bytes=int(wanted["payload_bytes"].sum()))

    async def inspect(self, segment: Segment, pages: U32Array) -> BoolArray:
        """Which of the records at these pages are whole. In the background. OSError: nothing is known."""
        segment.readers += 1
        work = partial(
            inspect_records, self._files, self._home.segments_fd, segment.name, segment.header.uuid, pages,
            direct=self._home.is_direct,
        )  # fmt: skip
        try:
            return await self.lane.perform(work, flow=BACKGROUND)
        except OSError:
            self.read_errors += 1
            raise
        finally:
            segment.readers -= 1
            self._changed.set()

    def figures(self) -> dict[str, int]:
        """For `status`."""
        return {"read_bytes": self.read_bytes, "read_errors": self.read_errors}
