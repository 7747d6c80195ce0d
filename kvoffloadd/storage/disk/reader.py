"""Reads records of a root's segments, in the threads of its read lane."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from functools import partial

import numpy as np

from kvoffloadd.model import BoolArray, U8Array, U32Array, U64Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import BACKGROUND, CancelledWork, Flow, Lane, Ticket
from kvoffloadd.storage.disk.files import lacks_resources
from kvoffloadd.storage.disk.format import KeyspaceId, Records
from kvoffloadd.storage.disk.health import Health
from kvoffloadd.storage.disk.records import FAILED, GONE, NO_RESOURCES, NOT_READ, OK, read_records
from kvoffloadd.storage.disk.recovery import inspect_records
from kvoffloadd.storage.disk.rootdirectory import RootDirectory
from kvoffloadd.storage.disk.segment import Segment

log = logging.getLogger(__name__)


class Reader:
    """`changes` reports the end of each read, `on_gone` segments with removed files. Counts reads and errors since the
    start.
    """

    def __init__(
        self,
        directory: RootDirectory,
        health: Health,
        lane: Lane,
        changes: Changes,
        on_gone: Callable[[Segment], None],
    ) -> None:
        self.lane = lane
        self.read_bytes = 0
        self.read_errors = 0
        self._directory = directory
        self._files = directory.files
        self._health = health
        self._changes = changes
        self._on_gone = on_gone
        self._inspections: set[asyncio.Future[BoolArray]] = set()

    def read(
        self,
        segment: Segment,
        keyspace: KeyspaceId,
        wanted: Records,
        urgent: int,
        done: Callable[[U8Array, U64Array], None],
        flow: Flow = BACKGROUND,
    ) -> Ticket:
        """Reads records (records.READ) to their addresses and verifies them. Calls `done(status, digests)` once, later:
        nothing touches the addresses after that. A cancelled ticket has NOT_READ for all.
        """
        segment.readers += 1
        work = partial(
            read_records, self._files, self._directory.segments_fd, segment.name, segment.header.uuid, keyspace, wanted,
            direct=self._directory.is_direct,
        )  # fmt: skip

        def finish(result: tuple[U8Array, U64Array] | BaseException) -> None:
            segment.readers -= 1
            self._changes.notify_all()
            if isinstance(result, BaseException):
                status, digests = self._no_result(result, len(wanted)), np.zeros((len(wanted), 2), np.uint64)
            else:
                status, digests = result
            good = status == OK
            self.read_bytes += int(wanted["payload_bytes"][good].sum())
            failed = int((status == FAILED).sum())
            if (status == GONE).any():
                self._on_gone(segment)
            self.read_errors += failed
            self._health.reads_failed = self._health.reads_failed + failed if not good.any() else 0
            done(status, digests)

        return self.lane.submit(work, finish, flow=flow, urgent=urgent, cost_bytes=int(wanted["payload_bytes"].sum()))

    def _no_result(self, error: BaseException, count: int) -> U8Array:
        """Returns the status of `count` records for a read that ended with this error."""
        if isinstance(error, CancelledWork):
            return np.full(count, NOT_READ, np.uint8)
        if lacks_resources(error):
            return np.full(count, NO_RESOURCES, np.uint8)
        if not isinstance(error, OSError):
            log.error("%s: reading failed", self._directory.name, exc_info=error)
        return np.full(count, FAILED, np.uint8)

    async def inspect(self, segment: Segment, pages: U32Array, cost_bytes: int) -> BoolArray:
        """Returns which of the records at these pages are whole. In the background; `cost_bytes`: their approximate
        size.

        Raises:
            OSError: nothing is known. ETIMEDOUT: `give_up` was called.
        """
        segment.readers += 1
        work = partial(
            inspect_records, self._files, self._directory.segments_fd, segment.name, segment.header.uuid, pages,
            direct=self._directory.is_direct,
        )  # fmt: skip
        ended: asyncio.Future[BoolArray] = self.lane.loop.create_future()

        def finish(result: BoolArray | BaseException) -> None:
            segment.readers -= 1
            self._changes.notify_all()
            if isinstance(result, FileNotFoundError):
                self._on_gone(segment)
            elif isinstance(result, OSError) and not lacks_resources(result):
                self.read_errors += 1
            if ended.done():
                return
            if isinstance(result, CancelledWork):
                ended.set_exception(OSError(errno.ECANCELED, "not read"))
            elif isinstance(result, BaseException):
                ended.set_exception(result)
            else:
                ended.set_result(result)

        ticket = self.lane.submit(work, finish, flow=BACKGROUND, cost_bytes=cost_bytes)
        self._inspections.add(ended)
        try:
            return await ended
        finally:
            self._inspections.discard(ended)
            ticket.cancel()

    def give_up(self) -> None:
        """Handles a disk that does not answer: `inspect` raises. Callers of `read` have tickets to cancel."""
        for ended in self._inspections:
            if not ended.done():
                ended.set_exception(OSError(errno.ETIMEDOUT, "the disk does not answer"))

    def figures(self) -> dict[str, int]:
        """Returns the figures for `status`."""
        return {"read_bytes": self.read_bytes, "read_errors": self.read_errors}
