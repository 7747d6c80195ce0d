"""Writes records to the open segment of a root, in the threads of its write lane, and seals full segments.

Batches lie one after another in the order in which they are appended; several may be under way at once. A segment is
sealed when it is full and the last batch in it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import PAGE_BYTES, I64Array, U64Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import CancelledWork, Lane, Ticket
from kvoffloadd.storage.disk.files import Files, lacks_resources
from kvoffloadd.storage.disk.format import KeyspaceId, Records, encode_records, footer_pages, record_pages
from kvoffloadd.storage.disk.health import Health, RootState, is_trouble
from kvoffloadd.storage.disk.records import write_records
from kvoffloadd.storage.disk.recovery import Kind, Recovered
from kvoffloadd.storage.disk.rootdirectory import FIRST, RootDirectory
from kvoffloadd.storage.disk.segment import Segment, seal_segment
from kvoffloadd.storage.disk.segmentpool import SegmentPool

OnWritten = Callable[[Segment, Records, BaseException | None], None]
"""Called with the segment, the entries (format.ENTRY) with their pages, and an error if none of them is valid."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteBatch:
    """Payloads of one keyspace that wait for a write: `entries` (format.ENTRY; page and keyspace are filled in here),
    their checksums and their addresses, which stay valid until the batch has ended.
    """

    keyspace: KeyspaceId
    entries: Records
    digests: U64Array
    addresses: U64Array


class Writer:
    """Writes to a root, owned by the event loop. `changes` reports the end of a batch or of the sealing of a segment.
    The memory of a batch belongs to the caller of `append`.
    """

    def __init__(
        self, directory: RootDirectory, pool: SegmentPool, health: Health, lane: Lane, changes: Changes
    ) -> None:
        self.reserved_pages = 0  # at the end of the open segment, for records that are rewritten
        self.written_bytes = 0  # payloads, since the start
        self._directory = directory
        self._files = directory.files
        self._pool = pool
        self._health = health
        self._lane = lane
        self._changes = changes
        self._batches: dict[int, Ticket] = {}
        self._next_batch = 0
        self._sealing: set[asyncio.Task[None]] = set()

    # --- capacity ---

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload that a segment can hold."""
        return self._pool.segment_bytes - (2 + footer_pages(1, 1)) * PAGE_BYTES

    @property
    def writing(self) -> int:
        """Batches that wait or are being written."""
        return len(self._batches)

    @property
    def depth(self) -> int:
        """The number of batches that keep the disk busy; further ones only wait."""
        return 2 * self._lane.threads

    @property
    def load(self) -> tuple[int, float]:
        """The load of the root: roots with less of it should get the next batch."""
        return self.writing, self.written_bytes / self._pool.capacity_bytes

    # --- batches ---

    def append(self, batch: WriteBatch, done: OnWritten, *, rewrite: bool = False) -> int:
        """Writes the first records of a batch one after another; returns how many, 0 if there is no room right now.

        `rewrite`: they may take `reserved_pages`, too. `done` is called once, later, if any were taken.
        """
        segment = self._pool.open_segment
        if self._health.state != RootState.OK or segment is None or not self._directory.has_epoch(batch.keyspace):
            return 0
        pages = record_pages(batch.entries["payload_bytes"]).astype(np.int64)
        ends = segment.next_page + np.cumsum(pages)
        rooms = segment.room_ends(len(pages))
        if ends[0] > rooms[0]:
            if self.reserved_pages and not rewrite:
                return 0  # the records with reserved pages would have no segment
            self._pool.advance()
            self._seal_later(segment)
            return 0
        count = int(np.count_nonzero(ends <= (rooms if rewrite else rooms - self.reserved_pages)))
        if count == 0:
            return 0
        entries = batch.entries[:count].copy()
        entries["page"] = ends[:count] - pages[:count]
        entries["space"], keyspace = segment.keyspace_entry(batch.keyspace)
        segment.next_page = int(ends[count - 1])
        segment.num_entries += count
        segment.writers += 1
        segment.oldest_sequence = min(segment.oldest_sequence, int(entries["sequence"].min()))
        work = partial(_write, self._files, segment, entries, keyspace, batch.digests[:count], batch.addresses[:count])
        self._next_batch += 1
        finish = partial(self._written, self._next_batch, segment, entries, done)
        self._batches[self._next_batch] = self._lane.submit(work, finish)
        return count

    def _written(
        self, batch: int, segment: Segment, entries: Records, done: OnWritten, result: BaseException | None
    ) -> None:
        del self._batches[batch]
        segment.writers -= 1
        if result is None:
            segment.entries.append(entries)
            self.written_bytes += int(entries["payload_bytes"].sum())
            self._health.write_succeeded()
        elif not isinstance(result, CancelledWork):
            if lacks_resources(result):
                self._take_back(segment, entries)
            elif is_trouble(result):
                self.withdraw(segment)
            self._pool.write_failed(result)
        self._changes.notify_all()  # first: waiters run in a later turn, even if `done` fails
        done(segment, entries, result)

    @staticmethod
    def _take_back(segment: Segment, entries: Records) -> None:
        """Gives the place of the segment's last records back, which could not be written. Earlier records stay a gap.
        Repeated attempts would otherwise use up the room for records that are rewritten.
        """
        end = int(entries["page"][-1]) + int(record_pages(entries["payload_bytes"][-1:])[0])
        if segment.next_page == end:
            segment.next_page = int(entries["page"][0])
            segment.num_entries -= len(entries)

    def withdraw(self, segment: Segment) -> None:
        """Stops writing to this segment. It gets no footer, which would need a write: a start walks it."""
        segment.broken = True
        if self._pool.withdraw(segment):
            self._seal_later(segment)

    def give_up(self) -> None:
        """Handles a disk that does not answer: batches that wait for a thread end with CancelledWork."""
        for ticket in self._batches.values():
            ticket.cancel()

    # --- sealing ---

    async def settle(self) -> None:
        """Seals open segments, as far as possible; when this returns no write is under way."""
        self.seal_unsealed()
        if self._sealing:
            await asyncio.wait(set(self._sealing))

    def seal_unsealed(self) -> None:
        """Begins to seal every segment that is open for writing."""
        for segment in self._pool.release_unsealed():
            self._seal_later(segment)

    def _seal_later(self, segment: Segment) -> None:
        task = self._lane.loop.create_task(self._seal(segment))
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)
        self._changes.notify_all()

    async def _seal(self, segment: Segment) -> None:
        await self._changes.wait_for(lambda: not segment.writers)
        entries = None
        if segment.entries and not segment.broken:
            entries = np.concatenate(segment.entries)
            entries = entries[np.argsort(entries["page"], kind="stable")]
        work = partial(_seal_and_close, self._files, segment, entries, list(segment.keyspaces))
        try:
            await self._lane.perform(work, urgent=FIRST)
        except CancelledWork:
            return  # the lane ends, and the process: nothing closes it
        except (OSError, KvOffloadError, MemoryError) as error:
            # Where writes wait in the page cache, only a sync shows that they fail.
            self._pool.write_failed(error, lasting=not segment.gone)
        finally:  # also after a bug: the loop logs it
            is_empty = not segment.entries
            segment.fd = -1
            segment.entries, segment.keyspaces = [], {}
            if is_empty:
                self._pool.empty(segment)
            self._changes.notify_all()

    def seal_recovered(self, segment: Segment, found: Recovered) -> None:
        """Begins to write the footer of a segment that was walked, so that the next start need not walk it, if there is
        room for one. It is not recycled meanwhile.
        """
        room = segment.size_bytes // PAGE_BYTES - found.end_page
        whole = segment.size_bytes == segment.header.segment_bytes
        needs = footer_pages(len(found.entries), len(found.keyspaces))
        if found.kind is Kind.WALKED and whole and room >= needs:
            segment.readers += 1
            work = partial(_seal_file, self._directory, segment, found)
            self._lane.submit(work, partial(self._recovered_sealed, segment))

    def _recovered_sealed(self, segment: Segment, result: BaseException | None) -> None:
        segment.readers -= 1
        self._changes.notify_all()
        if isinstance(result, FileNotFoundError):
            self._pool.lost(segment)
        elif result is not None:
            self._pool.write_failed(result)


# --- in threads of the write lane ---


def _write(
    files: Files, segment: Segment, entries: Records, keyspace: Records, digests: U64Array, addresses: U64Array
) -> None:
    """`keyspace`: of all the entries, a row of format.SPACE."""
    headers = reserve_array((len(entries), PAGE_BYTES), np.uint8)
    encode_records(headers, segment.header.uuid, entries, keyspace, digests, int(time.time()))
    sizes: I64Array = entries["payload_bytes"].astype(np.int64)
    write_records(files, segment.fd, int(entries["page"][0]), headers, addresses, sizes)


def _seal_and_close(files: Files, segment: Segment, entries: Records | None, keyspaces: list[KeyspaceId]) -> None:
    """`entries`: None for a segment that gets no footer."""
    try:
        if entries is not None:
            seal_segment(files, segment.fd, segment.header, entries, keyspaces)
    finally:
        files.close(segment.fd)


def _seal_file(directory: RootDirectory, segment: Segment, found: Recovered) -> None:
    files = directory.files
    with files.open_to_write(directory.segments_fd, segment.name, direct=directory.is_direct) as fd:
        seal_segment(files, fd, segment.header, found.entries, found.keyspaces)
